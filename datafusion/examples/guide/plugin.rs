use std::sync::Arc;

use arrow_device::device::sim::SimMemory;
use arrow_device::{
    ArrowDeviceType, DeviceArray, DeviceBufferMut, DeviceRecordBatch, Devices, Queue,
};
use arrow_device_datafusion::{
    DeviceOperator, DevicePlugin, DeviceRule, DeviceSpec, DeviceTable, DeviceTask,
    SendableDeviceStream, Verdict, to_datafusion,
};
use datafusion::arrow::array::{AsArray, Int64Array, RecordBatch};
use datafusion::arrow::datatypes::{DataType, Field, Int64Type, Schema};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SessionStateBuilder;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{BinaryExpr, Column, Literal};
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::{ExecutionPlan, displayable};
use datafusion::prelude::SessionContext;
use datafusion::scalar::ScalarValue;
use futures::TryStreamExt;

/// `WHERE column > number`, for a single column of 64-bit integers without nulls.
#[derive(Debug)]
struct GreaterExec {
    than: i64,
}

impl GreaterExec {
    /// Returns why the kernel does not do what DataFusion's filter does, if it does not.
    fn in_place_of(host: &FilterExec) -> std::result::Result<Self, &'static str> {
        let predicate = host.predicate().downcast_ref::<BinaryExpr>();
        let predicate = predicate.filter(|p| *p.op() == Operator::Gt && p.left().is::<Column>());
        let literal = predicate.and_then(|p| p.right().downcast_ref::<Literal>());
        let Some(ScalarValue::Int64(Some(than))) = literal.map(Literal::value) else {
            return Err("the predicate is not: column > number");
        };
        match &host.input().schema().fields()[..] {
            [field] if *field.data_type() == DataType::Int64 && !field.is_nullable() => {}
            _ => return Err("there are other columns"),
        }
        match host.projection().is_none() && host.fetch().is_none() {
            true => Ok(Self { than: *than }),
            false => Err("it has a projection or a limit"),
        }
    }
}

/// Queues the kernel, and awaits the number of rows that pass.
async fn filter(
    batch: DeviceRecordBatch,
    than: i64,
    queue: Queue,
) -> arrow_device::Result<DeviceRecordBatch> {
    let rows = batch.num_rows();
    let column = batch.column(0)?;
    let values = column.values_on::<i64>(&queue)?; // the queue waits until they are there
    let mut passing = DeviceBufferMut::for_values::<i64>(&queue, rows)?;
    let count = DeviceBufferMut::for_values::<i64>(&queue, 1)?;
    let (from, to, total) = (values.address(), passing.address(), count.address());
    let kernel = move |memory: &mut SimMemory<'_>| {
        let values = memory.slice::<i64>(from, rows)?.iter().copied();
        let passing: Vec<i64> = values.filter(|value| *value > than).collect();
        memory.write(total, &[passing.len() as i64])?;
        memory.write(to, &passing)
    };
    // SAFETY: the kernel writes `passing` and `count`, which nothing else uses before they are frozen.
    unsafe { queue.as_sim()?.launch(kernel)? };
    drop(values); // the loan ends here; the memory stays until the kernel is done
    let count = DeviceArray::from_values(DataType::Int64, 1, count.freeze()?, None)?;
    // The task awaits the copy of one number, and no thread waits.
    let count = count.start_to_host(&queue)?.await?;
    let rows = count.as_primitive::<Int64Type>().value(0) as usize;
    passing.truncate(rows * size_of::<i64>());
    passing.shrink_to_fit()?;
    let column = DeviceArray::from_values(DataType::Int64, rows, passing.freeze()?, None)?;
    DeviceRecordBatch::try_new(batch.schema(), &[column])
}

impl DeviceOperator for GreaterExec {
    fn name(&self) -> &str {
        "GreaterExec"
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let queue = task.device.new_queue().map_err(to_datafusion)?;
        let than = self.than;
        let filtered = task.input(0)?.map_ok(move |batch| filter(batch, than, queue.clone()));
        Ok(task.stream(filtered.try_buffered(2))) // the next kernel is queued meanwhile
    }
}

/// Runs filters on the simulated device.
#[derive(Debug)]
pub(crate) struct Filters;

impl DevicePlugin for Filters {
    fn can_run(&self, node: &Arc<dyn ExecutionPlan>, device: &DeviceSpec) -> Verdict {
        match node.downcast_ref::<FilterExec>() {
            Some(filter) if device.device_type() == ArrowDeviceType::EXT_DEV => {
                GreaterExec::in_place_of(filter).map_or_else(Verdict::stays, |_| Verdict::Runs)
            }
            _ => Verdict::Unknown,
        }
    }

    fn replace(&self, node: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn DeviceOperator>> {
        let filter = node.downcast_ref::<FilterExec>().ok_or("no filter");
        match filter.and_then(GreaterExec::in_place_of) {
            Ok(greater) => Ok(Arc::new(greater)),
            Err(why) => Err(DataFusionError::Plan(why.to_owned())),
        }
    }
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let rule = DeviceRule::default().with_plugin(Arc::new(Filters));
    let state = SessionStateBuilder::new()
        .with_default_features()
        .with_physical_optimizer_rule(Arc::new(rule)); // after other rules
    let context = SessionContext::new_with_state(state.build());
    let device = Devices::simulated()?;
    let schema = Arc::new(Schema::new(vec![Field::new("a", DataType::Int64, false)]));
    let column = Arc::new(Int64Array::from_iter_values(0..1000));
    let batch = device.upload(&RecordBatch::try_new(schema.clone(), vec![column])?)?;
    let table = DeviceTable::from_batches(schema, device, vec![vec![batch]])?;
    context.register_table("t", Arc::new(table))?;

    let query = context.sql("SELECT a FROM t WHERE a > 997").await?;
    let plan = query.clone().create_physical_plan().await?;
    let text = displayable(&*plan).indent(false).to_string();
    let names = ["DeviceToHostExec", "CoalesceBatchesExec", "GreaterExec", "DeviceScanExec"];
    assert!(
        names.map(|name| text.find(name).expect(name)).is_sorted(),
        "{text}"
    );
    let found: Vec<RecordBatch> = query.collect().await?;
    let values = found.iter().flat_map(|b| b.column(0).as_primitive::<Int64Type>().values());
    assert!(values.copied().eq([998, 999]), "{found:?}");
    Ok(())
}
