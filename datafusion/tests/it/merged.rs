//! Several partitions as one stream.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier};
use std::time::Instant;

use arrow_device::{Device, Error};
use arrow_device_datafusion::{
    DeviceTable, HostToDeviceExec, SendableDeviceStream, execute_on_device,
};
use datafusion::arrow::array::RecordBatch;
use futures::channel::mpsc::UnboundedSender;
use futures::{FutureExt, StreamExt, TryStreamExt};

use crate::kit::*;
use crate::memory::limited;
use crate::nodes::*;

/// The next item, which must come without any other's being sent.
async fn next(stream: &mut SendableDeviceStream) -> Option<Sent> {
    let end = Instant::now() + LONG;
    loop {
        if let Some(next) = stream.next().now_or_never() {
            return next;
        }
        assert!(Instant::now() < end, "what was sent never came");
        tokio::task::yield_now().await;
    }
}

/// All tasks run until they can no more.
async fn settle() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

fn start(plan: Plan, sim: &Sim) -> SendableDeviceStream {
    execute_on_device(plan, session().task_ctx(), sim).unwrap()
}

/// A partition that ends takes no other's turn: what is there is given, and who has nothing is
/// asked for a wake-up.
#[tokio::test]
async fn a_partition_that_ends_takes_no_others_turn() {
    let sim = Sim::new();
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    for ends in 0..4 {
        for gives in (0..4).filter(|gives| *gives != ends) {
            let (table, senders) = sent(&sim, 4);
            let mut senders: Vec<_> = senders.into_iter().map(Some).collect();
            let mut stream = start(scan(table).await, &sim);
            let send = |senders: &[Option<UnboundedSender<Sent>>]| {
                let sender = senders[gives].as_ref().unwrap();
                sender.unbounded_send(Ok(batch.clone())).unwrap();
            };
            send(&senders);
            let first = next(&mut stream).await;
            assert_eq!(first.unwrap().unwrap().num_rows(), 16);
            // Both at once, after a turn in which all were asked.
            send(&senders);
            senders[ends] = None;
            let second = next(&mut stream).await;
            assert_eq!(second.unwrap().unwrap().num_rows(), 16);
            assert!(stream.next().now_or_never().is_none());
            senders.clear();
            assert!(next(&mut stream).await.is_none());
        }
    }
    drop(batch);
    sim.assert_done();
}

/// A table of these partitions, of 8 batches each, whose streams do something before each batch.
fn watched_table(
    device: &Device,
    partitions: usize,
    before: impl Fn() + Clone + Send + Sync + 'static,
) -> Arc<DeviceTable> {
    let batch = device.upload(&numbers(0, 16)).unwrap();
    streams_table(device, partitions, move |_| {
        let (batch, before) = (batch.clone(), before.clone());
        futures::stream::iter(0..8).map(move |_| {
            before();
            Ok(batch.clone())
        })
    })
}

/// Two partitions, of which neither gives a batch before the other is about to: in one task,
/// this would take for ever. A worker that waits leaves its other tasks to another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_run_at_the_same_time() {
    let sim = Sim::new();
    let met = Arc::new(Barrier::new(2));
    let meet = move || {
        tokio::task::block_in_place(|| met.wait());
    };
    let plan = scan(watched_table(&sim, 2, meet)).await;
    assert_eq!(on_device(&plan, &sim).await.unwrap().len(), 16);
    drop(plan);
    sim.assert_done();
}

/// A fast partition beside seven that have nothing yet has no more room than its own.
#[tokio::test]
async fn tasks_are_one_batch_ahead() {
    let sim = Sim::new();
    let made = Arc::new(AtomicUsize::new(0));
    let counts = made.clone();
    let fast = watched_table(&sim, 1, move || {
        counts.fetch_add(1, SeqCst);
    });
    let (slow, senders) = sent(&sim, 7);
    let mut stream = start(union([scan(fast).await, scan(slow).await]), &sim);
    for read in 0..8 {
        settle().await;
        assert_eq!(made.load(SeqCst), read + 1, "after {read} batches");
        next(&mut stream).await.unwrap().unwrap();
    }
    drop(senders);
    assert!(next(&mut stream).await.is_none());
    drop(stream);
    sim.assert_done();
}

/// What waits to be taken is reserved, and no more than that.
#[tokio::test]
async fn a_batch_that_waits_for_the_reader_is_reserved() {
    let sim = Sim::new();
    let (context, pool) = limited(1 << 20);
    let plan = scan(host_table(&[batches(0, 4), batches(0, 4)])).await;
    let plan = HostToDeviceExec::default().above(plan, &sim);
    let mut stream = execute_on_device(plan, context, &sim).unwrap();
    for _ in 0..8 {
        settle().await;
        // 16 numbers of 8 bytes for each partition that has not ended.
        assert!([128, 256].contains(&pool.reserved()), "{}", pool.reserved());
        next(&mut stream).await.unwrap().unwrap();
    }
    assert!(next(&mut stream).await.is_none());
    assert_eq!(pool.reserved(), 0);
}

/// A panic is told at once, though another partition never ends, and with its text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_of_one_partition_ends_the_result() {
    let sim = Sim::new();
    let (table, senders) = sent(&sim, 1);
    let panics = watched_table(&sim, 1, || panic!("a defect of the source"));
    let mut stream = start(union([scan(table).await, scan(panics).await]), &sim);
    let found = next(&mut stream).await.unwrap();
    let error = fails(found, &["a defect of the source"]);
    assert!(matches!(error, Error::Panic { .. }), "{error:?}");
    assert!(stream.next().await.is_none());
    // The other partition's task was aborted, which drops what it reads.
    eventually("the other partition ended", || senders[0].is_closed());
}

/// Dropping the result ends every partition, those that wait and those that are busy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_result_ends_every_partition() {
    let sim = Sim::new();
    let (table, senders) = sent(&sim, 4);
    let mut stream = start(scan(table).await, &sim);
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    let send = |p: usize| senders[p].unbounded_send(Ok(batch.clone())).unwrap();
    send(1);
    next(&mut stream).await.unwrap().unwrap();
    // Partition 2 has more than the channel holds.
    (0..10).for_each(|_| send(2));
    drop((stream, batch));
    let closed = || senders.iter().all(|sender| sender.is_closed());
    eventually("all ended", closed);
    drop(senders);
    sim.assert_done();
}

/// A query's order is that of its result.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ordered_query_comes_in_its_order() {
    let sim = Sim::new();
    let ctx = session_with(4, 1);
    let partition = |p: i64| (0..8).map(|i| numbers((i * 4 + p) * 16, 16)).collect();
    let partitions: Vec<Vec<RecordBatch>> = (0..4).map(partition).collect();
    register(&ctx, "t", device_table(&sim, &partitions));
    let plan = plan(&ctx, "SELECT a FROM t ORDER BY a DESC").await;
    let stream = execute_on_device(plan, ctx.task_ctx(), &sim).unwrap();
    let batches: Vec<_> = stream.try_collect().await.unwrap();
    let expected: Vec<i64> = (0..512).rev().map(|i| i * 2).collect();
    assert_eq!(numbers_on(&batches), expected);
}
