//! Runs of a repartitioning on the device: several of one plan, and when their inputs go.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use arrow_device_datafusion::{DeviceExec, SendableDeviceStream, execute_on_device};
use datafusion::execution::TaskContext;
use futures::StreamExt;

use crate::kit::*;
use crate::round_robin::{all, rest, spread, start, table};

/// A plan runs as often as it is asked to, as it is, and reset while an earlier run goes on.
#[tokio::test]
async fn each_run_begins_anew() {
    let sim = Sim::new();
    let context = session().task_ctx();
    let plan = spread(table(&sim, 2, 3), &sim, 2).await;
    let rows = async |plan: &Plan| {
        let stream = execute_on_device(plan.clone(), context.clone(), &sim).unwrap();
        rest(stream).await.len()
    };
    assert_eq!([rows(&plan).await, rows(&plan).await], [96, 96]);
    // An output of this run stays: the others' are not its.
    let mut kept = start(&plan, 0, &session().task_ctx());
    assert_eq!(kept.next().await.unwrap().unwrap().num_rows(), 16);
    let reset = plan.clone().reset_state().unwrap();
    assert_eq!([rows(&reset).await, rows(&reset).await], [96, 96]);
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
    let again = node.execute_device(0, context.clone());
    fails(
        again,
        &["DeviceRepartitionExec: partition 0", "task context"],
    );
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

/// A run belongs to the plan, whatever contexts its outputs are started with, and whenever: each row comes once.
#[tokio::test]
async fn each_output_may_have_a_context_of_its_own() {
    let sim = Sim::new();
    let session = session();
    let plan = spread(table(&sim, 2, 20), &sim, 3).await;
    for _ in 0..2 {
        let own = |i| start(&plan, i, &session.task_ctx());
        let streams: Vec<_> = (0..3).map(own).collect();
        let mut numbers = Vec::new();
        for stream in streams {
            numbers.extend(rest(stream).await);
        }
        assert_eq!(sorted(numbers), all(2, 20));
        // One after the other, in another order.
        let mut numbers = Vec::new();
        for output in [2, 0, 1] {
            let mut stream = start(&plan, output, &session.task_ctx());
            let some = if output == 1 { 40 } else { 3 };
            for batch in stream.by_ref().take(some).collect::<Vec<_>>().await {
                numbers.extend(numbers_on(&[batch.unwrap()]));
            }
        }
        assert_eq!(sorted(numbers), all(2, 20));
    }
}

/// Where contexts do not tell runs apart, there is an error, and no row is lost.
#[tokio::test]
async fn runs_that_cannot_be_told_apart_are_an_error() {
    let sim = Sim::new();
    let session = session();
    let plan = spread(table(&sim, 2, 2), &sim, 2).await;
    let node = DeviceExec::of(&plan).unwrap();
    let refused = |output, context: &Arc<TaskContext>| {
        let again = node.execute_device(output, context.clone());
        fails(again, &["reset the plan's state"]);
    };
    let (mut first, mut second) = (session.task_ctx(), session.task_ctx());
    let zeros = [start(&plan, 0, &first), start(&plan, 0, &second)];
    // It could be the rest of either.
    refused(1, &session.task_ctx());
    refused(0, &first);
    let ones = [start(&plan, 1, &first), start(&plan, 1, &second)];
    for (zero, one) in zeros.into_iter().zip(ones) {
        let numbers = [rest(zero).await, rest(one).await].concat();
        assert_eq!(sorted(numbers), all(2, 2));
    }
    // The second run's first output is taken for the rest of the first run. Both get to know, even when all has been read.
    for read in [false, true] {
        let [zero, one] = [start(&plan, 0, &first), start(&plan, 1, &second)];
        if read {
            let numbers = [rest(zero).await, rest(one).await].concat();
            assert_eq!(sorted(numbers), all(2, 2));
        }
        refused(1, &first);
        refused(0, &second);
        // They can begin again, with other contexts.
        let context = session.task_ctx();
        let [zero, one] = [start(&plan, 0, &context), start(&plan, 1, &context)];
        let numbers = [rest(zero).await, rest(one).await].concat();
        assert_eq!(sorted(numbers), all(2, 2));
        if !read {
            (first, second) = (session.task_ctx(), session.task_ctx());
        }
    }
}

/// The inputs stay while an output can be started that has not been, and no longer.
#[tokio::test]
async fn inputs_go_with_their_run() {
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
    // The next run begins.
    let (plan, context, gone) = new().await;
    drop(start(&plan, 0, &context));
    drop(context);
    assert!(!gone.load(SeqCst));
    let _next = start(&plan, 0, &session().task_ctx());
    eventually("another run began", || gone.load(SeqCst));
    // The plan is dropped.
    let (plan, context, gone) = new().await;
    drop(start(&plan, 0, &context));
    assert!(!gone.load(SeqCst));
    drop(plan);
    eventually("the plan was dropped", || gone.load(SeqCst));
}
