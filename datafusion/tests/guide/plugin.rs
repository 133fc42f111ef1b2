use std::sync::Arc;

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::device::sim::SimMemory;
use arrow_device::{
    Device, DeviceArray, DeviceBufferMut, DeviceRecordBatch, DeviceRecordBatches, Devices, Queue,
};
use arrow_device_datafusion::{
    DeviceExec, DevicePlan, DeviceSpec, DeviceTable, DeviceTransitions, SendableDeviceStream,
    device_of, execute_child, to_datafusion,
};
use datafusion::arrow::array::{AsArray, Int64Array, RecordBatch};
use datafusion::arrow::datatypes::{DataType, Field, Int64Type, Schema};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::error::Result;
use datafusion::execution::{SessionStateBuilder, TaskContext};
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{BinaryExpr, Column, Literal};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::filter::{FilterExec, FilterExecBuilder};
use datafusion::physical_plan::{ExecutionPlan, PlanProperties, displayable};
use datafusion::prelude::SessionContext;
use datafusion::scalar::ScalarValue;
use futures::TryStreamExt;

/// `WHERE column > number`, for a single column of 64-bit integers without nulls.
#[derive(Clone, Debug)]
struct GreaterExec {
    /// DataFusion's node, whose properties this one has.
    host: FilterExec,
    than: i64,
    device: DeviceSpec,
}

impl GreaterExec {
    /// Returns `None` if the kernel does not do what DataFusion's filter does.
    fn in_place_of(host: &FilterExec) -> Option<Self> {
        let device = device_of(host.input())?;
        let predicate = host.predicate().downcast_ref::<BinaryExpr>()?;
        predicate.left().downcast_ref::<Column>()?;
        let literal = predicate.right().downcast_ref::<Literal>()?;
        let schema = host.input().schema();
        let of_numbers = match &schema.fields()[..] {
            [field] => *field.data_type() == DataType::Int64 && !field.is_nullable(),
            _ => false,
        };
        let plain = host.projection().is_none() && host.fetch().is_none();
        match literal.value() {
            ScalarValue::Int64(Some(than)) if of_numbers && plain => {
                let (host, than) = (host.clone(), *than);
                let greater = *predicate.op() == Operator::Gt;
                greater.then_some(Self { host, than, device })
            }
            _ => None,
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

impl DevicePlan for GreaterExec {
    fn name(&self) -> &str {
        "GreaterExec"
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.host.properties()
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![self.host.input()]
    }

    fn with_children(&self, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn DevicePlan>> {
        let host = FilterExecBuilder::from(&self.host).with_input(children[0].clone());
        let (host, own) = (host.build()?, self.clone());
        Ok(Arc::new(Self { host, ..own }))
    }

    fn execute_device(
        &self,
        partition: usize,
        device: &Device,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let input = execute_child(self.host.input(), partition, device, context)?;
        let queue = device.new_queue().map_err(to_datafusion)?;
        let (schema, device_type, than) = (input.schema(), input.device_type(), self.than);
        let filtered = input.map_ok(move |batch| filter(batch, than, queue.clone()));
        let filtered = filtered.try_buffered(2); // the next kernel is queued meanwhile
        let output = DeviceRecordBatches::from_stream(filtered, schema, device_type);
        Ok(Box::pin(output))
    }
}

/// Replaces DataFusion's filters whose rows come from a device.
#[derive(Debug)]
pub(crate) struct FilterOnDevice;

impl PhysicalOptimizerRule for FilterOnDevice {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let replace = |node: Arc<dyn ExecutionPlan>| {
            let filter = node.downcast_ref::<FilterExec>();
            Ok(match filter.and_then(GreaterExec::in_place_of) {
                Some(greater) => Transformed::yes(Arc::new(DeviceExec::new(Arc::new(greater))) as _),
                None => Transformed::no(node),
            })
        };
        Ok(plan.transform_up(replace)?.data)
    }

    fn name(&self) -> &str {
        "FilterOnDevice"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let state = SessionStateBuilder::new()
        .with_default_features()
        .with_physical_optimizer_rule(Arc::new(FilterOnDevice))
        .with_physical_optimizer_rule(Arc::new(DeviceTransitions)); // last
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
    let names = ["DeviceToHostExec", "GreaterExec", "DeviceScanExec"];
    assert!(
        names.map(|name| text.find(name).expect(name)).is_sorted(),
        "{text}"
    );
    let found: Vec<RecordBatch> = query.collect().await?;
    let values = found.iter().flat_map(|b| b.column(0).as_primitive::<Int64Type>().values());
    assert!(values.copied().eq([998, 999]), "{found:?}");
    Ok(())
}
