//! What reaches a source: columns, limit, filters, and the device.

use datafusion::logical_expr::TableProviderFilterPushDown::{Exact, Inexact, Unsupported};
use datafusion::physical_expr::expressions::DynamicFilterPhysicalExpr;

use super::batches;
use super::watched::{Support, Watched, declaring};
use crate::kit::*;
use crate::nodes::*;
use crate::queries::{result, same_as_on_host};

const NO: Support = |_| Unsupported;
const INEXACT: Support = |_| Inexact;
const EXACT: Support = |_| Exact;
const EXACT_FOR_B: Support = |filter| match filter.to_string().contains("b@1") {
    true => Exact,
    false => Unsupported,
};
const DYNAMIC: Support = |filter| match filter.is::<DynamicFilterPhysicalExpr>() {
    true => Inexact,
    false => Unsupported,
};

/// A query; how the source supports filters, and whether one stays above it; what it is asked for.
#[rustfmt::skip]
const REQUESTS: [(&str, Support, bool, &str); 14] = [
    ("SELECT * FROM t", NO, false, "None filters=[] fetch=None"),
    ("SELECT s, a FROM t", NO, false, "Some([2, 0]) filters=[] fetch=None"),
    ("SELECT count(b) AS n FROM t", NO, false, "Some([1]) filters=[] fetch=None"),
    ("SELECT b FROM t LIMIT 5 OFFSET 20", NO, false, "Some([1]) filters=[] fetch=Some(25)"),
    ("SELECT a FROM t WHERE b < 3 LIMIT 2", NO, true, "Some([0, 1]) filters=[] fetch=None"),
    ("SELECT s FROM t WHERE a > 3", NO, true, "Some([0, 2]) filters=[] fetch=None"),
    ("SELECT s FROM t WHERE a > 3", INEXACT, true, "Some([0, 2]) filters=[a@0 > 3] fetch=None"),
    ("SELECT s FROM t WHERE a > 3", EXACT, false, "Some([2]) filters=[a@0 > 3] fetch=None"),
    ("SELECT s FROM t WHERE a > 3 LIMIT 4", INEXACT, true, "Some([0, 2]) filters=[a@0 > 3] fetch=None"),
    ("SELECT s FROM t WHERE a > 3 AND b < 5 LIMIT 4", EXACT, false, "Some([2]) filters=[a@0 > 3, b@1 < 5] fetch=Some(4)"),
    ("SELECT s FROM t WHERE a > 3 AND b < 5", EXACT_FOR_B, true, "Some([0, 2]) filters=[b@1 < 5] fetch=None"),
    // Of a limit, no filter above it may choose the rows, be it a TopK's.
    ("SELECT s FROM (SELECT * FROM t LIMIT 10) WHERE a > 3", EXACT, true, "Some([0, 2]) filters=[] fetch=Some(10)"),
    ("SELECT s FROM (SELECT * FROM t LIMIT 10) WHERE a > 3", INEXACT, true, "Some([0, 2]) filters=[] fetch=Some(10)"),
    ("SELECT s FROM (SELECT * FROM t LIMIT 20) ORDER BY b DESC, a LIMIT 3", INEXACT, false, "None filters=[] fetch=Some(20)"),
];

#[tokio::test]
async fn a_source_is_asked_for_what_the_query_needs() {
    let sim = Sim::new();
    for (sql, support, filters_above, expected) in REQUESTS {
        for projects in [true, false] {
            let (table, seen) = declaring(&sim, &batches(1), |source| {
                (source.support, source.projects) = (support, projects);
            });
            let plan = text(&plan(&over(table.clone()), sql).await, &[]);
            assert_eq!(plan.contains("FilterExec"), filters_above, "{sql}\n{plan}");
            let pushed = !expected.contains("filters=[]");
            assert_eq!(plan.contains("filters=["), pushed, "{sql}\n{plan}");
            same_as_on_host(host_table(&batches(1)), &[table], &[1], sql).await;
            let expected = format!("0: columns={expected}");
            // With the rule and without.
            assert_eq!(seen.requests(), [expected.clone(), expected], "{sql}");
        }
    }
    sim.assert_done();
}

/// Only the columns that are asked for are on the device at all, and no batch after the last one that is needed. Nothing above a source
/// that promised to filter does it again, so fewer rows come down.
#[tokio::test]
async fn no_more_is_moved_than_is_needed() {
    let sim = Sim::new();
    for (sql, rows, up, down) in [
        ("SELECT b FROM t LIMIT 20", vec![16, 16], 32 * 8, 20),
        ("SELECT a FROM t WHERE b = 7", vec![1, 2, 2], 3 * 64, 5),
    ] {
        let (table, seen) = declaring(&sim, &batches(1), |source| source.support = EXACT);
        let (ctx, before) = (over(table), sim.stats());
        assert_eq!(numbers_in(&ctx, sql).await.len(), down, "{sql}");
        let moved = sim.stats().since(&before);
        assert_eq!(seen.uploaded(), rows, "{sql}");
        let moved = (moved.bytes_to_device, moved.bytes_to_host);
        assert_eq!(moved, (up, down as u64 * 8), "{sql}");
    }
    sim.assert_done();
}

/// A projection above the scan narrows it.
#[tokio::test]
async fn a_projection_that_drops_columns_becomes_the_scans() {
    let sim = Sim::new();
    let (table, seen) = declaring(&sim, &batches(1), |_| {});
    let mut scan = device_leaf(table).await;
    // Twice: the columns are the scan's.
    for columns in [&[(2, "s"), (0, "a")][..], &[(1, "a")]] {
        let above = project(scan.clone(), columns);
        let narrow = scan.try_swapping_with_projection(above.downcast_ref().unwrap());
        scan = narrow.unwrap().unwrap();
        assert_eq!(scan.schema().fields(), above.schema().fields());
        assert_eq!(shape(&scan, &[&sim]), "Scan A");
    }
    let found = on_device(&scan, &sim).await.unwrap();
    assert_eq!(numbers_on(&found), multiples(48, 1));
    let expected = "0: columns=Some([0]) filters=[] fetch=None";
    assert_eq!(seen.requests(), [expected]);
}

/// What comes is checked, and the error says what was wrong.
#[tokio::test]
async fn batches_on_another_device_or_of_another_schema_are_refused() {
    let (a, b) = (Sim::new(), Sim::new());
    let elsewhere = b.upload(&numbers(0, 16)).unwrap();
    let other = a.upload(&rows(0, 16)).unwrap();
    let (id_a, id_b) = (a.id().to_string(), b.id().to_string());
    for (wrong, parts) in [
        (elsewhere, ["DeviceScanExec", &id_a, &id_b]),
        (other, ["DeviceScanExec", "schema", "\"s\": nullable Utf8"]),
    ] {
        let table = streams_table(&a, 1, move |_| futures::stream::iter([Ok(wrong.clone())]));
        let error = fails(query(&over(table), "SELECT a FROM t").await, &parts);
        let error = ours(&error);
        assert!(matches!(error, Error::InvalidArgument(_)), "{error:?}");
    }
}

/// The filter of a TopK gets stricter while the scan runs; so does that of a join once its other side is known.
#[tokio::test]
async fn dynamic_filters_reach_the_source_and_change_while_it_runs() {
    let sim = Sim::new();
    // The download is one batch ahead of the TopK.
    let topk = "SELECT a, s FROM t ORDER BY a LIMIT 3";
    let join = "SELECT t.a, t.s FROM h JOIN t ON h.a = t.a";
    for (sql, support, most) in [
        (topk, DYNAMIC, 2 * 16),
        (join, DYNAMIC, 2),
        (join, EXACT, 2),
    ] {
        let (table, seen) = declaring(&sim, &batches(1), |source| source.support = support);
        let (device, host) = (over(table), over(host_table(&batches(1))));
        for ctx in [&device, &host] {
            register(ctx, "h", host_table(&[vec![numbers(20, 2)]]));
        }
        assert_eq!(result(&device, sql).await, result(&host, sql).await);
        let asked = seen.requests();
        assert_eq!(asked.len(), 1, "{asked:?}");
        says(&asked[0], &["filters=[DynamicFilter"]);
        let rows: usize = seen.uploaded().iter().sum();
        assert!(rows <= most, "{rows} rows of {sql}");
    }
    sim.assert_done();
}

/// A plan that runs again does not keep the filter of its first run.
#[tokio::test]
async fn a_plan_that_is_reset_drops_dynamic_filters() {
    let sim = Sim::new();
    let (table, _) = declaring(&sim, &batches(1), |source| source.support = INEXACT);
    let sql = "SELECT a, s FROM t WHERE b < 8 ORDER BY a LIMIT 3";
    let mut scan = plan(&over(table), sql).await;
    while let Some(child) = scan.children().first().copied().cloned() {
        scan = child;
    }
    says(&text(&scan, &[]), &["b@1 < 8", "DynamicFilter"]);
    let reset = text(&scan.reset_state().unwrap(), &[]);
    says(&reset, &["b@1 < 8"]);
    assert!(!reset.contains("DynamicFilter"), "{reset}");
}

/// A source that changes its mind would lose the filter.
#[tokio::test]
async fn a_source_that_refuses_what_it_accepted_is_an_error() {
    static PLANNED: AtomicBool = AtomicBool::new(false);
    let sim = Sim::new();
    let mut source = Watched::new(&sim, &batches(1));
    source.support = |_| match PLANNED.load(SeqCst) {
        true => Unsupported,
        false => Exact,
    };
    let ctx = over(source.table());
    let frame = ctx.sql("SELECT s FROM t WHERE a > 3").await.unwrap();
    let logical = frame.into_optimized_plan().unwrap();
    PLANNED.store(true, SeqCst);
    let state = ctx.state();
    let planned = state.query_planner().create_physical_plan(&logical, &state);
    fails(planned.await, &["a@0 > 3", "supports_filter"]);
}
