//! Plans: which of DataFusion's nodes become operators on a device.

use std::sync::Arc;

use arrow_device_datafusion::{DeviceResolver, DeviceSpec, DeviceTable, execute_on_device};
use datafusion::arrow::compute::SortOptions;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::common::config::ConfigOptions;
use datafusion::common::stats::Precision;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::PhysicalSortExpr;
use datafusion::physical_expr::expressions::{Column, binary, col, lit};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::filter_pushdown::{FilterPushdownPhase, PushedDown};
use datafusion::physical_plan::limit::{GlobalLimitExec, LocalLimitExec};
use datafusion::physical_plan::statistics::{StatisticsArgs, StatisticsContext};
use datafusion::physical_plan::union::UnionExec;
use datafusion::physical_plan::{SortOrderPushdownResult, collect, displayable};
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::TryStreamExt;

use crate::asking::Asked;
use crate::kit::*;
use crate::ops::{cases, device_leaf, form, project, round_robin};
use crate::plans::{assert_becomes, computed, device_scan, down, host_scan, on_host, up};

/// Nodes that need no kernel do not bring a plan down between device operators.
#[tokio::test]
async fn between_device_operators_host_nodes_take_their_forms() {
    let a = Sim::new();
    let scan = device_scan(&a).await;
    let union = |one: Plan, other: Plan| UnionExec::try_new(vec![one, other]).unwrap();
    let expected = "
        DeviceToHostExec: device=A
          MapExec: device=A
            DeviceCoalescePartitionsExec: device=A
              DeviceUnionExec: device=A
                DeviceProjectionExec: device=A, expr=[b@1 as x]
                  DeviceRepartitionExec: device=A, partitioning=RoundRobinBatch(3), input_partitions=1
                    DeviceScanExec: device=A, partitions=1
                DeviceProjectionExec: device=A, expr=[a@0 as x]
                  MapExec: device=A
                    DeviceScanExec: device=A, partitions=1
    ";
    for leaf in [scan.clone(), down(scan.clone()), up(down(scan.clone()), &a)] {
        let one = project(round_robin(leaf.clone(), 3), &[(1, "x")]);
        let other = project(double(leaf, &a), &[(0, "x")]);
        let plan = double(on_host(union(one, other)), &a);
        assert_becomes(plan, &[&a], expected);
    }
    // What comes from two devices, or from the host and a device, meets on the host.
    let b = Sim::new();
    let expected = "
        DeviceToHostExec: device=A
          MapExec: device=A
            HostToDeviceExec: device=A
              UnionExec
                DeviceToHostExec: device=A
                  DeviceScanExec: device=A, partitions=1
                DeviceToHostExec: device=B
                  DeviceScanExec: device=B, partitions=1
    ";
    let plan = double(union(scan.clone(), device_scan(&b).await), &a);
    assert_becomes(plan, &[&a, &b], expected);
    let expected = "
        DeviceToHostExec: device=A
          MapExec: device=A
            HostToDeviceExec: device=A
              UnionExec
                DeviceToHostExec: device=A
                  DeviceScanExec: device=A, partitions=1
                DataSourceExec: partitions=1, partition_sizes=[1]
    ";
    let plan = double(union(scan, host_scan().await), &a);
    assert_becomes(plan, &[&a], expected);
}

/// A plan whose batches are wanted on the device does not come down either.
#[tokio::test]
async fn a_result_on_the_device_passes_nodes_without_a_kernel() {
    let a = Sim::new();
    let table = device_table(&a, &[vec![rows(0, 10)], vec![rows(10, 10)]]);
    let plan = on_host(project(scan(table).await, &[(0, "a")]));
    let before = a.stats();
    let stream = execute_on_device(plan, session().task_ctx(), &a).unwrap();
    let batches: Vec<_> = stream.try_collect().await.unwrap();
    let cost = a.stats().since(&before);
    assert_eq!(
        (cost.copies, cost.bytes_to_host, cost.host_waits),
        (0, 0, 0)
    );
    assert_eq!(batches.len(), 2);
}

/// Less comes down, whatever stands above.
#[tokio::test]
async fn limits_and_projections_that_drop_columns_go_below_the_download() {
    let a = Sim::new();
    let scan = device_scan(&a).await;
    let expected = "
        CoalescePartitionsExec
          DeviceToHostExec: device=A
            DeviceLimitExec: device=A, fetch=3
              DeviceProjectionExec: device=A, expr=[s@2 as t]
                DeviceScanExec: device=A, partitions=1
    ";
    for leaf in [scan.clone(), down(scan.clone())] {
        let narrow = project(leaf, &[(2, "t")]);
        let plan = on_host(Arc::new(LocalLimitExec::new(narrow, 3)));
        assert_becomes(plan, &[&a], expected);
    }
    let expected = "
        DeviceToHostExec: device=A
          DeviceLimitExec: device=A, skip=1, fetch=None
            DeviceScanExec: device=A, partitions=1
    ";
    let plan = Arc::new(GlobalLimitExec::new(scan.clone(), 1, None));
    assert_becomes(plan, &[&a], expected);
    // As many bytes come down, or more.
    let all = [(1, "x"), (0, "y"), (2, "z")];
    let expected = "
        ProjectionExec: expr=[b@1 as x, a@0 as y, s@2 as z]
          DeviceToHostExec: device=A
            DeviceScanExec: device=A, partitions=1
    ";
    assert_becomes(project(scan.clone(), &all), &[&a], expected);
    let expected = "
        ProjectionExec: expr=[s@2 as x, s@2 as y]
          DeviceToHostExec: device=A
            DeviceScanExec: device=A, partitions=1
    ";
    let twice = project(scan.clone(), &[(2, "x"), (2, "y")]);
    assert_becomes(twice, &[&a], expected);
    // And a projection above a host node stays.
    let expected = "
        ProjectionExec: expr=[s@2 as s]
          CoalescePartitionsExec
            DeviceToHostExec: device=A
              DeviceScanExec: device=A, partitions=1
    ";
    let above = project(on_host(scan), &[(2, "s")]);
    assert_becomes(above, &[&a], expected);
}

/// What DataFusion puts above the scan of a table of one partition, before the session's own rules.
#[tokio::test]
async fn a_repartitioning_above_a_scan_brings_nothing_down() {
    let a = Sim::new();
    let ctx = session_with(4, 0);
    register(&ctx, "t", device_table(&a, &[vec![rows(0, 40)]]));
    let plan = plan(&ctx, "SELECT a FROM t WHERE b > 3").await;
    // A plugin's rule replaces the filter.
    let children = plan.children();
    let plan = double(children[0].clone(), &a);
    let expected = "
        DeviceToHostExec: device=A
          MapExec: device=A
            DeviceRepartitionExec: device=A, partitioning=RoundRobinBatch(4), input_partitions=1
              DeviceScanExec: device=A, partitions=1, projection=[a, b]
    ";
    assert_becomes(plan, &[&a], expected);
}

/// What a form tells DataFusion is what the node over the same children tells it.
#[tokio::test]
async fn a_form_gives_the_answers_of_its_node() {
    let a = Sim::new();
    let one = device_leaf(device_table(&a, &[vec![rows(0, 16), rows(16, 16)]])).await;
    let two = device_leaf(device_table(&a, &[vec![rows(0, 16)], vec![rows(16, 9)]])).await;
    let uneven = [1, 2, 4].map(|n| vec![rows(0, 16 * n)]);
    let three = device_leaf(device_table(&a, &uneven)).await;
    for (partitions, leaf) in [(1, one), (2, two), (3, three)] {
        for case in cases(partitions, 3) {
            let node = (case.make)(leaf.clone());
            let own = form(node.clone(), &a);
            let same = |what: &str, found: String, expected: String| {
                assert_eq!(found, expected, "{what} of {}", case.name);
            };
            let all = |plan: &Plan| {
                let plan = plan.as_ref();
                format!(
                    "{:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?}",
                    plan.properties().output_ordering(),
                    plan.properties().output_partitioning(),
                    plan.properties().boundedness,
                    plan.maintains_input_order(),
                    plan.required_input_ordering(),
                    plan.input_distribution_requirements(),
                    // A limit must not pass what joins partitions. DataFusion knows its own node for that.
                    plan.supports_limit_pushdown() && !plan.is::<CoalescePartitionsExec>(),
                    plan.fetch(),
                    plan.cardinality_effect() as u8,
                )
            };
            same("properties", all(&own), all(&node));
            let statistics = StatisticsContext::new();
            let partitions = node.properties().output_partitioning().partition_count();
            for partition in std::iter::once(None).chain((0..partitions).map(Some)) {
                let args = StatisticsArgs::new().with_partition(partition);
                let of = |plan: &Plan| statistics.compute(plan.as_ref(), &args).unwrap();
                let what = format!("statistics of {partition:?}");
                assert_ne!(of(&own).num_rows, Precision::Absent, "{}", case.name);
                same(&what, format!("{:?}", of(&own)), format!("{:?}", of(&node)));
            }
            let limited = |plan: &Plan| plan.with_fetch(Some(3)).map(|plan| plan.fetch());
            assert_eq!(limited(&own), limited(&node), "{}", case.name);
            let mut expressions = [Vec::new(), Vec::new()];
            for (plan, found) in [&own, &node].into_iter().zip(&mut expressions) {
                plan.apply_expressions(&mut |e| {
                    found.push(e.to_string());
                    Ok(TreeNodeRecursion::Continue)
                })
                .unwrap();
            }
            assert_eq!(expressions[0], expressions[1], "{}", case.name);
        }
    }
}

/// Filters and sorts from above reach the scan through all of them, with the scan's columns.
#[test]
fn filters_and_sorts_pass_through_them() {
    let a = Sim::new();
    let leaf = Asked::new(&a, &[rows(0, 16)], &Arc::default()).node();
    let stack = round_robin(project(leaf, &[(2, "x"), (1, "y")]), 2);
    let limit = |plan| Arc::new(CoalescePartitionsExec::new(plan)) as Plan;
    let plan = form(limit(stack), &a);
    let config = ConfigOptions::default();
    let filter = |schema: &SchemaRef| {
        let y = col("y", schema).unwrap();
        binary(y, Operator::Gt, lit(1i64), schema).unwrap()
    };
    let mut offered = vec![filter(&plan.schema())];
    let mut node = plan.clone();
    while let Some(child) = node.children().first().copied().cloned() {
        let phase = FilterPushdownPhase::Pre;
        let to_child = node.gather_filters_for_pushdown(phase, offered, &config);
        let to_child = to_child.unwrap().parent_filters().remove(0);
        offered = to_child
            .into_iter()
            .map(|filter| match filter.discriminant {
                PushedDown::Yes => filter.predicate,
                PushedDown::No => panic!("{} refused it", node.name()),
            })
            .collect();
        node = child;
    }
    assert_eq!(node.name(), "AskedExec");
    assert_eq!(offered[0].to_string(), "b@1 > 1");

    // One input partition, so a repartitioning keeps the order, but many outputs merged do not.
    let by = PhysicalSortExpr::new(Arc::new(Column::new("y", 1)), SortOptions::default());
    match plan.try_pushdown_sort(std::slice::from_ref(&by)).unwrap() {
        SortOrderPushdownResult::Inexact { inner } => {
            assert_plan(&inner, &[&a], &text(&plan, &[&a]));
        }
        other => panic!("{other:?}"),
    }
    let below = plan.children()[0];
    let sorted = below.try_pushdown_sort(&[by]).unwrap();
    assert!(matches!(sorted, SortOrderPushdownResult::Exact { .. }));
}

/// A projection above goes below, and stays on the device.
#[tokio::test]
async fn projections_pass_through_them() {
    let a = Sim::new();
    let leaf = device_leaf(device_table(&a, &[vec![rows(0, 16)], vec![rows(16, 16)]])).await;
    let union = UnionExec::try_new(vec![leaf.clone(), leaf]).unwrap();
    let plan = form(on_host(round_robin(union, 3)), &a);
    let expected = "
        DeviceCoalescePartitionsExec: device=A
          DeviceProjectionExec: device=A, expr=[b@1 as b]
            DeviceRepartitionExec: device=A, partitioning=RoundRobinBatch(3), input_partitions=4
              DeviceUnionExec: device=A
                DeviceScanExec: device=A, partitions=2
                DeviceScanExec: device=A, partitions=2
    ";
    let above = project(plan.clone(), &[(1, "b")]);
    let swapped = plan.try_swapping_with_projection(above.downcast_ref().unwrap());
    assert_plan(&swapped.unwrap().unwrap(), &[&a], expected);
    // And on, where DataFusion asks the next.
    let projection = project(plan.children()[0].clone(), &[(1, "b")]);
    let next = plan.children()[0].try_swapping_with_projection(projection.downcast_ref().unwrap());
    let next = next.unwrap().unwrap();
    let (found, union) = (
        text(&next, &[&a]),
        project(plan.children()[0].children()[0].clone(), &[(1, "b")]),
    );
    assert!(found.starts_with("DeviceRepartitionExec"), "{found}");
    let union_below = plan.children()[0].children()[0];
    let narrow = union_below.try_swapping_with_projection(union.downcast_ref().unwrap());
    let narrow = text(&narrow.unwrap().unwrap(), &[&a]);
    assert_eq!(
        narrow.matches("DeviceProjectionExec").count(),
        2,
        "{narrow}"
    );
    // An expression needs a kernel: it stays above.
    let above = computed(plan.clone());
    let stays = plan.try_swapping_with_projection(above.downcast_ref().unwrap());
    assert!(stays.unwrap().is_none());
}

#[tokio::test]
async fn explain_shows_what_their_nodes_show() {
    let a = Sim::new();
    let leaf = device_leaf(device_table(&a, &[vec![rows(0, 16)]])).await;
    let limit = Arc::new(GlobalLimitExec::new(project(leaf, &[(0, "x")]), 2, Some(3)));
    let plan = form(limit, &a);
    let expected = "
        DeviceLimitExec: device=A, skip=2, fetch=3
          DeviceProjectionExec: device=A, expr=[a@0 as x]
            DeviceScanExec: device=A, partitions=1
    ";
    assert_plan(&plan, &[&a], expected);
    let tree = displayable(plan.as_ref()).tree_render().to_string();
    for part in ["DeviceLimitExec", "limit: 3", "skip: 2", "x: a"] {
        assert!(tree.contains(part), "{tree}");
    }
}

/// Whoever plans needs no device. Where there is none, the error says which is wanted, and what there is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forms_on_a_device_that_is_not_there() {
    let sim = Sim::new();
    for wanted in ["cuda", "cuda:7"] {
        let spec: DeviceSpec = wanted.parse().unwrap();
        let schema = numbers(0, 1).schema();
        let open = |_| -> arrow_device::Result<Reader> { panic!("there is no device to read on") };
        let table = DeviceTable::from_readers(schema, spec.clone(), 2, open);
        let leaf = scan(Arc::new(table)).await;
        let few = Arc::new(LocalLimitExec::new(round_robin(leaf, 3), 3));
        let plan = with_transitions(double(on_host(project(few, &[(0, "x")])), spec));
        let shown = text(&plan, &[]);
        for line in shown.lines().skip(1) {
            assert!(line.contains(&format!("device={wanted}")), "{shown}");
        }
        let resolver = DeviceResolver::of([sim.device.clone()]);
        let config = SessionConfig::new().with_extension(Arc::new(resolver));
        let context = SessionContext::new_with_config(config).task_ctx();
        let error = collect(plan, context).await.unwrap_err().to_string();
        for part in [wanted, "the session offers [sim"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
