//! How long things live: cancelled queries, limits, bounded memory; and what has no rows.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use arrow_device::device::sim::SimConfig;
use arrow_device_datafusion::{DeviceExec, DeviceTable, ScanRequest};
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::common::stats::Precision;
use datafusion::datasource::MemTable;
use datafusion::physical_plan::{collect, execute_stream};
use futures::StreamExt;

use crate::kit::*;

fn partition(first: i64, batches: i64) -> Vec<RecordBatch> {
    (0..batches).map(|i| numbers(first + i * 16, 16)).collect()
}

/// Lets other tasks run.
async fn pause() {
    for _ in 0..20 {
        std::thread::sleep(Duration::from_micros(500));
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_stream_that_is_dropped_after_its_first_batch_frees_everything() {
    let sim = Sim::new();
    let host = scan(host_table(&[partition(0, 50)])).await;
    let table = scan(device_table(&sim, &[partition(0, 50)])).await;
    let (reader, _, gone) = watched(&sim);
    let reader = scan(reader).await;
    for child in [host, table, reader] {
        let plan = with_transitions(double(double(child, &sim), &sim));
        let mut stream = execute_stream(plan, session().task_ctx()).unwrap();
        let batch = stream.next().await.unwrap().unwrap();
        assert_eq!(numbers_of(&[batch])[1], 4);
        drop(stream);
    }
    eventually("the reader goes", || gone.load(SeqCst));
    sim.assert_done();
}

/// While work is queued, on a device where nothing has run yet.
#[tokio::test]
async fn a_stream_that_is_dropped_while_it_waits_frees_everything() {
    let sim = Sim::deferred();
    let host = scan(host_table(&[partition(0, 50)])).await;
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

/// A stream that nobody ever polled.
#[tokio::test]
async fn a_stream_that_is_never_polled_frees_everything() {
    let sim = Sim::new();
    let (reader, _, gone) = watched(&sim);
    let plan = with_transitions(double(scan(reader).await, &sim));
    drop(execute_stream(plan, session().task_ctx()).unwrap());
    eventually("the reader goes", || gone.load(SeqCst));
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

#[tokio::test]
async fn a_limit_stops_the_reader_early() {
    let sim = Sim::new();
    let (reader, asked, gone) = watched(&sim);
    let ctx = over(reader);
    let found = numbers_in(&ctx, "SELECT a FROM t LIMIT 20").await;
    assert_eq!(found, (0..20).collect::<Vec<_>>());
    eventually("the reader goes", || gone.load(SeqCst));
    // Two that are needed, one that waits in the stream, and one that the thread has.
    let asked = asked.load(SeqCst);
    assert!((2..=4).contains(&asked), "{asked} batches");
    drop(ctx);
    sim.assert_done();
}

/// Where the limit stays above the operators, which cannot have one.
#[tokio::test]
async fn a_limit_above_operators_stops_the_reader_early() {
    let sim = Sim::new();
    let (reader, asked, gone) = watched(&sim);
    let ctx = session_with(1, 2);
    register(&ctx, "t", reader);
    let plan = plan(&ctx, "SELECT a FROM t WHERE a % 2 = 0 LIMIT 20").await;
    let batches = collect(plan, ctx.task_ctx()).await.unwrap();
    assert_eq!(numbers_of(&batches).len(), 20);
    drop(batches);
    eventually("the reader goes", || gone.load(SeqCst));
    // And one that comes down meanwhile.
    let asked = asked.load(SeqCst);
    assert!((2..=6).contains(&asked), "{asked} batches");
    drop(ctx);
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
    let plan: Plan = Arc::new(DeviceExec::new(Arc::new(table_scan)));
    let batches = collect(with_transitions(plan), session().task_ctx()).await;
    assert_eq!(numbers_of(&batches.unwrap()), [0; 0]);
    pause().await;
    // The thread reads ahead before anybody asks.
    assert!(asked.load(SeqCst) <= 2);
    let ctx = over(reader);
    assert_eq!(numbers_in(&ctx, "SELECT a FROM t LIMIT 0").await, [0; 0]);
}

/// Batches of 64 KiB, on a device with room for a few.
const ROWS: usize = 8 << 10;

fn large(i: usize) -> RecordBatch {
    numbers((i * ROWS) as i64, ROWS)
}

async fn assert_bounded(sim: &Sim, plan: Plan, slow: bool, factor: i64) {
    let mut stream = execute_stream(plan, session().task_ctx()).unwrap();
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
    // 1 MiB: 16 batches, with red zones less; 200 pass through.
    let small = SimConfig::default();
    let small = small.with_capacity_bytes(1 << 20).with_quarantine_bytes(0);
    let slow_copies = small.clone().with_bytes_per_second(100 << 20);
    for config in [small, slow_copies] {
        for slow in [false, true] {
            let sim = Sim::with(config.clone());
            let (table, _) = host_stream(|i| (i < 200).then(|| Ok(large(i))));
            let plan = with_transitions(double(double(scan(table).await, &sim), &sim));
            assert_bounded(&sim, plan, slow, 4).await;
            // A reader's thread runs ahead by its depth.
            let next = |i| (i < 200).then(|| Ok(large(i)));
            let (table, _) = reader_table(&sim, next);
            let plan = with_transitions(double(scan(table).await, &sim));
            assert_bounded(&sim, plan, slow, 2).await;
            sim.assert_done();
        }
    }
}

/// A consumer that does not read holds the producer up.
#[tokio::test]
async fn a_consumer_that_stops_reading_stops_the_producers() {
    let sim = Sim::new();
    let (host, asked_host) = host_stream(|i| Some(Ok(numbers(i as i64, 16))));
    let (reader, asked_reader, _) = watched(&sim);
    for (table, asked) in [
        (scan(host).await, asked_host),
        (scan(reader).await, asked_reader),
    ] {
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

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_partitions() {
    let sim = Sim::new();
    let partitions: Vec<_> = (0..40).map(|i| partition(i * 64, i % 5)).collect();
    let rows: usize = partitions.iter().flatten().map(RecordBatch::num_rows).sum();
    let device = device_table(&sim, &partitions);
    for (ctx, doubles) in [
        (session_without_rule(8), 0),
        (session_with(8, 0), 0),
        (session_with(8, 1), 1),
        (session_with(8, 2), 2),
    ] {
        let reference = session_with(8, 0);
        register(&ctx, "t", device.clone());
        register(&reference, "t", host_table(&partitions));
        let sql = format!("SELECT a * {} AS a FROM t", 1 << doubles);
        let expected = sorted(numbers_in(&reference, &sql).await);
        let found = sorted(numbers_in(&ctx, "SELECT a FROM t").await);
        assert_eq!((found.len(), &found), (rows, &expected));
        let found = numbers_in(&ctx, "SELECT a FROM t ORDER BY a").await;
        assert_eq!(found, expected);
        let found = numbers_in(&ctx, "SELECT sum(a) FROM t").await;
        assert_eq!(found, [expected.iter().sum::<i64>()]);
        // A limit holds for all of them together.
        for limit in [0, 1, 17, 40, rows, rows + 1] {
            let sql = format!("SELECT a FROM t LIMIT {limit}");
            assert_eq!(numbers_in(&ctx, &sql).await.len(), limit.min(rows), "{sql}");
            let sql = format!("SELECT a FROM t LIMIT {limit} OFFSET 5");
            let expected = limit.min(rows - 5);
            assert_eq!(numbers_in(&ctx, &sql).await.len(), expected, "{sql}");
        }
    }
    drop(device);
    sim.assert_done();
}

const QUERIES: [&str; 14] = [
    "SELECT * FROM t",
    "SELECT a FROM t",
    "SELECT a FROM t LIMIT 3",
    "SELECT count(*) FROM t",
    "SELECT count(*) FROM (SELECT * FROM t LIMIT 3)",
    "SELECT sum(a), min(a), count(a) FROM t",
    "SELECT a, count(*) FROM t GROUP BY a ORDER BY a",
    "SELECT x.a FROM t x JOIN t y ON x.a = y.a ORDER BY x.a",
    "SELECT a FROM t UNION ALL SELECT a + 1 FROM t ORDER BY a",
    "SELECT a FROM t ORDER BY a",
    "SELECT a FROM t ORDER BY a DESC LIMIT 2 OFFSET 1",
    "SELECT a, row_number() OVER (ORDER BY a DESC) FROM t",
    "SELECT a, sum(a) OVER (PARTITION BY a % 2 ORDER BY a) FROM t",
    "SELECT count(*) FROM (SELECT a FROM t LIMIT 2 OFFSET 1)",
];

/// What DataFusion's own table gives, with `DeviceTransitions` and without.
async fn assert_as_on_host(partitions: &[Vec<RecordBatch>]) {
    let sim = Sim::new();
    let schema = numbers(0, 1).schema();
    let host = Arc::new(MemTable::try_new(schema, partitions.to_vec()).unwrap());
    let device = device_table_of(&sim, numbers(0, 1).schema(), partitions);
    let readers = {
        let (device, partitions) = (sim.device.clone(), partitions.to_vec());
        let schema = numbers(0, 1).schema();
        let of = schema.clone();
        let n = partitions.len();
        let open = move |request: ScanRequest| {
            let p = request.partition;
            let batches = partitions[p].clone();
            let next = move |i| batches.get(i).cloned().map(Ok);
            Ok(Reader::new(&device, of.clone(), next))
        };
        Arc::new(DeviceTable::from_readers(
            schema,
            sim.device.clone(),
            n,
            open,
        ))
    };
    for target in [1, 4] {
        let reference = session_with(target, 0);
        register(&reference, "t", host.clone());
        for sql in QUERIES {
            let expected = shown(query(&reference, sql).await);
            for table in [device.clone(), readers.clone()] {
                for ctx in [session_with(target, 0), session_without_rule(target)] {
                    register(&ctx, "t", table.clone());
                    assert_eq!(shown(query(&ctx, sql).await), expected, "{sql}, {target}");
                }
            }
        }
    }
}

fn shown(batches: datafusion::common::Result<Vec<RecordBatch>>) -> Vec<String> {
    let batches = match batches {
        Ok(batches) => batches,
        Err(e) => panic!("{e}"),
    };
    let text = pretty_format_batches(&batches).unwrap().to_string();
    let lines = text.lines().filter(|line| line.starts_with('|'));
    // Without any batch there is no header.
    let mut rows: Vec<String> = lines.skip(1).map(str::to_string).collect();
    rows.sort();
    rows
}

fn device_table_of(
    sim: &Sim,
    schema: SchemaRef,
    partitions: &[Vec<RecordBatch>],
) -> Arc<DeviceTable> {
    let up = |batch: &RecordBatch| sim.upload(batch).unwrap();
    let partitions = partitions.iter().map(|p| p.iter().map(up).collect());
    let table = DeviceTable::from_batches(schema, sim.device.clone(), partitions.collect());
    Arc::new(table.unwrap())
}

#[tokio::test]
async fn tables_with_few_rows_or_none() {
    let empty = || numbers(0, 0);
    assert_as_on_host(&[vec![numbers(0, 3), numbers(3, 1)], vec![numbers(1, 2)]]).await;
    assert_as_on_host(&[vec![]]).await;
    assert_as_on_host(&[vec![], vec![]]).await;
    assert_as_on_host(&[vec![empty()]]).await;
    assert_as_on_host(&[vec![empty(), numbers(0, 2), empty()], vec![], vec![empty()]]).await;
}

#[tokio::test]
async fn a_table_of_no_partitions() {
    let sim = Sim::new();
    for target in [1, 4] {
        for ctx in [
            session_without_rule(target),
            session_with(target, 0),
            session_with(target, 2),
        ] {
            let table = device_table_of(&sim, numbers(0, 1).schema(), &[]);
            register(&ctx, "t", table);
            assert_eq!(numbers_in(&ctx, "SELECT a FROM t").await, [0; 0]);
            assert_eq!(numbers_in(&ctx, "SELECT a FROM t LIMIT 3").await, [0; 0]);
            assert_eq!(numbers_in(&ctx, "SELECT count(*) FROM t").await, [0]);
        }
    }
}

#[tokio::test]
async fn operators_over_batches_without_rows() {
    let sim = Sim::new();
    let batches = vec![numbers(0, 0), numbers(0, 2), numbers(2, 0), numbers(2, 1)];
    for child in [
        scan(host_table(std::slice::from_ref(&batches))).await,
        scan(device_table(&sim, &[batches])).await,
    ] {
        let plan = with_transitions(double(double(child, &sim), &sim));
        let found = collect(plan, session().task_ctx()).await.unwrap();
        assert_eq!(numbers_of(&found), [0, 4, 8]);
    }
    sim.assert_done();
}

/// No column moves for them, though the number of rows is known to nobody.
#[tokio::test]
async fn rows_without_columns_are_counted() {
    let sim = Sim::new();
    let next = |i| (i < 5).then(|| Ok(numbers(0, 16)));
    let ctx = over(reader_table(&sim, next).0);
    let counting = plan(&ctx, "SELECT count(*) FROM t").await;
    let text = text(&counting, &[&sim]);
    assert!(text.contains("projection=[]"), "{text}");
    let before = sim.stats();
    assert_eq!(numbers_in(&ctx, "SELECT count(*) FROM t").await, [80]);
    assert_eq!(sim.stats().since(&before).bytes_to_host, 0);
    // A table that has none.
    let schema = Arc::new(Schema::empty());
    let batch = |rows| {
        let (device, schema) = (&sim.device, schema.clone());
        arrow_device::DeviceRecordBatch::try_new_with_rows(device, schema, &[], rows).unwrap()
    };
    let partitions = vec![vec![batch(3), batch(0)], vec![batch(4)]];
    let table = DeviceTable::from_batches(schema, sim.device.clone(), partitions).unwrap();
    let ctx = over(Arc::new(table));
    assert_eq!(numbers_in(&ctx, "SELECT count(*) FROM t").await, [7]);
    assert_eq!(numbers_in(&ctx, "SELECT 1 FROM t").await, [1; 7]);
    assert_eq!(numbers_in(&ctx, "SELECT 1 FROM t LIMIT 5").await, [1; 5]);
}

#[tokio::test]
async fn columns_in_any_order() {
    let sim = Sim::new();
    let table = device_table(&sim, &[vec![rows(0, 3)]]);
    for projection in [&[2, 0][..], &[1], &[0, 1, 2], &[2, 1, 0], &[]] {
        let expected = rows(0, 3).project(projection).unwrap();
        let node = table.scan_on_device(Some(projection), None).unwrap();
        let plan = with_transitions(Arc::new(DeviceExec::new(Arc::new(node))));
        let batches = collect(plan, session().task_ctx()).await.unwrap();
        assert_eq!(batches, [expected]);
    }
    assert!(table.scan_on_device(Some(&[3]), None).is_err());
}

/// Columns named twice are not all columns, though there are as many.
#[tokio::test]
async fn a_column_twice() {
    let sim = Sim::new();
    let table = device_table(&sim, &[vec![rows(0, 3)]]);
    for projection in [&[0, 0][..], &[0, 0, 1], &[1, 1, 1]] {
        let expected = rows(0, 3).project(projection).unwrap();
        let node = table.scan_on_device(Some(projection), None).unwrap();
        let plan = with_transitions(Arc::new(DeviceExec::new(Arc::new(node))));
        let batches = collect(plan, session().task_ctx()).await.unwrap();
        assert_eq!(batches, [expected]);
    }
}

/// The exact number of rows that a node claims, if it claims one.
fn claimed(plan: &Plan) -> Option<usize> {
    let statistics = datafusion::physical_plan::statistics::StatisticsContext::new()
        .compute(plan.as_ref(), &Default::default())
        .unwrap();
    match statistics.num_rows {
        Precision::Exact(rows) => Some(rows),
        _ => None,
    }
}

async fn assert_claim(partitions: &[Vec<RecordBatch>], fetch: Option<usize>) {
    let sim = Sim::new();
    let table = device_table(&sim, partitions);
    let node = table.scan_on_device(None, fetch).unwrap();
    let plan: Plan = Arc::new(DeviceExec::new(Arc::new(node)));
    let plan = with_transitions(plan);
    let batches = collect(plan.clone(), session().task_ctx()).await.unwrap();
    let rows: usize = batches.iter().map(RecordBatch::num_rows).sum();
    if let Some(claimed) = claimed(&plan) {
        assert_eq!(claimed, rows, "{partitions:?} {fetch:?}");
    }
}

#[tokio::test]
async fn an_exact_number_of_rows_is_one() {
    assert_claim(&[partition(0, 2)], None).await;
    assert_claim(&[partition(0, 2), partition(0, 3)], None).await;
    assert_claim(&[partition(0, 2)], Some(5)).await;
    assert_claim(&[partition(0, 2)], Some(50)).await;
    let sim = Sim::new();
    let table = device_table(&sim, &[partition(0, 2), partition(0, 1)]);
    assert_eq!(claimed(&scan(table).await), Some(48));
}

/// With several partitions nobody knows how many of the rows a limit on each of them leaves.
#[tokio::test]
async fn an_exact_number_of_rows_is_one_with_a_limit_on_partitions() {
    assert_claim(&[vec![numbers(0, 1)], vec![numbers(0, 10)]], Some(5)).await;
}

/// The scan's own words.
#[tokio::test]
async fn tables_and_nodes_can_be_shown() {
    let sim = Sim::new();
    let table = device_table(&sim, &[vec![rows(0, 3)]]);
    assert!(format!("{table:?}").contains("partitions: 1"));
    let plan = scan(table).await;
    assert!(format!("{plan:?}").contains("DeviceScanExec"));
    let tree = datafusion::physical_plan::displayable(plan.as_ref());
    let tree = tree.tree_render().to_string();
    assert!(tree.contains(&format!("device: {}", sim.id())), "{tree}");
    let field = Field::new("a", DataType::Int64, false);
    assert_eq!(*plan.schema().field(0), field);
}
