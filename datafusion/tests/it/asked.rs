//! What DataFusion asks of a node, the node in whose place an operator runs answers.

use std::fmt::Debug;
use std::sync::Arc;

use arrow_device_datafusion::DeviceExec;
use datafusion::arrow::compute::SortOptions;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::PhysicalSortExpr;
use datafusion::physical_expr::expressions::{Column, binary, lit};
use datafusion::physical_plan::SortOrderPushdownResult::{Exact, Inexact, Unsupported};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::execution_plan::CardinalityEffect;
use datafusion::physical_plan::filter_pushdown::{
    ChildFilterPushdownResult, ChildPushdownResult, FilterPushdownPhase, PushedDown,
    PushedDownPredicate,
};
use datafusion::physical_plan::statistics::{ChildStats, StatisticsArgs, StatisticsContext};

use crate::kit::*;
use crate::nodes::*;
use crate::operator::doubling;
use crate::source::watched::Watched;

/// A node of DataFusion, or that in whose place an operator runs.
fn inside(plan: &Plan) -> String {
    text(DeviceExec::of(plan).map_or(plan, DeviceExec::node), &[])
}

/// What DataFusion asks a node.
pub(crate) fn answers(plan: &Plan) -> Vec<String> {
    fn shown(answer: impl Debug) -> String {
        format!("{answer:?}")
    }
    let (properties, config) = (plan.properties(), ConfigOptions::default());
    let mut answers = vec![
        shown(properties.output_ordering()),
        shown(properties.output_partitioning()),
        shown(properties.boundedness),
        shown(plan.maintains_input_order()),
        shown(plan.required_input_ordering()),
        shown(plan.input_distribution_requirements()),
        shown(plan.dynamic_expressions_produced()),
        shown(plan.cardinality_effect() as u8),
        shown(plan.fetch()),
        shown(plan.with_fetch(Some(3)).as_ref().map(inside)),
        inside(&plan.clone().reset_state().unwrap()),
    ];
    // A limit must not pass what joins partitions. DataFusion knows its own node for that.
    let passes = plan.supports_limit_pushdown() && !plan.is::<CoalescePartitionsExec>();
    answers.push(passes.to_string());
    let partitions = properties.output_partitioning().partition_count();
    for partition in std::iter::once(None).chain((0..partitions).map(Some)) {
        answers.push(shown(plan.child_stats_requests(partition)));
        let args = StatisticsArgs::new().with_partition(partition);
        let found = StatisticsContext::new().compute(plan.as_ref(), &args);
        answers.push(shown(found.unwrap()));
    }
    let expression = &mut |e: &Arc<_>| {
        answers.push(format!("{e}"));
        Ok(TreeNodeRecursion::Continue)
    };
    plan.apply_expressions(expression).unwrap();
    let schema = plan.schema();
    let Some(first) = schema.fields().first() else {
        return answers;
    };
    let column = Arc::new(Column::new(first.name(), 0));
    let by = [PhysicalSortExpr::new(
        column.clone(),
        SortOptions::default(),
    )];
    answers.push(match plan.try_pushdown_sort(&by).unwrap() {
        Exact { inner } => format!("exactly {}", inside(&inner)),
        Inexact { inner } => format!("nearly {}", inside(&inner)),
        Unsupported => "not".to_owned(),
    });
    let Ok(filter) = binary(column, Operator::Gt, lit(1i64), &schema) else {
        return answers;
    };
    for phase in [FilterPushdownPhase::Pre, FilterPushdownPhase::Post] {
        let offered = plan.gather_filters_for_pushdown(phase, vec![filter.clone()], &config);
        let offered = offered.unwrap();
        let taken = |of: Vec<_>| of.into_iter().map(PushedDownPredicate::supported).collect();
        let result = ChildPushdownResult {
            parent_filters: vec![ChildFilterPushdownResult {
                filter: filter.clone(),
                child_results: vec![PushedDown::Yes; plan.children().len()],
            }],
            self_filters: offered.self_filters().into_iter().map(taken).collect(),
        };
        answers.push(shown(offered.parent_filters()));
        let answer = plan.handle_child_pushdown_result(phase, result, &config);
        let answer = answer.unwrap();
        let updated = answer.updated_node.as_ref().map(inside);
        answers.push(shown((answer.filters, updated)));
    }
    answers
}

/// The nodes of some plans, each in the place of which an operator runs.
#[tokio::test]
async fn every_question_is_answered_by_the_node() {
    let sim = Sim::new();
    let ctx = session_without_rule(4);
    let partitions = [vec![rows(0, 16), rows(16, 16)], vec![rows(32, 20)]];
    register(&ctx, "t", host_table(&partitions));
    register(&ctx, "u", device_table(&sim, &partitions));
    let mut names = Vec::new();
    for sql in [
        "SELECT a, count(*) FROM t WHERE b > 2 GROUP BY a ORDER BY a LIMIT 3",
        "SELECT t.a, u.s FROM t JOIN u ON t.a = u.a WHERE u.b = 1 ORDER BY t.a LIMIT 2",
        "SELECT a, row_number() OVER (PARTITION BY b ORDER BY a) AS n FROM u",
        "SELECT a + 1 AS c FROM t UNION ALL SELECT b FROM u LIMIT 5 OFFSET 1",
        "SELECT x.a FROM t x CROSS JOIN u y WHERE x.a + y.b > 3",
    ] {
        let asked = |node: &Plan| {
            let own = DeviceExec::of(node).map_or(node, DeviceExec::node);
            let exec = Arc::new(DeviceExec::new(own.clone(), &sim, doubling(false))) as Plan;
            assert_eq!(answers(&exec), answers(own), "{}", text(own, &[]));
            let none = vec![false; own.children().len()];
            assert_eq!(exec.benefits_from_input_partitioning(), none);
            let above = down(exec);
            let effect = above.cardinality_effect();
            assert!(matches!(effect, CardinalityEffect::Equal));
            let requests = above.child_stats_requests(Some(0));
            assert_eq!(requests, [ChildStats::At(Some(0))]);
            names.push(own.name().to_owned());
            Ok(TreeNodeRecursion::Continue)
        };
        plan(&ctx, sql).await.apply(asked).unwrap();
    }
    names.sort_unstable();
    names.dedup();
    assert!(names.len() > 10, "{names:?}");
}

/// A projection above is a scan's to take. Another operator below it might have to run on the host.
#[tokio::test]
async fn a_projection_is_a_scans_to_take() {
    let sim = Sim::new();
    let scan = device_scan(&sim).await;
    for (plan, takes) in [(scan.clone(), true), (double(scan, &sim), false)] {
        let above = project(plan.clone(), &[(1, "b")]);
        let above = above.downcast_ref().unwrap();
        let swapped = plan.try_swapping_with_projection(above).unwrap();
        assert_eq!(
            swapped.is_some_and(|plan| plan.name() == "DeviceScanExec"),
            takes
        );
    }
}

/// Filters and sorts from above reach the scan through all forms, with the scan's columns.
#[tokio::test]
async fn filters_and_sorts_pass_through_forms() {
    let a = Sim::new();
    let by = |name, column| {
        PhysicalSortExpr::new(Arc::new(Column::new(name, column)), SortOptions::default())
    };
    let mut source = Watched::new(&a, &[vec![rows(0, 16)]]);
    source.orderings = vec![[by("b", 1)].into()];
    let stack = project(device_leaf(source.table()).await, &[(2, "x"), (1, "y")]);
    let plan = form(on_host(stack), &a);
    let y = Arc::new(Column::new("y", 1));
    let mut offered = binary(y, Operator::Gt, lit(1i64), &plan.schema()).unwrap();
    let (mut node, config) = (plan.clone(), ConfigOptions::default());
    while let Some(child) = node.children().first().copied().cloned() {
        let phase = FilterPushdownPhase::Pre;
        let to_child = node.gather_filters_for_pushdown(phase, vec![offered], &config);
        let filter = to_child.unwrap().parent_filters()[0].remove(0);
        assert!(matches!(filter.discriminant, PushedDown::Yes), "{node:?}");
        offered = filter.predicate;
        node = child;
    }
    assert_eq!(node.name(), "DeviceScanExec");
    assert_eq!(offered.to_string(), "b@1 > 1");
    // The only partition keeps the order.
    for plan in [&plan, plan.children()[0]] {
        let Exact { inner } = plan.try_pushdown_sort(&[by("y", 1)]).unwrap() else {
            panic!("not exact")
        };
        assert_eq!(text(&inner, &[]), text(plan, &[]));
    }
}

/// Each round of a recursive query runs the plan again, as it was before it ran.
#[tokio::test]
async fn a_recursive_query_runs_operators_again() {
    let sim = Sim::new();
    let ctx = session_with(4, 1);
    let batches: Vec<_> = (0..4).map(|i| rows(i * 16, 16)).collect();
    register(&ctx, "t", device_table(&sim, &[batches]));
    let sql = "WITH RECURSIVE r AS (SELECT 2 AS a UNION ALL \
               SELECT t.a + 2 FROM r JOIN t ON r.a = t.a WHERE t.a < 8) SELECT a FROM r";
    assert_eq!(sorted(numbers_in(&ctx, sql).await), [2, 4, 6, 8]);
    drop(ctx);
    sim.assert_done();
}
