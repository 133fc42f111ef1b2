//! How long things live: cancelled queries, limits, bounded memory; and what has no rows.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use arrow_device::DeviceRecordBatch;
use arrow_device::device::sim::SimConfig;
use arrow_device_datafusion::{DeviceExec, DeviceTable};
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::Schema;
use datafusion::common::stats::Precision;
use datafusion::physical_plan::statistics::StatisticsContext;
use datafusion::physical_plan::{displayable, execute_stream};
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::StreamExt;

use crate::kit::*;
use crate::nodes::*;

/// Lets other tasks run.
async fn pause() {
    for _ in 0..20 {
        std::thread::sleep(Duration::from_micros(500));
        tokio::task::yield_now().await;
    }
}

/// After its first batch, or before anybody polled it.
#[tokio::test]
async fn a_stream_that_is_dropped_frees_everything() {
    let sim = Sim::new();
    let host = scan(host_table(&[batches(0, 50)])).await;
    let table = scan(device_table(&sim, &[batches(0, 50)])).await;
    let (reader, _, gone) = watched(&sim);
    for child in [host, table, scan(reader).await] {
        let plan = with_transitions(double(double(child, &sim), &sim));
        let mut stream = execute_stream(plan.clone(), session().task_ctx()).unwrap();
        let batch = stream.next().await.unwrap().unwrap();
        assert_eq!(numbers_of(&[batch])[1], 4);
        drop(stream);
        drop(execute_stream(plan, session().task_ctx()).unwrap());
    }
    eventually("the reader goes", || gone.load(SeqCst));
    sim.assert_done();
}

/// While work is queued, on a device where nothing has run yet.
#[tokio::test]
async fn a_stream_that_is_dropped_while_it_waits_frees_everything() {
    let sim = Sim::deferred();
    let host = scan(host_table(&[batches(0, 50)])).await;
    let plan = with_transitions(double(double(host, &sim), &sim));
    let mut stream = execute_stream(plan, session().task_ctx()).unwrap();
    poll_fn(|cx| {
        assert!(stream.poll_next_unpin(cx).is_pending());
        std::task::Poll::Ready(())
    })
    .await;
    assert!(sim.sim.report().pending_operations > 0);
    drop(stream);
    sim.assert_done();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_task_that_is_aborted_frees_everything() {
    let sim = Sim::new();
    let (reader, asked, gone) = watched(&sim);
    let ctx = session_with(4, 2);
    register(&ctx, "t", reader);
    let sql = "SELECT a % 7, count(*) FROM t GROUP BY a % 7";
    let task = tokio::spawn(async move { query(&ctx, sql).await });
    eventually("it is under way", || asked.load(SeqCst) > 20);
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    eventually("the reader goes", || gone.load(SeqCst));
    sim.assert_done();
}

/// Also where the limit stays above the operators, which cannot have one.
#[tokio::test]
async fn a_limit_stops_the_reader_early() {
    let sim = Sim::new();
    for (doubles, sql, most) in [
        // Two that are needed, one that waits in the stream, and one that the thread has.
        (0, "SELECT a FROM t LIMIT 20", 4),
        // And one that comes down meanwhile.
        (2, "SELECT a FROM t WHERE a % 2 = 0 LIMIT 20", 6),
    ] {
        let (reader, asked, gone) = watched(&sim);
        let ctx = session_with(1, doubles);
        register(&ctx, "t", reader);
        let expected = multiples(20, 1 << doubles);
        assert_eq!(numbers_in(&ctx, sql).await, expected);
        eventually("the reader goes", || gone.load(SeqCst));
        let asked = asked.load(SeqCst);
        assert!((2..=most).contains(&asked), "{asked} batches");
    }
    sim.assert_done();
}

#[tokio::test]
async fn a_limit_stops_uploads_early() {
    let sim = Sim::new();
    let (table, asked) = host_stream(|i| Some(Ok(numbers(i as i64 * 16, 16))));
    let plan = with_transitions(double(scan(table).await, &sim));
    let mut stream = execute_stream(plan, session().task_ctx()).unwrap();
    stream.next().await.unwrap().unwrap();
    stream.next().await.unwrap().unwrap();
    drop(stream);
    let asked = asked.load(SeqCst);
    assert!((2..=4).contains(&asked), "{asked} batches");
    sim.assert_done();
}

#[tokio::test]
async fn a_limit_of_no_rows_asks_for_none() {
    let sim = Sim::new();
    let (reader, asked, _) = watched(&sim);
    let table_scan = reader.scan_on_device(None, Some(0)).unwrap();
    let plan: Plan = Arc::new(DeviceExec::from(table_scan));
    assert_eq!(numbers_from(&with_transitions(plan)).await, [0; 0]);
    pause().await;
    // The thread reads ahead before anybody asks.
    assert!(asked.load(SeqCst) <= 2);
    let ctx = over(reader);
    assert_eq!(numbers_in(&ctx, "SELECT a FROM t LIMIT 0").await, [0; 0]);
}

/// Batches of 64 KiB, on a device with room for a few.
const ROWS: usize = 8 << 10;

fn large(i: usize) -> Option<RecordBatch> {
    (i < 200).then(|| numbers((i * ROWS) as i64, ROWS))
}

async fn assert_bounded(sim: &Sim, plan: Plan, slow: bool, factor: i64) {
    // As `session()`, with batches as large as these.
    let config = SessionConfig::new().with_batch_size(ROWS);
    let config = config.with_option_extension(joined_to(32));
    let context = SessionContext::new_with_config(config).task_ctx();
    let mut stream = execute_stream(plan, context).unwrap();
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
    let small = SimConfig::default();
    let small = SimConfig {
        capacity_bytes: 1 << 20,
        ..small
    };
    let slow_copies = SimConfig {
        bytes_per_second: Some(100 << 20),
        ..small.clone()
    };
    for (config, slow) in [(small, true), (slow_copies, false)] {
        let sim = Sim::with(config);
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

/// A consumer that does not read holds the producer up.
#[tokio::test]
async fn a_consumer_that_stops_reading_stops_the_producers() {
    let sim = Sim::new();
    let (host, asked_host) = host_stream(|i| Some(Ok(numbers(i as i64, 16))));
    let (reader, asked_reader, _) = watched(&sim);
    let (host, reader) = (scan(host).await, scan(reader).await);
    for (table, asked) in [(host, asked_host), (reader, asked_reader)] {
        let plan = with_transitions(double(table, &sim));
        let mut stream = execute_stream(plan, session().task_ctx()).unwrap();
        stream.next().await.unwrap().unwrap();
        pause().await;
        let asked_once = asked.load(SeqCst);
        assert!(asked_once <= 5, "{asked_once} batches");
        pause().await;
        assert_eq!(asked.load(SeqCst), asked_once);
    }
    sim.assert_done();
}

/// No column moves for them, though the number of rows is known to nobody.
#[tokio::test]
async fn rows_without_columns_are_counted() {
    let sim = Sim::new();
    let ctx = over(reader_table(&sim, |i| (i < 5).then(|| Ok(numbers(0, 16)))).0);
    let counting = plan(&ctx, "SELECT count(*) FROM t").await;
    says(&text(&counting, &[&sim]), &["projection=[]"]);
    let before = sim.stats();
    assert_eq!(numbers_in(&ctx, "SELECT count(*) FROM t").await, [80]);
    assert_eq!(sim.stats().since(&before).bytes_to_host, 0);
    // A table that has none.
    let schema = Arc::new(Schema::empty());
    let batch = |n| DeviceRecordBatch::try_new_with_rows(&sim, schema.clone(), &[], n).unwrap();
    let partitions = vec![vec![batch(3), batch(0)], vec![batch(4)]];
    let table = DeviceTable::from_batches(schema.clone(), sim.device.clone(), partitions);
    let ctx = over(Arc::new(table.unwrap()));
    assert_eq!(numbers_in(&ctx, "SELECT count(*) FROM t").await, [7]);
    assert_eq!(numbers_in(&ctx, "SELECT 1 FROM t").await, [1; 7]);
    assert_eq!(numbers_in(&ctx, "SELECT 1 FROM t LIMIT 5").await, [1; 5]);
}

/// Columns named twice are not all columns, though there may be as many.
#[tokio::test]
async fn columns_in_any_order_and_twice() {
    let sim = Sim::new();
    let table = device_table(&sim, &[vec![rows(0, 3)]]);
    let (some, twice) = (
        [&[2, 0][..], &[1], &[2, 1, 0], &[]],
        [&[0, 0][..], &[0, 0, 1]],
    );
    for projection in some.into_iter().chain(twice) {
        let expected = rows(0, 3).project(projection).unwrap();
        let node = table.scan_on_device(Some(projection), None).unwrap();
        let plan = with_transitions(Arc::new(DeviceExec::from(node)));
        assert_eq!(run(&plan).await.unwrap(), [expected]);
    }
    assert!(table.scan_on_device(Some(&[3]), None).is_err());
}

/// With several partitions nobody knows how many of the rows a limit on each of them leaves.
#[tokio::test]
async fn an_exact_number_of_rows_is_one() {
    let sim = Sim::new();
    let uneven = [vec![numbers(0, 1)], vec![numbers(0, 10)]];
    for (partitions, fetch, exact) in [
        (&[batches(0, 2)][..], None, true),
        (&[batches(0, 2), batches(0, 3)], None, true),
        (&[batches(0, 2)], Some(5), true),
        (&[batches(0, 2)], Some(50), true),
        (&uneven, Some(5), false),
    ] {
        let table = device_table(&sim, partitions);
        let node = table.scan_on_device(None, fetch).unwrap();
        let plan = down(Arc::new(DeviceExec::from(node)));
        let found = StatisticsContext::new().compute(plan.as_ref(), &Default::default());
        let rows = Precision::Exact(row_count(&run(&plan).await.unwrap()));
        assert_eq!(found.unwrap().num_rows == rows, exact, "{fetch:?}");
    }
}

/// The scan's own words.
#[tokio::test]
async fn tables_and_nodes_can_be_shown() {
    let sim = Sim::new();
    let table = device_table(&sim, &[vec![rows(0, 3)]]);
    says(&format!("{table:?}"), &["num_rows: 3"]);
    let plan = scan(table).await;
    says(&format!("{plan:?}"), &["DeviceScanExec"]);
    let tree = displayable(plan.as_ref()).tree_render().to_string();
    says(&tree, &[&format!("device: {}", sim.id())]);
}
