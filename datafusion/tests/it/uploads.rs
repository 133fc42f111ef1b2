//! `DeviceUploads`: which rows of the host go up.

use std::sync::Arc;

use arrow_device::ArrowDeviceType;
use arrow_device_datafusion::{DeviceExec, DeviceSpec, DeviceUploads};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{binary, col, lit};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::union::UnionExec;

use crate::kit::*;
use crate::plans::{device_scan, down, host_scan};

/// A host operator that the tests' plugin supports.
pub(crate) fn filter(child: Plan) -> Plan {
    let schema = child.schema();
    let predicate = binary(col("a", &schema).unwrap(), Operator::Lt, lit(5i64), &schema);
    Arc::new(FilterExec::try_new(predicate.unwrap(), child).unwrap())
}

pub(crate) fn is_filter(plan: &Plan) -> bool {
    plan.downcast_ref::<FilterExec>().is_some()
}

pub(crate) fn any_sim() -> DeviceSpec {
    DeviceSpec::any(ArrowDeviceType::EXT_DEV)
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

fn uploads() -> DeviceUploads {
    DeviceUploads::new(any_sim(), is_filter)
}

fn uploaded(rule: &DeviceUploads, plan: Plan) -> Plan {
    rule.optimize(plan, &ConfigOptions::default()).unwrap()
}

fn ups(plan: &Plan) -> usize {
    text(plan, &[]).matches("HostToDeviceExec").count()
}

#[tokio::test]
async fn an_upload_stands_below_what_the_plugin_supports() {
    let plan = uploaded(&uploads(), filter(host_scan().await));
    let shown = text(&plan, &[]);
    let lines: Vec<_> = shown.lines().map(str::trim_start).collect();
    assert!(lines[0].starts_with("FilterExec"), "{shown}");
    assert_eq!(lines[1], "HostToDeviceExec: device=sim");
    assert!(lines[2].starts_with("DataSourceExec"), "{shown}");
    // Once more changes nothing, and neither does a rule for other operators.
    assert!(Arc::ptr_eq(&uploaded(&uploads(), plan.clone()), &plan));
    let none = DeviceUploads::new(any_sim(), |_| false);
    let plan = filter(host_scan().await);
    assert!(Arc::ptr_eq(&uploaded(&none, plan.clone()), &plan));
}

#[tokio::test]
async fn rows_of_a_device_are_not_uploaded() {
    let sim = Sim::new();
    for child in [
        device_scan(&sim).await,
        down(device_scan(&sim).await),
        crate::ops::round_robin(down(device_scan(&sim).await), 3),
    ] {
        let plan = filter(child);
        assert!(Arc::ptr_eq(&uploaded(&uploads(), plan.clone()), &plan));
    }
    // Of two inputs only the one on the host goes up.
    let both = |node: &Plan| node.downcast_ref::<UnionExec>().is_some();
    let (device, host) = (down(device_scan(&sim).await), host_scan().await);
    let union = UnionExec::try_new(vec![device, host]).unwrap();
    let plan = uploaded(&DeviceUploads::new(any_sim(), both), union);
    let up = |i: usize| plan.children()[i].name().to_owned();
    assert_eq!(
        [up(0), up(1)],
        ["DeviceToHostExec", "HostToDeviceExec"],
        "{}",
        text(&plan, &[])
    );
}

/// Ten rows each.
#[tokio::test]
async fn statistics_decide() {
    let at_least = |rows| uploads().with_min_rows(rows);
    for (rows, expected) in [(0, 1), (1, 1), (10, 1), (11, 0)] {
        let plan = filter(host_scan().await);
        let up = uploaded(&at_least(rows), plan.clone());
        assert_eq!(ups(&up), expected, "{rows}");
        assert_eq!(Arc::ptr_eq(&up, &plan), expected == 0);
    }
    // The inputs count together.
    for (rows, expected) in [(20, 2), (21, 0)] {
        let union = |node: &Plan| node.downcast_ref::<UnionExec>().is_some();
        let rule = DeviceUploads::new(any_sim(), union).with_min_rows(rows);
        let inputs = vec![host_scan().await, host_scan().await];
        let plan = uploaded(&rule, UnionExec::try_new(inputs).unwrap());
        assert_eq!(ups(&plan), expected, "{rows}");
    }
    // Unknown numbers of rows are not enough, unless any number is.
    let (endless, _) = host_stream(|i| (i == 0).then(|| Ok(numbers(0, 16))));
    let unknown = scan(endless).await;
    let plan = filter(unknown.clone());
    assert_eq!(ups(&uploaded(&at_least(1), plan.clone())), 0);
    assert_eq!(ups(&uploaded(&at_least(0), plan)), 1);
    // Each operator decides for itself.
    let inputs = vec![
        filter(unknown),
        filter(scan(host_table(&[vec![numbers(0, 10)]])).await),
    ];
    let plan = uploaded(&at_least(1), UnionExec::try_new(inputs).unwrap());
    assert_eq!(ups(plan.children()[0]), 0);
    assert_eq!(ups(plan.children()[1]), 1);
}
