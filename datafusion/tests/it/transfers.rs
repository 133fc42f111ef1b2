//! What moves, what is waited for, and whether it is told.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use arrow_device::device::sim::SimConfig;
use arrow_device::{Device, Devices, TransferStats};
use arrow_device_datafusion::{DeviceToDeviceExec, execute_on_device};
use datafusion::arrow::array::{ArrayRef, RecordBatch, StringArray};
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::execution::memory_pool::MemoryPool;
use datafusion::physical_plan::collect;
use datafusion::prelude::SessionContext;
use futures::{Stream, StreamExt};
use tokio::time::timeout;

use crate::kit::*;
use crate::memory::recorded;
use crate::nodes::*;
use crate::ops::{lines, run_on_device};

const METRICS: [&str; 6] = [
    "output_rows",
    "bytes_to_device",
    "bytes_to_host",
    "bytes_on_device",
    "copies",
    "host_waits",
];

/// The metrics above, of the nodes of a name.
fn metrics(plan: &Plan, node: &str) -> [usize; 6] {
    METRICS.map(|name| metric(plan, node, name).unwrap_or_else(|| panic!("no {name} of {node}")))
}

/// Runs a plan as it is; the numbers that it gives, and what the device did meanwhile.
async fn ran(plan: &Plan, device: &Device) -> (Vec<i64>, TransferStats) {
    let before = device.stats();
    let found = numbers_from(plan).await;
    (found, device.stats().since(&before))
}

#[tokio::test]
async fn adjacent_operators_pass_batches_on_without_a_copy_or_a_wait() {
    let sim = Sim::new();
    let ctx = session_with(1, 3);
    register(&ctx, "t", device_table(&sim, &[batches(0, 4)]));
    let plan = plan(&ctx, "SELECT a FROM t").await;
    assert_eq!(text(&plan, &[]).matches("MapExec").count(), 3);

    let (found, cost) = ran(&plan, &sim).await;
    assert_eq!(found, multiples(64, 8));
    assert_eq!((cost.bytes_to_device, cost.bytes_on_device), (0, 0));
    // One download of each batch at the end.
    assert_eq!((cost.bytes_to_host, cost.copies), (4 * 128, 4));
    assert_eq!(cost.host_waits, 0);
    // What the operators make, and nothing between them.
    assert_eq!(cost.allocations, 3 * 4);

    assert_eq!(metrics(&plan, "MapExec"), [3 * 64, 0, 0, 0, 0, 0]);
    assert_eq!(metrics(&plan, "DeviceScanExec"), [64, 0, 0, 0, 0, 0]);
    assert_eq!(metrics(&plan, "DeviceToHostExec"), [64, 0, 512, 0, 4, 0]);
    // Each operator's queue waits for the batches of the one before.
    assert!(metric(&plan, "MapExec", "queue_waits") > Some(0));
    drop((plan, ctx));
    sim.assert_done();
}

#[tokio::test]
async fn only_the_columns_and_rows_that_are_asked_for_move() {
    for ctx in [session(), session_without_rule(1)] {
        assert_only_what_is_asked_for_moves(ctx).await;
    }
}

async fn assert_only_what_is_asked_for_moves(ctx: SessionContext) {
    let sim = Sim::new();
    let table = device_table(&sim, &[vec![rows(0, 160), rows(160, 160)]]);
    register(&ctx, "t", table);
    let moved = async |sql| {
        let before = sim.stats();
        let batches = query(&ctx, sql).await.unwrap();
        let cost = sim.stats().since(&before);
        (
            row_count(&batches),
            cost.bytes_to_host,
            cost.bytes_to_device,
        )
    };
    assert_eq!(moved("SELECT a FROM t").await, (320, 2 * 160 * 8, 0));
    assert_eq!(moved("SELECT b, a FROM t").await, (320, 4 * 160 * 8, 0));
    assert_eq!(moved("SELECT a FROM t LIMIT 16").await, (16, 16 * 8, 0));
    assert_eq!(moved("SELECT count(*) FROM t").await, (1, 0, 0));
    let (rows, down, _) = moved("SELECT a FROM t LIMIT 168").await;
    assert_eq!((rows, down), (168, (160 + 8) * 8));
}

/// Up once and down once, whatever stands between.
#[tokio::test]
async fn every_node_tells_exactly_what_it_moved() {
    let sim = Sim::new();
    let host = scan(host_table(&[batches(0, 5)])).await;
    let plan = with_transitions(double(double(host, &sim), &sim));
    let (found, cost) = ran(&plan, &sim).await;
    assert_eq!(found.len(), 80);
    assert_eq!((cost.bytes_to_device, cost.bytes_to_host), (640, 640));
    assert_eq!(metrics(&plan, "HostToDeviceExec"), [80, 640, 0, 0, 5, 0]);
    assert_eq!(metrics(&plan, "MapExec"), [160, 0, 0, 0, 0, 0]);
    assert_eq!(metrics(&plan, "DeviceToHostExec"), [80, 0, 640, 0, 5, 0]);
    assert_eq!(metric(&plan, "HostToDeviceExec", "output_batches"), Some(5));
    assert_eq!(metric(&plan, "DeviceToHostExec", "output_batches"), Some(5));
    // The nodes together are the device: nothing is counted twice, and nothing is left out.
    assert_eq!((cost.copies, cost.host_waits), (10, 0));
}

#[tokio::test]
async fn between_devices_each_side_counts_its_own_half() {
    let (a, b) = (Sim::new(), Sim::new());
    let scan = scan(device_table(&a, &[batches(0, 3)])).await;
    let plan = with_transitions(double(scan, &b));
    let before = a.stats();
    let (found, on_b) = ran(&plan, &b).await;
    let on_a = a.stats().since(&before);
    assert_eq!(found, multiples(48, 2));
    assert_eq!((on_a.bytes_to_host, on_a.bytes_to_device), (384, 0));
    assert_eq!((on_b.bytes_to_host, on_b.bytes_to_device), (384, 384));
    assert_eq!((on_a.host_waits, on_b.host_waits), (0, 0));
    // Down from one and up to the other.
    let moved = metrics(&plan, "DeviceToDeviceExec");
    assert_eq!(moved, [48, 384, 384, 0, 6, 0]);
    assert_eq!(metrics(&plan, "MapExec"), [48, 0, 0, 0, 0, 0]);
    assert_eq!(metrics(&plan, "DeviceToHostExec"), [48, 0, 384, 0, 3, 0]);
}

/// One that reaches the memory of the other copies on its own, and nothing passes through the host.
#[tokio::test]
async fn a_device_that_reaches_the_other_copies_directly() {
    let peer = || {
        Sim::with(SimConfig {
            peer_access: true,
            ..SimConfig::default()
        })
    };
    let (a, b) = (peer(), peer());
    let table = device_table(&a, &[batches(0, 3)]);
    let plan = DeviceToDeviceExec::above(device_leaf(table.clone()).await, &b);
    let before = a.stats();
    let (batches, on_b) = run_on_device(&plan, &b).await.unwrap();
    let on_a = a.stats().since(&before);
    assert!(batches[0].iter().all(|batch| *batch.device() == b.device));
    assert_eq!((on_a.bytes_to_host, on_a.copies), (0, 0));
    assert_eq!((on_b.bytes_to_host, on_b.bytes_to_device), (0, 0));
    assert_eq!((on_b.bytes_on_device, on_b.copies), (384, 3));
    // Events of simulated devices are their own: a blocking thread waits for each batch.
    assert_eq!((on_a.host_waits, on_b.host_waits), (3, 0));
    assert_eq!(metrics(&plan, "DeviceToDeviceExec"), [48, 0, 0, 384, 3, 3]);
    assert_eq!(numbers_on(&batches[0]), multiples(48, 1));
    drop((plan, batches));

    // As the rule plans it.
    let plan = with_transitions(double(scan(table).await, &b));
    let before = a.stats();
    let (found, on_b) = ran(&plan, &b).await;
    let on_a = a.stats().since(&before);
    assert_eq!(found, multiples(48, 2));
    assert_eq!((on_a.bytes_to_host, on_a.copies), (0, 0));
    assert_eq!((on_b.bytes_on_device, on_b.bytes_to_device), (384, 0));
    assert_eq!(metrics(&plan, "DeviceToDeviceExec"), [48, 0, 0, 384, 3, 3]);
    // The result comes down, and nothing else.
    assert_eq!(on_b.bytes_to_host, 384);
    assert_eq!(metrics(&plan, "DeviceToHostExec"), [48, 0, 384, 0, 3, 0]);
    drop(plan);
    b.assert_done();
    a.assert_done();
}

/// A slow node on the host is no reason to look at the upload.
#[tokio::test]
async fn an_upload_does_not_count_its_childs_time() {
    let sim = Sim::new();
    let slept = Arc::new(AtomicU64::new(0));
    let sleeps = Arc::clone(&slept);
    let (table, _) = host_stream(move |i| {
        (i < 10).then(|| {
            let start = Instant::now();
            std::thread::sleep(Duration::from_millis(50));
            sleeps.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
            Ok(numbers(i as i64 * 16, 16))
        })
    });
    let plan = with_transitions(double(scan(table).await, &sim));
    let start = Instant::now();
    let (found, _) = ran(&plan, &sim).await;
    // Everything happens on one thread, one after the other.
    let awake = start.elapsed() - Duration::from_nanos(slept.load(Ordering::Relaxed));
    assert_eq!(found.len(), 160);
    for node in ["HostToDeviceExec", "MapExec", "DeviceToHostExec"] {
        let time = metric(&plan, node, "elapsed_compute").unwrap();
        let time = Duration::from_nanos(time as u64);
        assert!(
            time > Duration::ZERO && time < awake,
            "{node}: {time:?} of {awake:?}"
        );
    }
}

#[tokio::test]
async fn explain_analyze_shows_them() {
    let sim = Sim::new();
    let ctx = session_with(1, 1);
    register(&ctx, "t", device_table(&sim, &[batches(0, 2)]));
    let shown = query(&ctx, "EXPLAIN ANALYZE SELECT a FROM t")
        .await
        .unwrap();
    let shown = pretty_format_batches(&shown).unwrap().to_string();
    // With those of the operator itself.
    says(&shown, &["started=1"]);
    for (node, bytes, copies, peak) in [
        ("DeviceScanExec", 0, 0, 0),
        ("MapExec", 0, 0, 128),
        ("DeviceToHostExec", 256, 2, 256),
    ] {
        let line = shown.lines().find(|line| line.contains(node)).unwrap();
        let parts = [
            "output_rows=32,",
            "elapsed_compute=",
            "bytes_to_device=0",
            &format!("bytes_to_host={bytes}"),
            "bytes_on_device=0",
            &format!("copies={copies}"),
            &format!("peak_mem_used={peak}.0 B"),
            "queue_waits=",
            "host_waits=0",
        ];
        says(&line, &parts);
    }
}

/// Queries on one device, on threads of their own: each tells what it did itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn queries_at_once_do_not_count_each_other() {
    let sim = Sim::new();
    let down_table = device_table(&sim, &[batches(0, 6)]);
    for _ in 0..10 {
        let mut tasks = Vec::new();
        for n in 1..=4 {
            let up = scan(host_table(&[batches(0, n)])).await;
            let up = with_transitions(double(up, &sim));
            let down = scan(down_table.clone()).await;
            let down = with_transitions(double(down, &sim));
            let context = session().task_ctx();
            tasks.push(tokio::spawn(async move {
                collect(up.clone(), context.clone()).await.unwrap();
                collect(down.clone(), context).await.unwrap();
                (up, down, n as usize)
            }));
        }
        for task in tasks {
            let (up, down, n) = task.await.unwrap();
            let (rows, bytes) = (n * 16, n * 128);
            assert_eq!(metrics(&up, "HostToDeviceExec"), [rows, bytes, 0, 0, n, 0]);
            assert_eq!(metrics(&up, "MapExec"), [rows, 0, 0, 0, 0, 0]);
            assert_eq!(metrics(&up, "DeviceToHostExec"), [rows, 0, bytes, 0, n, 0]);
            assert_eq!(metrics(&down, "DeviceToHostExec"), [96, 0, 768, 0, 6, 0]);
        }
    }
}

/// Partitions are counted one by one, and run at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn partitions_count_for_themselves() {
    let sim = Sim::new();
    let partitions = [batches(0, 1), batches(100, 2), batches(200, 3)];
    let table = device_table(&sim, &partitions);
    let plan = with_transitions(double(scan(table).await, &sim));
    let (found, _) = ran(&plan, &sim).await;
    assert_eq!(found.len(), 96);
    let metrics = plan.metrics().unwrap();
    for (partition, expected) in [(0, 128), (1, 256), (2, 384)] {
        let bytes = metrics.sum(|metric| {
            metric.partition() == Some(partition) && metric.value().name() == "bytes_to_host"
        });
        assert_eq!(bytes.unwrap().as_usize(), expected);
    }
}

/// Polls. The devices run between polls and only then: a wait within one would run their work.
///
/// What came, and how often there was nothing yet.
fn drive<T: Send>(sims: &[&Sim], stream: impl Stream<Item = T> + Unpin + Send) -> (Vec<T>, usize) {
    // On a thread of its own: within a task, DataFusion's streams yield from time to time.
    std::thread::scope(|scope| {
        let driven = scope.spawn(|| polled(sims, stream)).join();
        driven.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn polled<T>(sims: &[&Sim], mut stream: impl Stream<Item = T> + Unpin) -> (Vec<T>, usize) {
    let mut driven = Driven::new();
    while !driven.ended {
        let watch = Watch::of(sims);
        let polled = stream.poll_next_unpin(&mut Context::from_waker(Waker::noop()));
        watch.assert_nothing_ran();
        driven.take(sims, polled);
    }
    (driven.items, driven.pending)
}

/// As [`drive`], for a stream that tasks of this runtime make: neither their polls nor the stream's wait.
async fn drive_tasks<T>(
    sims: &[&Sim],
    mut stream: impl Stream<Item = T> + Unpin,
) -> (Vec<T>, usize) {
    let mut driven = Driven::new();
    while !driven.ended {
        let watch = Watch::of(sims);
        // As far as the tasks get without the devices. Threads do some of the work, so that only
        // silence tells that nothing more comes.
        let polled = match timeout(Duration::from_millis(20), stream.next()).await {
            Ok(item) => Poll::Ready(item),
            Err(_) => Poll::Pending,
        };
        watch.assert_nothing_ran();
        driven.take(sims, polled);
    }
    (driven.items, driven.pending)
}

/// The devices before a poll.
struct Watch<'a>(Vec<(&'a Sim, usize, u64)>);

impl<'a> Watch<'a> {
    fn of(sims: &[&'a Sim]) -> Self {
        let state = |sim: &&'a Sim| {
            let pending = sim.sim.report().pending_operations;
            (*sim, pending, sim.stats().host_waits)
        };
        Self(sims.iter().map(state).collect())
    }

    fn assert_nothing_ran(&self) {
        for (sim, pending, host_waits) in &self.0 {
            let now = sim.sim.report().pending_operations;
            assert!(now >= *pending, "work ran within a poll");
            let now = sim.stats().host_waits;
            assert_eq!(now, *host_waits, "host waits within a poll");
        }
    }
}

/// What came, and how often there was nothing yet.
struct Driven<T> {
    items: Vec<T>,
    pending: usize,
    ended: bool,
}

impl<T> Driven<T> {
    fn new() -> Self {
        let (items, pending, ended) = (Vec::new(), 0, false);
        Self {
            items,
            pending,
            ended,
        }
    }

    fn take(&mut self, sims: &[&Sim], polled: Poll<Option<T>>) {
        match polled {
            Poll::Ready(Some(item)) => self.items.push(item),
            Poll::Ready(None) => self.ended = true,
            Poll::Pending => {
                self.pending += 1;
                assert!(self.pending < 10_000, "it never goes on");
                sims.iter().for_each(|sim| sim.synchronize().unwrap());
            }
        }
    }
}

#[track_caller]
fn drive_plan(sims: &[&Sim], plan: &Plan) -> Vec<RecordBatch> {
    let stream = plan.execute(0, session().task_ctx()).unwrap();
    let (batches, pending) = drive(sims, stream);
    assert!(pending > 0, "nothing was ever waited for");
    batches.into_iter().map(Result::unwrap).collect()
}

#[tokio::test]
async fn no_poll_waits_for_a_scan() {
    let sim = Sim::deferred();
    // Text, whose length hides on the device, whole and cut.
    let ctx = over(device_table(&sim, &[vec![rows(0, 50), rows(50, 50)]]));
    for (sql, n) in [
        ("SELECT * FROM t", 100),
        ("SELECT s FROM t LIMIT 20", 20),
        ("SELECT a FROM t WHERE b = 3", 10),
        ("SELECT s, count(*) FROM t GROUP BY s ORDER BY s", 86),
    ] {
        let batches = drive_plan(&[&sim], &plan(&ctx, sql).await);
        assert_eq!(row_count(&batches), n, "{sql}");
    }
    drop(ctx);
    sim.assert_done();
}

#[tokio::test]
async fn no_poll_waits_for_operators() {
    let sim = Sim::deferred();
    let table = scan(device_table(&sim, &[batches(0, 6)])).await;
    let host = scan(host_table(&[batches(0, 6)])).await;
    for child in [table, host] {
        let plan = with_transitions(double(double(child, &sim), &sim));
        let found = numbers_of(&drive_plan(&[&sim], &plan));
        assert_eq!(found, multiples(96, 4));
    }
    sim.assert_done();
}

#[tokio::test]
async fn no_poll_waits_between_devices() {
    let (a, b) = (Sim::deferred(), Sim::deferred());
    let table = device_table(&a, &[vec![rows(0, 30), rows(30, 3), rows(33, 60)]]);
    let plan = with_transitions(double(double(scan(table).await, &b), &a));
    let found = numbers_of(&drive_plan(&[&a, &b], &plan));
    assert_eq!(found, multiples(93, 4));
    drop(plan);
    b.synchronize().unwrap();
    a.assert_done();
    b.assert_done();
}

/// As [`drive_plan`], for a node that waits on a blocking thread. The runtime has one, which is held up while the stream is
/// polled, and has done what the poll left to it before the next one.
fn drive_blocking(sims: &[&Sim], plan: &Plan) -> Vec<RecordBatch> {
    let drive = || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.max_blocking_threads(1).build().unwrap();
        let mut stream = {
            let _within = runtime.enter();
            plan.execute(0, session().task_ctx()).unwrap()
        };
        let mut driven = Driven::new();
        while !driven.ended {
            let (begin, begun) = mpsc::channel();
            let (release, released) = mpsc::channel::<()>();
            runtime.spawn_blocking(move || {
                begin.send(()).unwrap();
                released.recv().unwrap_err();
            });
            begun.recv().unwrap();
            let watch = Watch::of(sims);
            let polled = stream.poll_next_unpin(&mut Context::from_waker(Waker::noop()));
            watch.assert_nothing_ran();
            drop(release);
            let (end, ended) = mpsc::channel();
            runtime.spawn_blocking(move || end.send(()).unwrap());
            ended.recv().unwrap();
            driven.take(sims, polled);
        }
        driven.items.into_iter().map(Result::unwrap).collect()
    };
    std::thread::scope(|scope| scope.spawn(drive).join().unwrap())
}

/// A copy on a blocking thread goes on if its reader has gone, and what it has allocated stays reserved.
#[tokio::test]
async fn a_copy_that_nobody_waits_for_stays_reserved() {
    let peer = || {
        Sim::with(SimConfig {
            peer_access: true,
            ..SimConfig::default()
        })
    };
    let (a, b) = (peer(), peer());
    let moves = device_leaf(device_table(&a, &[batches(0, 1)])).await;
    let moves = DeviceToDeviceExec::above(moves, &b);
    let moves = down(moves);
    std::thread::scope(|scope| {
        let dropped = || {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = runtime.max_blocking_threads(1).build().unwrap();
            let _within = runtime.enter();
            let (context, pool) = recorded();
            let mut stream = moves.execute(0, context).unwrap();
            let (release, released) = mpsc::channel::<()>();
            runtime.spawn_blocking(move || released.recv().unwrap_err());
            let polled = stream.poll_next_unpin(&mut Context::from_waker(Waker::noop()));
            assert!(polled.is_pending());
            drop(stream);
            assert_eq!(pool.reserved(), 128);
            drop(release);
            eventually("the copy is done", || pool.reserved() == 0);
        };
        scope.spawn(dropped).join().unwrap();
    });
    drop(moves);
    b.assert_done();
    a.assert_done();
}

/// The columns of a batch come down by themselves, and at once.
#[tokio::test]
async fn columns_come_down_at_once() {
    let sim = Sim::deferred();
    let mut waits = Vec::new();
    for columns in [1, 5] {
        let text = (0..4000).map(|i| format!("{i:020}"));
        let column: ArrayRef = Arc::new(StringArray::from_iter_values(text));
        let batch = (0..columns).map(|i| (format!("c{i}"), column.clone()));
        let batch = RecordBatch::try_from_iter(batch).unwrap();
        let ctx = over(device_table(&sim, &[vec![batch.clone()]]));
        // The ends of a slice's text are read first.
        let plan = plan(&ctx, "SELECT * FROM t LIMIT 3000").await;
        let stream = plan.execute(0, SessionContext::new().task_ctx()).unwrap();
        let (found, pending) = drive(&[&sim], stream);
        assert_eq!(found[0].as_ref().unwrap(), &batch.slice(0, 3000));
        waits.push(pending);
    }
    assert_eq!(waits[0], waits[1]);
}

/// Sizes, offsets and bitmaps of the batches to join are on the device.
#[tokio::test]
async fn no_poll_waits_for_a_join() {
    let sim = Sim::deferred();
    let table = device_table(&sim, &[(0..12).map(|i| rows(i * 10, 10)).collect()]);
    let plan = with_transitions(joining(device_leaf(table).await, &sim, 40));
    let batches = drive_blocking(&[&sim], &plan);
    let joined = metric(&plan, "DeviceCoalesceBatchesExec", "output_batches");
    assert_eq!(joined, Some(3));
    assert_eq!(lines(&batches), lines(&[rows(0, 120)]));
    // It did wait.
    let waits = metric(&plan, "DeviceCoalesceBatchesExec", "host_waits");
    assert!(waits >= Some(3), "{waits:?}");
    drop((plan, batches));
    sim.assert_done();
}

/// A consumer that takes all that there is, while the device does nothing: the task waits for the
/// oldest upload, no thread does.
#[tokio::test]
async fn no_poll_waits_for_more_uploads_than_may_be_under_way() {
    let sim = Sim::deferred();
    let host = scan(host_table(&[batches(0, 200)])).await;
    let stream = execute_on_device(host, session().task_ctx(), &sim).unwrap();
    let (batches, pending) = drive_tasks(&[&sim], stream).await;
    assert_eq!(batches.len(), 200);
    assert!(pending > 0, "200 uploads at once");
    drop(batches);
    sim.assert_done();
}

/// As well of moves.
#[tokio::test]
async fn no_poll_waits_for_more_moves_than_may_be_under_way() {
    let sim = Sim::deferred();
    let table = device_table(&Devices::cpu(), &[batches(0, 200)]);
    let moves = DeviceToDeviceExec::above(device_leaf(table).await, &sim);
    let stream = execute_on_device(moves, session().task_ctx(), &sim).unwrap();
    let (batches, pending) = drive_tasks(&[&sim], stream).await;
    assert_eq!(batches.len(), 200);
    assert!(batches.iter().all(Result::is_ok));
    // 66 copies, and then all that were under way are done.
    assert!((3..200).contains(&pending), "{pending}");
    drop(batches);
    sim.assert_done();
}

/// The other way: results on another device.
#[tokio::test]
async fn no_poll_waits_for_a_result_on_another_device() {
    let (a, b) = (Sim::deferred(), Sim::deferred());
    let table = device_table(&a, &[batches(0, 3), batches(100, 2)]);
    let plan = scan(table).await;
    let stream = execute_on_device(plan, session().task_ctx(), &b).unwrap();
    let (batches, pending) = drive_tasks(&[&a, &b], stream).await;
    assert_eq!((batches.len(), pending > 0), (5, true));
    drop(batches);
    // What b has not copied yet is host memory of a's.
    b.assert_done();
    a.assert_done();
}
