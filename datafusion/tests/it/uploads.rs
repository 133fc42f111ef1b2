//! `DeviceUploads`: which rows of the host go up.

use std::sync::Arc;

use arrow_device_datafusion::{DeviceExec, DeviceUploads};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::union::UnionExec;

use crate::kit::*;
use crate::nodes::*;

pub(crate) fn is_filter(plan: &Plan) -> bool {
    plan.downcast_ref::<FilterExec>().is_some()
}

fn is_union(plan: &Plan) -> bool {
    plan.downcast_ref::<UnionExec>().is_some()
}

/// A plugin's rule: replaces filters whose rows are on a device, by an operator that doubles.
#[derive(Debug)]
pub(crate) struct DoubleFilters;

impl PhysicalOptimizerRule for DoubleFilters {
    fn optimize(&self, plan: Plan, _: &ConfigOptions) -> datafusion::common::Result<Plan> {
        let replace = |node: Plan| {
            let child = is_filter(&node).then(|| node.children()[0]);
            let device = child.and_then(|c| Some(DeviceExec::of(c)?.device().clone()));
            Ok(match (child, device) {
                (Some(child), Some(device)) => Transformed::yes(double(child.clone(), device)),
                _ => Transformed::no(node),
            })
        };
        Ok(plan.transform_up(replace)?.data)
    }

    fn name(&self) -> &str {
        "DoubleFilters"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// What the rule makes of a plan if operators with fewer rows stay; a second run changes nothing.
fn uploaded(plan: &Plan, supported: fn(&Plan) -> bool, min_rows: usize) -> String {
    let rule = DeviceUploads::new(any_sim(), supported).with_min_rows(min_rows);
    let run = |plan: &Plan| rule.optimize(plan.clone(), &ConfigOptions::default());
    let up = run(plan).unwrap();
    assert!(Arc::ptr_eq(&run(&up).unwrap(), &up));
    let shown = shape(&up, &[]);
    assert_eq!(Arc::ptr_eq(&up, plan), !shown.contains("Up"), "{shown}");
    shown
}

#[tokio::test]
async fn rows_of_the_host_go_up_and_those_of_a_device_do_not() {
    let sim = Sim::new();
    let (on_device, host) = (device_scan(&sim).await, host_scan().await);
    let plan = filter(host.clone());
    let expected = "Filter < Up < DataSource";
    assert_eq!(uploaded(&plan, is_filter, 0), expected);
    assert_eq!(uploaded(&plan, is_union, 0), "Filter < DataSource");
    let below = down(on_device.clone());
    for child in [on_device, below.clone(), round_robin(below.clone(), 3)] {
        let shown = uploaded(&filter(child), is_filter, 0);
        assert!(!shown.contains("Up"), "{shown}");
    }
    // Of two inputs only the one on the host goes up.
    let plan = union([below, host]);
    let expected = "Union < (Down < Scan, Up < DataSource)";
    assert_eq!(uploaded(&plan, is_union, 0), expected);
}

/// Ten rows each.
#[tokio::test]
async fn statistics_decide() {
    let ups = |plan: &Plan, supported, rows| {
        let shown = uploaded(plan, supported, rows);
        shown.matches("Up <").count()
    };
    let (endless, _) = host_stream(|i| (i == 0).then(|| Ok(numbers(0, 16))));
    let unknown = filter(scan(endless).await);
    let one = filter(host_scan().await);
    // The inputs count together, and each operator decides for itself.
    let two = union([host_scan().await, host_scan().await]);
    let both = union([
        unknown.clone(),
        filter(scan(host_table(&[vec![numbers(0, 10)]])).await),
    ]);
    for (plan, supported, rows, expected) in [
        (&one, is_filter as fn(&Plan) -> bool, 0, 1),
        (&one, is_filter, 1, 1),
        (&one, is_filter, 10, 1),
        (&one, is_filter, 11, 0),
        (&two, is_union, 20, 2),
        (&two, is_union, 21, 0),
        // Unknown numbers of rows are not enough, unless any number is.
        (&unknown, is_filter, 1, 0),
        (&unknown, is_filter, 0, 1),
        (&both, is_filter, 1, 1),
    ] {
        assert_eq!(ups(plan, supported, rows), expected, "{rows}");
    }
}
