//! Where a plan's rows come from, and what DataFusion's own rules make of a plan that is on a device already.

use std::sync::Arc;

use arrow_device_datafusion::{DeviceSpec, device_of};
use datafusion::arrow::compute::SortOptions;
use datafusion::common::config::ConfigOptions;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{binary, col, lit};
use datafusion::physical_expr::{LexOrdering, PhysicalSortExpr};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_optimizer::limit_pushdown::LimitPushdown;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::limit::GlobalLimitExec;
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::union::UnionExec;
use datafusion::physical_plan::{collect, replace_children_if_necessary};

use crate::kit::*;
use crate::ops::{device_leaf, form, round_robin};
use crate::plans::{device_scan, down, host_scan, on_host};

/// Through transitions and nodes that need no kernel, and no further.
#[tokio::test]
async fn a_rule_learns_where_rows_come_from() {
    let (a, b) = (Sim::new(), Sim::new());
    let spec = Some(DeviceSpec::from(&a));
    let union = |one: Plan, other: Plan| UnionExec::try_new(vec![one, other]).unwrap();
    let scan = device_scan(&a).await;
    for plan in [
        scan.clone(),
        down(scan.clone()),
        round_robin(down(scan.clone()), 3),
        on_host(round_robin(down(scan.clone()), 3)),
        union(down(scan.clone()), round_robin(scan.clone(), 1)),
        down(double(down(scan.clone()), &a)),
    ] {
        assert_eq!(device_of(&plan), spec, "{}", text(&plan, &[&a]));
        // The rule agrees: an operator above it needs no transition.
        let above = text(&with_transitions(double(plan, &a)), &[&a]);
        assert!(!above.contains("HostToDevice"), "{above}");
        assert_eq!(above.matches("DeviceToHost").count(), 1, "{above}");
    }
    let schema = scan.schema();
    let order = PhysicalSortExpr::new(col("a", &schema).unwrap(), SortOptions::default());
    let order = LexOrdering::new([order]).unwrap();
    let predicate = binary(col("a", &schema).unwrap(), Operator::Gt, lit(1i64), &schema);
    for plan in [
        host_scan().await,
        round_robin(host_scan().await, 3),
        Arc::new(SortExec::new(order, down(scan.clone()))),
        Arc::new(FilterExec::try_new(predicate.unwrap(), down(scan.clone())).unwrap()),
        union(down(scan.clone()), down(device_scan(&b).await)),
        union(down(scan.clone()), host_scan().await),
    ] {
        assert_eq!(device_of(&plan), None, "{}", text(&plan, &[&a, &b]));
    }
}

/// DataFusion's rule for limits may run again: a limit of all rows does not become one of each partition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_over_coalesced_partitions_stays_one() {
    let a = Sim::new();
    let partitions: Vec<_> = (0..4).map(|p| vec![numbers(p * 16, 16)]).collect();
    let leaf = device_leaf(device_table(&a, &partitions)).await;
    let coalesced = form(Arc::new(CoalescePartitionsExec::new(leaf)), &a);
    let limit: Plan = Arc::new(GlobalLimitExec::new(down(coalesced), 0, Some(10)));
    let pushed = LimitPushdown::new()
        .optimize(limit, &ConfigOptions::default())
        .unwrap();
    for plan in [pushed.clone(), with_transitions(pushed)] {
        let rows = collect(plan.clone(), session().task_ctx()).await.unwrap();
        assert_eq!(numbers_of(&rows).len(), 10, "{}", text(&plan, &[&a]));
    }
    a.assert_done();
}

/// The rows of `INSERT ... SELECT ... ORDER BY` are written in that order.
#[tokio::test]
async fn an_insert_keeps_its_order() {
    let a = Sim::new();
    for partitions in [1, 4] {
        let ctx = session_with(partitions, 0);
        let from: Vec<_> = (0..4).map(|p| vec![numbers(p * 16, 16)]).collect();
        register(&ctx, "t", host_table(&from));
        let schema = numbers(0, 1).schema();
        let into = arrow_device_datafusion::DeviceTable::from_batches(
            schema,
            a.device.clone(),
            vec![vec![]],
        );
        register(&ctx, "u", Arc::new(into.unwrap()));
        query(&ctx, "INSERT INTO u SELECT a FROM t ORDER BY a DESC")
            .await
            .unwrap();
        // A rule that gives the node another input gets an error if its columns are others.
        let insertion = plan(&ctx, "INSERT INTO u SELECT a FROM t").await;
        let wide = scan(host_table(&[vec![rows(0, 16)]])).await;
        let e = replace_children_if_necessary(insertion, vec![wide]).unwrap_err();
        assert!(e.to_string().contains("3 columns to insert"), "{e}");
        let found = numbers_in(&ctx, "SELECT a FROM u").await;
        assert_eq!(found, (0..64).rev().collect::<Vec<_>>(), "{partitions}");
    }
}
