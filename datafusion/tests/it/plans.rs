//! Plans: where transitions stand.

use std::sync::Arc;

use arrow_device::Device;

use crate::kit::*;
use crate::nodes::*;

/// Queries over the device tables t, u and, of two partitions, p, and over the host table h; above each scan of a device there are
/// so many device operators of another rule, with superfluous transitions in between. Then the plan's shape.
const PLANNED: &str = "
    0 SELECT * FROM t
      Down < Scan A
    0 SELECT b FROM t LIMIT 3 OFFSET 2
      Down < Limit A < Scan A
    0 SELECT a + 1 AS x FROM t WHERE b > 3
      Projection < Filter < Down < Scan A
    0 SELECT b, sum(a) FROM t GROUP BY b
      Aggregate < Down < Scan A
    0 SELECT a FROM t ORDER BY b DESC LIMIT 2
      Projection < Sort < Down < Scan A
    0 SELECT t.a, u.s FROM t JOIN u ON t.a = u.b
      HashJoin < (Down < Scan A, Down < Scan A)
    0 SELECT t.a, h.s FROM t JOIN h ON t.a = h.b
      HashJoin < (Down < Scan A, DataSource)
    0 SELECT a FROM p ORDER BY a
      SortPreservingMerge < Sort < Down < Scan A
    1 SELECT a FROM p ORDER BY a
      SortPreservingMerge < Sort < Down < Map A < Scan A
    2 SELECT a FROM t WHERE b > 3
      Filter < Down < Map A < Map A < Scan A
    1 SELECT t.a, u.s FROM t JOIN u ON t.a = u.b
      HashJoin < (Down < Map A < Scan A, Down < Map A < Scan A)
    2 SELECT * FROM h
      DataSource
";

#[tokio::test]
async fn transitions_stand_where_rows_leave_a_device() {
    let sim = Sim::new();
    let lines: Vec<_> = PLANNED.trim().lines().map(str::trim).collect();
    for case in lines.chunks(2) {
        let (doubles, sql) = case[0].split_once(' ').unwrap();
        let ctx = session_with(1, doubles.parse().unwrap());
        let ten = [vec![rows(0, 10)]];
        for name in ["t", "u"] {
            register(&ctx, name, device_table(&sim, &ten));
        }
        let two = [vec![rows(0, 10)], vec![rows(10, 10)]];
        register(&ctx, "p", device_table(&sim, &two));
        register(&ctx, "h", host_table(&ten));
        let plan = plan(&ctx, sql).await;
        assert_eq!(shape(&plan, &[&sim]), case[1], "{sql}, {doubles}");
    }
}

/// What EXPLAIN shows.
#[tokio::test]
async fn a_scan_has_projection_and_limit() {
    let sim = Sim::new();
    let ctx = over(device_table(&sim, &[vec![rows(0, 10)]]));
    let expected = "
        DeviceToHostExec: device=A
          DeviceLimitExec: device=A, skip=2, fetch=3
            DeviceScanExec: device=A, partitions=1, projection=[b], fetch=5
    ";
    let plan = plan(&ctx, "SELECT b FROM t LIMIT 3 OFFSET 2").await;
    assert_plan(&plan, &[&sim], expected);
}

/// The rule's answer, which a second run leaves as it is.
#[track_caller]
pub(crate) fn assert_becomes(before: Plan, devices: &[&Device], expected: &str) {
    let after = with_transitions(before);
    assert_eq!(shape(&after, devices), expected);
    let again = with_transitions(after.clone());
    assert!(Arc::ptr_eq(&after, &again), "another plan: {again:?}");
}

#[tokio::test]
async fn superfluous_pairs_cancel_out() {
    let (a, b) = (Sim::new(), Sim::new());
    let (t, h) = (device_scan(&a).await, host_scan().await);
    // A pair of another device, too, and what a user's rule may put around any node.
    let over_host = [
        h.clone(),
        down(h.clone()),
        up(h.clone(), &a),
        down(up(h.clone(), &a)),
        up(down(up(h.clone(), &a)), &a),
        down(up(down(up(h.clone(), &b)), &a)),
        down(down(down(h.clone()))),
        up(up(h.clone(), &a), &a),
    ];
    for child in over_host {
        assert_becomes(child.clone(), &[&a, &b], "DataSource");
        let plan = on_host(child.clone());
        assert_becomes(plan, &[&a, &b], "CoalescePartitions < DataSource");
        let plan = double(child, &a);
        assert_becomes(plan, &[&a, &b], "Down < Map A < Up A < DataSource");
    }
    let over_device = [
        t.clone(),
        down(t.clone()),
        up(t.clone(), &a),
        up(down(t.clone()), &a),
        up(down(t.clone()), &b),
        down(up(down(t.clone()), &a)),
        down(up(down(t.clone()), &b)),
        up(down(up(down(t.clone()), &a)), &a),
        down(down(t.clone())),
    ];
    for child in over_device {
        let operator = double(child.clone(), &a);
        for plan in [
            operator.clone(),
            down(operator.clone()),
            up(down(operator), &a),
        ] {
            assert_becomes(plan, &[&a, &b], "Down < Map A < Scan A");
        }
        let plan = double(double(child, &a), &a);
        assert_becomes(plan, &[&a, &b], "Down < Map A < Map A < Scan A");
    }
    // The root's batches come to the host: who collects them reads them there.
    assert_becomes(t.clone(), &[&a], "Down < Scan A");
    for child in [t.clone(), down(t.clone()), down(up(down(t.clone()), &b))] {
        let expected = "CoalescePartitions < Down < Scan A";
        assert_becomes(on_host(child), &[&a], expected);
    }
    let plan = double(computed(t), &a);
    let expected = "Down < Map A < Up A < Projection < Down < Scan A";
    assert_becomes(plan, &[&a], expected);
}

#[tokio::test]
async fn each_child_is_brought_over_on_its_own() {
    let (a, b) = (Sim::new(), Sim::new());
    let (on_a, on_b) = (device_scan(&a).await, device_scan(&b).await);
    let plan = double(double(on_a.clone(), &b), &a);
    let expected = "Down < Map A < Move A < Map B < Move B < Scan A";
    assert_becomes(plan, &[&a, &b], expected);
    let plan = map(vec![on_a, host_scan().await, on_b], &a, Ok);
    let expected = "Down < Map A < (Scan A, Up A < DataSource, Move A < Scan B)";
    assert_becomes(plan, &[&a, &b], expected);
}

/// Without the rule, an operator uploads its host child's batches itself, and passes by a download.
#[tokio::test]
async fn plans_are_right_without_the_rule() {
    let (a, b) = (Sim::new(), Sim::new());
    let (on_a, on_b) = (device_scan(&a).await, device_scan(&b).await);
    let plans = [
        (double(host_scan().await, &a), 2),
        (double(down(up(host_scan().await, &b)), &a), 2),
        (double(down(on_a.clone()), &a), 2),
        (double(up(down(on_a), &a), &a), 2),
        (double(on_b.clone(), &a), 2),
        (double(down(double(on_b, &b)), &a), 4),
    ];
    for (plan, factor) in plans {
        let name = text(&plan, &[&a, &b]);
        let ups = || a.stats().bytes_to_device + b.stats().bytes_to_device;
        let before = ups();
        let expected = multiples(10, factor);
        assert_eq!(numbers_from(&plan).await, expected, "{name}");
        // What the operator moved is among its own metrics.
        let up = (ups() - before) as usize;
        let counted = ["MapExec", "HostToDeviceExec"];
        let counted = counted.map(|node| metric(&plan, node, "bytes_to_device").unwrap_or(0));
        assert_eq!(up, counted.iter().sum::<usize>(), "{name}");
        let plan = with_transitions(plan);
        assert_eq!(numbers_from(&plan).await, expected, "{name}");
    }
    a.assert_done();
    b.assert_done();
}
