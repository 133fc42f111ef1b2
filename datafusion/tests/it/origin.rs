//! Where a plan's rows come from, and what DataFusion's own rules make of a plan that is on a device already.

use std::sync::Arc;

use arrow_device_datafusion::{DeviceSpec, device_of};
use datafusion::common::config::ConfigOptions;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_optimizer::limit_pushdown::LimitPushdown;
use datafusion::physical_plan::limit::GlobalLimitExec;
use datafusion::physical_plan::replace_children_if_necessary;

use crate::kit::*;
use crate::nodes::*;

/// Through transitions and nodes that need no kernel, and no further.
#[tokio::test]
async fn a_rule_learns_where_rows_come_from() {
    let (a, b) = (Sim::new(), Sim::new());
    let spec = Some(DeviceSpec::from(&a));
    let (scan, host) = (device_scan(&a).await, host_scan().await);
    let below = down(scan.clone());
    for plan in [
        scan.clone(),
        below.clone(),
        round_robin(below.clone(), 3),
        on_host(round_robin(below.clone(), 3)),
        union([below.clone(), round_robin(scan.clone(), 1)]),
        down(double(below.clone(), &a)),
    ] {
        assert_eq!(device_of(&plan), spec, "{}", text(&plan, &[&a]));
        // The rule agrees: an operator above it needs no transition.
        let above = shape(&with_transitions(double(plan, &a)), &[&a]);
        let transitions = (above.matches("Up").count(), above.matches("Down").count());
        assert_eq!(transitions, (0, 1), "{above}");
    }
    for plan in [
        host.clone(),
        round_robin(host.clone(), 3),
        sort(below.clone()),
        filter(below.clone()),
        union([below.clone(), down(device_scan(&b).await)]),
        union([below, host]),
    ] {
        assert_eq!(device_of(&plan), None, "{}", text(&plan, &[&a, &b]));
    }
}

/// DataFusion's rule for limits may run again: a limit of all rows does not become one of each partition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_over_coalesced_partitions_stays_one() {
    let a = Sim::new();
    let partitions: Vec<_> = (0..4).map(|p| batches(p * 16, 1)).collect();
    let leaf = device_leaf(device_table(&a, &partitions)).await;
    let coalesced = form(on_host(leaf), &a);
    let limit: Plan = Arc::new(GlobalLimitExec::new(down(coalesced), 0, Some(10)));
    let pushed = LimitPushdown::new().optimize(limit, &ConfigOptions::default());
    let pushed = pushed.unwrap();
    for plan in [pushed.clone(), with_transitions(pushed)] {
        let found = numbers_from(&plan).await;
        assert_eq!(found.len(), 10, "{}", text(&plan, &[&a]));
    }
    a.assert_done();
}

/// The rows of `INSERT ... SELECT ... ORDER BY` are written in that order.
#[tokio::test]
async fn an_insert_keeps_its_order() {
    let a = Sim::new();
    for partitions in [1, 4] {
        let ctx = session_with(partitions, 0);
        let from: Vec<_> = (0..4).map(|p| batches(p * 16, 1)).collect();
        register(&ctx, "t", host_table(&from));
        let schema = numbers(0, 1).schema();
        register(&ctx, "u", device_table_of(&a, schema, &[vec![]]));
        let sql = "INSERT INTO u SELECT a FROM t ORDER BY a DESC";
        query(&ctx, sql).await.unwrap();
        // A rule that gives the node another input gets an error if its columns are others.
        let insertion = plan(&ctx, "INSERT INTO u SELECT a FROM t").await;
        let wide = replace_children_if_necessary(insertion, vec![host_scan().await]);
        fails(wide, &["3 columns to insert"]);
        let found = numbers_in(&ctx, "SELECT a FROM u").await;
        assert_eq!(found, (0..64).rev().collect::<Vec<_>>(), "{partitions}");
    }
}
