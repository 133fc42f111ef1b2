//! Filters on their way to a source: from SQL, from joins and from TopK.

use std::sync::Arc;

use datafusion::common::Result;
use datafusion::logical_expr::TableProviderFilterPushDown::{self, Exact, Inexact, Unsupported};
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::DynamicFilterPhysicalExpr;
use datafusion::physical_plan::displayable;
use datafusion::prelude::SessionContext;

use super::requests::{batches, same_as_host};
use super::watched::{Support, Watched};
use crate::kit::*;
use crate::queries::result;

fn is_dynamic(filter: &Arc<dyn PhysicalExpr>) -> bool {
    filter.downcast_ref::<DynamicFilterPhysicalExpr>().is_some()
}

fn only_b(filter: &Arc<dyn PhysicalExpr>) -> TableProviderFilterPushDown {
    match filter.to_string().contains("b@1") && !filter.to_string().contains("a@0") {
        true => Exact,
        false => Unsupported,
    }
}

#[tokio::test]
async fn filters_reach_the_source_as_it_supports_them() {
    let sim = Sim::new();
    // What the source supports, whether a filter stays above it, the query, and the request.
    let below = "SELECT s FROM (SELECT * FROM t LIMIT 10) WHERE a > 3";
    let topk = "SELECT s FROM (SELECT * FROM t LIMIT 20) ORDER BY b DESC, a LIMIT 3";
    let three = "SELECT s FROM t WHERE a > 3";
    let four = "SELECT s FROM t WHERE a > 3 LIMIT 4";
    let both = "SELECT s FROM t WHERE a > 3 AND b < 5";
    let both_four = "SELECT s FROM t WHERE a > 3 AND b < 5 LIMIT 4";
    let inexact: Support = |_| Inexact;
    let exact: Support = |_| Exact;
    let no: Support = |_| Unsupported;
    let cases = [
        // Nor may the filter of a TopK choose the rows of a limit below it.
        (inexact, false, topk, "None filters=[] fetch=Some(20)"),
        (no, true, three, "Some([0, 2]) filters=[] fetch=None"),
        (
            inexact,
            true,
            three,
            "Some([0, 2]) filters=[a@0 > 3] fetch=None",
        ),
        (
            exact,
            false,
            three,
            "Some([2]) filters=[a@0 > 3] fetch=None",
        ),
        (
            exact,
            false,
            both_four,
            "Some([2]) filters=[a@0 > 3, b@1 < 5] fetch=Some(4)",
        ),
        (
            inexact,
            true,
            four,
            "Some([0, 2]) filters=[a@0 > 3] fetch=None",
        ),
        (
            only_b,
            true,
            both,
            "Some([0, 2]) filters=[b@1 < 5] fetch=None",
        ),
        // The filter is above the limit.
        (exact, true, below, "Some([0, 2]) filters=[] fetch=Some(10)"),
        (
            inexact,
            true,
            below,
            "Some([0, 2]) filters=[] fetch=Some(10)",
        ),
    ];
    for (support, filters_above, sql, expected) in cases {
        let mut source = Watched::new(&sim, &batches(1));
        source.support = support;
        let requests = source.requests.clone();
        let table = source.table();
        let ctx = over(table.clone());
        let plan = text(&plan(&ctx, sql).await, &[&sim]);
        assert_eq!(plan.contains("FilterExec"), filters_above, "{sql}\n{plan}");
        let pushed = !expected.contains("filters=[]");
        assert_eq!(plan.contains("filters=["), pushed, "{plan}");
        same_as_host(table, &batches(1), sql).await;
        let expected = format!("0: columns={expected}");
        assert_eq!(requests.take(), [expected.clone(), expected], "{sql}");
    }
    sim.assert_done();
}

/// Nothing above a source that promised to filter does it again, so fewer rows come down.
#[tokio::test]
async fn an_exact_filter_saves_the_way_down() {
    let sim = Sim::new();
    let mut source = Watched::new(&sim, &batches(1));
    source.support = |_| Exact;
    let ctx = over(source.table());
    let before = sim.stats();
    let found = numbers_in(&ctx, "SELECT a FROM t WHERE b = 7").await;
    assert_eq!(found, [7, 17, 27, 37, 47]);
    assert_eq!(sim.stats().since(&before).bytes_to_host, 5 * 8);
}

/// The filter of a TopK gets stricter while the scan runs; so does that of a join once its other side is known.
#[tokio::test]
async fn dynamic_filters_reach_the_source_and_change_while_it_runs() {
    let sim = Sim::new();
    let dynamic: Support = |filter| match is_dynamic(filter) {
        true => Inexact,
        false => Unsupported,
    };
    // The download is one batch ahead of the TopK.
    for (sql, most) in [
        ("SELECT a, s FROM t ORDER BY a LIMIT 3", 2 * 16),
        ("SELECT t.a, t.s FROM h JOIN t ON h.a = t.a", 2),
    ] {
        let mut source = Watched::new(&sim, &batches(1));
        source.support = dynamic;
        let (requests, uploaded) = (source.requests.clone(), source.uploaded.clone());
        let ctx = session();
        register(&ctx, "h", host_table(&[vec![numbers(20, 2)]]));
        register(&ctx, "t", source.table());
        let plan = plan(&ctx, sql).await;
        says(&text(&plan, &[&sim]), &["filters=[DynamicFilter"]);
        let found = result(&ctx, sql).await;
        let asked = requests.take();
        assert_eq!(asked.len(), 1, "{asked:?}");
        says(&asked[0], &["filters=[DynamicFilter"]);
        let rows: usize = uploaded.lock().unwrap().iter().sum();
        assert!(rows <= most, "{rows} of {sql}");
        ctx.deregister_table("t").unwrap();
        register(&ctx, "t", host_table(&batches(1)));
        assert_eq!(found, result(&ctx, sql).await);
    }
    sim.assert_done();
}

/// A plan that runs again does not keep the filter of its first run.
#[tokio::test]
async fn a_plan_that_is_reset_drops_dynamic_filters() -> Result<()> {
    let sim = Sim::new();
    let mut source = Watched::new(&sim, &batches(1));
    source.support = |_| Inexact;
    let ctx = over(source.table());
    let plan = plan(&ctx, "SELECT a, s FROM t WHERE b < 8 ORDER BY a LIMIT 3").await;
    let mut scan = plan;
    while let Some(child) = scan.children().first() {
        scan = (*child).clone();
    }
    let describe = |scan: &Plan| displayable(scan.as_ref()).one_line().to_string();
    says(&describe(&scan), &["DynamicFilter"]);
    let reset = describe(&scan.reset_state()?);
    says(&reset, &["b@1 < 8"]);
    assert!(!reset.contains("DynamicFilter"), "{reset}");
    Ok(())
}

/// A source that changes its mind would lose the filter.
#[tokio::test]
async fn a_source_that_refuses_what_it_accepted_is_an_error() {
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    static PLANNED: AtomicBool = AtomicBool::new(false);
    let sim = Sim::new();
    let mut source = Watched::new(&sim, &batches(1));
    source.support = |_| match PLANNED.load(SeqCst) {
        true => Unsupported,
        false => Exact,
    };
    let ctx: SessionContext = over(source.table());
    let frame = ctx.sql("SELECT s FROM t WHERE a > 3").await.unwrap();
    let logical = frame.into_optimized_plan().unwrap();
    PLANNED.store(true, SeqCst);
    let state = ctx.state();
    let planned = state.query_planner().create_physical_plan(&logical, &state);
    fails(planned.await, &["a@0 > 3", "supports_filter"]);
}
