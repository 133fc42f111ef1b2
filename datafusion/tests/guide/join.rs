use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use arrow_device::device::sim::SimMemory;
use arrow_device::{ArrowDeviceType, DeviceArray, DeviceBufferMut, DeviceRecordBatch, Error, Queue};
use arrow_device_datafusion::{
    DeviceOperator, DevicePlugin, DeviceReservation, DeviceRule, DeviceSpec, DeviceTask,
    SendableDeviceStream, Verdict, to_datafusion,
};
use datafusion::arrow::array::{AsArray, Int64Array, RecordBatch};
use datafusion::arrow::datatypes::{DataType, Field, Int64Type, Schema};
use datafusion::arrow::error::ArrowError;
use datafusion::common::JoinType;
use datafusion::datasource::MemTable;
use datafusion::error::Result;
use datafusion::execution::SessionStateBuilder;
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_plan::joins::{HashJoinExec, PartitionMode};
use datafusion::physical_plan::{ExecutionPlan, displayable};
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::future::{BoxFuture, FutureExt, Shared};
use futures::TryStreamExt;

/// The left side of a join, with the memory that it has reserved.
struct Build {
    batches: Vec<DeviceRecordBatch>,
    _memory: DeviceReservation,
}

/// It is read once, by the partition that needs it first. The others await the same.
type SharedBuild = Shared<BoxFuture<'static, std::result::Result<Arc<Build>, Arc<Error>>>>;

async fn build(
    mut left: SendableDeviceStream,
    memory: DeviceReservation,
) -> arrow_device::Result<Build> {
    let mut batches = Vec::new();
    while let Some(batch) = left.try_next().await? {
        let reserved = memory.grow(batch.get_array_memory_size());
        reserved.map_err(|e| ArrowError::ExternalError(Box::new(e)))?;
        batches.push(batch);
    }
    Ok(Build { batches, _memory: memory })
}

/// The rows whose number is on the left side, too.
async fn probe(
    batch: DeviceRecordBatch,
    left: SharedBuild,
    queue: Queue,
) -> arrow_device::Result<DeviceRecordBatch> {
    let left = left.await.map_err(|e| ArrowError::ExternalError(Box::new(e)))?;
    let (column, rows) = (batch.column(0)?, batch.num_rows());
    let keys: Vec<_> = left.batches.iter().map(|batch| batch.column(0)).collect::<Result<_, _>>()?;
    let loans = keys.iter().map(|keys| keys.values_on::<i64>(&queue));
    let loans: Vec<_> = loans.collect::<Result<_, _>>()?;
    let keys: Vec<_> = loans.iter().map(|loan| (loan.address(), loan.len())).collect();
    let values = column.values_on::<i64>(&queue)?;
    let mut found = DeviceBufferMut::for_values::<i64>(&queue, rows)?;
    let count = DeviceBufferMut::for_values::<i64>(&queue, 1)?;
    let (from, to, total) = (values.address(), found.address(), count.address());
    let kernel = move |memory: &mut SimMemory<'_>| {
        let mut known = HashSet::<i64>::new();
        for (at, n) in keys {
            known.extend(memory.slice::<i64>(at, n)?);
        }
        let values = memory.slice::<i64>(from, rows)?.iter().copied();
        let found: Vec<i64> = values.filter(|value| known.contains(value)).collect();
        memory.write(total, &[found.len() as i64])?;
        memory.write(to, &found)
    };
    // SAFETY: the kernel writes `found` and `count`, which nothing else uses before they are frozen.
    unsafe { queue.as_sim()?.launch(kernel)? };
    drop((values, loans)); // the memory stays until the kernel is done
    let count = DeviceArray::from_values(DataType::Int64, 1, count.freeze()?, None)?;
    let count = count.start_to_host(&queue)?.await?;
    let rows = count.as_primitive::<Int64Type>().value(0) as usize;
    found.truncate(rows * size_of::<i64>());
    found.shrink_to_fit()?;
    let column = DeviceArray::from_values(DataType::Int64, rows, found.freeze()?, None)?;
    DeviceRecordBatch::try_new(batch.schema(), &[column])
}

/// `WHERE number IN (SELECT number FROM ...)`, for tables of a column of 64-bit integers without nulls.
#[derive(Default)]
struct SemiJoinExec(Mutex<Option<SharedBuild>>);

impl std::fmt::Debug for SemiJoinExec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SemiJoinExec")
    }
}

impl DeviceOperator for SemiJoinExec {
    fn name(&self) -> &str {
        "SemiJoinExec"
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let queue = task.device.new_queue().map_err(to_datafusion)?;
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left = match &*shared {
            Some(left) => left.clone(),
            None => {
                let built = build(task.input_partition(0, 0)?, task.reservation());
                let built = built.map(|built| built.map(Arc::new).map_err(Arc::new));
                shared.insert(built.boxed().shared()).clone()
            }
        };
        let right = task.input(1)?;
        let found = right.map_ok(move |batch| probe(batch, left.clone(), queue.clone()));
        Ok(task.stream(found.try_buffered(2)))
    }

    fn runs_on_host(&self) -> bool {
        false // partitions share the left side, so all run in one place
    }
}

#[derive(Debug)]
struct SemiJoins;

impl DevicePlugin for SemiJoins {
    fn can_run(&self, node: &Arc<dyn ExecutionPlan>, _: &DeviceSpec) -> Verdict {
        let Some(join) = node.downcast_ref::<HashJoinExec>() else { return Verdict::Unknown };
        let is_number = |side: &&Arc<dyn ExecutionPlan>| match &side.schema().fields()[..] {
            [field] => *field.data_type() == DataType::Int64 && !field.is_nullable(),
            _ => false,
        };
        let is_plain = join.filter().is_none() && node.fetch().is_none();
        let of_columns = join.on().iter().all(|(a, b)| a.is::<Column>() && b.is::<Column>());
        match (join.join_type(), join.partition_mode()) {
            (JoinType::RightSemi, PartitionMode::CollectLeft)
                if is_plain && of_columns && node.children().iter().all(is_number) =>
            {
                Verdict::Runs
            }
            _ => Verdict::stays("the join is of another kind"),
        }
    }

    fn replace(&self, _: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn DeviceOperator>> {
        Ok(Arc::new(SemiJoinExec::default()))
    }
}

/// A table of numbers, of as many partitions as there are lists.
fn numbers(name: &str, lists: &[Vec<i64>]) -> Result<MemTable> {
    let schema = Arc::new(Schema::new(vec![Field::new(name, DataType::Int64, false)]));
    let batch = |list: &Vec<i64>| {
        let numbers = Int64Array::from(list.clone());
        Ok(vec![RecordBatch::try_new(schema.clone(), vec![Arc::new(numbers)])?])
    };
    MemTable::try_new(schema.clone(), lists.iter().map(batch).collect::<Result<_>>()?)
}

#[tokio::main]
async fn main() -> Result<()> {
    let device = DeviceSpec::any(ArrowDeviceType::EXT_DEV); // the simulated device
    let rule = DeviceRule::default().with_plugin(Arc::new(SemiJoins)).with_uploads(device, 0);
    let state = SessionStateBuilder::new()
        .with_default_features()
        .with_config(SessionConfig::new().with_target_partitions(3))
        .with_physical_optimizer_rule(Arc::new(rule));
    let context = SessionContext::new_with_state(state.build());
    let lists = [0, 100, 200].map(|first| (first..first + 100).collect());
    context.register_table("t", Arc::new(numbers("a", &lists)?))?;
    context.register_table("few", Arc::new(numbers("b", &[vec![7, 107, 207, 999]])?))?;

    let query = context.sql("SELECT a FROM t WHERE a IN (SELECT b FROM few)").await?;
    let plan = query.clone().create_physical_plan().await?;
    let text = displayable(&*plan).indent(false).to_string();
    assert!(text.contains("SemiJoinExec: device=sim"), "{text}");
    let found = query.collect().await?.into_iter();
    let mut found: Vec<i64> = found
        .flat_map(|batch| batch.column(0).as_primitive::<Int64Type>().values().to_vec())
        .collect();
    found.sort();
    assert_eq!(found, [7, 107, 207]);
    Ok(())
}
