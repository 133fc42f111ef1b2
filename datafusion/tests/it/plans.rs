//! Plans: where transitions stand.

use std::sync::Arc;

use arrow_device::Device;
use arrow_device_datafusion::{DeviceExec, DeviceToHostExec, HostToDeviceExec};
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{binary, col, lit};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::projection::{ProjectionExec, ProjectionExpr};

use crate::kit::*;

pub(crate) fn up(child: Plan, device: &Device) -> Plan {
    let up = HostToDeviceExec::new(child, device.clone());
    Arc::new(DeviceExec::new(Arc::new(up)))
}

pub(crate) fn down(child: Plan) -> Plan {
    Arc::new(DeviceToHostExec::new(child))
}

/// A node on the host.
pub(crate) fn on_host(child: Plan) -> Plan {
    Arc::new(CoalescePartitionsExec::new(child))
}

/// A node on the host that has no form on a device.
pub(crate) fn computed(child: Plan) -> Plan {
    let schema = child.schema();
    let (b, one) = (col("b", &schema).unwrap(), lit(1i64));
    let expr = binary(b, Operator::Plus, one, &schema).unwrap();
    let alias = "b1".to_owned();
    Arc::new(ProjectionExec::try_new([ProjectionExpr { expr, alias }], child).unwrap())
}

/// A device scan, and nothing above it.
pub(crate) async fn device_scan(device: &Device) -> Plan {
    let scan = scan(device_table(device, &[vec![rows(0, 10)]])).await;
    scan.children()[0].clone()
}

pub(crate) async fn host_scan() -> Plan {
    scan(host_table(&[vec![rows(0, 10)]])).await
}

/// A session over the device tables t and u and the host table h.
fn tables(sim: &Sim, doubles: usize) -> datafusion::prelude::SessionContext {
    let ctx = session_with(1, doubles);
    register(&ctx, "t", device_table(sim, &[vec![rows(0, 10)]]));
    register(&ctx, "u", device_table(sim, &[vec![rows(0, 10)]]));
    register(&ctx, "h", host_table(&[vec![rows(0, 10)]]));
    ctx
}

async fn assert_planned(doubles: usize, sql: &str, expected: &str) {
    let sim = Sim::new();
    let plan = plan(&tables(&sim, doubles), sql).await;
    assert_plan(&plan, &[&sim], expected);
}

#[tokio::test]
async fn a_scan_has_projection_and_limit() {
    let expected = "
        DeviceToHostExec: device=A
          DeviceScanExec: device=A, partitions=1
    ";
    assert_planned(0, "SELECT * FROM t", expected).await;
    let expected = "
        DeviceToHostExec: device=A
          DeviceScanExec: device=A, partitions=1, projection=[s, a], fetch=3
    ";
    assert_planned(0, "SELECT s, a FROM t LIMIT 3", expected).await;
    let expected = "
        DeviceToHostExec: device=A
          DeviceLimitExec: device=A, skip=2, fetch=3
            DeviceScanExec: device=A, partitions=1, projection=[b], fetch=5
    ";
    assert_planned(0, "SELECT b FROM t LIMIT 3 OFFSET 2", expected).await;
}

#[tokio::test]
async fn host_operators_stand_above_one_transition_for_each_table() {
    let expected = "
        ProjectionExec: expr=[a@0 + 1 as x]
          FilterExec: b@1 > 3, projection=[a@0]
            DeviceToHostExec: device=A
              DeviceScanExec: device=A, partitions=1, projection=[a, b]
    ";
    assert_planned(0, "SELECT a + 1 AS x FROM t WHERE b > 3", expected).await;
    let expected = "
        AggregateExec: mode=Single, gby=[b@1 as b], aggr=[sum(t.a)]
          DeviceToHostExec: device=A
            DeviceScanExec: device=A, partitions=1, projection=[a, b]
    ";
    assert_planned(0, "SELECT b, sum(a) FROM t GROUP BY b", expected).await;
    let expected = "
        HashJoinExec: mode=CollectLeft, join_type=Inner, on=[(a@0, b@0)], projection=[a@0, s@2]
          DeviceToHostExec: device=A
            DeviceScanExec: device=A, partitions=1, projection=[a]
          DeviceToHostExec: device=A
            DeviceScanExec: device=A, partitions=1, projection=[b, s]
    ";
    let sql = "SELECT t.a, u.s FROM t JOIN u ON t.a = u.b";
    assert_planned(0, sql, expected).await;
    let expected = "
        ProjectionExec: expr=[a@0 as a]
          SortExec: TopK(fetch=2), expr=[b@1 DESC], preserve_partitioning=[false]
            DeviceToHostExec: device=A
              DeviceScanExec: device=A, partitions=1, projection=[a, b]
    ";
    let sql = "SELECT a FROM t ORDER BY b DESC LIMIT 2";
    assert_planned(0, sql, expected).await;
}

/// DataFusion pushes a sort of each partition below a scan's transition, since that keeps the
/// order.
#[tokio::test]
async fn a_sort_that_was_pushed_below_a_transition_stands_on_the_host() {
    let sim = Sim::new();
    let partitions = [vec![rows(0, 10)], vec![rows(10, 10)]];
    for doubles in [0, 1] {
        let ctx = session_with(4, doubles);
        register(&ctx, "t", device_table(&sim, &partitions));
        let plan = plan(&ctx, "SELECT a FROM t ORDER BY a").await;
        let expected = match doubles {
            0 => {
                "
                SortPreservingMergeExec: [a@0 ASC NULLS LAST]
                  SortExec: expr=[a@0 ASC NULLS LAST], preserve_partitioning=[true]
                    DeviceToHostExec: device=A
                      DeviceScanExec: device=A, partitions=2, projection=[a]
                "
            }
            _ => {
                "
                SortPreservingMergeExec: [a@0 ASC NULLS LAST]
                  SortExec: expr=[a@0 ASC NULLS LAST], preserve_partitioning=[true]
                    DeviceToHostExec: device=A
                      MapExec: device=A
                        DeviceScanExec: device=A, partitions=2, projection=[a]
                "
            }
        };
        assert_plan(&plan, &[&sim], expected);
    }
}

#[tokio::test]
async fn a_join_of_a_device_table_and_a_host_table_brings_one_down() {
    let expected = "
        HashJoinExec: mode=CollectLeft, join_type=Inner, on=[(a@0, b@0)], projection=[a@0, s@2]
          DeviceToHostExec: device=A
            DeviceScanExec: device=A, partitions=1, projection=[a]
          DataSourceExec: partitions=1, partition_sizes=[1]
    ";
    let sql = "SELECT t.a, h.s FROM t JOIN h ON t.a = h.b";
    assert_planned(0, sql, expected).await;
}

/// The session's other rule leaves superfluous transitions.
#[tokio::test]
async fn device_operators_of_another_rule_take_the_scan_over() {
    let expected = "
        FilterExec: b@1 > 3, projection=[a@0]
          DeviceToHostExec: device=A
            MapExec: device=A
              MapExec: device=A
                DeviceScanExec: device=A, partitions=1, projection=[a, b]
    ";
    assert_planned(2, "SELECT a FROM t WHERE b > 3", expected).await;
    let expected = "
        HashJoinExec: mode=CollectLeft, join_type=Inner, on=[(a@0, b@0)], projection=[a@0, s@2]
          DeviceToHostExec: device=A
            MapExec: device=A
              DeviceScanExec: device=A, partitions=1, projection=[a]
          DeviceToHostExec: device=A
            MapExec: device=A
              DeviceScanExec: device=A, partitions=1, projection=[b, s]
    ";
    let sql = "SELECT t.a, u.s FROM t JOIN u ON t.a = u.b";
    assert_planned(1, sql, expected).await;
    // One on the host stays.
    let expected = "
        DataSourceExec: partitions=1, partition_sizes=[1]
    ";
    assert_planned(2, "SELECT * FROM h", expected).await;
}

/// The rule's answer, which a second run leaves as it is: the same nodes.
#[track_caller]
pub(crate) fn assert_becomes(before: Plan, devices: &[&Device], expected: &str) {
    let after = with_transitions(before);
    assert_plan(&after, devices, expected);
    let again = with_transitions(after.clone());
    assert_plan(&again, devices, expected);
    let nodes = |plan: &Plan| {
        let mut nodes = Vec::new();
        let walk = |node: &Plan| {
            nodes.push((node.name().to_string(), Arc::as_ptr(node).cast::<()>()));
            Ok(TreeNodeRecursion::Continue)
        };
        plan.apply(walk).unwrap();
        nodes
    };
    assert_eq!(
        nodes(&after),
        nodes(&again),
        "another plan at the second run"
    );
}

#[tokio::test]
async fn a_device_operator_under_a_host_node() {
    let a = Sim::new();
    let plan = on_host(double(device_scan(&a).await, &a));
    let expected = "
        CoalescePartitionsExec
          DeviceToHostExec: device=A
            MapExec: device=A
              DeviceScanExec: device=A, partitions=1
    ";
    assert_becomes(plan, &[&a], expected);
}

#[tokio::test]
async fn a_device_operator_over_a_host_node() {
    let a = Sim::new();
    let expected = "
        DeviceToHostExec: device=A
          MapExec: device=A
            HostToDeviceExec: device=A
              DataSourceExec: partitions=1, partition_sizes=[1]
    ";
    assert_becomes(double(host_scan().await, &a), &[&a], expected);
    let expected = "
        DeviceToHostExec: device=A
          MapExec: device=A
            HostToDeviceExec: device=A
              ProjectionExec: expr=[b@1 + 1 as b1]
                DeviceToHostExec: device=A
                  DeviceScanExec: device=A, partitions=1
    ";
    let plan = double(computed(device_scan(&a).await), &a);
    assert_becomes(plan, &[&a], expected);
}

/// The root's batches come to the host: who collects them reads them there.
#[tokio::test]
async fn a_root_on_a_device_and_adjacent_operators() {
    let a = Sim::new();
    let expected = "
        DeviceToHostExec: device=A
          MapExec: device=A
            MapExec: device=A
              DeviceScanExec: device=A, partitions=1
    ";
    let scan = device_scan(&a).await;
    assert_becomes(double(double(scan.clone(), &a), &a), &[&a], expected);
    let plan = double(double(down(scan.clone()), &a), &a);
    assert_becomes(plan, &[&a], expected);
    let expected = "
        DeviceToHostExec: device=A
          DeviceScanExec: device=A, partitions=1
    ";
    assert_becomes(scan, &[&a], expected);
}

#[tokio::test]
async fn between_two_devices_batches_move_from_one_to_the_other() {
    let (a, b) = (Sim::new(), Sim::new());
    let expected = "
        DeviceToHostExec: device=A
          MapExec: device=A
            DeviceToDeviceExec: device=A
              MapExec: device=B
                DeviceToDeviceExec: device=B
                  DeviceScanExec: device=A, partitions=1
    ";
    let plan = double(double(device_scan(&a).await, &b), &a);
    let after = with_transitions(plan);
    assert_plan(&after, &[&a, &b], expected);
    assert_plan(&with_transitions(after), &[&a, &b], expected);
}

/// The same nodes: their metrics are those of the plan that `execute_on_device` was given.
#[tokio::test]
async fn a_plan_between_two_devices_stays_the_same_plan() {
    let (a, b) = (Sim::new(), Sim::new());
    let plan = with_transitions(double(device_scan(&a).await, &b));
    let expected = text(&plan, &[&a, &b]);
    assert_becomes(plan, &[&a, &b], &expected);
}

#[tokio::test]
async fn each_child_is_brought_over_on_its_own() {
    let (a, b) = (Sim::new(), Sim::new());
    let children = vec![
        device_scan(&a).await,
        host_scan().await,
        device_scan(&b).await,
    ];
    let expected = "
        DeviceToHostExec: device=A
          MapExec: device=A
            DeviceScanExec: device=A, partitions=1
            HostToDeviceExec: device=A
              DataSourceExec: partitions=1, partition_sizes=[1]
            DeviceToDeviceExec: device=A
              DeviceScanExec: device=B, partitions=1
    ";
    let plan = map(children, &a, Ok);
    assert_plan(&with_transitions(plan), &[&a, &b], expected);
}

#[tokio::test]
async fn pairs_over_host_nodes_cancel_out() {
    let a = Sim::new();
    let h = || host_scan();
    let expected = "DataSourceExec: partitions=1, partition_sizes=[1]";
    assert_becomes(down(h().await), &[], expected);
    assert_becomes(up(h().await, &a), &[], expected);
    assert_becomes(down(up(h().await, &a)), &[], expected);
    assert_becomes(up(down(up(h().await, &a)), &a), &[], expected);
    assert_becomes(down(up(down(up(h().await, &a)), &a)), &[], expected);
    assert_becomes(down(down(down(h().await))), &[], expected);
    let expected = "
        CoalescePartitionsExec
          DataSourceExec: partitions=1, partition_sizes=[1]
    ";
    assert_becomes(on_host(up(h().await, &a)), &[], expected);
    assert_becomes(on_host(down(up(h().await, &a))), &[], expected);
    assert_becomes(on_host(down(up(down(h().await), &a))), &[], expected);
    let expected = "
        DeviceToHostExec: device=A
          MapExec: device=A
            HostToDeviceExec: device=A
              DataSourceExec: partitions=1, partition_sizes=[1]
    ";
    for child in [
        down(up(h().await, &a)),
        up(h().await, &a),
        up(down(up(h().await, &a)), &a),
        down(h().await),
    ] {
        assert_becomes(double(child, &a), &[&a], expected);
    }
}

#[tokio::test]
async fn pairs_over_device_nodes_cancel_out() {
    let a = Sim::new();
    let scan = device_scan(&a).await;
    let children = || {
        [
            scan.clone(),
            down(scan.clone()),
            up(down(scan.clone()), &a),
            down(up(down(scan.clone()), &a)),
            up(down(up(down(scan.clone()), &a)), &a),
        ]
    };
    let expected = "
        DeviceToHostExec: device=A
          MapExec: device=A
            DeviceScanExec: device=A, partitions=1
    ";
    for child in children() {
        assert_becomes(double(child.clone(), &a), &[&a], expected);
        assert_becomes(down(double(child.clone(), &a)), &[&a], expected);
        assert_becomes(up(down(double(child, &a)), &a), &[&a], expected);
    }
    let expected = "
        CoalescePartitionsExec
          DeviceToHostExec: device=A
            DeviceScanExec: device=A, partitions=1
    ";
    for child in children() {
        assert_becomes(on_host(child), &[&a], expected);
    }
}

/// A pair through another device cancels out just so.
#[tokio::test]
async fn pairs_through_another_device_cancel_out_on_the_host() {
    let (a, b) = (Sim::new(), Sim::new());
    let expected = "
        CoalescePartitionsExec
          DeviceToHostExec: device=A
            DeviceScanExec: device=A, partitions=1
    ";
    let plan = on_host(down(up(down(device_scan(&a).await), &b)));
    assert_becomes(plan, &[&a, &b], expected);
}

#[tokio::test]
async fn pairs_through_another_device_cancel_out_on_the_device() {
    let (a, b) = (Sim::new(), Sim::new());
    let scan = device_scan(&a).await;
    let expected = "
        DeviceToHostExec: device=A
          MapExec: device=A
            DeviceScanExec: device=A, partitions=1
    ";
    for child in [
        up(down(scan.clone()), &b),
        down(up(down(scan.clone()), &b)),
        down(down(scan)),
    ] {
        assert_becomes(double(child, &a), &[&a, &b], expected);
    }
}

/// What a rule of a user's may put around any node.
#[tokio::test]
async fn an_upload_of_what_is_on_the_device_already_goes() {
    let a = Sim::new();
    let expected = "
        DeviceToHostExec: device=A
          MapExec: device=A
            DeviceScanExec: device=A, partitions=1
    ";
    let plan = double(up(device_scan(&a).await, &a), &a);
    assert_becomes(plan, &[&a], expected);
}

#[tokio::test]
async fn an_upload_of_an_upload_goes() {
    let a = Sim::new();
    let expected = "
        DeviceToHostExec: device=A
          MapExec: device=A
            HostToDeviceExec: device=A
              DataSourceExec: partitions=1, partition_sizes=[1]
    ";
    let plan = double(up(up(host_scan().await, &a), &a), &a);
    assert_becomes(plan, &[&a], expected);
}

/// What a plan gives is what it gave before the rule moved its transitions about.
#[tokio::test]
async fn plans_give_the_same_with_and_without_superfluous_pairs() {
    let (a, b) = (Sim::new(), Sim::new());
    let ctx = session();
    let plans = [
        double(up(down(device_scan(&a).await), &a), &a),
        double(double(device_scan(&a).await, &b), &b),
        double(down(up(host_scan().await, &b)), &a),
    ];
    let factors = [2, 4, 2];
    for (plan, factor) in plans.into_iter().zip(factors) {
        let plan = with_transitions(plan);
        let batches = datafusion::physical_plan::collect(plan, ctx.task_ctx()).await;
        let expected: Vec<i64> = (0..10).map(|i| i * factor).collect();
        assert_eq!(numbers_of(&batches.unwrap()), expected);
    }
    a.assert_done();
    b.assert_done();
}

/// Without the rule, an operator uploads its host child's batches itself, and passes by a download.
#[tokio::test]
async fn plans_are_right_without_the_rule() {
    let (a, b) = (Sim::new(), Sim::new());
    let context = session().task_ctx();
    let plans = [
        double(host_scan().await, &a),
        double(down(device_scan(&a).await), &a),
        double(device_scan(&b).await, &a),
        double(down(double(device_scan(&b).await, &b)), &a),
    ];
    for (plan, factor) in plans.into_iter().zip([2, 2, 2, 4]) {
        let (before, name) = (a.stats(), text(&plan, &[&a, &b]));
        let batches = datafusion::physical_plan::collect(plan.clone(), context.clone()).await;
        let expected: Vec<i64> = (0..10).map(|i| i * factor).collect();
        assert_eq!(numbers_of(&batches.unwrap()), expected, "{name}");
        // What the operator moved is among its own metrics.
        let up = a.stats().since(&before).bytes_to_device as usize;
        let counted = metric(&plan, "MapExec", "bytes_to_device").unwrap_or(0);
        assert_eq!(up, counted, "{name}");
    }
    a.assert_done();
    b.assert_done();
}
