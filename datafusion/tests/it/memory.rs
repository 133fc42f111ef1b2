//! What is reserved in a device's memory pool.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};

use arrow_device::device::sim::FaultOp;
use arrow_device::{Device, Devices};
use arrow_device_datafusion::{
    DeviceMemory, DeviceOptions, DevicePools, DeviceReservation, DeviceRule, DeviceTable,
    DeviceToDeviceExec, execute_on_device, to_datafusion,
};
use datafusion::arrow::array::{
    ArrayRef, Int64Array, ListBuilder, RecordBatch, StringArray, StringBuilder,
};
use datafusion::catalog::TableProvider;
use datafusion::common::{DataFusionError, Result};
use datafusion::execution::memory_pool::{
    FairSpillPool, GreedyMemoryPool, MemoryConsumer, MemoryPool, MemoryReservation,
};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::execution::{SessionStateBuilder, TaskContext};
use datafusion::physical_plan::spill::get_record_batch_memory_size;
use datafusion::physical_plan::{collect, execute_stream};
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::{FutureExt, StreamExt, TryStreamExt};

use crate::kit::*;
use crate::nodes::*;

/// A pool without a limit that keeps what each consumer has, and had at most.
#[derive(Debug, Default)]
pub(crate) struct Recorder(Mutex<BTreeMap<String, (usize, usize)>>);

impl Recorder {
    /// The most bytes of each consumer that had any.
    pub(crate) fn peaks(&self) -> BTreeMap<String, usize> {
        let of = self.0.lock().unwrap();
        let peaks = of.iter().map(|(name, (_, peak))| (name.clone(), *peak));
        peaks.filter(|(_, peak)| *peak > 0).collect()
    }
}

impl fmt::Display for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Recorder")
    }
}

impl MemoryPool for Recorder {
    fn name(&self) -> &str {
        "Recorder"
    }

    fn grow(&self, reservation: &MemoryReservation, additional: usize) {
        let mut all = self.0.lock().unwrap();
        let (bytes, peak) = all.entry(reservation.consumer().name().into()).or_default();
        *bytes += additional;
        *peak = (*peak).max(*bytes);
    }

    fn shrink(&self, reservation: &MemoryReservation, shrink: usize) {
        let mut all = self.0.lock().unwrap();
        let bytes = &mut all.get_mut(reservation.consumer().name()).unwrap().0;
        *bytes = bytes.checked_sub(shrink).expect("more than it has");
    }

    fn try_grow(&self, reservation: &MemoryReservation, additional: usize) -> Result<()> {
        assert!(!reservation.consumer().can_spill());
        self.grow(reservation, additional);
        Ok(())
    }

    fn reserved(&self) -> usize {
        let of = self.0.lock().unwrap();
        of.values().map(|(bytes, _)| bytes).sum()
    }
}

/// A session whose uploads join nothing, with this pool for its devices.
fn context(pool: Arc<dyn MemoryPool>) -> Arc<TaskContext> {
    let config = SessionConfig::new().with_option_extension(joined_to(0));
    let config = config.with_extension(Arc::new(DevicePools::new(move |_| pool.clone())));
    SessionContext::new_with_config(config).task_ctx()
}

pub(crate) fn limited(bytes: usize) -> (Arc<TaskContext>, Arc<dyn MemoryPool>) {
    let pool: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(bytes));
    (context(pool.clone()), pool)
}

pub(crate) fn recorded() -> (Arc<TaskContext>, Arc<Recorder>) {
    let pool = Arc::new(Recorder::default());
    (context(pool.clone()), pool)
}

/// `double` over an upload, with a download above.
async fn up_and_down(n: i64, sim: &Sim) -> Plan {
    with_transitions(double(scan(host_table(&[batches(0, n)])).await, sim))
}

#[track_caller]
pub(crate) fn assert_refused<T>(result: Result<T>, parts: &[&str]) {
    let e = fails(result, parts);
    let exhausted = |e: &_| matches!(e, DataFusionError::ResourcesExhausted(_));
    assert!(exhausted(e.find_root()), "{e:?}");
    assert!(exhausted(&e), "not wrapped: {e:?}");
}

/// 1.28 MB under 1 KiB.
#[tokio::test]
async fn uploads_are_refused_before_they_allocate() {
    let sim = Sim::new();
    let wide: Vec<_> = (0..20).map(|i| numbers(i * 8_000, 8_000)).collect();
    let device = sim.id().to_string();
    let parts = ["HostToDeviceExec, partition 0", "64000 bytes", &device];
    for doubles in 0..3 {
        let host = scan(host_table(std::slice::from_ref(&wide))).await;
        let plan = (0..doubles).fold(host, |plan, _| double(plan, &sim));
        let (context, pool) = limited(1024);
        let before = sim.stats();
        if doubles == 0 {
            // The errors of device streams are those of DataFusion, too.
            let stream = execute_on_device(plan, context, &sim).unwrap();
            let found: arrow_device::Result<Vec<_>> = stream.try_collect().await;
            assert_refused(found.map_err(to_datafusion), &parts);
        } else {
            assert_refused(collect(with_transitions(plan), context).await, &parts);
        }
        assert_eq!(sim.stats().since(&before).allocations, 0);
        assert_eq!(pool.reserved(), 0);
        sim.assert_done();
    }
    // Enough for what is under way, however much goes through.
    let host = scan(host_table(&[wide])).await;
    let (context, pool) = limited(4 * 64_000);
    let found = collect(with_transitions(double(host, &sim)), context).await;
    assert_eq!(row_count(&found.unwrap()), 160_000);
    assert_eq!(pool.reserved(), 0);
}

/// For each partition by itself.
#[tokio::test]
async fn each_node_reserves_what_is_under_way() {
    let sim = Sim::new();
    let (context, pool) = recorded();
    let host = scan(host_table(&[batches(0, 10), batches(0, 10)])).await;
    let plan = with_transitions(double(host, &sim));
    assert_eq!(collect(plan.clone(), context).await.unwrap().len(), 20);
    let mut expected = BTreeMap::new();
    for partition in 0..2 {
        // One that was returned or is being copied, and one ahead.
        expected.insert(format!("DeviceToHostExec[{partition}]"), 2 * 128);
        expected.insert(format!("HostToDeviceExec[{partition}]"), 128);
        expected.insert(format!("MapExec[{partition}]"), 128);
    }
    assert_eq!(pool.peaks(), expected);
    assert_eq!(pool.reserved(), 0);
    let peak = metric(&plan, "DeviceToHostExec", "peak_mem_used");
    assert_eq!(peak, Some(2 * 2 * 128));
}

/// Nothing is reserved twice where an operator uploads or moves its input itself.
#[tokio::test]
async fn plans_without_the_rule_reserve_the_same() {
    let (a, b) = (Sim::new(), Sim::new());
    let (context, pool) = recorded();
    let plan = double(scan(host_table(&[batches(0, 5)])).await, &a);
    assert_eq!(collect(plan, context).await.unwrap().len(), 5);
    // The operator itself and the download in it.
    let expected = [("MapExec[0]", 3 * 128), ("input DataSourceExec[0]", 128)];
    let expected = expected.map(|(name, bytes)| (name.to_owned(), bytes));
    assert_eq!(pool.peaks(), expected.into());
    assert_eq!(pool.reserved(), 0);

    let (context, pool) = recorded();
    let moved = double(scan(device_table(&a, &[batches(0, 5)])).await, &b);
    assert_eq!(collect(moved, context).await.unwrap().len(), 5);
    // On its way through the host and on the device; and one ahead, except where it has arrived only after the one before was taken.
    let peak = pool.peaks()["input DeviceToHostExec[0]"];
    assert!((2 * 128..=3 * 128).contains(&peak), "{peak}");
    assert_eq!(pool.reserved(), 0);
}

/// By node: what it needs beside others, and what it says if there is not enough.
#[tokio::test]
async fn every_node_is_refused_what_it_needs() {
    let (a, b) = (Sim::new(), Sim::new());
    let source = scan(device_table(&a, &[batches(0, 5)])).await;
    let moves = DeviceToDeviceExec::above(source.children()[0].clone(), &b);
    let moves = down(moves);
    let doubled = with_transitions(double(source.clone(), &a));
    for (plan, device, least, node) in [
        // A copy of one batch and one ahead, on their way to the host.
        (source, &a, 2 * 128, "DeviceToHostExec, partition 0"),
        // What operators allocate is known when they have.
        (doubled, &a, 3 * 128, "MapExec, partition 0"),
        // Both halves.
        (moves, &b, 6 * 128, "DeviceToDeviceExec, partition 0"),
    ] {
        let (context, pool) = limited(127);
        let before = device.stats();
        let found = collect(plan.clone(), context).await;
        let id = device.id().to_string();
        assert_refused(found, &[node, "128 bytes", &id]);
        let copies = device.stats().since(&before).copies;
        assert_eq!((pool.reserved(), copies), (0, 0), "{node}");
        let (context, pool) = limited(least);
        assert_eq!(collect(plan, context).await.unwrap().len(), 5);
        assert_eq!(pool.reserved(), 0);
    }
}

#[tokio::test]
async fn memory_that_the_host_reads_is_not_reserved() {
    let cpu = Devices::cpu();
    let (context, pool) = limited(1);
    let plan = scan(device_table(&cpu, &[batches(0, 5)])).await;
    assert_eq!(collect(plan, context.clone()).await.unwrap().len(), 5);
    // An upload to the host's own memory copies nothing.
    let host = scan(host_table(&[batches(0, 5)])).await;
    let stream = execute_on_device(host, context, &cpu).unwrap();
    assert_eq!(stream.try_collect::<Vec<_>>().await.unwrap().len(), 5);
    assert_eq!(pool.reserved(), 0);
}

#[tokio::test]
async fn nothing_stays_reserved() {
    let sim = Sim::new();
    // In the middle.
    let (context, pool) = recorded();
    let mut stream = execute_stream(up_and_down(10, &sim).await, context).unwrap();
    stream.next().await.unwrap().unwrap();
    assert!(pool.reserved() >= 3 * 128, "{}", pool.reserved());
    drop(stream);
    assert_eq!(pool.reserved(), 0);

    // After errors of the host, of the device, and of an operator.
    for failing in 0..3 {
        let (context, pool) = recorded();
        let plan = match failing {
            0 => {
                let (table, _) = host_stream(|i| match i {
                    0..3 => Some(Ok(numbers(i as i64 * 16, 16))),
                    _ => Some(Err(DataFusionError::Execution("line 7".into()))),
                });
                with_transitions(double(scan(table).await, &sim))
            }
            1 => up_and_down(5, &sim).await,
            _ => {
                let host = scan(host_table(&[batches(0, 5)])).await;
                let kernel = |n| match n {
                    40 => Err("no 40".to_string()),
                    n => Ok(n),
                };
                with_transitions(map(vec![host], &sim, kernel))
            }
        };
        if failing == 1 {
            sim.sim.faults().fail_nth(FaultOp::Allocate, 4);
        }
        let mut stream = execute_stream(plan, context).unwrap();
        let mut failed = false;
        while let Some(batch) = stream.next().await {
            failed = batch.is_err();
        }
        assert!(failed, "{failing}");
        // The stream is still there.
        assert_eq!(pool.reserved(), 0, "{failing}");
        drop(stream);
        sim.sim.faults().clear();
    }
}

/// A task that is cancelled gives back what it had.
#[tokio::test]
async fn a_cancelled_task_gives_all_back() {
    let sim = Sim::deferred();
    let (context, pool) = recorded();
    let plan = up_and_down(10, &sim).await;
    // Its download never arrives.
    let task = tokio::spawn(collect(plan, context));
    while pool.reserved() < 3 * 128 {
        tokio::task::yield_now().await;
    }
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    assert_eq!(pool.reserved(), 0);
    sim.assert_done();
}

/// Of a session's memory its sorts have as much as over tables on the host, so that they fail over a device table only where they fail there.
#[tokio::test]
async fn sorts_lose_nothing_to_devices() {
    let sim = Sim::new();
    // One partition: what two have beside each other would depend on which is faster.
    let parts = [batches(0, 200)];
    let (on_device, on_host) = (device_table(&sim, &parts), host_table(&parts));
    let mut spilled = 0;
    for bytes in (2..30).map(|i| i * 2000) {
        let sort = async |table: Arc<dyn TableProvider>, rule| {
            let pool: Arc<dyn MemoryPool> = Arc::new(FairSpillPool::new(bytes));
            let runtime = RuntimeEnvBuilder::new().with_memory_pool(pool).build_arc();
            let mut config = SessionConfig::new().with_target_partitions(1);
            config.options_mut().execution.sort_spill_reservation_bytes = 1000;
            let mut state = SessionStateBuilder::new()
                .with_config(config.with_batch_size(16))
                .with_runtime_env(runtime.unwrap())
                .with_default_features();
            if rule {
                state = state.with_physical_optimizer_rule(Arc::new(DeviceRule::default()));
            }
            let ctx = SessionContext::new_with_state(state.build());
            register(&ctx, "t", table);
            let plan = plan(&ctx, "SELECT a FROM t ORDER BY a DESC").await;
            let found = collect(plan.clone(), ctx.task_ctx()).await;
            let spills = metric(&plan, "SortExec", "spill_count").unwrap_or(0);
            (found.is_ok(), spills)
        };
        let (fits, spills) = sort(on_host.clone(), false).await;
        spilled += spills;
        for rule in [true, false] {
            let (found, _) = sort(on_device.clone(), rule).await;
            assert!(found || !fits, "{bytes} bytes, {rule}");
        }
    }
    assert!(spilled > 0);
}

#[test]
fn a_limit_is_of_all_devices_or_of_one() {
    let (a, b) = (Sim::new(), Sim::new());
    for (text, of_a, of_b) in [
        ("100".to_owned(), true, true),
        (format!("{}=100", a.id()), true, false),
        (format!(" {}=1000, sim=100 ", a.id()), false, true),
        (format!("cuda=1,{}=100", b.id()), false, true),
    ] {
        let limit: DeviceMemory = text.parse().unwrap();
        let shown = limit.to_string();
        assert_eq!(shown, text.replace(' ', ""));
        assert_eq!(shown.parse::<DeviceMemory>().unwrap(), limit);
        let context = SessionContext::new_with_config(taking_turns(&text, EVER)).task_ctx();
        for (sim, limited) in [(&a, of_a), (&b, of_b)] {
            let kept = DeviceReservation::new(&context, "JoinExec", 0, &sim.device);
            kept.grow(100).unwrap();
            // What another partition has, this one has not.
            let other = DeviceReservation::new(&context, "JoinExec", 1, &sim.device);
            assert_eq!(other.grow(1).is_err(), limited, "{text}");
        }
    }
    for text in ["many", "cuda=", "no such=1"] {
        assert!(text.parse::<DeviceMemory>().is_err(), "{text}");
    }
}

/// No query is overtaken.
const EVER: u64 = 3_600_000;

fn taking_turns(memory: &str, idle_ms: u64) -> SessionConfig {
    let mut options = DeviceOptions::default();
    (options.memory, options.idle_ms) = (memory.parse().unwrap(), idle_ms);
    SessionConfig::new().with_option_extension(options)
}

/// One query at a time where the memory has a limit; one that nobody polls is not waited for, since it may wait for this one.
#[tokio::test]
async fn queries_take_turns() {
    let sim = Sim::new();
    let table = device_table(&sim, &[batches(0, 5)]);
    let start = async |memory: &str, idle_ms| {
        let context = SessionContext::new_with_config(taking_turns(memory, idle_ms)).task_ctx();
        let plan = with_transitions(double(scan(table.clone()).await, &sim));
        execute_stream(plan, context).unwrap()
    };
    let limit = "1000000";
    let mut first = start(limit, EVER).await;
    first.next().await.unwrap().unwrap();
    let mut second = start(limit, EVER).await;
    assert!(second.next().now_or_never().is_none());
    // Not where there is no limit, and not for ever.
    assert_eq!(start("", EVER).await.count().await, 5);
    let overtakes = start(limit, 50).await.count();
    assert_eq!(tokio::time::timeout(LONG, overtakes).await.unwrap(), 5);
    assert!(second.next().now_or_never().is_none());
    // It is woken.
    let second = tokio::spawn(second.count());
    tokio::task::yield_now().await;
    assert_eq!(first.count().await, 4);
    let second = tokio::time::timeout(LONG, second).await.unwrap();
    assert_eq!(second.unwrap(), 5);
    // One that is dropped has no turn any more.
    let mut first = start(limit, EVER).await;
    first.next().await.unwrap().unwrap();
    drop(first);
    let second = start(limit, EVER).await.count();
    assert_eq!(tokio::time::timeout(LONG, second).await.unwrap(), 5);
}

/// Counts, and then may panic.
struct Woken(AtomicUsize, bool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
        if self.1 {
            std::panic::resume_unwind(Box::new("no report of it"));
        }
    }
}

#[tokio::test]
async fn tasks_that_wait_are_known_once_and_woken_one_by_one() {
    let sim = Sim::new();
    let table = device_table(&sim, &[batches(0, 5)]);
    let start = async || {
        let context = SessionContext::new_with_config(taking_turns("1000000", EVER)).task_ctx();
        execute_stream(scan(table.clone()).await, context).unwrap()
    };
    let mut first = start().await;
    first.next().await.unwrap().unwrap();
    let mut waiting = Vec::new();
    for panics in [true, false] {
        let woken = Arc::new(Woken(AtomicUsize::new(0), panics));
        let (waker, mut stream) = (Waker::from(woken.clone()), start().await);
        for _ in 0..100 {
            let mut cx = Context::from_waker(&waker);
            assert!(stream.poll_next_unpin(&mut cx).is_pending());
        }
        // Here, among those that wait, and at the timer.
        assert_eq!(Arc::strong_count(&woken), 4);
        waiting.push((woken, stream));
    }
    drop(first);
    for (woken, _) in waiting {
        assert_eq!(woken.0.load(SeqCst), 1);
    }
}

#[test]
fn an_operator_reserves_what_it_keeps() {
    let sim = Sim::new();
    let device: &Device = &sim;
    let (context, pool) = limited(1000);
    let kept = DeviceReservation::new(&context, "JoinExec", 7, device);
    kept.grow(600).unwrap();
    let id = sim.id().to_string();
    let parts = ["JoinExec, partition 7", "401 bytes", &id, "JoinExec[7]"];
    assert_refused(kept.grow(401), &parts);
    assert_eq!((kept.size(), pool.reserved()), (600, 600));
    kept.shrink(100);
    assert_eq!(pool.reserved(), 500);
    kept.shrink(501);
    assert_eq!((kept.size(), pool.reserved()), (0, 0));
    kept.grow(1000).unwrap();
    drop(kept);
    assert_eq!(pool.reserved(), 0);
}

/// Nodes that cannot be refused may take a pool beyond its limit: that is no reason to refuse nothing.
#[tokio::test]
async fn a_pool_beyond_its_limit_refuses_only_more() {
    let sim = Sim::new();
    let device: &Device = &sim;
    let (context, pool) = limited(1000);
    let other = MemoryConsumer::new("other").register(&pool);
    let kept = DeviceReservation::new(&context, "JoinExec", 0, device);
    kept.grow(600).unwrap();
    other.grow(1000);
    kept.grow(0).unwrap();
    kept.grow(1).unwrap_err();
    kept.shrink(500);
    kept.grow(0).unwrap();
    assert_eq!((kept.size(), pool.reserved()), (100, 1100));
    drop((kept, other));

    // A stream ends, and a device error stays one.
    for fault in [false, true] {
        let other = MemoryConsumer::new("other").register(&pool);
        let plan = scan(host_table(&[batches(0, 3)])).await;
        let stream = execute_on_device(plan, context.clone(), &sim).unwrap();
        let (n, grown) = (if fault { 1 } else { 3 }, &other);
        let taken = stream.enumerate().map(|(i, batch)| {
            if i + 1 == n {
                grown.grow(1000);
                if fault {
                    sim.sim.faults().fail_nth(FaultOp::Allocate, 1);
                }
            }
            batch
        });
        let found: Vec<_> = taken.collect().await;
        let ok = found.iter().filter(|batch| batch.is_ok()).count();
        assert_eq!(found.len() - ok, usize::from(fault), "{found:?}");
        drop(found);
        drop(other);
        sim.sim.faults().clear();
        assert_eq!(pool.reserved(), 0);
    }
}

/// Of columns whose rows have no fixed width, what is reserved for a slice follows its rows.
#[tokio::test]
async fn a_slice_reserves_its_part_of_a_column() {
    const ROWS: usize = 10_000;
    let (a, b) = (Sim::new(), Sim::new());
    let texts = StringArray::from_iter_values((0..ROWS).map(|i| format!("{i:0100}")));
    let mut lists = ListBuilder::new(StringBuilder::new());
    for i in 0..ROWS {
        lists.append_value([Some(format!("{i:050}")), None, Some(format!("{i:050}"))]);
    }
    let columns: [(&str, ArrayRef); 2] = [("s", Arc::new(texts)), ("l", Arc::new(lists.finish()))];
    let whole = RecordBatch::try_from_iter(columns).unwrap();
    let up = a.upload(&whole).unwrap();
    for (rows, fits) in [(100, true), (ROWS, false)] {
        let slice = up.slice(ROWS - rows, rows).unwrap();
        let partitions = vec![vec![slice]];
        let table = DeviceTable::from_batches(whole.schema(), a.device.clone(), partitions);
        let source = scan(Arc::new(table.unwrap())).await;
        let moves = DeviceToDeviceExec::above(source.children()[0].clone(), &b);
        let moves = down(moves);
        for plan in [source, moves] {
            // 22 KB on their way, of about 2.3 MB.
            let (context, pool) = limited(100_000);
            let found = collect(plan, context).await;
            match fits {
                true => assert_eq!(found.unwrap(), [whole.slice(ROWS - rows, rows)]),
                false => assert_refused(found, &["partition 0"]),
            }
            assert_eq!(pool.reserved(), 0);
        }
    }
}

/// More than is left is all that is left, also while another thread gives back.
#[test]
fn two_threads_give_back() {
    let sim = Sim::new();
    let device: &Device = &sim;
    // This pool has no lock that would have them take turns.
    let (context, pool) = limited(1000);
    let kept = DeviceReservation::new(&context, "JoinExec", 0, device);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..100_000 {
                    kept.grow(1).unwrap();
                    kept.shrink(2);
                }
            });
        }
    });
    kept.shrink(usize::MAX);
    assert_eq!((kept.size(), pool.reserved()), (0, 0));
}

/// A node that keeps one column of a downloaded batch keeps that column's memory, and counts it right.
#[tokio::test]
async fn a_kept_column_keeps_no_others() {
    const ROWS: usize = 8192;
    // 64 KiB: one block of the device's host memory.
    const COLUMN: usize = ROWS * 8;
    let sim = Sim::new();
    let column = |i: i64| {
        let values = Int64Array::from_iter_values((0..ROWS as i64).map(|row| row * 20 + i));
        (format!("c{i}"), Arc::new(values) as ArrayRef)
    };
    let wide = RecordBatch::try_from_iter((0..20).map(column)).unwrap();
    for direct in [false, true] {
        let table = device_table(&sim, &[vec![wide.clone()]]);
        let scan = scan(table).await;
        // With and without a node for the download.
        let plan = match direct {
            true => scan.children()[0].clone(),
            false => scan,
        };
        let found = collect(plan, recorded().0).await.unwrap();
        assert_eq!(found, std::slice::from_ref(&wide));
        // Staging memory returns to the pool, and goes, a little later than its copy is done.
        let live = |bytes| {
            eventually(&format!("{bytes} bytes of host memory"), || {
                sim.synchronize().unwrap();
                sim.trim();
                sim.sim.report().live_host_bytes == bytes
            });
        };
        live(20 * COLUMN);
        assert_eq!(get_record_batch_memory_size(&found[0]), 20 * COLUMN);
        let kept = found[0].project(&[7]).unwrap();
        drop(found);
        live(COLUMN);
        assert_eq!(get_record_batch_memory_size(&kept), COLUMN);
        assert_eq!(kept, wide.project(&[7]).unwrap());
        drop(kept);
        live(0);
    }
}
