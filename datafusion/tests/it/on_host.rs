//! Operators whose work is done on the host after all: because the session says so, or the device cannot.

use arrow_device_datafusion::ran_on_host;
use datafusion::common::Result;
use datafusion::physical_plan::display::DisplayableExecutionPlan;

use crate::kept::{open_store, written};
use crate::kit::*;
use crate::nodes::*;
use crate::operator::double_by;

/// As `double`, which does not run on the host.
fn doubled(child: Plan, device: impl Into<DeviceSpec>) -> Plan {
    double_by(child, device, |operator| operator.runs_on_host = true)
}

/// A session with fallback that offers no device, whose options are changed.
fn context(set: impl FnOnce(&mut DeviceOptions)) -> Arc<TaskContext> {
    let config = config(|options| {
        assert!(!options.fallback, "by default");
        options.fallback = true;
        set(options);
    });
    task(config.with_extension(Arc::new(DeviceResolver::of([]))))
}

/// 128 numbers of the host in one partition, doubled.
fn once(device: impl Into<DeviceSpec>) -> Plan {
    with_transitions(doubled(planned("Numbers 8", &[], &[]), device))
}

/// In two partitions, doubled twice.
fn twice(device: impl Into<DeviceSpec>) -> Plan {
    let device = device.into();
    let host = planned("Numbers 4 4", &[], &[]);
    with_transitions(doubled(doubled(host, device.clone()), device))
}

/// Runs it, which gives the right rows with so many copies on the device; and what it says of why it did not run there.
async fn reasons(
    plan: Plan,
    context: Arc<TaskContext>,
    sim: &Sim,
    copies: bool,
) -> Vec<(String, String)> {
    let before = sim.stats();
    let found = collect(plan.clone(), context).await.unwrap();
    assert_eq!(sorted(numbers_of(&found)), multiples(128, 4));
    assert_eq!(sim.stats().since(&before).copies > 0, copies);
    ran_on_host(&plan).unwrap()
}

fn exhausted(found: Result<Vec<RecordBatch>>) -> bool {
    matches!(found, Err(DataFusionError::ResourcesExhausted(_)))
}

#[tokio::test]
async fn a_session_keeps_operators_on_the_host() {
    let sim = Sim::new();
    let disable =
        |names: &'static str| move |options: &mut DeviceOptions| options.disable = names.into();
    let not = |options: &mut DeviceOptions| options.enable = false;
    let because =
        |why: Option<&str>| Vec::from_iter(why.map(|why| ("MapExec".to_owned(), why.to_owned())));
    for (context, why) in [
        (context(|_| ()), None),
        (context(not), Some("device.enable is false")),
        (
            context(disable("FilterExec, MapExec")),
            Some("device.disable has MapExec"),
        ),
        (context(disable("OtherExec")), None),
    ] {
        let found = reasons(twice(&sim), context, &sim, why.is_none()).await;
        assert_eq!(found, because(why));
    }
    // Also below what starts it on a device that is not its own.
    let plan = twice(&sim);
    let stream = execute_on_device(plan.clone(), context(not), &sim).unwrap();
    let found: Vec<_> = stream.try_collect().await.unwrap();
    assert_eq!(sorted(numbers_on(&found)), multiples(128, 4));
    let why = Some("device.enable is false");
    assert_eq!(ran_on_host(&plan).unwrap(), because(why));
    let shown = DisplayableExecutionPlan::with_metrics(&*plan);
    let shown = shown.indent(false).to_string();
    says(&shown, &["on_host (device.enable is false)=2"]);
    drop((found, plan));
    // In SQL as well; and a table on the device is read there.
    let ctx = session_with(1, 2);
    register(&ctx, "t", device_table(&sim, &[batches(0, 2)]));
    query(&ctx, "SET device.enable = false").await.unwrap();
    let found = query(&ctx, "SELECT a FROM t LIMIT 20").await.unwrap();
    assert_eq!(row_count(&found), 20);
    drop((found, ctx));
    sim.assert_done();
}

#[tokio::test]
async fn a_device_that_is_not_there_is_replaced() {
    let sim = Sim::new();
    let absent: DeviceSpec = "cuda:7".parse().unwrap();
    let found = reasons(twice(absent.clone()), context(|_| ()), &sim, false).await;
    assert_eq!(found.len(), 2, "{found:?}");
    for (partition, (node, why)) in found.iter().enumerate() {
        assert_eq!(node, "MapExec");
        says(why, &["cuda:7", &format!("partition {partition}")]);
    }
    // Only if that is wanted.
    let context = context(|options| options.fallback = false);
    fails(collect(twice(absent), context).await, &["cuda:7"]);
}

#[tokio::test]
async fn too_little_memory_for_a_first_batch() {
    let sim = Sim::new();
    let small = || context(|options| options.memory = "100".parse().unwrap());
    let found = reasons(twice(&sim), small(), &sim, false).await;
    let upload = "HostToDeviceExec, partition 0";
    says(&found[0].1, &["Resources exhausted", upload]);
    // When a partition starts.
    let host = planned("Numbers 8", &[], &[]);
    let plan = with_transitions(double_by(host, &sim, |operator| {
        (operator.runs_on_host, operator.at_start) = (true, 1000);
    }));
    let found = collect(plan.clone(), small()).await.unwrap();
    assert_eq!(numbers_of(&found), multiples(128, 2));
    let why = &ran_on_host(&plan).unwrap()[0].1;
    says(why, &["Resources exhausted", "1000 bytes"]);
    // The device's own: the first batch of each partition, and a later one, after which nothing can be taken back.
    for (nth, fits) in [(1, true), (2, true), (7, false)] {
        sim.sim.faults().fail_nth(FaultOp::Allocate, nth);
        let plan = once(&sim);
        let found = collect(plan.clone(), context(|_| ())).await;
        sim.sim.faults().clear();
        let fell_back = ran_on_host(&plan).unwrap().len();
        assert_eq!(
            (found.is_ok(), fell_back),
            (fits, usize::from(fits)),
            "{nth}"
        );
        if let Ok(found) = found {
            assert_eq!(numbers_of(&found), multiples(128, 2));
        }
    }
    // What has been read may not be there any more.
    let tiny = Sim::set(|config| config.capacity_bytes = 100);
    let host = planned("Sort < Numbers 2", &[], &[]);
    let plan = with_transitions(doubled(host, &tiny));
    assert!(exhausted(collect(plan, context(|_| ())).await));
}

/// Partitions take files from a queue of the scan, where they are not again.
#[tokio::test]
async fn files_are_read_again_only_if_all_rows_are_there() {
    let sim = Sim::new();
    let copy = "COPY (SELECT a FROM t) TO 'memory:///t/0.parquet' STORED AS PARQUET";
    let store = written(&[copy]).await;
    for (queue, fits) in [(true, false), (false, true)] {
        let config = config(|options| {
            options.fallback = true;
            options.memory = "100".parse().unwrap();
        });
        let mut config = config.with_target_partitions(1);
        let execution = &mut config.options_mut().execution;
        execution.enable_file_stream_work_stealing = queue;
        let ctx = SessionContext::new_with_config(config);
        open_store(&ctx, &store);
        let table = "CREATE EXTERNAL TABLE t STORED AS PARQUET LOCATION 'memory:///t/'";
        query(&ctx, table).await.unwrap();
        let file = plan(&ctx, "SELECT a FROM t").await;
        let plan = with_transitions(doubled(file, &sim));
        let found = collect(plan, ctx.task_ctx()).await;
        match fits {
            true => assert_eq!(numbers_of(&found.unwrap()), multiples(100, 2)),
            false => assert!(exhausted(found)),
        }
    }
}
