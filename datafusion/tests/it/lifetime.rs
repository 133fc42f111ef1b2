//! How long things live: cancelled queries, limits, bounded memory.

use std::future::poll_fn;

use crate::kit::*;

/// Lets other tasks run.
async fn pause() {
    for _ in 0..20 {
        std::thread::sleep(Duration::from_micros(500));
        tokio::task::yield_now().await;
    }
}

/// After its first batch, before anybody polled it, and while work is queued on a device where nothing has run yet.
#[tokio::test]
async fn a_stream_that_is_dropped_frees_everything() {
    let (sim, deferred) = (Sim::new(), Sim::deferred());
    let host = scan(host_table(&[batches(0, 50)])).await;
    let table = scan(device_table(&sim, &[batches(0, 50)])).await;
    let (reader, _, gone) = watched(&sim);
    for child in [host.clone(), table, scan(reader).await] {
        let plan = with_transitions(double(double(child, &sim), &sim));
        let mut stream = started(&plan);
        let batch = stream.next().await.unwrap().unwrap();
        assert_eq!(numbers_of(&[batch])[1], 4);
        drop(stream);
        drop(started(&plan));
    }
    eventually("the reader goes", || gone.load(SeqCst));
    sim.assert_done();
    let plan = with_transitions(double(double(host, &deferred), &deferred));
    let mut stream = started(&plan);
    poll_fn(|cx| {
        assert!(stream.poll_next_unpin(cx).is_pending());
        Poll::Ready(())
    })
    .await;
    assert!(deferred.sim.report().pending_operations > 0);
    drop(stream);
    deferred.assert_done();
}

/// Also where the limit stays above the operators, which cannot have one.
#[tokio::test]
async fn a_limit_stops_the_reader_early() {
    let sim = Sim::new();
    for (doubles, sql, rows, asked_of) in [
        // Two that are needed, one that waits in the stream, and one that the thread has.
        (0, "SELECT a FROM t LIMIT 20", 20, 2..=4),
        // And one that comes down meanwhile.
        (2, "SELECT a FROM t WHERE a % 2 = 0 LIMIT 20", 20, 2..=6),
        // The thread reads ahead before anybody asks.
        (0, "SELECT a FROM t LIMIT 0", 0, 0..=2),
    ] {
        let (reader, asked, gone) = watched(&sim);
        let ctx = session_with(1, doubles);
        register(&ctx, "t", reader);
        let found = numbers_in(&ctx, sql).await;
        assert_eq!(found, multiples(rows, 1 << doubles), "{sql}");
        if rows > 0 {
            eventually("the reader goes", || gone.load(SeqCst));
        }
        let asked = asked.load(SeqCst);
        assert!(asked_of.contains(&asked), "{asked} batches, {sql}");
    }
    sim.assert_done();
}

/// A consumer that does not read holds the producers up, uploads as well as readers.
#[tokio::test]
async fn a_consumer_that_stops_reading_stops_the_producers() {
    let sim = Sim::new();
    let (host, asked_host) = host_stream(|i| Some(Ok(numbers(i as i64, 16))));
    let (reader, asked_reader, _) = watched(&sim);
    let (host, reader) = (scan(host).await, scan(reader).await);
    for (table, asked) in [(host, asked_host), (reader, asked_reader)] {
        let plan = with_transitions(double(table, &sim));
        let mut stream = started(&plan);
        stream.next().await.unwrap().unwrap();
        pause().await;
        let asked_once = asked.load(SeqCst);
        assert!(asked_once <= 5, "{asked_once} batches");
        pause().await;
        assert_eq!(asked.load(SeqCst), asked_once);
    }
    sim.assert_done();
}

/// Batches of 64 KiB, on a device with room for a few.
const ROWS: usize = 8 << 10;

fn large(i: usize) -> Option<RecordBatch> {
    (i < 200).then(|| numbers((i * ROWS) as i64, ROWS))
}

/// All batches come, and never are more than ten of them on the device.
async fn assert_bounded(sim: &Sim, plan: Plan, slow: bool, factor: i64) {
    let context = task(config(|_| ()).with_batch_size(ROWS));
    let mut stream = plan.execute(0, context).unwrap();
    let (mut n, mut most) = (0, 0);
    while let Some(batch) = stream.next().await {
        let first = numbers_of(&[batch.unwrap()])[0];
        assert_eq!(first, (n * ROWS) as i64 * factor);
        n += 1;
        if slow && n % 10 == 0 {
            pause().await;
        }
        most = most.max(sim.sim.report().live_bytes);
    }
    assert_eq!(n, 200);
    assert!(most <= 10 * ROWS * 8, "{most} bytes");
}

#[tokio::test]
async fn memory_stays_bounded_on_a_stream_larger_than_the_device() {
    // 1 MiB: 16 batches, with the gaps between them less; 200 pass through.
    for slow_copies in [None, Some(100 << 20)] {
        let sim = Sim::set(|config| {
            (config.capacity_bytes, config.bytes_per_second) = (1 << 20, slow_copies);
        });
        let slow = slow_copies.is_none();
        let (table, _) = host_stream(|i| large(i).map(Ok));
        let plan = with_transitions(double(double(scan(table).await, &sim), &sim));
        assert_bounded(&sim, plan, slow, 4).await;
        // A reader's thread runs ahead by its depth.
        let (table, _) = reader_table(&sim, |i| large(i).map(Ok));
        let plan = with_transitions(double(scan(table).await, &sim));
        assert_bounded(&sim, plan, slow, 2).await;
        sim.assert_done();
    }
}
