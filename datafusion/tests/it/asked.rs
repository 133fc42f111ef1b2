//! What DataFusion asks of a node, the node in whose place an operator runs answers.

use std::collections::BTreeSet;
use std::fmt::Debug;

use datafusion::physical_plan::SortOrderPushdownResult::{Exact, Inexact, Unsupported};
use datafusion::physical_plan::execution_plan::CardinalityEffect;
use datafusion::physical_plan::filter_pushdown::{
    ChildFilterPushdownResult, ChildPushdownResult, FilterPushdownPhase, PushedDown,
    PushedDownPredicate,
};
use datafusion::physical_plan::statistics::ChildStats;

use crate::kit::*;
use crate::nodes::*;
use crate::operator::Backed;
use crate::ops::{cases, over_x};
use crate::source::watched::Watched;

/// A node of DataFusion, or that in whose place an operator runs.
fn inside(plan: &Plan) -> String {
    text(DeviceExec::of(plan).map_or(plan, DeviceExec::node), &[])
}

/// What DataFusion asks a node.
fn answers(plan: &Plan) -> Vec<String> {
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
    let mut names = BTreeSet::new();
    for sql in [
        "SELECT a, count(*) FROM t WHERE b > 2 GROUP BY a ORDER BY a LIMIT 3",
        "SELECT t.a, u.s FROM t JOIN u ON t.a = u.a WHERE u.b = 1 ORDER BY t.a LIMIT 2",
        "SELECT a, row_number() OVER (PARTITION BY b ORDER BY a) AS n FROM u",
        "SELECT a + 1 AS c FROM t UNION ALL SELECT b FROM u LIMIT 5 OFFSET 1",
        "SELECT x.a FROM t x CROSS JOIN u y WHERE x.a + y.b > 3",
    ] {
        let asked = |node: &Plan| {
            let own = DeviceExec::of(node).map_or(node, DeviceExec::node);
            let operator = Arc::new(Backed::new(own, false));
            let exec = Arc::new(DeviceExec::new(own.clone(), &sim, operator)) as Plan;
            assert_eq!(answers(&exec), answers(own), "{}", text(own, &[]));
            let none = vec![false; own.children().len()];
            assert_eq!(exec.benefits_from_input_partitioning(), none);
            let above = down(exec);
            let effect = above.cardinality_effect();
            assert!(matches!(effect, CardinalityEffect::Equal));
            let requests = above.child_stats_requests(Some(0));
            assert_eq!(requests, [ChildStats::At(Some(0))]);
            names.insert(own.name().to_owned());
            Ok(TreeNodeRecursion::Continue)
        };
        plan(&ctx, sql).await.apply(asked).unwrap();
    }
    assert!(names.len() > 10, "{names:?}");
}

/// What a form tells DataFusion is what the node over the same children tells it.
#[tokio::test]
async fn a_form_gives_the_answers_of_its_node() {
    let a = Sim::new();
    let one = vec![vec![rows(0, 16), rows(16, 16)]];
    let two = vec![vec![rows(0, 16)], vec![rows(16, 9)]];
    let uneven = [1, 2, 4].map(|n| vec![rows(0, 16 * n)]).to_vec();
    for partitions in [one, two, uneven] {
        let leaf = device_leaf(device_table(&a, &partitions)).await;
        for line in cases(partitions.len(), 3) {
            let node = over_x(line, &leaf);
            let expected = answers(&node);
            assert_eq!(answers(&form(node, &a)), expected, "{line}");
            let is_unknown = |answer: &String| answer.contains("num_rows: Absent");
            assert!(!expected.iter().any(is_unknown), "{line}");
        }
    }
}

/// A projection above is a scan's to take. Another operator below it might have to run on the host.
#[tokio::test]
async fn a_projection_is_a_scans_to_take() {
    let sim = Sim::new();
    for (line, takes) in [("Scan A", true), ("Map A < Scan A", false)] {
        let plan = planned(line, &[&sim], &[]);
        let above = project(plan.clone(), &[(1, "b")]);
        let swapped = plan.try_swapping_with_projection(above.downcast_ref().unwrap());
        let took = swapped
            .unwrap()
            .is_some_and(|plan| plan.name() == "DeviceScanExec");
        assert_eq!(took, takes);
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
