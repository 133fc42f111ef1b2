use std::sync::Arc;

use arrow_device::device::sim::SimMemory;
use arrow_device::{ArrowDeviceType, DeviceBufferMut, DeviceRecordBatch};
use arrow_device_datafusion::{
    DeviceOperator, DevicePlugin, DeviceRule, DeviceSpec, DeviceTask, SendableDeviceStream, Verdict,
    to_datafusion,
};
use datafusion::arrow::array::record_batch;
use datafusion::arrow::datatypes::DataType;
use datafusion::error::Result;
use datafusion::execution::SessionStateBuilder;
use datafusion::physical_expr::expressions::{Column, NegativeExpr};
use datafusion::physical_plan::{ExecutionPlan, displayable, projection::ProjectionExec};
use datafusion::prelude::SessionContext;
use futures::StreamExt;

/// `SELECT -column`, for 64-bit integers: the plugin, and its operator.
#[derive(Debug)]
struct Negate;

/// The column that a projection negates, if it does just that.
fn negated(node: &Arc<dyn ExecutionPlan>) -> Option<usize> {
    let projection: &ProjectionExec = node.downcast_ref()?;
    let [only] = projection.expr() else { return None };
    let negative: &NegativeExpr = only.expr.downcast_ref()?;
    let column: &Column = negative.arg().downcast_ref()?;
    (*node.schema().field(0).data_type() == DataType::Int64).then_some(column.index())
}

impl DevicePlugin for Negate {
    fn can_run(&self, node: &Arc<dyn ExecutionPlan>, _: &DeviceSpec) -> Verdict {
        negated(node).map_or(Verdict::Unknown, |_| Verdict::Runs)
    }

    fn replace(&self, _: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn DeviceOperator>> {
        Ok(Arc::new(Negate))
    }
}

impl DeviceOperator for Negate {
    fn name(&self) -> &str {
        "NegateExec"
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let queue = task.device.new_queue().map_err(to_datafusion)?;
        let (schema, column) = (task.node().schema(), negated(task.node()).unwrap_or_default());
        let negate = move |batch: DeviceRecordBatch| {
            let (column, rows) = (batch.column(column)?, batch.num_rows());
            let values = column.values_on::<i64>(&queue)?; // the queue waits until they are there
            let out = DeviceBufferMut::for_values::<i64>(&queue, rows)?;
            let (from, to) = (values.address(), out.address());
            let kernel = move |memory: &mut SimMemory<'_>| {
                let values = memory.slice::<i64>(from, rows)?.iter();
                let negated: Vec<i64> = values.map(|n| n.wrapping_neg()).collect();
                memory.write(to, &negated)
            };
            // SAFETY: the kernel writes `out`, which nothing else uses before it is frozen.
            unsafe { queue.as_sim()?.launch(kernel)? };
            let column = column.with_values(DataType::Int64, out.freeze()?)?; // with the same nulls
            DeviceRecordBatch::try_new(schema.clone(), &[column])
        };
        Ok(task.stream(task.input(0)?.map(move |batch| batch.and_then(&negate))))
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let device = DeviceSpec::any(ArrowDeviceType::EXT_DEV); // the simulated device
    let rule = DeviceRule::default().with_plugin(Arc::new(Negate)).with_uploads(device, 0);
    let state = SessionStateBuilder::new().with_default_features();
    let state = state.with_physical_optimizer_rule(Arc::new(rule));
    let context = SessionContext::new_with_state(state.build());
    context.register_batch("t", record_batch!(("a", Int64, [Some(1), None, Some(3)]))?)?;
    let query = context.sql("SELECT -a AS b FROM t").await?;
    let plan = query.clone().create_physical_plan().await?;
    assert!(displayable(&*plan).indent(false).to_string().contains("NegateExec: device=sim"));
    let expected = record_batch!(("b", Int64, [Some(-1), None, Some(-3)]))?;
    assert_eq!(query.collect().await?, [expected]);
    Ok(())
}
