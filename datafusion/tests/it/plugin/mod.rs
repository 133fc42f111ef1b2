//! The worked plugin: its results are DataFusion's own, bit by bit, and its rule replaces what it
//! can and nothing else.

mod aggregates;
mod economy;
mod kit;
mod memory;
mod types;

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use arrow_device::device::sim::FaultOp;
use arrow_device::{DeviceRecordBatch, Devices};
use arrow_device_datafusion::execute_on_device;
use datafusion::arrow::compute::concat_batches;
use datafusion::datasource::MemTable;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::collect;
use datafusion::physical_plan::filter::FilterExec;
use futures::StreamExt;

use kit::*;

#[tokio::test]
async fn results_are_datafusions() {
    let sim = Sim::new();
    let tables = Tables::new(&sim, PARTITIONS);
    let columns = "id, a, x, n, d, ts";
    let all = check(&tables, "SELECT id FROM t WHERE id >= 0").await;
    let float = |literal| ("x", format!("CAST({literal} AS DOUBLE)"));
    let floats = ["0.0", "-0.0", "1.5", "5e-324", "'-inf'", "'nan'", "'-nan'"].map(float);
    let others = [
        ("a", "7"),
        ("a", "9223372036854775807"),
        ("a", "-9223372036854775808"),
        ("n", "-6"),
        ("d", "DATE '1970-01-15'"),
        ("id", "1000"),
        ("ts", "TIMESTAMP '1970-01-01T00:00:00.000100'"),
    ];
    let others = others.map(|(column, literal)| (column, literal.to_owned()));
    let (mut checked, mut empty) = (0, 0);
    for (column, literal) in floats.into_iter().chain(others) {
        for op in ["=", "<>", "<", ">="] {
            let sql = format!("SELECT {columns} FROM t WHERE {column} {op} {literal}");
            let shown = shape(&plan(&tables.host, &sql).await, &[]);
            // What cannot be, DataFusion sees by itself: nothing is beyond the last integer.
            if !shown.contains("Filter") {
                continue;
            }
            let n = check(&tables, &sql).await;
            assert!(n < all || column == "id", "nulls do not pass: {sql}");
            checked += 1;
            empty += usize::from(n == 0);
        }
    }
    assert!(
        checked > 45 && (1..20).contains(&empty),
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
        for columns in ["ts, d, n, x, a, id", "x, a", "sum(a), min(n), max(d)"] {
            let sql = format!("SELECT {columns} FROM t WHERE {predicate}");
            let n = check(&tables, &sql).await;
            assert_eq!(n > 0, some || sql.contains('('), "{sql}");
        }
    }
    drop(tables);
    sim.assert_done();
}

#[tokio::test]
async fn it_replaces_the_filter() {
    let sim = Sim::new();
    let tables = Tables::new(&sim, PARTITIONS);
    let with = plan(&tables.device, "SELECT a, x FROM t WHERE n > 3 AND x < 1.5").await;
    let expected = "
        DeviceToHostExec: device=A
          DeviceFilterExec: device=A, n@2 > 3 AND x@1 < 1.5, projection=[a@0, x@1]
            DeviceScanExec: device=A, partitions=3, projection=[a, x, n]
    ";
    crate::kit::assert_plan(&with, &[&sim], expected);
    let with = plan(&tables.device, "SELECT id FROM t WHERE a = 1 ORDER BY id").await;
    let expected = "SortPreservingMerge < Sort < Down < Filter A < Scan A";
    assert_eq!(shape(&with, &[&sim]), expected);
    // Running the rules again changes nothing.
    let state = tables.device.state();
    let config = state.config_options();
    let again = filters().optimize(with, config).unwrap();
    assert_eq!(shape(&again, &[&sim]), expected);
}

#[tokio::test]
async fn it_leaves_what_it_cannot_do() {
    let sim = Sim::new();
    let tables = Tables::new(&sim, PARTITIONS);
    for predicate in [
        "a > 3 OR n > 3",
        "(a > 3) IS NULL",
        "a > 3 AND x + 1 IS NOT NULL",
        "s LIKE 'row 5%'",
        "s = concat('row ', id)",
        "a > id",
        "a + 1 > 2 - id",
        "CAST(a AS DOUBLE) > 2.5",
        "a IN (1, 3, 5, 7, 9, 11, 13)",
        "a IS DISTINCT FROM 4",
        "CAST(ts AS DATE) > DATE '1969-12-31'",
    ] {
        let sql = format!("SELECT id FROM t WHERE {predicate}");
        let with = plan(&tables.device, &sql).await;
        assert!(!is_on_device(&with), "{sql}");
        let found = rows(&tables.device, with).await;
        let expected = rows(&tables.host, plan(&tables.host, &sql).await).await;
        assert!(found == expected && row_count(&found) > 0, "{sql}");
    }
    // Not on a device, or on one without kernels.
    let host = MemTable::try_new(batch(0).schema(), vec![vec![batch(0)]]).unwrap();
    let on_host = session(Arc::new(host), 1, true);
    for context in [on_host, Tables::new(&Devices::cpu(), 1).device] {
        let plan = plan(&context, "SELECT id FROM t WHERE a > 3").await;
        assert!(!is_on_device(&plan));
    }
}

/// Only numbers of rows come to the host between two operators.
#[tokio::test]
async fn filters_pass_batches_to_each_other() {
    let sim = Sim::new();
    let tables = Tables::new(&sim, 1);
    let context = &tables.device;
    let sql = "SELECT id, a, x FROM t WHERE a > -20";
    let first = plan(&tables.host, sql).await;
    let outer = first.downcast_ref::<FilterExec>().expect("one filter");
    let inner = plan(context, "SELECT id, a, x FROM t WHERE x < 100.0").await;
    let both = FilterExec::try_new(outer.predicate().clone(), inner).unwrap();
    let state = context.state();
    let both = filters().optimize(Arc::new(both), state.config_options());
    let both = both.unwrap();
    let expected = "Down < Filter A < Filter A < Scan A";
    assert_eq!(shape(&both, &[&sim]), expected);
    let before = sim.stats();
    let on_device = execute_on_device(both.clone(), context.task_ctx(), &sim).unwrap();
    let batches: Vec<_> = on_device.map(Result::unwrap).collect().await;
    let cost = sim.stats().since(&before);
    // A count, and three columns' nulls and bytes, of each batch in each filter; of 5 batches one has no rows.
    let counts = 2 * 4 * (1 + 2 * 3) * 8;
    assert!((1..=counts).contains(&cost.bytes_to_host), "{cost:?}");
    assert_eq!((cost.bytes_to_device, cost.host_waits), (0, 0));
    let found: usize = batches.iter().map(DeviceRecordBatch::num_rows).sum();
    let sql = "SELECT id FROM t WHERE x < 100.0 AND a > -20";
    assert_eq!(found, check(&tables, sql).await);
}

/// Nothing of this device runs unless somebody waits for it: within a poll nobody does.
#[test]
fn no_poll_runs_work() {
    let sim = Sim::deferred();
    let tables = Tables::new(&sim, 1);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let sql = "SELECT id, a, s FROM t WHERE a > -20 AND x < 100.0 AND s <> 'row 77'";
    let query = runtime.block_on(plan(&tables.device, sql));
    let expected =
        runtime.block_on(async { rows(&tables.host, plan(&tables.host, sql).await).await });
    sim.synchronize().unwrap();
    let before = sim.stats();
    let mut stream = query.execute(0, tables.device.task_ctx()).unwrap();
    let (mut found, mut waits) = (Vec::new(), 0);
    let mut cx = Context::from_waker(Waker::noop());
    loop {
        let pending = sim.sim.report().pending_operations;
        let polled = stream.poll_next_unpin(&mut cx);
        assert!(
            sim.sim.report().pending_operations >= pending,
            "work ran within a poll"
        );
        match polled {
            Poll::Ready(None) => break,
            Poll::Ready(Some(batch)) => found.push(batch.unwrap()),
            Poll::Pending => {
                sim.synchronize().unwrap();
                waits += 1;
                assert!(waits < 10_000, "no progress");
                // Whoever wakes the task does so from another thread.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    assert!(waits > 1);
    assert_eq!(
        sim.stats().since(&before).host_waits,
        waits,
        "the test's own"
    );
    let found = concat_batches(&query.schema(), &found).unwrap();
    assert!(same(&found, &expected[0]));
}

#[tokio::test]
async fn a_limit_ends_it() {
    let sim = Sim::new();
    let (context, asked) = endless(&sim, 1000);
    // 238 of the 300 rows of a batch.
    let query = plan(&context, "SELECT id, a FROM t WHERE a > -100 LIMIT 400").await;
    let shown = crate::kit::text(&query, &[]);
    says(&shown, &["a@1 > -100, fetch=400"]);
    let found = tokio::time::timeout(Duration::from_secs(20), rows(&context, query)).await;
    assert_eq!(found.expect("it ends")[0].num_rows(), 400);
    let asked = asked.load(SeqCst);
    assert!(asked <= 8, "asked for {asked} batches");

    // A stream that says nothing more, once there are enough rows.
    let (silent, _) = endless(&sim, 2);
    let query = plan(&silent, "SELECT id, a FROM t WHERE a > -100 LIMIT 400").await;
    let found = tokio::time::timeout(Duration::from_secs(20), rows(&silent, query)).await;
    assert_eq!(found.expect("it ends")[0].num_rows(), 400);
    drop((context, silent));
    sim.assert_done();
}

#[tokio::test]
async fn what_is_dropped_is_freed() {
    let sim = Sim::new();
    let (context, _) = endless(&sim, 1000);
    let query = plan(&context, "SELECT id, a FROM t WHERE a > -100").await;
    for polls in 0..20 {
        let mut stream = query.execute(0, context.task_ctx()).unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..polls {
            let _ = stream.poll_next_unpin(&mut cx);
        }
    }
    drop((query, context));
    sim.assert_done();
}

/// Whatever fails, the query ends with it or does without, and nothing is left behind.
#[tokio::test]
async fn failures_end_the_query() {
    // One condition is tested, rows are selected, a column is measured, and 2 columns are gathered.
    let sql = "SELECT id, s FROM t WHERE s <> 'row 77'";
    let operations = [
        FaultOp::Launch,
        FaultOp::Allocate,
        FaultOp::Fill,
        FaultOp::Copy,
        FaultOp::Record,
    ];
    for operation in operations {
        for n in 1.. {
            let sim = Sim::new();
            let tables = Tables::new(&sim, 1);
            let query = plan(&tables.device, sql).await;
            sim.synchronize().unwrap();
            sim.sim.faults().clear();
            sim.sim.faults().fail_nth(operation, n);
            let found = collect(query, tables.device.task_ctx()).await;
            let fired = sim.sim.faults().fired();
            sim.sim.faults().clear();
            match found {
                Err(e) => says(&e, &[&sim.id().to_string()]),
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
            sim.assert_done();
            if fired == 0 {
                assert!(n > 3, "{operation:?}: {n}");
                break;
            }
        }
    }
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
    let parts = [
        "On the host:\nFilterExec",
        // The guide shows these counts: see "What moves when" in docs/guide/datafusion.md.
        "output_batches=2, peak_mem_used=1568.0 B, bytes_on_device=0, bytes_to_device=0, bytes_to_host=1.57 K, copies=4, host_waits=0, queue_waits=2]\n",
        "bytes_on_device=0, bytes_to_device=0, bytes_to_host=1.28 K, copies=2, host_waits=0, queue_waits=0]\n",
        "output_batches=32, peak_mem_used=0.0 B, bytes_on_device=0, bytes_to_device=0, bytes_to_host=0, copies=0, host_waits=0, queue_waits=0]\n",
        "DeviceFilterExec: device=sim",
        "host_waits=0",
        "the same as DataFusion's own",
        "HostToDeviceExec: device=sim, ",
        "Kernels were loaded 1 time(s), for 1 device(s).",
    ];
    says(&stdout, &parts);
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
