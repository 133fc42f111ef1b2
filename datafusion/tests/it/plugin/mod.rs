//! The worked plugin: its results are DataFusion's own, bit by bit, and its rule replaces what it
//! can and nothing else.

mod economy;
mod host;
mod kit;
mod memory;
mod types;

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use arrow_device::device::sim::{FaultOp, SimMode};
use arrow_device::{DeviceRecordBatch, Devices};
use arrow_device_datafusion::{DeviceTable, DeviceTransitions, execute_on_device};
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::compute::concat_batches;
use datafusion::common::Statistics;
use datafusion::datasource::MemTable;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{BinaryExpr, Column, lit};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::collect;
use datafusion::physical_plan::filter::FilterExec;
use futures::StreamExt;

use crate::device_filter::{self, PushFilterToDevice};
use kit::*;

#[tokio::test]
async fn results_are_datafusions() {
    let (device, sim) = sim(SimMode::Async);
    let tables = Tables::new(&device, PARTITIONS);
    let columns = "id, a, x, n, d, ts";
    let all = "SELECT id FROM t WHERE id >= 0";
    let all = check(&tables, all).await;
    let floats = [
        "0.0", "-0.0", "1.5", "-1.5", "5e-324", "'inf'", "'-inf'", "'nan'", "'-nan'",
    ];
    let floats = floats.map(|literal| ("x", format!("CAST({literal} AS DOUBLE)")));
    let integers = [
        "0",
        "7",
        "9223372036854775807",
        "-9223372036854775808",
        "-9223372036854775807",
    ];
    let integers = integers.map(|literal| ("a", literal.to_owned()));
    let others = [
        ("n", "2".to_owned()),
        ("n", "-6".to_owned()),
        ("d", "DATE '1970-01-15'".to_owned()),
        ("id", "1000".to_owned()),
        ("ts", "TIMESTAMP '1970-01-01T00:00:00.000100'".to_owned()),
    ];
    let (mut checked, mut empty) = (0, 0);
    for (column, literal) in floats.into_iter().chain(integers).chain(others) {
        for op in ["=", "<>", "<", "<=", ">", ">="] {
            let sql = format!("SELECT {columns} FROM t WHERE {column} {op} {literal}");
            let shown = text(&plan(&tables.host, &sql).await);
            // What cannot be, DataFusion sees by itself: nothing is beyond the last integer.
            if !shown.contains("FilterExec") {
                continue;
            }
            let n = check(&tables, &sql).await;
            assert!(n < all || column == "id", "nulls do not pass: {sql}");
            checked += 1;
            empty += usize::from(n == 0);
        }
    }
    assert!(
        checked > 90 && (1..20).contains(&empty),
        "{checked}, {empty}"
    );
    for (predicate, some) in [
        ("a > -10 AND a <= 10 AND x >= 0.0 AND n <> 0", true),
        ("2 < n AND 10 > a", true),
        ("a BETWEEN -3 AND 3", true),
        ("NOT (id < 1700)", true),
        ("id < 0", false),
        ("a = 5 AND n = 100", false),
    ] {
        for columns in ["*", "id", "x, a", "count(*)", "sum(a), min(n), max(d)"] {
            let columns = if columns == "*" {
                "ts, d, n, x, a, id"
            } else {
                columns
            };
            let sql = format!("SELECT {columns} FROM t WHERE {predicate}");
            let n = check(&tables, &sql).await;
            assert_eq!(n > 0, some || sql.contains('('), "{sql}");
        }
    }
    drop(tables);
    assert_done(&device, &sim);
}

#[tokio::test]
async fn it_replaces_the_filter() {
    let (device, _) = sim(SimMode::Async);
    let tables = Tables::new(&device, PARTITIONS);
    let text = |plan: &_| text(plan).replace(&device.id().to_string(), "sim");
    let with = plan(&tables.device, "SELECT a, x FROM t WHERE n > 3 AND x < 1.5").await;
    let expected = "\
DeviceToHostExec: device=sim
  DeviceFilterExec: device=sim, n@2 > 3 AND x@1 < 1.5, projection=[a@0, x@1]
    DeviceScanExec: device=sim, partitions=3, projection=[a, x, n]
";
    assert_eq!(text(&with), expected);
    // The text is not kept, only the row's number: it need not be on the way.
    let with = plan(&tables.device, "SELECT id FROM t WHERE a = 1 ORDER BY id").await;
    let expected = "\
SortPreservingMergeExec: [id@0 ASC NULLS LAST]
  SortExec: expr=[id@0 ASC NULLS LAST], preserve_partitioning=[true]
    DeviceToHostExec: device=sim
      DeviceFilterExec: device=sim, a@1 = 1, projection=[id@0]
        DeviceScanExec: device=sim, partitions=3, projection=[id, a]
";
    assert_eq!(text(&with), expected);
    // Running the rules again changes nothing.
    let state = tables.device.state();
    let config = state.config_options();
    let again = PushFilterToDevice::default()
        .optimize(with, config)
        .unwrap();
    let again = DeviceTransitions.optimize(again, config).unwrap();
    assert_eq!(text(&again), expected);
}

#[tokio::test]
async fn it_leaves_what_it_cannot_do() {
    let (device, _) = sim(SimMode::Async);
    let tables = Tables::new(&device, PARTITIONS);
    for sql in [
        "SELECT id FROM t WHERE a > 3 OR n > 3",
        "SELECT id FROM t WHERE (a > 3) IS NULL",
        "SELECT id FROM t WHERE a > 3 AND x + 1 IS NOT NULL",
        "SELECT id FROM t WHERE s LIKE 'row 5%'",
        "SELECT id FROM t WHERE s = concat('row ', id)",
        "SELECT id FROM t WHERE a > id",
        "SELECT id FROM t WHERE a + 1 > 2 - id",
        "SELECT id FROM t WHERE a > 3 AND x + 1 > 2",
        "SELECT id FROM t WHERE CAST(a AS DOUBLE) > 2.5",
        "SELECT id FROM t WHERE a IN (1, 3, 5, 7, 9, 11, 13)",
        "SELECT id FROM t WHERE a IS DISTINCT FROM 4",
        "SELECT id FROM t WHERE CAST(ts AS DATE) > DATE '1969-12-31'",
    ] {
        let with = text(&plan(&tables.device, sql).await);
        let without = text(&plan(&tables.host, sql).await);
        assert!(!with.contains("DeviceFilterExec"), "{sql}\n{with}");
        assert_eq!(with.lines().next(), without.lines().next(), "{sql}");
        assert_eq!(
            with.lines().count(),
            without.lines().count() + 1,
            "{sql}: {with}"
        );
        let found = rows(&tables.device, plan(&tables.device, sql).await).await;
        let expected = rows(&tables.host, plan(&tables.host, sql).await).await;
        let n: usize = found.iter().map(RecordBatch::num_rows).sum();
        assert!(found == expected && n > 0, "{sql}: {n} rows");
    }
    // Not on a device, or on one without kernels.
    let sql = "SELECT id FROM t WHERE a > 3";
    let on_host = MemTable::try_new(batch(0).schema(), vec![vec![batch(0)]]).unwrap();
    let on_host = text(&plan(&session(Arc::new(on_host), 1, true), sql).await);
    let on_cpu = text(&plan(&Tables::new(&Devices::cpu(), 1).device, sql).await);
    for plan in [on_host, on_cpu] {
        assert!(plan.contains("FilterExec: a@1 > 3"), "{plan}");
        assert!(!plan.contains("DeviceFilterExec"), "{plan}");
    }
}

/// Predicates as DataFusion's planner does not make them, but other rules may.
#[tokio::test]
async fn it_reads_either_side() {
    let (device, _) = sim(SimMode::Async);
    let tables = Tables::new(&device, 1);
    let filter = |input, left, op, right| {
        let predicate = Arc::new(BinaryExpr::new(left, op, right));
        Arc::new(FilterExec::try_new(predicate, input).unwrap())
    };
    let pushed = |filter: Arc<FilterExec>| {
        let state = tables.device.state();
        let plan = PushFilterToDevice::default().optimize(filter, state.config_options());
        let plan = DeviceTransitions.optimize(plan.unwrap(), state.config_options());
        plan.unwrap()
    };
    let sql = "SELECT id, a, d FROM t";
    for op in [
        Operator::Eq,
        Operator::NotEq,
        Operator::Lt,
        Operator::LtEq,
        Operator::Gt,
        Operator::GtEq,
    ] {
        let (left, right) = (lit(8i64), Arc::new(Column::new("a", 1)));
        let on_device = plan(&tables.device, sql).await;
        let on_device = pushed(filter(on_device, left.clone(), op, right.clone()));
        assert!(text(&on_device).contains("DeviceFilterExec"), "{op}");
        let on_host = filter(plan(&tables.host, sql).await, left, op, right);
        let found = rows(&tables.device, on_device).await;
        let expected = rows(&tables.host, on_host).await;
        assert!(same(&found[0], &expected[0]), "{op}");
        assert!(found[0].num_rows() > 0, "{op}");
    }
}

/// Only numbers of rows come to the host between two operators.
#[tokio::test]
async fn filters_pass_batches_to_each_other() {
    let (device, _) = sim(SimMode::Async);
    let tables = Tables::new(&device, 1);
    let context = &tables.device;
    let sql = "SELECT id, a, x FROM t WHERE a > -20";
    let first = plan(&tables.host, sql).await;
    let outer = first.downcast_ref::<FilterExec>().expect("one filter");
    let inner = plan(context, "SELECT id, a, x FROM t WHERE x < 100.0").await;
    let both = FilterExec::try_new(outer.predicate().clone(), inner).unwrap();
    let state = context.state();
    let both = PushFilterToDevice::default().optimize(Arc::new(both), state.config_options());
    let both = DeviceTransitions.optimize(both.unwrap(), state.config_options());
    let both = both.unwrap();
    let shown = text(&both);
    assert_eq!(shown.matches("DeviceFilterExec").count(), 2, "{shown}");
    assert_eq!(shown.matches("DeviceToHostExec").count(), 1, "{shown}");
    let before = device.stats();
    let on_device = execute_on_device(both.clone(), context.task_ctx(), &device).unwrap();
    let batches: Vec<_> = on_device.map(Result::unwrap).collect().await;
    let cost = device.stats().since(&before);
    // A count, and three columns' nulls and bytes, of each batch in each filter; of 5 batches one has no rows.
    let counts = 2 * 4 * (1 + 2 * 3) * 8;
    assert!(
        cost.bytes_to_host <= counts && cost.bytes_to_host > 0,
        "{cost:?}"
    );
    assert_eq!((cost.bytes_to_device, cost.host_waits), (0, 0));
    let found: usize = batches.iter().map(DeviceRecordBatch::num_rows).sum();
    let sql = "SELECT id FROM t WHERE x < 100.0 AND a > -20";
    assert_eq!(found, check(&tables, sql).await);
    let host = rows(context, both).await;
    let sql = "SELECT id, a, x FROM t WHERE x < 100.0 AND a > -20";
    let expected = rows(&tables.host, plan(&tables.host, sql).await).await;
    assert!(same(&host[0], &expected[0]));
}

#[tokio::test]
async fn nothing_waits() {
    let (device, _) = sim(SimMode::Async);
    let tables = Tables::new(&device, PARTITIONS);
    let sql = "SELECT id, a, x, n FROM t WHERE a > -20 AND x < 100.0";
    let query = plan(&tables.device, sql).await;
    let before = device.stats();
    let found = collect(query, tables.device.task_ctx()).await.unwrap();
    assert!(!found.is_empty());
    let cost = device.stats().since(&before);
    assert_eq!((cost.host_waits, cost.bytes_to_device), (0, 0));
}

/// Nothing of this device runs unless somebody waits for it: within a poll nobody does.
#[test]
fn no_poll_runs_work() {
    let (device, sim) = sim(SimMode::Deferred);
    let tables = Tables::new(&device, 1);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let sql = "SELECT id, a, s FROM t WHERE a > -20 AND x < 100.0 AND s <> 'row 77'";
    let query = runtime.block_on(plan(&tables.device, sql));
    let expected =
        runtime.block_on(async { rows(&tables.host, plan(&tables.host, sql).await).await });
    device.synchronize().unwrap();
    let before = device.stats();
    let mut stream = query.execute(0, tables.device.task_ctx()).unwrap();
    let (mut found, mut waits) = (Vec::new(), 0);
    let mut cx = Context::from_waker(Waker::noop());
    loop {
        let pending = sim.report().pending_operations;
        let polled = stream.poll_next_unpin(&mut cx);
        assert!(
            sim.report().pending_operations >= pending,
            "work ran within a poll"
        );
        match polled {
            Poll::Ready(None) => break,
            Poll::Ready(Some(batch)) => found.push(batch.unwrap()),
            Poll::Pending => {
                device.synchronize().unwrap();
                waits += 1;
                assert!(waits < 10_000, "no progress");
                // Whoever wakes the task does so from another thread.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    assert!(waits > 1);
    assert_eq!(
        device.stats().since(&before).host_waits,
        waits,
        "the test's own"
    );
    let found = concat_batches(&query.schema(), &found).unwrap();
    assert!(same(&found, &expected[0]));
}

#[tokio::test]
async fn a_limit_ends_it() {
    let (device, sim) = sim(SimMode::Async);
    let (context, asked) = endless(&device, 1000);
    // 238 of the 300 rows of a batch.
    let query = plan(&context, "SELECT id, a FROM t WHERE a > -100 LIMIT 400").await;
    let shown = text(&query);
    assert!(shown.contains("a@1 > -100, fetch=400"), "{shown}");
    let found = tokio::time::timeout(Duration::from_secs(20), rows(&context, query)).await;
    assert_eq!(found.expect("it ends")[0].num_rows(), 400);
    let asked = asked.load(SeqCst);
    assert!(asked <= 8, "asked for {asked} batches");

    // A stream that says nothing more, once there are enough rows.
    let (silent, _) = endless(&device, 2);
    let query = plan(&silent, "SELECT id, a FROM t WHERE a > -100 LIMIT 400").await;
    let found = tokio::time::timeout(Duration::from_secs(20), rows(&silent, query)).await;
    assert_eq!(found.expect("it ends")[0].num_rows(), 400);
    drop((context, silent));
    assert_done(&device, &sim);
}

#[tokio::test]
async fn what_is_dropped_is_freed() {
    let (device, sim) = sim(SimMode::Async);
    let (context, _) = endless(&device, 1000);
    let query = plan(&context, "SELECT id, a FROM t WHERE a > -100").await;
    for polls in 0..20 {
        let mut stream = query.execute(0, context.task_ctx()).unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..polls {
            let _ = stream.poll_next_unpin(&mut cx);
        }
    }
    drop((query, context));
    assert_done(&device, &sim);
}

/// Whatever fails, the query ends with it or does without, and nothing is left behind.
#[tokio::test]
async fn failures_end_the_query() {
    // Of 5 batches one is empty. Of each, nulls of the first column are dropped, 2 conditions are tested, rows are selected, a
    // column's nulls are counted, and 2 columns are gathered.
    let sql = "SELECT id, a FROM t WHERE a > -20 AND id >= 0";
    each_failure_ends(sql, 4 * (1 + 2 + 1 + 1 + 2)).await;
    // Here one condition is tested, and a column is measured.
    let sql = "SELECT id, s FROM t WHERE s <> 'row 77'";
    each_failure_ends(sql, 4 * (1 + 1 + 1 + 2)).await;
}

async fn each_failure_ends(sql: &str, launches: u64) {
    let operations = [
        FaultOp::Launch,
        FaultOp::Allocate,
        FaultOp::Fill,
        FaultOp::Copy,
        FaultOp::Record,
    ];
    let mut failed_launches = 0;
    for operation in operations {
        for n in 1.. {
            let (device, sim) = sim(SimMode::Async);
            let tables = Tables::new(&device, 1);
            let query = plan(&tables.device, sql).await;
            device.synchronize().unwrap();
            sim.faults().clear();
            sim.faults().fail_nth(operation, n);
            let found = collect(query, tables.device.task_ctx()).await;
            let (fired, launched) = (sim.faults().fired(), sim.faults().seen(FaultOp::Launch));
            sim.faults().clear();
            match found {
                Err(e) => {
                    let e = e.to_string();
                    assert!(
                        e.contains(&device.id().to_string()),
                        "{operation:?} {n}: {e}"
                    );
                    failed_launches += u64::from(operation == FaultOp::Launch);
                }
                // Of some events nobody has to hear.
                Ok(found) => {
                    assert!(
                        fired == 0 || operation == FaultOp::Record,
                        "{operation:?} {n}"
                    );
                    let found = concat_batches(&found[0].schema(), &found).unwrap();
                    let expected = rows(&tables.host, plan(&tables.host, sql).await).await;
                    assert!(same(&found, &expected[0]), "{operation:?} {n}");
                }
            }
            drop(tables);
            assert_done(&device, &sim);
            if fired == 0 {
                assert!(n > 4, "{operation:?}: {n}");
                assert_eq!(launched, launches);
                break;
            }
        }
    }
    assert_eq!(failed_launches, launches, "each of them");
}

/// A table of fewer partitions than there are tasks: DataFusion spreads its batches, after the
/// device's work.
#[tokio::test]
async fn a_spread_comes_after_the_filter() {
    let (device, _) = sim(SimMode::Async);
    let schema = batch(0).schema();
    let up = (0..4).map(|n| device.upload(&batch(n)).unwrap()).collect();
    let table = DeviceTable::from_batches(schema.clone(), device.clone(), vec![up]).unwrap();
    // So few rows it would not spread, if it knew.
    let table = table
        .with_statistics(Statistics::new_unknown(&schema))
        .unwrap();
    let context = session(Arc::new(table), PARTITIONS, true);
    let host = MemTable::try_new(schema, vec![(0..4).map(batch).collect()]).unwrap();
    let host = session(Arc::new(host), 1, false);
    let sql = "SELECT id, x FROM t WHERE a > -20";
    let query = plan(&context, sql).await;
    let expected = "\
RepartitionExec: partitioning=RoundRobinBatch(3), input_partitions=1
  DeviceToHostExec: device=sim
    DeviceFilterExec: device=sim, a@1 > -20, projection=[id@0, x@2]
      DeviceScanExec: device=sim, partitions=1, projection=[id, a, x]
";
    let shown = text(&query).replace(&device.id().to_string(), "sim");
    assert_eq!(shown, expected);
    let sql = format!("{sql} ORDER BY id");
    let shown = text(&plan(&context, &sql).await);
    assert!(shown.contains("DeviceFilterExec"), "{shown}");
    let found = collect(plan(&context, &sql).await, context.task_ctx())
        .await
        .unwrap();
    let found = concat_batches(&found[0].schema(), &found).unwrap();
    let expected = rows(&host, plan(&host, &sql).await).await;
    assert!(same(&found, &expected[0]));
    // A limit is each partition's own, and stays above.
    let query = plan(&context, "SELECT id FROM t WHERE a > -20 LIMIT 5").await;
    let shown = text(&query);
    assert!(
        shown.contains("FilterExec: a@1 > -20, projection=[id@0], fetch=5"),
        "{shown}"
    );
    let found = collect(query, context.task_ctx()).await.unwrap();
    assert_eq!(found.iter().map(RecordBatch::num_rows).sum::<usize>(), 5);
}

#[tokio::test]
async fn the_program_runs() {
    let (device, sim) = sim(SimMode::Async);
    for uploads in [None, Some(0), Some(100_000)] {
        assert!(device_filter::run(&device, uploads).await.unwrap());
    }
    assert_done(&device, &sim);
}

/// The example's program, beside the tests' folder. Built if this test alone was built.
fn program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().unwrap().parent().unwrap();
    let name = format!("sql{}", std::env::consts::EXE_SUFFIX);
    let program = profile.join("examples").join(name);
    if !program.exists() {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--example", "sql"]);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        let built = build.current_dir(env!("CARGO_MANIFEST_DIR")).status();
        assert!(built.unwrap().success(), "the example does not build");
    }
    program
}

#[test]
fn the_program_says_how_it_went() {
    let run = |arguments: &[&str]| {
        let output = Command::new(program()).args(arguments).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (
            output.status.code(),
            text(output.stdout),
            text(output.stderr),
        )
    };
    let (status, stdout, stderr) = run(&["--device", "sim"]);
    assert_eq!((status, &*stderr), (Some(0), ""));
    for part in [
        "Before the rule:\nFilterExec",
        // The guide shows these counts: see "What moves when" in docs/guide/datafusion.md.
        "output_batches=2, peak_mem_used=1792.0 B, bytes_on_device=0, bytes_to_device=0, bytes_to_host=1.57 K, copies=4, host_waits=0, queue_waits=4]\n",
        "bytes_on_device=0, bytes_to_device=0, bytes_to_host=1.28 K, copies=32, host_waits=0, queue_waits=288]\n",
        "output_batches=32, peak_mem_used=0.0 B, bytes_on_device=0, bytes_to_device=0, bytes_to_host=0, copies=0, host_waits=0, queue_waits=0]\n",
        "DeviceFilterExec: device=sim",
        "host_waits=0",
        "the same as DataFusion's own",
        "HostToDeviceExec: device=sim\n",
        "Kernels were loaded 1 time(s), for 1 device(s).",
    ] {
        assert!(stdout.contains(part), "{part}: {stdout}");
    }
    let (status, stdout, _) = run(&["--uploads", "never"]);
    assert!(!stdout.contains("HostToDeviceExec"), "{stdout}");
    assert_eq!(status, Some(0));
    assert_eq!(run(&["--uploads", "some"]).0, Some(2));
    let (status, _, stderr) = run(&["--device", "cpu"]);
    let why = "sql: the filter has no kernels for cpu\n";
    assert_eq!((status, &*stderr), (Some(2), why));
    let (status, _, stderr) = run(&["--device", "no-such-device"]);
    assert!(stderr.contains("no-such-device"), "{stderr}");
    assert_eq!(status, Some(2));
    assert_eq!(run(&["--bad"]).0, Some(2));
    assert_eq!(run(&["--help"]).0, Some(0));
}
