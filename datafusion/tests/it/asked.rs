//! What DataFusion asks of a node, the operator answers.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use arrow_device_datafusion::{DeviceExec, DeviceToHostExec};
use datafusion::arrow::compute::SortOptions;
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::common::Statistics;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{Column, binary, col, lit};
use datafusion::physical_expr::{Distribution, PhysicalSortExpr};
use datafusion::physical_plan::SortOrderPushdownResult;
use datafusion::physical_plan::execution_plan::{CardinalityEffect, InvariantLevel};
use datafusion::physical_plan::filter_pushdown::{
    ChildFilterPushdownResult, ChildPushdownResult, FilterPushdownPhase, PushedDown,
};
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion::prelude::SessionContext;

use crate::asking::{Asked, AskedTable, Log};
use crate::kit::*;
use crate::ops::project;

/// What made the operator in a node of another.
fn last(plan: &Plan) -> &str {
    &DeviceExec::operator::<Asked>(plan)
        .expect("the operator")
        .last
}

/// An operator over a child.
fn over_a_child(device: &Sim) -> Plan {
    let child = Asked::new(device, &[numbers(0, 1)], &Arc::default()).node();
    let mut plan = Asked::new(device, &[rows(0, 1)], &Arc::default());
    plan.child = Some(child);
    plan.node()
}

#[test]
fn every_answer_of_the_operator_arrives() {
    let sim = Sim::new();
    let (plan, config) = (over_a_child(&sim), ConfigOptions::default());
    let one = plan.input_distribution_requirements();
    let one: Vec<_> = one.per_child_distributions().cloned().collect();
    assert!(matches!(one[..], [Distribution::SinglePartition]));
    assert!(plan.required_input_ordering()[0].is_some());
    assert_eq!(plan.maintains_input_order(), [true]);
    assert_eq!(plan.benefits_from_input_partitioning(), [true]);
    assert_eq!(plan.dynamic_expressions_produced().len(), 1);
    assert!(matches!(
        plan.cardinality_effect(),
        CardinalityEffect::LowerEqual
    ));
    assert!(plan.supports_limit_pushdown());
    assert_eq!(plan.fetch(), None);
    assert_eq!(plan.with_fetch(Some(7)).unwrap().fetch(), Some(7));
    assert!(plan.with_fetch(None).is_none());
    let more = plan.repartitioned(5, &config).unwrap().unwrap();
    assert_eq!(last(&more), "repartitioned(5)");
    assert_eq!(last(&plan.with_preserve_order(true).unwrap()), "preserves");
    assert!(plan.with_preserve_order(false).is_none());
    assert_eq!(last(&plan.clone().reset_state().unwrap()), "reset");
    let state = plan.with_new_state(Arc::new("state")).unwrap();
    assert_eq!(last(&state), "state");
    assert!(plan.with_new_state(Arc::new(5)).is_none());
    assert!(plan.check_invariants(InvariantLevel::Executable).is_ok());
    let broken = plan.with_new_state(Arc::new("broken")).unwrap();
    assert!(broken.check_invariants(InvariantLevel::Always).is_ok());
    let error = broken.check_invariants(InvariantLevel::Executable);
    assert!(error.unwrap_err().to_string().contains("as asked"));
}

#[test]
fn statistics_are_the_operators_of_the_partition_that_was_asked_for() {
    let sim = Sim::new();
    let plan = over_a_child(&sim);
    // The only partition is made of all of the child's.
    for partition in [None, Some(0)] {
        assert_eq!(plan.child_stats_requests(partition), [ChildStats::At(None)]);
        let args = StatisticsArgs::new().with_partition(partition);
        let child = Arc::new(Statistics::new_unknown(&schema()));
        let found = plan.statistics_from_inputs(&[child], &args).unwrap();
        let expected = 1010 + partition.unwrap_or(9);
        assert_eq!(found.num_rows.get_value(), Some(&expected));
    }
}

#[test]
fn a_projection_above_is_the_operators_to_take() {
    let sim = Sim::new();
    let plan = over_a_child(&sim);
    let projection = project(plan.clone(), &[(0, "a")]);
    let projection: &ProjectionExec = projection.downcast_ref().unwrap();
    let taken = plan.try_swapping_with_projection(projection).unwrap();
    assert!(Arc::ptr_eq(&taken.unwrap(), plan.children()[0]));
}

fn by(columns: usize) -> Vec<PhysicalSortExpr> {
    let by = |i| PhysicalSortExpr::new(Arc::new(Column::new("a", i)), SortOptions::default());
    (0..columns).map(by).collect()
}

/// Of the operator and of the download above it.
#[test]
fn sorts_are_answered_exactly_nearly_and_not() {
    use SortOrderPushdownResult::*;
    let sim = Sim::new();
    let plan = over_a_child(&sim);
    match plan.try_pushdown_sort(&by(1)).unwrap() {
        Exact { inner } => assert_eq!(last(&inner), "sorted"),
        other => panic!("{other:?}"),
    }
    match plan.try_pushdown_sort(&by(2)).unwrap() {
        Inexact { inner } => assert_eq!(last(&inner), "sorted"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        plan.try_pushdown_sort(&by(3)).unwrap(),
        Unsupported
    ));
    let down: Plan = Arc::new(DeviceToHostExec::new(plan));
    let below = |plan: &Plan| {
        let down = plan.downcast_ref::<DeviceToHostExec>().expect("a download");
        last(down.input()).to_owned()
    };
    match down.try_pushdown_sort(&by(1)).unwrap() {
        Exact { inner } => assert_eq!(below(&inner), "sorted"),
        other => panic!("{other:?}"),
    }
    match down.try_pushdown_sort(&by(2)).unwrap() {
        Inexact { inner } => assert_eq!(below(&inner), "sorted"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        down.try_pushdown_sort(&by(3)).unwrap(),
        Unsupported
    ));
    assert_eq!(below(&down.with_preserve_order(true).unwrap()), "preserves");
    assert!(down.with_preserve_order(false).is_none());
    // DataFusion asks the nodes below others for more partitions, and so the download.
    let more = down.repartitioned(5, &ConfigOptions::default()).unwrap();
    assert_eq!(below(&more.expect("more partitions")), "repartitioned(5)");
}

#[test]
fn filters_reach_the_operator_and_the_node_is_the_updated_one() {
    let sim = Sim::new();
    let log = Arc::new(Log::default());
    let plan = Asked::new(&sim, &[numbers(0, 1)], &log).node();
    let config = ConfigOptions::default();
    let filter = binary(
        col("a", &plan.schema()).unwrap(),
        Operator::Gt,
        lit(1i64),
        &plan.schema(),
    );
    let filter = filter.unwrap();
    let phase = FilterPushdownPhase::Pre;
    let over = over_a_child(&sim);
    let offered = over.gather_filters_for_pushdown(phase, vec![filter.clone()], &config);
    assert_eq!(offered.unwrap().parent_filters()[0].len(), 1);
    let child_results = vec![];
    let result = ChildPushdownResult {
        parent_filters: vec![ChildFilterPushdownResult {
            filter,
            child_results,
        }],
        self_filters: vec![],
    };
    let answer = plan.handle_child_pushdown_result(phase, result, &config);
    let answer = answer.unwrap();
    assert!(matches!(answer.filters[..], [PushedDown::Yes]));
    let updated = answer.updated_node.expect("another node");
    let mut seen = 0;
    updated
        .apply_expressions(&mut |e| {
            assert_eq!(e.to_string(), "a@0 > 1");
            seen += 1;
            Ok(TreeNodeRecursion::Continue)
        })
        .unwrap();
    assert_eq!(seen, 1);
    let offered = log.offered.lock().unwrap().clone();
    assert_eq!(offered, [(phase, "a@0 > 1".to_owned())]);
}

/// A download gives DataFusion the operator's answers to what concerns its rows.
#[test]
fn a_projection_goes_below_the_download() {
    let sim = Sim::new();
    // The operator takes it.
    let own = over_a_child(&sim);
    let down = |plan: Plan| Arc::new(DeviceToHostExec::new(plan)) as Plan;
    let swapped = |down: &Plan, columns: &[(usize, &str)]| {
        let above = project(down.clone(), columns);
        let above: &ProjectionExec = above.downcast_ref().unwrap();
        down.try_swapping_with_projection(above).unwrap()
    };
    let taken = swapped(&down(own.clone()), &[(0, "a")]).unwrap();
    assert!(Arc::ptr_eq(taken.children()[0], own.children()[0]));
    // It does not: a projection of its own goes between.
    let own = down(Asked::new(&sim, &[rows(0, 1)], &Arc::default()).node());
    let expected = "
        DeviceToHostExec: device=A
          DeviceProjectionExec: device=A, expr=[s@2 as t]
            AskedExec: device=A, filters=0
    ";
    assert_plan(&swapped(&own, &[(2, "t")]).unwrap(), &[&sim], expected);
    // No fewer bytes would come down.
    assert!(swapped(&own, &[(2, "c"), (1, "b"), (0, "a")]).is_none());
    assert!(swapped(&own, &[(2, "c"), (2, "b")]).is_none());
    let effect = own.cardinality_effect();
    assert!(matches!(effect, CardinalityEffect::Equal));
    assert_eq!(own.child_stats_requests(Some(0)), [ChildStats::At(Some(0))]);
}

/// A session over such a table t of 64 batches of 16 rows, and a host table h of the numbers 20 to 22.
fn asked(sim: &Sim, partitions: usize) -> (SessionContext, Arc<Log>) {
    let (ctx, log) = (session_with(partitions, 0), Arc::new(Log::default()));
    let batches: Vec<_> = (0..64).map(|i| rows(i * 16, 16)).collect();
    let table = AskedTable(Asked::new(sim, &batches, &log));
    register(&ctx, "t", Arc::new(table));
    register(&ctx, "h", host_table(&[vec![rows(20, 3)]]));
    (ctx, log)
}

#[tokio::test]
async fn a_filter_of_a_query_goes_into_the_scan() {
    let sim = Sim::new();
    let (ctx, log) = asked(&sim, 1);
    let sql = "SELECT a FROM t WHERE a > 1000";
    let expected = "
        DeviceToHostExec: device=A
          AskedExec: device=A, filters=1
    ";
    assert_plan(&plan(&ctx, sql).await, &[&sim], expected);
    assert_eq!(
        numbers_in(&ctx, sql).await,
        (1001..1024).collect::<Vec<_>>()
    );
    assert_eq!(log.rows.load(SeqCst), 23);
    let offered = log.offered.lock().unwrap();
    assert!(
        offered
            .iter()
            .all(|(phase, _)| *phase == FilterPushdownPhase::Pre)
    );
    assert!(
        offered.iter().any(|(_, text)| text == "a@0 > 1000"),
        "{offered:?}"
    );
}

/// The scan says that its rows are in this order, and a sort is no longer needed.
#[tokio::test]
async fn a_sort_that_the_scan_does_is_gone() {
    let sim = Sim::new();
    let (ctx, _) = asked(&sim, 1);
    let expected = "
        DeviceToHostExec: device=A
          AskedExec: device=A, filters=0
    ";
    let plan = plan(&ctx, "SELECT a FROM t ORDER BY a").await;
    assert_plan(&plan, &[&sim], expected);
}

/// The filter of a sort with a limit tightens while the query runs, and the scan leaves out what it cuts.
#[tokio::test]
async fn the_dynamic_filter_of_a_top_k_cuts_the_scan() {
    let sim = Sim::new();
    let (ctx, log) = asked(&sim, 1);
    let sql = "SELECT a FROM t ORDER BY a, b, s LIMIT 3";
    assert_eq!(numbers_in(&ctx, sql).await, [0, 1, 2]);
    assert_dynamic(&log);
}

#[tokio::test]
async fn the_dynamic_filter_of_a_hash_join_cuts_the_scan() {
    let sim = Sim::new();
    let (ctx, log) = asked(&sim, 1);
    let sql = "SELECT t.a FROM h JOIN t ON h.a = t.a";
    assert_eq!(sorted(numbers_in(&ctx, sql).await), [20, 21, 22]);
    assert_dynamic(&log);
    assert_eq!(log.rows.load(SeqCst), 3);
}

#[track_caller]
fn assert_dynamic(log: &Log) {
    let offered = log.offered.lock().unwrap();
    let dynamic = |(phase, text): &(_, String)| {
        *phase == FilterPushdownPhase::Post && text.contains("DynamicFilter")
    };
    assert!(offered.iter().any(dynamic), "{offered:?}");
    let rows = log.rows.load(SeqCst);
    assert!(rows < 1024 / 2, "the scan returned {rows} rows");
}

async fn text_of(ctx: &SessionContext, sql: &str) -> String {
    let batches = query(ctx, sql).await.unwrap();
    pretty_format_batches(&batches).unwrap().to_string()
}

#[tokio::test]
async fn explain_shows_what_the_operator_says() {
    let sim = Sim::new();
    let (ctx, _) = asked(&sim, 1);
    let tree = text_of(&ctx, "EXPLAIN FORMAT TREE SELECT a FROM t").await;
    for part in [
        "AskedExec",
        "answers: all",
        &format!("device: {}", sim.id()),
    ] {
        assert!(tree.contains(part), "{tree}");
    }
    let analyzed = text_of(&ctx, "EXPLAIN ANALYZE SELECT a FROM t").await;
    let line = analyzed.lines().find(|line| line.contains("AskedExec"));
    let line = line.expect("the operator's line");
    for part in ["batches_read=64", "output_rows=1.02 K", "bytes_to_device="] {
        assert!(line.contains(part), "{line}");
    }
}

/// Each round of a recursive query runs the plan again, as it was before it ran.
#[tokio::test]
async fn a_recursive_query_resets_the_scan() {
    let sim = Sim::new();
    for partitions in [1, 4] {
        let (ctx, log) = asked(&sim, partitions);
        let sql = "WITH RECURSIVE r AS (SELECT 1 AS a UNION ALL \
                   SELECT t.a + 1 FROM r JOIN t ON r.a = t.a WHERE t.a < 6) SELECT a FROM r";
        let found = sorted(numbers_in(&ctx, sql).await);
        assert_eq!(found, [1, 2, 3, 4, 5, 6]);
        assert!(log.resets.load(SeqCst) >= 5, "{log:?}");
    }
    // A device operator above the scan of a table runs again, too.
    let ctx = session_with(4, 1);
    let batches: Vec<_> = (0..4).map(|i| rows(i * 16, 16)).collect();
    register(&ctx, "t", device_table(&sim, &[batches]));
    let sql = "WITH RECURSIVE r AS (SELECT 2 AS a UNION ALL \
               SELECT t.a + 2 FROM r JOIN t ON r.a = t.a WHERE t.a < 8) SELECT a FROM r";
    assert_eq!(sorted(numbers_in(&ctx, sql).await), [2, 4, 6, 8]);
    drop(ctx);
    sim.assert_done();
}
