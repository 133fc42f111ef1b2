//! `INSERT`, `UPDATE` and `DELETE` on a device table. DataFusion's own SQL logic tests compare more of them with its table in memory.

use datafusion::arrow::datatypes::UInt64Type;

use super::watched::declaring;
use crate::kit::*;
use crate::nodes::*;
use crate::operator::operator;
use crate::queries::result;

/// The only row of such a statement's result.
fn count(batches: &[RecordBatch]) -> u64 {
    assert_eq!(row_count(batches), 1);
    assert_eq!(batches[0].schema().field(0).name(), "count");
    batches[0].column(0).as_primitive::<UInt64Type>().value(0)
}

async fn changed(ctx: &SessionContext, sql: &str) -> u64 {
    count(&query(ctx, sql).await.unwrap())
}

/// The numbers of the table t, sorted.
async fn all(ctx: &SessionContext) -> Vec<i64> {
    sorted(numbers_in(ctx, "SELECT a FROM t").await)
}

/// From one device table to another: no byte comes down, none is copied. Without the rule, too: the node finds the device operator below
/// the download.
#[tokio::test]
async fn rows_of_a_device_table_stay_on_the_device() {
    let sim = Sim::new();
    for (ctx, partitions) in [
        (session_with(1, 0), 1),
        (session_with(3, 0), 3),
        (session_without_rule(3), 3),
    ] {
        let partition = |i| vec![rows(i as i64 * 16, 16)];
        let from: Vec<_> = (0..partitions).map(partition).collect();
        register(&ctx, "t", device_table(&sim, &from));
        register(&ctx, "u", device_table(&sim, &[vec![]]));
        let before = sim.stats();
        let plan = plan(&ctx, "INSERT INTO u SELECT * FROM t").await;
        let insert = "DeviceInsertExec: device=A, op=Insert Into";
        says(&text(&plan, &[&sim]), &[insert]);
        let found = collect(plan.clone(), ctx.task_ctx()).await.unwrap();
        assert_eq!(count(&found), partitions as u64 * 16);
        let written = metric(&plan, "DeviceInsertExec", "rows_written");
        assert_eq!(written, Some(partitions * 16));
        let none = "INSERT INTO u SELECT a, b, s FROM t WHERE false";
        assert_eq!(changed(&ctx, none).await, 0);
        let moved = sim.stats().since(&before);
        assert_eq!((moved.copies, moved.allocations), (0, 0), "{moved:?}");
        let found = result(&ctx, "SELECT * FROM u").await.1;
        assert_eq!(found, result(&ctx, "SELECT * FROM t").await.1);
    }
    sim.assert_done();
}

/// Rows of the host go up, once.
#[tokio::test]
async fn rows_of_the_host_are_uploaded() {
    let sim = Sim::new();
    let ctx = over(device_table(&sim, &[batches(16, 1)]));
    register(&ctx, "h", host_table(&[batches(0, 1)]));
    let plan = plan(&ctx, "INSERT INTO t SELECT a FROM h").await;
    assert_eq!(shape(&plan, &[&sim]), "Insert < Up A < DataSource");
    let before = sim.stats();
    assert_eq!(count(&collect(plan, ctx.task_ctx()).await.unwrap()), 16);
    let moved = sim.stats().since(&before);
    assert_eq!((moved.bytes_to_device, moved.bytes_to_host), (16 * 8, 0));
    assert_eq!(changed(&ctx, "INSERT INTO t VALUES (33), (32)").await, 2);
    assert_eq!(all(&ctx).await, multiples(34, 1));
    assert_eq!(numbers_in(&ctx, "SELECT count(*) FROM t").await, [34]);
    drop(ctx);
    sim.assert_done();
}

/// A statement reads the rows that were there when it was planned, of all partitions, also of the table that it changes. One that is
/// planned afterwards reads the new ones.
#[tokio::test]
async fn a_scan_reads_the_rows_of_one_moment() {
    let sim = Sim::new();
    #[rustfmt::skip]
    let statements = [
        ("INSERT INTO t VALUES (32)", 1, multiples(33, 1)),
        ("INSERT INTO t SELECT a + 32 FROM t", 32, multiples(64, 1)),
        ("INSERT OVERWRITE t SELECT a - 1 FROM t WHERE a < 3 AND a > 0", 2, vec![0, 1]),
        ("INSERT OVERWRITE t SELECT a FROM t WHERE false", 0, vec![]),
        ("DELETE FROM t WHERE a >= 20", 12, multiples(20, 1)),
        ("UPDATE t SET a = 2 * a WHERE true", 32, multiples(32, 2)),
    ];
    for (sql, rows, new) in statements {
        let ctx = over(device_table(&sim, &[batches(0, 1), batches(16, 1)]));
        let old = plan(&ctx, "SELECT a FROM t").await;
        let started = execute_stream(old.clone(), ctx.task_ctx()).unwrap();
        assert_eq!(changed(&ctx, sql).await, rows, "{sql}");
        let started: Vec<_> = started.map(Result::unwrap).collect().await;
        for found in [started, run(&old).await.unwrap()] {
            assert_eq!(sorted(numbers_of(&found)), multiples(32, 1), "{sql}");
        }
        assert_eq!(all(&ctx).await, new, "{sql}");
    }
    sim.assert_done();
}

/// Of what fails, nothing is visible. The table's columns allow no nulls; the input's do.
#[tokio::test]
async fn a_statement_that_fails_leaves_the_table_as_it_was() {
    let sim = Sim::new();
    let ctx = over(device_table(&sim, &[batches(0, 1)]));
    let (broken, _) = host_stream(|i| match i {
        0..3 => Some(Ok(numbers(100, 16))),
        _ => Some(Err(DataFusionError::Execution("the disk is gone".into()))),
    });
    register(&ctx, "h", broken);
    register(&ctx, "readers", reader_table(&sim, |_| None).0);
    let nullable = Arc::new(Schema::new(vec![Field::new("a", DataType::Int64, true)]));
    let values = Int64Array::from(vec![Some(1), None, None]);
    let values = RecordBatch::try_new(nullable, vec![Arc::new(values)]).unwrap();
    register(&ctx, "some", device_table(&sim, &[vec![values]]));
    let id = sim.id().to_string();
    #[rustfmt::skip]
    let statements = [
        ("INSERT INTO t SELECT a FROM h", ["the disk is gone", ""]),
        ("INSERT OVERWRITE t SELECT a FROM h", ["the disk is gone", ""]),
        ("INSERT INTO t SELECT a FROM some", ["'a'", "2 nulls"]),
        // The nulls of a slice are not known.
        ("INSERT INTO t SELECT a FROM some LIMIT 2", ["'a'", "1 nulls"]),
        ("UPDATE t SET a = NULL WHERE a = 1", ["Column 'a'", "non-nullable"]),
        ("UPDATE t SET a = 1 / 0 WHERE a = 1", ["Divide by zero", ""]),
        ("UPDATE t SET nothing = 1", ["nothing", ""]),
        ("DELETE FROM t WHERE 1 / (a - 1) = 0", ["Divide by zero", ""]),
        // What the table does not do, or another one.
        ("REPLACE INTO t VALUES (1)", ["Replace Into", &id]),
        ("INSERT INTO readers VALUES (1)", ["Insert Into", &id]),
        ("UPDATE readers SET a = 1", ["the source", "does not support UPDATE"]),
    ];
    for (sql, parts) in statements {
        let error = fails(query(&ctx, sql).await, &parts);
        let refused = || matches!(ours(&error), Error::InvalidArgument(_));
        assert!(parts[0] != "'a'" || refused(), "{error:?}");
        assert_eq!(all(&ctx).await, multiples(16, 1), "{sql}");
    }
    // Nor of one that is dropped before its end.
    let plan = plan(&ctx, "INSERT INTO t VALUES (1)").await;
    drop(execute_stream(plan, ctx.task_ctx()).unwrap());
    assert_eq!(all(&ctx).await, multiples(16, 1));
    // Rows without nulls fit, whatever their column allows.
    let fits = "INSERT INTO t SELECT a FROM some LIMIT 1";
    assert_eq!(changed(&ctx, fits).await, 1);
    drop(ctx);
    sim.assert_done();
}

/// Each statement has a sink of its own, which is committed once, or dropped after an error.
#[tokio::test]
async fn a_sink_is_committed_once_or_dropped() {
    let sim = Sim::new();
    let (table, seen) = declaring(&sim, &[batches(0, 1)], |_| {});
    let ctx = over(table);
    register(&ctx, "two", device_table(&sim, &[batches(0, 2)]));
    register(&ctx, "three", device_table(&sim, &[batches(0, 3)]));
    assert_eq!(changed(&ctx, "INSERT INTO t SELECT a FROM two").await, 32);
    let all = ["started", "written", "written", "committed", "dropped"];
    assert_eq!(seen.notes(), all);
    let full = query(&ctx, "INSERT INTO t SELECT a FROM three").await;
    fails(full, &["the sink is full"]);
    assert_eq!(seen.notes(), ["started", "written", "written", "dropped"]);
    // Planned, and never run.
    plan(&ctx, "INSERT INTO t SELECT a FROM two").await;
    assert_eq!(seen.notes(), [""; 0]);
}

/// A session that lacks the table's device says which node needs it.
#[tokio::test]
async fn an_insert_without_its_device_names_its_node() {
    let id = DeviceId::new(ArrowDeviceType::CUDA, 5);
    let config = SessionConfig::new().with_extension(Arc::new(DeviceResolver::of([])));
    let ctx = SessionContext::new_with_config(config);
    let (table, seen) = declaring(&Sim::new(), &[batches(0, 1)], |source| {
        source.device = id.into();
    });
    register(&ctx, "t", table);
    let found = query(&ctx, "INSERT INTO t VALUES (1)").await;
    let text = "DeviceInsertExec, partition 0, needs a device";
    let error = ours(&fails(found, &[text]));
    let of = |e: &_| matches!(e, Error::DeviceNotAvailable { device, .. } if *device == id);
    assert!(of(&error), "{error:?}");
    assert_eq!(seen.notes(), [""; 0]);
}

/// The device of a table of batches is the program's as long as the table is, even if there is no batch on it.
#[tokio::test]
async fn an_empty_table_keeps_its_device() {
    let ctx = session_without_rule(1);
    let sim = Sim::new();
    register(&ctx, "t", device_table(&sim, &[vec![]]));
    drop(sim);
    assert_eq!(all(&ctx).await, [0; 0]);
    assert_eq!(changed(&ctx, "INSERT INTO t VALUES (1, 2, 'c')").await, 1);
    assert_eq!(all(&ctx).await, [1]);
}

/// Batches that do not keep to their plan's schema are an error, not a panic.
#[tokio::test]
async fn rows_of_another_schema_are_refused() {
    let sim = Sim::new();
    let ctx = over(device_table(&sim, &[vec![rows(0, 16)]]));
    let scan = device_leaf(device_table(&sim, &[vec![rows(16, 16)]])).await;
    let narrow = operator("NarrowExec", vec![scan], &sim, |state, cx| {
        let next = ready!(state.next(cx));
        Poll::Ready(next.map(|batch| batch?.project(&[0])))
    });
    let table = ctx.table_provider("t").await.unwrap();
    let state = ctx.state();
    let insert = table.insert_into(&state, narrow, InsertOp::Append);
    fails(run(&insert.await.unwrap()).await, &["DeviceInsertExec"]);
    assert_eq!(all(&ctx).await, multiples(16, 1));
}
