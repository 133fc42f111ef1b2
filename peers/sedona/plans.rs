//! Plans that SedonaDB exports for programs in C: `execute_async` fills a handler of ours.

use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;

use arrow_schema::SchemaRef;
use datafusion_execution::TaskContext;
use datafusion_physical_plan::SendableRecordBatchStream;
use datafusion_physical_plan::streaming::{PartitionStream, StreamingTableExec};
use futures::StreamExt;
use sedona_extension::execution_plan::ExportedExecutionPlan;
use sedona_extension::extension::{SedonaCError, SedonaCExecutionPlan, SedonaCExecutionPlanArgs};
use sedona_extension::runtime::RuntimeHandle;

use crate::kit::{Counted, Last, handler, number, within};

#[derive(Debug)]
struct Partition {
    schema: SchemaRef,
    source: Counted,
    count: i64,
}

impl PartitionStream for Partition {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        self.source.theirs(self.count, Last::End)
    }
}

/// A plan with partitions of so many batches, and a runtime of its own.
fn exported(source: &Counted, counts: &[i64]) -> SedonaCExecutionPlan {
    let schema = source.schema();
    let partitions = counts.iter().map(|&count| {
        Arc::new(Partition {
            schema: schema.clone(),
            source: source.clone(),
            count,
        }) as Arc<dyn PartitionStream>
    });
    let partitions = partitions.collect();
    let plan = StreamingTableExec::try_new(schema.clone(), partitions, None, [], false, None);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .build()
        .unwrap();
    let runtime = Arc::new(RuntimeHandle::new(runtime));
    ExportedExecutionPlan::new(Arc::new(plan.unwrap()), Arc::default(), runtime).into()
}

/// Runs a partition as a C program would.
fn execute<T>(plan: &SedonaCExecutionPlan, partition: &CStr, handler: *mut T) -> i32 {
    let mut error = SedonaCError::default();
    let mut args = SedonaCExecutionPlanArgs {
        args: partition.as_ptr().cast(),
        args_len: partition.count_bytes(),
        exec_plans: ptr::null(),
        num_exec_plans: 0,
        exprs: ptr::null(),
        num_exprs: 0,
        reserved: ptr::null_mut(),
    };
    // SAFETY: all structs live during the call, and the handler until its release.
    unsafe { (plan.execute_async.unwrap())(plan, &mut args, handler.cast(), &mut error) }
}

/// The plan may be released as soon as its partitions run: the streams keep its runtime.
#[tokio::test]
async fn partitions_outlive_their_plan() {
    let source = Counted::default();
    let plan = exported(&source, &[3, 0, 100]);
    let (handlers, openings): (Vec<_>, Vec<_>) = (0..3).map(|_| handler(4)).unzip();
    let partitions = [
        c"{\"partition\": 0}",
        c"{\"partition\": 1}",
        c"{\"partition\": 2}",
    ];
    for (partition, handler) in partitions.into_iter().zip(handlers) {
        let handler: *mut std::ffi::c_void = handler;
        assert_eq!(execute(&plan, partition, handler), 0);
    }
    drop(plan);
    for (opening, count) in openings.into_iter().zip([3, 0, 100]) {
        let mut stream = within(opening).await.unwrap();
        for expected in 0..count {
            let batch = within(stream.next()).await.unwrap().unwrap();
            assert_eq!(number(&batch.to_host().unwrap()), expected);
        }
        assert!(within(stream.next()).await.is_none());
    }
    source.assert_gone();
}

#[tokio::test]
async fn a_partition_is_dropped() {
    let source = Counted::default();
    let plan = exported(&source, &[i64::MAX]);
    let (handler, opening) = handler::<std::ffi::c_void>(4);
    assert_eq!(execute(&plan, c"{\"partition\": 0}", handler), 0);
    let mut stream = within(opening).await.unwrap();
    within(stream.next()).await.unwrap().unwrap();
    drop((stream, plan));
    source.assert_gone();
}
