//! Several partitions as one stream.

use std::sync::Barrier;

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
            let mut stream = started_on(&scan(table).await, &sim);
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
    let mut stream = started_on(&union([scan(fast).await, scan(slow).await]), &sim);
    for read in 0..8 {
        settle().await;
        assert_eq!(made.load(SeqCst), read + 1, "after {read} batches");
        next(&mut stream).await.unwrap().unwrap();
    }
    drop(senders);
    assert!(next(&mut stream).await.is_none());
}

/// What waits to be taken is reserved, and no more than that.
#[tokio::test]
async fn a_batch_that_waits_for_the_reader_is_reserved() {
    let sim = Sim::new();
    let (context, pool) = limited(1 << 20);
    let plan = planned("Up A < Numbers 4 4", &[&sim], &[]);
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

/// Each partition in its order, and none waits for another's reader.
#[tokio::test]
async fn partitions_come_as_they_are_ready() {
    let sim = Sim::new();
    let gate = Arc::new(AtomicBool::new(false));
    let opened = gate.clone();
    let (table, ..) = readers_table(&sim, 4, move |partition, i| {
        // The first two wait.
        if partition < 2 {
            eventually("the gate", || opened.load(SeqCst));
        }
        (i < 3).then(|| Ok(numbers((partition * 48 + i * 16) as i64, 16)))
    });
    let mut stream = started_on(&scan(table).await, &sim);
    let mut found = Vec::new();
    for _ in 0..6 {
        found.push(stream.next().await.unwrap().unwrap());
    }
    assert_eq!(sorted(numbers_on(&found)), (96..192).collect::<Vec<_>>());
    gate.store(true, SeqCst);
    found.extend(stream.try_collect::<Vec<_>>().await.unwrap());
    let all = numbers_on(&found);
    assert_eq!(sorted(all.clone()), multiples(192, 1));
    for partition in 0..4 {
        let of = all.iter().filter(|i| **i / 48 == partition);
        assert!(of.is_sorted(), "{partition}");
    }
}

/// All take their turn. Without any, or without batches, there is nothing to give.
#[tokio::test]
async fn partitions_that_are_always_ready_take_turns() {
    let sim = Sim::new();
    let partitions = [batches(0, 5), batches(1000, 5), batches(2000, 1)];
    let plan = scan(device_table(&sim, &partitions)).await;
    let found = on_device(&plan, &sim).await.unwrap();
    let first_of = |batch: &DeviceRecordBatch| numbers_on(std::slice::from_ref(batch))[0] / 1000;
    let order: Vec<i64> = found.iter().map(first_of).collect();
    assert_eq!(order.len(), 11);
    for partition in 0..3 {
        let at = order.iter().position(|p| *p == partition);
        // Each partition has a place in the channel, and one batch more at hand.
        assert!(at.unwrap() < 6, "{order:?}");
    }
    let none: [Vec<RecordBatch>; 2] = [vec![], vec![]];
    for partitions in [&none[..], &none[..0]] {
        let table = device_table_of(&sim, numbers(0, 1).schema(), partitions);
        let plan = scan(table).await;
        assert_eq!(on_device(&plan, &sim).await.unwrap().len(), 0);
    }
}

/// A consumer that never waits lets others run all the same, as with DataFusion's own streams.
#[tokio::test]
async fn a_result_that_is_always_ready_yields() {
    let sim = Sim::new();
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    let (schema, batches) = (numbers(0, 1).schema(), vec![vec![batch; 1000]]);
    let table = DeviceTable::from_batches(schema, sim.device.clone(), batches).unwrap();
    let plan = scan(Arc::new(table)).await;
    for on_host in [true, false] {
        let ran = Arc::new(AtomicBool::new(false));
        let flag = ran.clone();
        let other = tokio::spawn(async move { flag.store(true, SeqCst) });
        let batches = if on_host {
            let stream = started(&plan);
            stream.map_ok(drop).map_err(drop).boxed()
        } else {
            let stream = started_on(&plan, &sim);
            stream.map_ok(drop).map_err(drop).boxed()
        };
        assert_eq!(batches.try_collect::<Vec<_>>().await.unwrap().len(), 1000);
        assert!(ran.load(SeqCst), "on the host: {on_host}");
        other.await.unwrap();
    }
}

/// A panic is told at once, though another partition never ends, and with its text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_of_one_partition_ends_the_result() {
    let sim = Sim::new();
    let (table, senders) = sent(&sim, 1);
    let panics = watched_table(&sim, 1, || panic!("a defect of the source"));
    let mut stream = started_on(&union([scan(table).await, scan(panics).await]), &sim);
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
    let mut stream = started_on(&scan(table).await, &sim);
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
