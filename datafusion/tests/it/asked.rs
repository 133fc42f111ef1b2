//! What DataFusion asks of a node, the operator answers.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use arrow_device_datafusion::DeviceExec;
use datafusion::arrow::compute::SortOptions;
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::common::Statistics;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_expr::{Distribution, PhysicalSortExpr};
use datafusion::physical_plan::SortOrderPushdownResult::{Exact, Inexact, Unsupported};
use datafusion::physical_plan::execution_plan::{CardinalityEffect, InvariantLevel};
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::filter_pushdown::{
    ChildFilterPushdownResult, ChildPushdownResult, FilterPushdownPhase, PushedDown,
};
use datafusion::physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion::prelude::SessionContext;

use crate::asking::{Asked, AskedTable};
use crate::kit::*;
use crate::nodes::*;

/// What made the operator in a node of another.
fn last(plan: &Plan) -> &str {
    let node = DeviceExec::of(plan).expect("the operator").node();
    &node.downcast_ref::<Asked>().unwrap().last
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
    let plan = over_a_child(&sim);
    let one = plan.input_distribution_requirements();
    let one: Vec<_> = one.per_child_distributions().cloned().collect();
    assert!(matches!(one[..], [Distribution::SinglePartition]));
    assert!(plan.required_input_ordering()[0].is_some());
    assert_eq!(plan.maintains_input_order(), [true]);
    // Whatever its node says: DataFusion would repartition on the host.
    assert_eq!(plan.benefits_from_input_partitioning(), [false]);
    assert_eq!(plan.dynamic_expressions_produced().len(), 1);
    let effect = plan.cardinality_effect();
    assert!(matches!(effect, CardinalityEffect::LowerEqual));
    assert!(plan.supports_limit_pushdown());
    assert_eq!(plan.fetch(), None);
    assert_eq!(plan.with_fetch(Some(7)).unwrap().fetch(), Some(7));
    assert!(plan.with_fetch(None).is_none());
    assert_eq!(last(&plan.clone().reset_state().unwrap()), "reset");
    assert!(plan.check_invariants(InvariantLevel::Executable).is_ok());
    let broken = DeviceExec::of(&plan)
        .unwrap()
        .node()
        .downcast_ref::<Asked>();
    let mut broken = broken.unwrap().clone();
    broken.last = "broken".to_owned();
    let broken = broken.node();
    assert!(broken.check_invariants(InvariantLevel::Always).is_ok());
    let found = broken.check_invariants(InvariantLevel::Executable);
    fails(found, &["as asked"]);
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
fn sorts_are_answered_exactly_nearly_and_not() {
    let sim = Sim::new();
    let plan = over_a_child(&sim);
    let by = |columns: usize| {
        let by = |i| Arc::new(Column::new("a", i)) as _;
        let by = |i| PhysicalSortExpr::new(by(i), SortOptions::default());
        let by: Vec<_> = (0..columns).map(by).collect();
        match plan.try_pushdown_sort(&by).unwrap() {
            Exact { inner } => format!("exactly {}", last(&inner)),
            Inexact { inner } => format!("nearly {}", last(&inner)),
            Unsupported => "not".to_owned(),
        }
    };
    let found = [by(1), by(2), by(3)];
    assert_eq!(found, ["exactly sorted", "nearly sorted", "not"]);
}

#[test]
fn filters_reach_the_operator_and_the_node_is_the_updated_one() {
    let sim = Sim::new();
    let plan = Asked::new(&sim, &[numbers(0, 1)], &Arc::default()).node();
    let config = ConfigOptions::default();
    let filter = filter(plan.clone());
    let filter = filter.downcast_ref::<FilterExec>().unwrap().predicate();
    let phase = FilterPushdownPhase::Pre;
    let over = over_a_child(&sim);
    let offered = over.gather_filters_for_pushdown(phase, vec![filter.clone()], &config);
    assert_eq!(offered.unwrap().parent_filters()[0].len(), 1);
    let result = ChildPushdownResult {
        parent_filters: vec![ChildFilterPushdownResult {
            filter: filter.clone(),
            child_results: vec![],
        }],
        self_filters: vec![],
    };
    let answer = plan.handle_child_pushdown_result(phase, result, &config);
    let answer = answer.unwrap();
    assert!(matches!(answer.filters[..], [PushedDown::Yes]));
    let mut seen = Vec::new();
    let see = &mut |e: &Arc<_>| {
        seen.push(format!("{e}"));
        Ok(TreeNodeRecursion::Continue)
    };
    answer.updated_node.unwrap().apply_expressions(see).unwrap();
    assert_eq!(seen, ["a@0 < 5"]);
}

/// A projection above is the operator's to take.
#[test]
fn a_projection_is_the_operators_to_take() {
    let sim = Sim::new();
    let own = over_a_child(&sim);
    let swapped = |plan: &Plan, alias| {
        let above = project(plan.clone(), &[(0, alias)]);
        plan.try_swapping_with_projection(above.downcast_ref().unwrap())
            .unwrap()
    };
    let leaf = own.children()[0].clone();
    assert_eq!(last(&swapped(&leaf, "taken").unwrap()), "projected");
    assert!(swapped(&leaf, "left").is_none());
    // Below an operator with a child it might have to run on the host.
    assert!(swapped(&own, "taken").is_none());
    let down = down(own);
    assert!(matches!(
        down.cardinality_effect(),
        CardinalityEffect::Equal
    ));
    assert_eq!(
        down.child_stats_requests(Some(0)),
        [ChildStats::At(Some(0))]
    );
}

/// Such a table t of 64 batches of 16 rows.
fn asked(sim: &Sim, partitions: usize) -> (SessionContext, Asked) {
    let ctx = session_with(partitions, 0);
    let batches: Vec<_> = (0..64).map(|i| rows(i * 16, 16)).collect();
    let table = Asked::new(sim, &batches, &Arc::default());
    register(&ctx, "t", Arc::new(AskedTable(table.clone())));
    (ctx, table)
}

#[tokio::test]
async fn explain_shows_what_the_operator_says() {
    let sim = Sim::new();
    let (ctx, _) = asked(&sim, 1);
    let shown = async |sql| {
        let batches = query(&ctx, sql).await.unwrap();
        pretty_format_batches(&batches).unwrap().to_string()
    };
    let tree = shown("EXPLAIN FORMAT TREE SELECT a FROM t").await;
    let device = format!("device: {}", sim.id());
    says(&tree, &["AskedExec", "answers: all", &device]);
    let analyzed = shown("EXPLAIN ANALYZE SELECT a FROM t").await;
    let line = analyzed.lines().find(|line| line.contains("AskedExec"));
    let parts = ["batches_read=64", "output_rows=1.02 K", "bytes_to_device="];
    says(&line.expect("the operator's line"), &parts);
}

/// Each round of a recursive query runs the plan again, as it was before it ran.
#[tokio::test]
async fn a_recursive_query_resets_the_scan() {
    let sim = Sim::new();
    for partitions in [1, 4] {
        let (ctx, table) = asked(&sim, partitions);
        let sql = "WITH RECURSIVE r AS (SELECT 1 AS a UNION ALL \
                   SELECT t.a + 1 FROM r JOIN t ON r.a = t.a WHERE t.a < 6) SELECT a FROM r";
        let found = sorted(numbers_in(&ctx, sql).await);
        assert_eq!(found, [1, 2, 3, 4, 5, 6]);
        assert!(table.resets.load(SeqCst) >= 5);
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
