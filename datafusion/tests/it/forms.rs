//! Plans: which of DataFusion's nodes become operators on a device.

use std::sync::Arc;

use arrow_device_datafusion::{DeviceResolver, DeviceSpec, DeviceTable};
use datafusion::physical_plan::limit::{GlobalLimitExec, LocalLimitExec};
use datafusion::physical_plan::{collect, displayable};

use crate::asked::answers;
use crate::kit::*;
use crate::nodes::*;
use crate::ops::cases;
use crate::plans::assert_becomes;

/// Nodes that need no kernel do not bring a plan down between device operators.
#[tokio::test]
async fn between_device_operators_host_nodes_take_their_forms() {
    let (a, b) = (Sim::new(), Sim::new());
    let scan = device_scan(&a).await;
    let expected = "Down < Map A < CoalescePartitions A < Union A < (\
        Projection A < Scan A, Projection A < Map A < Scan A)";
    for leaf in [scan.clone(), down(scan.clone()), up(down(scan.clone()), &a)] {
        let one = project(round_robin(leaf.clone(), 3), &[(1, "x")]);
        let other = project(double(leaf, &a), &[(0, "x")]);
        let plan = double(on_host(union([one, other])), &a);
        assert_becomes(plan, &[&a], expected);
    }
    // What comes from two devices, or from the host and a device, meets on the host.
    let plan = double(union([scan.clone(), device_scan(&b).await]), &a);
    let expected = "Down < Map A < Up A < Union < (Down < Scan A, Down < Scan B)";
    assert_becomes(plan, &[&a, &b], expected);
    let plan = double(union([scan, host_scan().await]), &a);
    let expected = "Down < Map A < Up A < Union < (Down < Scan A, DataSource)";
    assert_becomes(plan, &[&a], expected);
    // What DataFusion puts above the scan of a table of one partition, whose filter a plugin's rule replaces.
    let ctx = session_with(4, 0);
    register(&ctx, "t", device_table(&a, &[vec![rows(0, 40)]]));
    let plan = crate::kit::plan(&ctx, "SELECT a FROM t WHERE b > 3").await;
    let plan = double(plan.children()[0].clone(), &a);
    assert_becomes(plan, &[&a], "Repartition < Down < Map A < Scan A");
}

/// A plan whose batches are wanted on the device does not come down either.
#[tokio::test]
async fn a_result_on_the_device_passes_nodes_without_a_kernel() {
    let a = Sim::new();
    let table = device_table(&a, &[vec![rows(0, 10)], vec![rows(10, 10)]]);
    let plan = on_host(project(scan(table).await, &[(0, "a")]));
    let before = a.stats();
    assert_eq!(on_device(&plan, &a).await.unwrap().len(), 2);
    let cost = a.stats().since(&before);
    assert_eq!((cost.copies, cost.host_waits), (0, 0));
}

/// Less comes down, whatever stands above.
#[tokio::test]
async fn limits_and_projections_that_drop_columns_go_below_the_download() {
    let a = Sim::new();
    let scan = device_scan(&a).await;
    let limit = |plan| Arc::new(LocalLimitExec::new(plan, 3)) as Plan;
    let below = project(down(scan.clone()), &[(2, "t")]);
    // As many bytes come down, or more.
    let all = project(scan.clone(), &[(1, "x"), (0, "y"), (2, "z")]);
    let twice = project(scan.clone(), &[(2, "x"), (2, "y")]);
    for (plan, expected) in [
        (
            on_host(limit(project(scan.clone(), &[(2, "t")]))),
            "CoalescePartitions < Down < Limit A < Projection A < Scan A",
        ),
        (
            on_host(limit(below)),
            "CoalescePartitions < Down < Limit A < Projection A < Scan A",
        ),
        (
            Arc::new(GlobalLimitExec::new(scan.clone(), 1, None)),
            "Down < Limit A < Scan A",
        ),
        (all, "Projection < Down < Scan A"),
        (twice, "Projection < Down < Scan A"),
        (
            project(on_host(scan), &[(2, "s")]),
            "Projection < CoalescePartitions < Down < Scan A",
        ),
    ] {
        assert_becomes(plan, &[&a], expected);
    }
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
        for (make, _) in cases(partitions.len(), 3) {
            let node = make(leaf.clone());
            let expected = answers(&node);
            assert_eq!(answers(&form(node.clone(), &a)), expected, "{node:?}");
            let is_unknown = |answer: &String| answer.contains("num_rows: Absent");
            assert!(!expected.iter().any(is_unknown), "{node:?}");
        }
    }
}

#[tokio::test]
async fn explain_shows_what_their_nodes_show() {
    let a = Sim::new();
    let narrow = project(device_scan(&a).await, &[(0, "x")]);
    let plan = form(Arc::new(GlobalLimitExec::new(narrow, 2, Some(3))), &a);
    let expected = "
        DeviceLimitExec: device=A, skip=2, fetch=3
          DeviceProjectionExec: device=A, expr=[a@0 as x]
            DeviceScanExec: device=A, partitions=1
    ";
    assert_plan(&plan, &[&a], expected);
    let tree = displayable(plan.as_ref()).tree_render().to_string();
    says(&tree, &["DeviceLimitExec", "limit: 3", "skip: 2", "x: a"]);
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
        let few = Arc::new(LocalLimitExec::new(leaf, 3));
        let plan = with_transitions(double(on_host(project(few, &[(0, "x")])), spec));
        let shown = text(&plan, &[]);
        for line in shown.lines().skip(1) {
            assert!(line.contains(&format!("device={wanted}")), "{shown}");
        }
        let context = resolving(DeviceResolver::of([sim.device.clone()]));
        let found = collect(plan, context).await;
        fails(found, &[wanted, "the session offers [sim"]);
    }
}
