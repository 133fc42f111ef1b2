//! Filters on their way to a source: from SQL, from joins and from TopK.

use std::sync::Arc;

use datafusion::common::Result;
use datafusion::logical_expr::TableProviderFilterPushDown::{self, Exact, Inexact, Unsupported};
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::DynamicFilterPhysicalExpr;
use datafusion::physical_plan::displayable;
use datafusion::prelude::SessionContext;

use super::requests::{batches, same_as_host, texts};
use super::watched::{Support, Watched};
use crate::kit::*;

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
    let cases: [(Support, &str, &str, bool); 11] = [
        // DataFusion offers it twice, over the table's columns and over the scan's.
        (
            |_| Inexact,
            "SELECT s FROM t WHERE b < 5",
            "columns=Some([1, 2]) filters=[b@1 < 5] fetch=None",
            true,
        ),
        // Nor may the filter of a TopK choose the rows of a limit below it.
        (
            |_| Inexact,
            "SELECT s FROM (SELECT * FROM t LIMIT 20) ORDER BY b DESC, a LIMIT 3",
            "columns=None filters=[] fetch=Some(20)",
            false,
        ),
        (
            |_| Unsupported,
            "SELECT s FROM t WHERE a > 3",
            "columns=Some([0, 2]) filters=[] fetch=None",
            true,
        ),
        (
            |_| Inexact,
            "SELECT s FROM t WHERE a > 3",
            "columns=Some([0, 2]) filters=[a@0 > 3] fetch=None",
            true,
        ),
        (
            |_| Exact,
            "SELECT s FROM t WHERE a > 3",
            "columns=Some([2]) filters=[a@0 > 3] fetch=None",
            false,
        ),
        (
            |_| Exact,
            "SELECT s FROM t WHERE a > 3 AND b < 5 LIMIT 4",
            "columns=Some([2]) filters=[a@0 > 3, b@1 < 5] fetch=Some(4)",
            false,
        ),
        (
            |_| Inexact,
            "SELECT s FROM t WHERE a > 3 LIMIT 4",
            "columns=Some([0, 2]) filters=[a@0 > 3] fetch=None",
            true,
        ),
        (
            only_b,
            "SELECT s FROM t WHERE a > 3 AND b < 5",
            "columns=Some([0, 2]) filters=[b@1 < 5] fetch=None",
            true,
        ),
        (
            only_b,
            "SELECT s FROM t WHERE a > b",
            "columns=None filters=[] fetch=None",
            true,
        ),
        // The filter is above the limit.
        (
            |_| Exact,
            "SELECT s FROM (SELECT * FROM t LIMIT 10) WHERE a > 3",
            "columns=Some([0, 2]) filters=[] fetch=Some(10)",
            true,
        ),
        (
            |_| Inexact,
            "SELECT s FROM (SELECT * FROM t LIMIT 10) WHERE a > 3",
            "columns=Some([0, 2]) filters=[] fetch=Some(10)",
            true,
        ),
    ];
    for (support, sql, expected, filters_above) in cases {
        let mut source = Watched::new(&sim, &batches(1));
        source.support = support;
        let requests = source.requests.clone();
        let table = source.table();
        let ctx = over(table.clone());
        let plan = text(&plan(&ctx, sql).await, &[&sim]);
        assert_eq!(plan.contains("FilterExec"), filters_above, "{sql}\n{plan}");
        assert_eq!(
            plan.contains("filters=["),
            !expected.contains("filters=[]"),
            "{plan}"
        );
        same_as_host(table, &batches(1), sql).await;
        let expected = format!("0: {expected}");
        assert_eq!(
            requests.take(),
            [expected.clone(), expected],
            "{sql}\n{plan}"
        );
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
        assert!(
            text(&plan, &[&sim]).contains("filters=[DynamicFilter"),
            "{}",
            text(&plan, &[&sim])
        );
        let found = texts(&ctx, sql).await;
        let asked = requests.take();
        assert!(
            asked.len() == 1 && asked[0].contains("filters=[DynamicFilter"),
            "{asked:?}"
        );
        let rows: usize = uploaded.lock().unwrap().iter().sum();
        assert!(rows <= most, "{rows} of {sql}");
        ctx.deregister_table("t").unwrap();
        register(&ctx, "t", host_table(&batches(1)));
        assert_eq!(found, texts(&ctx, sql).await);
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
    assert!(
        describe(&scan).contains("DynamicFilter"),
        "{}",
        describe(&scan)
    );
    let reset = describe(&scan.reset_state()?);
    assert!(
        !reset.contains("DynamicFilter") && reset.contains("b@1 < 8"),
        "{reset}"
    );
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
    let error = ctx
        .state()
        .query_planner()
        .create_physical_plan(&logical, &ctx.state())
        .await;
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("a@0 > 3") && error.contains("supports_filter"),
        "{error}"
    );
}
