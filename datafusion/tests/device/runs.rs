//! Runs of a repartitioning on the device: several of one plan, and when their inputs go.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, LazyLock};

use arrow_device_datafusion::{DeviceExec, SendableDeviceStream, execute_on_device};
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::catalog::streaming::StreamingTable;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::PartitionStream;
use futures::StreamExt;

use crate::kit::*;
use crate::ops::{form, round_robin};
use crate::round_robin::{all, numbers_on, rest, spread, start, table};

/// A plan runs as often as it is asked to, as it is, over other children, and reset.
#[tokio::test]
async fn each_run_begins_anew() {
    let sim = Sim::new();
    let context = session().task_ctx();
    let plan = spread(table(&sim, 2, 3), &sim, 2).await;
    // An output of this run stays: the others' are not its.
    let mut kept = start(&plan, 0, &session().task_ctx());
    assert_eq!(kept.next().await.unwrap().unwrap().num_rows(), 16);
    let reset = plan.clone().reset_state().unwrap();
    for plan in [&reset, &reset, &plan] {
        let stream = execute_on_device(plan.clone(), context.clone(), &sim).unwrap();
        assert_eq!(rest(stream).await.len(), 96);
    }
    assert_eq!(rest(kept).await.len(), 80);
}

/// Runs of one plan at the same time have all rows each, whichever outputs of theirs are started first.
#[tokio::test]
async fn runs_that_overlap_share_nothing() {
    let sim = Sim::new();
    let session = session();
    let plan = spread(table(&sim, 2, 20), &sim, 2).await;
    let contexts: Vec<_> = (0..3).map(|_| session.task_ctx()).collect();
    // A run that nobody reads on: its outputs are not all started.
    let mut half = start(&plan, 0, &contexts[2]);
    assert!(half.next().await.unwrap().is_ok());
    drop(half);
    let mut numbers = [Vec::new(), Vec::new()];
    let mut streams = Vec::new();
    for (run, output) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
        let mut stream = start(&plan, output, &contexts[run]);
        let batch = stream.next().await.unwrap().unwrap();
        numbers[run].extend(numbers_on(&[batch]));
        streams.push((run, stream));
    }
    for (run, stream) in streams {
        numbers[run].extend(rest(stream).await);
    }
    for own in numbers {
        assert_eq!(sorted(own), all(2, 20));
    }
}

/// With one context, nobody could tell whose the outputs are that are started next.
#[tokio::test]
async fn runs_of_one_context_do_not_overlap() {
    let sim = Sim::new();
    let context = session().task_ctx();
    let plan = spread(table(&sim, 2, 20), &sim, 2).await;
    let mut first = start(&plan, 0, &context);
    assert!(first.next().await.unwrap().is_ok());
    let node = DeviceExec::of(&plan).unwrap();
    let error = node.execute_device(0, context.clone()).err().unwrap();
    let error = error.to_string();
    for part in ["DeviceRepartitionExec: partition 0", "task context"] {
        assert!(error.contains(part), "{error}");
    }
    // The first run has lost nothing by it.
    let second = start(&plan, 1, &context);
    assert_eq!(rest(first).await.len() + rest(second).await.len(), 39 * 16);
    // A run whose outputs have been dropped is over when the next begins.
    drop(start(&plan, 0, &context));
    let again: Vec<_> = (0..2).map(|i| start(&plan, i, &context)).collect();
    let mut numbers = Vec::new();
    for stream in again {
        numbers.extend(rest(stream).await);
    }
    assert_eq!(sorted(numbers), all(2, 20));
}

/// The inputs stay while an output can be started that has not been, and no longer.
#[tokio::test]
async fn inputs_go_with_the_context_of_their_run() {
    let sim = Sim::new();
    let new = async || {
        let (table, _, gone) = watched(&sim);
        (spread(table, &sim, 2).await, session().task_ctx(), gone)
    };
    let read = async |stream: &mut SendableDeviceStream| {
        numbers_on(&[stream.next().await.unwrap().unwrap()])[0]
    };
    // One output ends before another is started, which goes on where it ended.
    let (plan, context, gone) = new().await;
    let mut first = start(&plan, 0, &context);
    assert_eq!(read(&mut first).await, 0);
    drop(first);
    let mut second = start(&plan, 1, &context);
    assert_eq!(read(&mut second).await, 16);
    assert!(!gone.load(SeqCst));
    drop(second);
    eventually("all outputs were dropped", || gone.load(SeqCst));
    // The context goes before the last output.
    let (plan, context, gone) = new().await;
    let mut first = start(&plan, 0, &context);
    assert_eq!(read(&mut first).await, 0);
    drop(context);
    assert_eq!(read(&mut first).await, 16);
    drop(first);
    eventually("the last output was dropped", || gone.load(SeqCst));
    // It goes after it: the next run lets go of the inputs.
    let (plan, context, gone) = new().await;
    drop(start(&plan, 0, &context));
    drop(context);
    assert!(!gone.load(SeqCst));
    let _next = start(&plan, 1, &session().task_ctx());
    eventually("another run began", || gone.load(SeqCst));
}

/// Its stream keeps the context and a token.
#[derive(Debug)]
struct Keeping(Arc<()>);

impl PartitionStream for Keeping {
    fn schema(&self) -> &SchemaRef {
        static SCHEMA: LazyLock<SchemaRef> = LazyLock::new(|| numbers(0, 1).schema());
        &SCHEMA
    }

    fn execute(&self, context: Arc<TaskContext>) -> SendableRecordBatchStream {
        let kept = (context, self.0.clone());
        let batches = futures::stream::repeat_with(move || {
            let _ = &kept;
            Ok(numbers(0, 16))
        });
        Box::pin(RecordBatchStreamAdapter::new(
            self.schema().clone(),
            batches,
        ))
    }
}

/// What inputs keep of the context does not keep the inputs.
#[tokio::test]
async fn inputs_that_keep_their_context_go_too() {
    let sim = Sim::new();
    let token = Arc::new(());
    let input = Arc::new(Keeping(token.clone()));
    let table = StreamingTable::try_new(input.schema().clone(), vec![input]).unwrap();
    let plan = form(round_robin(scan(Arc::new(table)).await, 2), &sim);
    let context = session().task_ctx();
    let mut first = start(&plan, 0, &context);
    assert!(first.next().await.unwrap().is_ok());
    assert_eq!(Arc::strong_count(&token), 3);
    drop(context);
    drop(first);
    tokio::time::timeout(LONG, async {
        while Arc::strong_count(&token) > 2 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the input's stream was dropped");
    assert_eq!(plan.name(), "DeviceRepartitionExec");
}
