//! What nodes reserve in a device's memory pool, and what they keep.

use datafusion::arrow::array::{ListBuilder, StringBuilder};
use datafusion::common::Result;
use datafusion::execution::memory_pool::{FairSpillPool, MemoryReservation};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::physical_plan::spill::get_record_batch_memory_size;

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
    let config = config(|options| options.upload_rows = 0);
    task(config.with_extension(Arc::new(DevicePools::new(move |_| pool.clone()))))
}

pub(crate) fn limited(bytes: usize) -> (Arc<TaskContext>, Arc<dyn MemoryPool>) {
    let pool: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(bytes));
    (context(pool.clone()), pool)
}

pub(crate) fn recorded() -> (Arc<TaskContext>, Arc<Recorder>) {
    let pool = Arc::new(Recorder::default());
    (context(pool.clone()), pool)
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
    let host = scan(host_table(&[wide])).await;
    let made = |line| planned(line, &[&sim], &[("Host", &host)]);
    let device = sim.id().to_string();
    let parts = ["HostToDeviceExec, partition 0", "64000 bytes", &device];
    for line in ["Host", "Map A < Host", "Map A < Map A < Host"] {
        let (context, pool) = limited(1024);
        let before = sim.stats();
        if line == "Host" {
            // The errors of device streams are those of DataFusion, too.
            let stream = execute_on_device(made(line), context, &sim).unwrap();
            let found: arrow_device::Result<Vec<_>> = stream.try_collect().await;
            assert_refused(found.map_err(to_datafusion), &parts);
        } else {
            let plan = with_transitions(made(line));
            assert_refused(collect(plan, context).await, &parts);
        }
        assert_eq!(sim.stats().since(&before).allocations, 0);
        assert_eq!(pool.reserved(), 0);
    }
    // Enough for what is under way, however much goes through.
    let (context, pool) = limited(4 * 64_000);
    let found = collect(with_transitions(made("Map A < Host")), context).await;
    assert_eq!(row_count(&found.unwrap()), 160_000);
    assert_eq!(pool.reserved(), 0);
    sim.assert_done();
}

/// Of batches of 128 bytes: for each partition by itself, and nothing twice where an operator uploads or moves its input itself.
#[tokio::test]
async fn each_node_reserves_what_is_under_way() {
    let (a, b) = (Sim::new(), Sim::new());
    for (line, expected) in [
        (
            // One that was returned or is being copied, and one ahead.
            "Down < Map A < Up A < Numbers 10 10",
            &[
                ("DeviceToHostExec[0]", 256..=256),
                ("DeviceToHostExec[1]", 256..=256),
                ("HostToDeviceExec[0]", 128..=128),
                ("HostToDeviceExec[1]", 128..=128),
                ("MapExec[0]", 128..=128),
                ("MapExec[1]", 128..=128),
            ][..],
        ),
        (
            // The operator itself and the download in it.
            "Map A < Numbers 5",
            &[
                ("MapExec[0]", 384..=384),
                ("input DataSourceExec[0]", 128..=128),
            ],
        ),
        (
            // On its way through the host and on the device; and one ahead, except where it has arrived only after the one before was taken.
            "Map B < Down < Numbers A 5",
            &[
                ("MapExec[0]", 384..=384),
                ("input DeviceToHostExec[0]", 256..=384),
            ],
        ),
    ] {
        let (context, pool) = recorded();
        let plan = planned(line, &[&a, &b], &[]);
        collect(plan.clone(), context).await.unwrap();
        let found = pool.peaks();
        let fits = |(name, bytes): &(&str, RangeInclusive<usize>)| bytes.contains(&found[*name]);
        assert!(expected.iter().all(fits), "{line}: {found:?}");
        assert_eq!(
            (found.len(), pool.reserved()),
            (expected.len(), 0),
            "{line}"
        );
        let peak = metric(&plan, "DeviceToHostExec", "peak_mem_used");
        assert!(peak.is_none_or(|peak| peak == 2 * 256 || line.starts_with("Map")));
    }
}

/// By node: what it needs beside others, and what it says if there is not enough.
#[tokio::test]
async fn every_node_is_refused_what_it_needs() {
    let (a, b) = (Sim::new(), Sim::new());
    for (line, device, least, node) in [
        // A copy of one batch and one ahead, on their way to the host.
        ("Down < Numbers A 5", &a, 2 * 128, "DeviceToHostExec"),
        // What operators allocate is known when they have.
        ("Down < Map A < Numbers A 5", &a, 3 * 128, "MapExec"),
        // Both halves.
        (
            "Down < Move B < Numbers A 5",
            &b,
            6 * 128,
            "DeviceToDeviceExec",
        ),
    ] {
        let plan = planned(line, &[&a, &b], &[]);
        let (context, pool) = limited(127);
        let before = device.stats();
        let found = collect(plan.clone(), context).await;
        let (node, id) = (format!("{node}, partition 0"), device.id().to_string());
        assert_refused(found, &[&node, "128 bytes", &id]);
        let copies = device.stats().since(&before).copies;
        assert_eq!((pool.reserved(), copies), (0, 0), "{line}");
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
    let host = planned("Numbers 5", &[], &[]);
    let stream = execute_on_device(host, context, &cpu).unwrap();
    assert_eq!(stream.try_collect::<Vec<_>>().await.unwrap().len(), 5);
    assert_eq!(pool.reserved(), 0);
}

/// When a stream or its task is dropped in the middle, and after errors of the host, of the device, and of an operator.
#[tokio::test]
async fn nothing_stays_reserved() {
    let (sim, deferred) = (Sim::new(), Sim::deferred());
    let host = planned("Numbers 10", &[], &[]);
    let started = |plan| {
        let (context, pool) = recorded();
        let stream = execute_stream(with_transitions(plan), context);
        (stream.unwrap(), pool)
    };
    let (mut stream, pool) = started(double(host.clone(), &sim));
    stream.next().await.unwrap().unwrap();
    assert!(pool.reserved() >= 3 * 128, "{}", pool.reserved());
    drop(stream);
    assert_eq!(pool.reserved(), 0);
    // Its download never arrives.
    let (stream, pool) = started(double(host.clone(), &deferred));
    let task = tokio::spawn(stream.count());
    while pool.reserved() < 3 * 128 {
        tokio::task::yield_now().await;
    }
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    assert_eq!(pool.reserved(), 0);
    deferred.assert_done();
    let broken = broken(3, || DataFusionError::Execution("line 7".into())).await;
    let kernel = |n| match n {
        40 => Err("no 40".to_string()),
        n => Ok(n),
    };
    for (failing, allocation, plan) in [
        ("the host", 0, double(broken, &sim)),
        ("the device", 4, double(host.clone(), &sim)),
        ("an operator", 0, map(vec![host], &sim, kernel)),
    ] {
        let faults = sim.sim.faults();
        faults.fail_nth(FaultOp::Allocate, allocation);
        let (mut stream, pool) = started(plan);
        let mut failed = false;
        while let Some(batch) = stream.next().await {
            failed = batch.is_err();
        }
        // The stream is still there.
        assert_eq!((failed, pool.reserved()), (true, 0), "{failing}");
        faults.clear();
    }
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
        let sort = async |table: Arc<dyn TableProvider>, rule: bool| {
            let pool: Arc<dyn MemoryPool> = Arc::new(FairSpillPool::new(bytes));
            let runtime = RuntimeEnvBuilder::new().with_memory_pool(pool).build_arc();
            let mut config = SessionConfig::new().with_target_partitions(1);
            config.options_mut().execution.sort_spill_reservation_bytes = 1000;
            let rule = rule.then(|| Arc::new(DeviceRule::default()) as Rule);
            let ctx = session_of(config.with_batch_size(16), rule);
            register(&ctx, "t", table);
            let plan = plan(&ctx, "SELECT a FROM t ORDER BY a DESC").await;
            let context = TaskContext::from(&ctx.state()).with_runtime(runtime.unwrap());
            let found = collect(plan.clone(), Arc::new(context)).await;
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
        let leaf = device_leaf(Arc::new(table.unwrap())).await;
        for line in ["Down < There", "Down < Move B < There"] {
            let plan = planned(line, &[&a, &b], &[("There", &leaf)]);
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
    let leaf = device_leaf(device_table(&sim, &[vec![wide.clone()]])).await;
    // With and without a node for the download.
    for plan in [leaf.clone(), down(leaf)] {
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
