//! Plans: where transitions stand, and which of DataFusion's nodes run on a device without a plugin.

use datafusion::physical_plan::execution_plan::reset_plan_states;

use crate::kit::*;
use crate::nodes::*;

/// The lines of a table in pairs: without empty ones and remarks, which begin with `#`.
fn pairs(table: &str) -> Vec<[&str; 2]> {
    let lines = table.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let lines: Vec<_> = lines.collect();
    let (pairs, rest) = lines.as_chunks();
    assert_eq!(rest, [""; 0]);
    pairs.to_vec()
}

/// Of each pair of lines, the rule makes the second of the first ([`planned`], [`shape`]); it keeps rows, partitions and orders, and
/// does nothing when it runs again.
pub(crate) async fn assert_becomes(
    rule: impl Fn(Plan) -> Plan,
    devices: &[&Sim],
    own: &[(&str, &Plan)],
    table: &str,
) {
    let names: Vec<_> = devices.iter().map(|sim| &sim.device).collect();
    for [line, expected] in pairs(table) {
        let plan = planned(line, devices, own);
        let placed = rule(plan.clone());
        assert_eq!(shape(&placed, &names), expected, "of {line}");
        let again = rule(placed.clone());
        let shown = text(&again, &names);
        assert!(Arc::ptr_eq(&again, &placed), "again, of {line}:\n{shown}");
        let properties = |plan: &Plan| {
            let by = plan.output_partitioning();
            let hash = matches!(by, Partitioning::Hash(..)).then(|| by.to_string());
            let ordering = plan.output_ordering().cloned();
            (plan.schema(), by.partition_count(), hash, ordering)
        };
        assert_eq!(properties(&placed), properties(&plan), "{line}");
        assert_eq!(all_rows(&placed).await, all_rows(&plan).await, "{line}");
    }
}

/// The rows of each partition if they have an order, or else all rows, sorted.
async fn all_rows(plan: &Plan) -> Vec<Vec<String>> {
    let fresh = reset_plan_states(plan.clone()).unwrap();
    let partitions = collect_partitioned(fresh, session().task_ctx()).await;
    let partitions = partitions.unwrap();
    for batch in partitions.iter().flatten() {
        assert_eq!(batch.schema(), plan.schema(), "{}", text(plan, &[]));
    }
    let partitions: Vec<_> = partitions.iter().map(|batches| lines(batches)).collect();
    if plan.output_ordering().is_some() {
        return partitions;
    }
    let mut all = partitions.concat();
    all.sort_unstable();
    vec![all]
}

/// Queries over the device tables t, u and, of two partitions, p, and over the host table h; above each scan of a device there are
/// so many device operators of another rule, with superfluous transitions in between. Then the plan's shape.
#[tokio::test]
async fn transitions_stand_where_rows_leave_a_device() {
    let sim = Sim::new();
    for [query, expected] in pairs(include_str!("../queries/planned.txt")) {
        let (doubles, sql) = query.split_once(' ').unwrap();
        let ctx = session_with(1, doubles.parse().unwrap());
        let two = [vec![rows(0, 10)], vec![rows(10, 10)]];
        for (name, partitions) in [("t", &two[..1]), ("u", &two[..1]), ("p", &two)] {
            register(&ctx, name, device_table(&sim, partitions));
        }
        register(&ctx, "h", host_table(&two[..1]));
        let plan = plan(&ctx, sql).await;
        assert_eq!(shape(&plan, &[&sim]), expected, "{sql}, {doubles}");
    }
}

/// As a user's rule may put them around any node, of another device, too.
#[tokio::test]
async fn superfluous_transitions_cancel_out() {
    let (a, b) = (Sim::new(), Sim::new());
    let mut table = String::new();
    for child in [
        "DataSource",
        "Down < DataSource",
        "Up A < DataSource",
        "Down < Up A < DataSource",
        "Up A < Down < Up A < DataSource",
        "Down < Up A < Down < Up B < DataSource",
        "Down < Down < Down < DataSource",
        "Up A < Up A < DataSource",
    ] {
        table += &format!(
            "{child}
             DataSource
             CoalescePartitions < {child}
             CoalescePartitions < DataSource
             Map A < {child}
             Down < Map A < Up A < DataSource\n"
        );
    }
    for child in [
        "Scan A",
        "Down < Scan A",
        "Up A < Scan A",
        "Up A < Down < Scan A",
        "Up B < Down < Scan A",
        "Down < Up A < Down < Scan A",
        "Down < Up B < Down < Scan A",
        "Up A < Down < Up A < Down < Scan A",
        "Down < Down < Scan A",
    ] {
        for top in ["", "Down < ", "Up A < Down < "] {
            let expected = "Down < Map A < Scan A";
            table += &format!("{top}Map A < {child}\n{expected}\n");
        }
        table += &format!(
            "Map A < Map A < {child}
             Down < Map A < Map A < Scan A
             CoalescePartitions < {child}
             CoalescePartitions < Down < Scan A\n"
        );
    }
    assert_becomes(with_transitions, &[&a, &b], &[], &table).await;
}

/// Nodes that need no kernel do not bring rows down between device operators; what comes from two devices, or from the host and
/// a device, meets on the host.
#[tokio::test]
async fn nodes_without_a_kernel_take_their_forms() {
    let (a, b) = (Sim::new(), Sim::new());
    let mut table = "
        Scan A
        Down < Scan A
        Map A < Map B < Scan A
        Down < Map A < Move A < Map B < Move B < Scan A
        Map A < Computed < Scan A
        Down < Map A < Up A < Projection < Down < Scan A
        Map A < Sort < Down < Scan A
        Down < Map A < Up A < Sort < Down < Scan A
        Map A < Filter < Down < Scan A
        Down < Map A < Up A < Filter < Down < Scan A
        Map A < Union < (Scan A, Scan B)
        Down < Map A < Up A < Union < (Down < Scan A, Down < Scan B)
        Map A < Union < (Scan A, DataSource)
        Down < Map A < Up A < Union < (Down < Scan A, DataSource)
        # The work comes before the rows are distributed.
        Map A < Repartition 4 < Down < Scan A
        Repartition < Down < Map A < Scan A
        Map A < Repartition 3 < DataSource
        Down < Map A < Up A < Repartition < DataSource
        # Limits and projections that drop columns go below the download.
        CoalescePartitions < LocalLimit 3 < Projection s:t < Scan A
        CoalescePartitions < Down < Limit A < Projection A < Scan A
        CoalescePartitions < LocalLimit 3 < Projection s:t < Down < Scan A
        CoalescePartitions < Down < Limit A < Projection A < Scan A
        GlobalLimit 1 < Scan A
        Down < Limit A < Scan A
        # As many bytes come down, or more.
        Projection b:x a:y s:z < Scan A
        Projection < Down < Scan A
        Projection s:x s:y < Scan A
        Projection < Down < Scan A
        Projection s < CoalescePartitions < Scan A
        Projection < CoalescePartitions < Down < Scan A
    "
    .to_owned();
    for leaf in ["Scan A", "Down < Scan A", "Up A < Down < Scan A"] {
        let one = format!("Projection b:x < Repartition 3 < {leaf}");
        let other = format!("Projection a:x < Map A < {leaf}");
        table += &format!(
            "Map A < CoalescePartitions < Union < ({one}, {other})
             Down < Map A < CoalescePartitions A < Union A < (Projection A < Scan A, Projection A < Map A < Scan A)\n"
        );
    }
    assert_becomes(with_transitions, &[&a, &b], &[], &table).await;
    a.assert_done();
    b.assert_done();
}

/// An operator uploads or moves its child's batches itself, which is among its own metrics, and passes by a download.
#[tokio::test]
async fn plans_are_right_without_the_rule() {
    let (a, b) = (Sim::new(), Sim::new());
    for (line, factor) in [
        ("Map A < DataSource", 2),
        ("Map A < Down < Up B < DataSource", 2),
        ("Map A < Down < Scan A", 2),
        ("Map A < Up A < Down < Scan A", 2),
        ("Map A < Scan B", 2),
        ("Map A < Down < Map B < Scan B", 4),
    ] {
        let plan = planned(line, &[&a, &b], &[]);
        let ups = || a.stats().bytes_to_device + b.stats().bytes_to_device;
        let before = ups();
        assert_eq!(numbers_from(&plan).await, multiples(10, factor), "{line}");
        let counted = ["MapExec", "HostToDeviceExec"];
        let counted = counted.map(|node| metric(&plan, node, "bytes_to_device").unwrap_or(0));
        let up = (ups() - before) as usize;
        assert_eq!(up, counted.iter().sum::<usize>(), "{line}");
    }
    a.assert_done();
    b.assert_done();
}

/// DataFusion's rule for limits may run again: a limit of all rows does not become one of each partition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_over_coalesced_partitions_stays_one() {
    let a = Sim::new();
    let coalesced = form(planned("CoalescePartitions < Scan A 4", &[&a], &[]), &a);
    let limit = planned("GlobalLimit 0 10 < Down < C", &[], &[("C", &coalesced)]);
    let pushed = LimitPushdown::new().optimize(limit, &ConfigOptions::default());
    let pushed = pushed.unwrap();
    for plan in [pushed.clone(), with_transitions(pushed)] {
        let found = numbers_from(&plan).await;
        assert_eq!(found.len(), 10, "{}", text(&plan, &[&a]));
    }
}

/// With the words of DataFusion's nodes.
#[tokio::test]
async fn explain_shows_device_nodes() {
    let sim = Sim::new();
    let ctx = over(device_table(&sim, &[vec![rows(0, 10)]]));
    let sql = "SELECT b FROM t LIMIT 3 OFFSET 2";
    let expected = "
        DeviceToHostExec: device=A
          DeviceLimitExec: device=A, skip=2, fetch=3
            DeviceScanExec: device=A, partitions=1, projection=[b], fetch=5
    ";
    assert_plan(&plan(&ctx, sql).await, &[&sim], expected);
    let forms = planned("GlobalLimit 2 3 < Projection a:x < Scan A", &[&sim], &[]);
    let forms = form(forms, &sim);
    let expected = "
        DeviceLimitExec: device=A, skip=2, fetch=3
          DeviceProjectionExec: device=A, expr=[a@0 as x]
            DeviceScanExec: device=A, partitions=1
    ";
    assert_plan(&forms, &[&sim], expected);
    let tree = displayable(&*forms).tree_render().to_string();
    says(&tree, &["DeviceLimitExec", "limit: 3", "skip: 2", "x: a"]);
    says(&tree, &[&format!("device: {}", sim.id())]);
    says(&format!("{forms:?}"), &["DeviceScanExec"]);
    let table = device_table(&sim, &[vec![rows(0, 3)]]);
    says(&format!("{table:?}"), &["num_rows: 3"]);
}

/// Partitions that a plan does not have.
#[tokio::test]
async fn a_partition_too_many_is_an_error() {
    let sim = Sim::new();
    let scan = planned("Scan A", &[&sim], &[]);
    let node = DeviceExec::of(&scan).unwrap();
    let started = node.execute_device(1, session().task_ctx());
    fails(started, &["partition 1 of 1 of DeviceScanExec"]);
}
