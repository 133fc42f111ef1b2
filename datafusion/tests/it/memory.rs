//! What is reserved in the session's memory pool.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use arrow_device::device::sim::FaultOp;
use arrow_device::{Device, Devices};
use arrow_device_datafusion::{
    DeviceExec, DeviceReservation, DeviceToDeviceExec, DeviceToHostExec, execute_on_device,
};
use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use datafusion::common::{DataFusionError, Result};
use datafusion::execution::TaskContext;
use datafusion::execution::memory_pool::{
    FairSpillPool, GreedyMemoryPool, MemoryConsumer, MemoryPool, MemoryReservation,
};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::physical_plan::spill::get_record_batch_memory_size;
use datafusion::physical_plan::{collect, execute_stream};
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::StreamExt;

use crate::kit::*;

/// A pool without a limit that keeps what each consumer has, and had at most.
#[derive(Debug, Default)]
pub(crate) struct Recorder(Mutex<BTreeMap<String, (usize, usize)>>);

impl Recorder {
    /// The most bytes of each consumer.
    pub(crate) fn peaks(&self) -> Vec<(String, usize)> {
        let of = self.0.lock().unwrap();
        let used = of.iter().filter(|(_, (_, peak))| *peak > 0);
        used.map(|(name, (_, peak))| (name.clone(), *peak))
            .collect()
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
        self.0
            .lock()
            .unwrap()
            .values()
            .map(|(bytes, _)| bytes)
            .sum()
    }
}

/// A session whose uploads join nothing, with this pool.
fn context(pool: Arc<dyn MemoryPool>) -> Arc<TaskContext> {
    let runtime = RuntimeEnvBuilder::new()
        .with_memory_pool(pool)
        .build_arc()
        .unwrap();
    let config = SessionConfig::new().with_option_extension(joined_to(0));
    SessionContext::new_with_config_rt(config, runtime).task_ctx()
}

pub(crate) fn limited(bytes: usize) -> (Arc<TaskContext>, Arc<dyn MemoryPool>) {
    let pool: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(bytes));
    (context(pool.clone()), pool)
}

pub(crate) fn recorded() -> (Arc<TaskContext>, Arc<Recorder>) {
    let pool = Arc::new(Recorder::default());
    (context(pool.clone()), pool)
}

/// Batches of 16 rows: 128 bytes.
fn batches(n: i64) -> Vec<RecordBatch> {
    (0..n).map(|i| numbers(i * 16, 16)).collect()
}

/// `double` over an upload, with a download above.
async fn up_and_down(n: i64, sim: &Sim) -> Plan {
    with_transitions(double(scan(host_table(&[batches(n)])).await, sim))
}

#[track_caller]
pub(crate) fn assert_refused<T: fmt::Debug>(result: Result<T>, parts: &[&str]) {
    let e = result.unwrap_err();
    assert!(
        matches!(e.find_root(), DataFusionError::ResourcesExhausted(_)),
        "{e:?}"
    );
    assert!(
        matches!(e, DataFusionError::ResourcesExhausted(_)),
        "not wrapped: {e:?}"
    );
    for part in parts {
        assert!(e.to_string().contains(part), "no {part:?} in {e}");
    }
}

/// 12.8 MB under 1 KiB.
#[tokio::test]
async fn uploads_are_refused_before_they_allocate() {
    let sim = Sim::new();
    let wide: Vec<_> = (0..200).map(|i| numbers(i * 8_000, 8_000)).collect();
    let device = sim.id().to_string();
    for doubles in 0..3 {
        let host = scan(host_table(std::slice::from_ref(&wide))).await;
        let plan = (0..doubles).fold(host, |plan, _| double(plan, &sim));
        let (context, pool) = limited(1024);
        let before = sim.stats();
        let found: Result<Vec<_>> = match doubles {
            // The errors of device streams are those of DataFusion, too.
            0 => {
                let stream = execute_on_device(plan, context, &sim).unwrap();
                let found: Vec<_> = stream.collect().await;
                let found: arrow_device::Result<Vec<_>> = found.into_iter().collect();
                let found = found.map_err(arrow_device_datafusion::to_datafusion);
                found.map(|_| Vec::new())
            }
            _ => collect(with_transitions(plan), context).await,
        };
        let parts = ["HostToDeviceExec, partition 0", "64000 bytes", &device];
        assert_refused(found, &parts);
        assert_eq!(sim.stats().since(&before).allocations, 0);
        assert_eq!(pool.reserved(), 0);
        sim.assert_done();
    }
    // Enough for what is under way, however much goes through.
    let host = scan(host_table(&[wide])).await;
    let (context, pool) = limited(4 * 64_000);
    let found = collect(with_transitions(double(host, &sim)), context)
        .await
        .unwrap();
    assert_eq!(
        found.iter().map(RecordBatch::num_rows).sum::<usize>(),
        1_600_000
    );
    assert_eq!(pool.reserved(), 0);
}

#[tokio::test]
async fn each_node_reserves_what_is_under_way() {
    let sim = Sim::new();
    let (context, pool) = recorded();
    let plan = up_and_down(10, &sim).await;
    assert_eq!(collect(plan.clone(), context).await.unwrap().len(), 10);
    let expected = [
        // One that was returned or is being copied, and one ahead.
        ("DeviceToHostExec[0]", 2 * 128),
        ("HostToDeviceExec[0]", 128),
        ("MapExec[0]", 128),
    ];
    assert_eq!(
        pool.peaks(),
        expected.map(|(name, bytes)| (name.to_string(), bytes))
    );
    assert_eq!(pool.reserved(), 0);
    for (name, bytes) in expected {
        let node = name.trim_end_matches("[0]");
        assert_eq!(metric(&plan, node, "peak_mem_used"), Some(bytes), "{node}");
    }
}

/// Nothing is reserved twice where an operator uploads or moves its input itself.
#[tokio::test]
async fn plans_without_the_rule_reserve_the_same() {
    let (a, b) = (Sim::new(), Sim::new());
    let (context, pool) = recorded();
    let plan = double(scan(host_table(&[batches(5)])).await, &a);
    assert_eq!(collect(plan, context).await.unwrap().len(), 5);
    let [(own, three), (input, one)] = <[_; 2]>::try_from(pool.peaks()).unwrap();
    // The operator itself and the download in it.
    assert_eq!((own.as_str(), three), ("MapExec[0]", 3 * 128));
    assert_eq!((input.as_str(), one), ("input DataSourceExec[0]", 128));
    assert_eq!(pool.reserved(), 0);

    let (context, pool) = recorded();
    let moved = double(scan(device_table(&a, &[batches(5)])).await, &b);
    assert_eq!(collect(moved, context).await.unwrap().len(), 5);
    let peaks: BTreeMap<_, _> = pool.peaks().into_iter().collect();
    // On the device, on its way through the host, and one ahead.
    assert_eq!(peaks["input DeviceToHostExec[0]"], 3 * 128);
    assert_eq!(pool.reserved(), 0);
}

#[tokio::test]
async fn partitions_reserve_for_themselves() {
    let sim = Sim::new();
    let (context, pool) = recorded();
    let host = scan(host_table(&[batches(3), batches(3), batches(3)])).await;
    collect(with_transitions(double(host, &sim)), context)
        .await
        .unwrap();
    let names: Vec<_> = pool.peaks().into_iter().map(|(name, _)| name).collect();
    for partition in 0..3 {
        for node in ["HostToDeviceExec", "MapExec", "DeviceToHostExec"] {
            let name = format!("{node}[{partition}]");
            assert!(names.contains(&name), "no {name} in {names:?}");
        }
    }
    assert_eq!(pool.reserved(), 0);
}

#[tokio::test]
async fn moves_reserve_both_halves() {
    let (a, b) = (Sim::new(), Sim::new());
    let source = scan(device_table(&a, &[batches(5)])).await;
    let plan = with_transitions(double(source.clone(), &b));
    let (context, pool) = recorded();
    collect(plan.clone(), context).await.unwrap();
    assert_eq!(
        metric(&plan, "DeviceToDeviceExec", "peak_mem_used"),
        Some(3 * 128)
    );
    assert_eq!(pool.reserved(), 0);

    let scan = source.children()[0].clone();
    let moves = DeviceToDeviceExec::new(scan, &b);
    let plan = Arc::new(DeviceExec::new(Arc::new(moves)));
    let plan = Arc::new(DeviceToHostExec::new(plan));
    let (context, pool) = limited(127);
    let device = b.id().to_string();
    assert_refused(
        collect(plan, context).await,
        &["DeviceToDeviceExec, partition 0", &device],
    );
    assert_eq!(pool.reserved(), 0);
}

#[tokio::test]
async fn downloads_are_refused_too() {
    let sim = Sim::new();
    let plan = scan(device_table(&sim, &[batches(5)])).await;
    let (context, pool) = limited(127);
    let before = sim.stats();
    assert_refused(
        collect(plan.clone(), context).await,
        &[
            "DeviceToHostExec, partition 0",
            "128 bytes",
            &sim.id().to_string(),
        ],
    );
    assert_eq!((pool.reserved(), sim.stats().since(&before).copies), (0, 0));
    let (context, pool) = limited(2 * 128);
    assert_eq!(collect(plan, context).await.unwrap().len(), 5);
    assert_eq!(pool.reserved(), 0);
}

/// What operators allocate is known when they have.
#[tokio::test]
async fn operators_are_refused_what_they_allocate() {
    let sim = Sim::new();
    let plan = double(scan(device_table(&sim, &[batches(5)])).await, &sim);
    let (context, pool) = limited(100);
    let found = collect(with_transitions(plan.clone()), context).await;
    assert_refused(
        found,
        &["MapExec, partition 0", "128 bytes", &sim.id().to_string()],
    );
    assert_eq!(pool.reserved(), 0);
    let (context, pool) = limited(3 * 128);
    let found = collect(with_transitions(plan), context).await.unwrap();
    assert_eq!((found.len(), pool.reserved()), (5, 0));
}

#[tokio::test]
async fn memory_that_the_host_reads_is_not_reserved() {
    let cpu = Devices::cpu();
    let table = device_table(&cpu, &[batches(5)]);
    let (context, pool) = limited(1);
    let plan = scan(table).await;
    assert_eq!(collect(plan, context.clone()).await.unwrap().len(), 5);
    // An upload to the host's own memory copies nothing.
    let host = scan(host_table(&[batches(5)])).await;
    let found: Vec<_> = execute_on_device(host, context, &cpu)
        .unwrap()
        .collect()
        .await;
    assert!(found.iter().all(|batch| batch.is_ok()) && found.len() == 5);
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
                let host = scan(host_table(&[batches(5)])).await;
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
        if failing < 2 {
            sim.sim.faults().clear();
        }
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

/// A node that spills has less beside an upload.
#[tokio::test]
async fn a_fair_pool_counts_uploads() {
    let sim = Sim::new();
    let pool: Arc<dyn MemoryPool> = Arc::new(FairSpillPool::new(1000));
    let sort = MemoryConsumer::new("sort")
        .with_can_spill(true)
        .register(&pool);
    sort.try_grow(900).unwrap();
    sort.free();
    let host = scan(host_table(&[batches(5)])).await;
    let up = with_transitions(double(host, &sim));
    let mut stream = execute_stream(up, context(pool.clone())).unwrap();
    stream.next().await.unwrap().unwrap();
    assert!(sort.try_grow(900).is_err(), "{} reserved", pool.reserved());
    sort.try_grow(400).unwrap();
    drop(stream);
    sort.try_grow(500).unwrap();
}

#[tokio::test]
async fn explain_analyze_shows_the_peak() {
    let sim = Sim::new();
    let ctx = session_with(1, 1);
    register(&ctx, "t", device_table(&sim, &[batches(2)]));
    let found = query(&ctx, "EXPLAIN ANALYZE SELECT a FROM t")
        .await
        .unwrap();
    let column = found[0].column_by_name("plan").unwrap();
    let text = column.as_any().downcast_ref::<StringArray>().unwrap();
    let text = text.value(0).to_string();
    let of = |node: &str| {
        text.lines()
            .find(|line| line.contains(node))
            .unwrap()
            .to_string()
    };
    assert!(of("MapExec").contains("peak_mem_used=128.0 B"), "{text}");
    assert!(
        of("DeviceToHostExec").contains("peak_mem_used=256.0 B"),
        "{text}"
    );
}

#[test]
fn an_operator_reserves_what_it_keeps() {
    let sim = Sim::new();
    let device: &Device = &sim;
    let (context, pool) = limited(1000);
    let kept = DeviceReservation::new(&context, "JoinExec", 7, device);
    kept.grow(600).unwrap();
    assert_refused(
        kept.grow(401),
        &[
            "JoinExec, partition 7",
            "401 bytes",
            &sim.id().to_string(),
            "JoinExec[7]",
        ],
    );
    assert_eq!((kept.size(), pool.reserved()), (600, 600));
    kept.shrink(100);
    assert_eq!(pool.reserved(), 500);
    kept.shrink(501);
    assert_eq!((kept.size(), pool.reserved()), (0, 0));
    kept.grow(1000).unwrap();
    drop(kept);
    assert_eq!(pool.reserved(), 0);
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
                for _ in 0..300_000 {
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
