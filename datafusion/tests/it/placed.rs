//! What plugins run, and where the rest of the plan runs.

use std::panic::panic_any;

use datafusion::common::Result;
use datafusion::error::DataFusionError;
use datafusion::physical_plan::empty::EmptyExec;

use crate::kit::*;
use crate::nodes::*;
use crate::operator::Runs;
use crate::plans::assert_becomes;

pub(crate) fn rule(plugin: Runs) -> DeviceRule {
    DeviceRule::default().with_plugin(Arc::new(plugin))
}

/// A plugin that runs filters, wherever the rows are.
fn filters() -> DeviceRule {
    rule(Runs::nodes(&["FilterExec"])).with_uploads(any_sim(), 0)
}

pub(crate) fn placed(plan: Plan, rule: &DeviceRule) -> Plan {
    rule.optimize(plan, &ConfigOptions::default()).unwrap()
}

fn rewritten(plan: &Plan, rule: &DeviceRule) -> Result<Plan> {
    rule.rewrite(plan.clone(), &ConfigOptions::default())
}

#[tokio::test]
async fn rows_of_the_host_go_up_and_those_of_a_device_do_not() {
    let (a, b) = (Sim::new(), Sim::new());
    let there = Runs {
        names: &["UnionExec"],
        there: &["FilterExec"],
        ..Runs::default()
    };
    for (rule, table) in [
        (
            filters(),
            "
            Filter < DataSource
            Down < MyFilter A < Up A < DataSource
            Filter < Scan A
            Down < MyFilter A < Scan A
            # Nodes that need no kernel follow, exchanges as well.
            Computed < Filter < Projection a b < Filter < DataSource
            Projection < Down < MyFilter A < Projection A < MyFilter A < Up A < DataSource
            Computed < Filter < CoalescePartitions < Filter < DataSource
            Projection < Down < MyFilter A < CoalescePartitions A < MyFilter A < Up A < DataSource
            Computed < Filter < SortPreservingMerge < Filter < Sort < DataSource
            Projection < Down < MyFilter A < SortPreservingMerge A < MyFilter A < Up A < Sort < DataSource
            ",
        ),
        (
            rule(Runs::nodes(&["FilterExec"])),
            "
            Filter < DataSource
            Filter < DataSource
            Filter < Down < Scan A
            Down < MyFilter A < Scan A
            Computed < Filter < Projection a b < Scan A
            Projection < Down < MyFilter A < Projection A < Scan A
            ",
        ),
        (
            rule(Runs::nodes(&["UnionExec"])),
            "
            # Of several inputs only those that are not there go there.
            Union < (Down < Scan A, DataSource, Scan B)
            Down < MyUnion A < (Scan A, Up A < DataSource, Move A < Scan B)
            ",
        ),
        (
            // Rows do not go up for a node that is not worth it, but with one that is, and what it reads is worth it then.
            rule(there).with_uploads(any_sim(), 0),
            "
            Filter < DataSource
            Down < Filter < DataSource
            Union < (Filter < DataSource, Filter < Down < Scan A)
            Down < MyUnion A < (Up A < Filter < DataSource, MyFilter A < Scan A)
            Union < (Filter < DataSource, DataSource)
            Down < MyUnion A < (MyFilter A < Up A < DataSource, Up A < DataSource)
            ",
        ),
    ] {
        assert_becomes(|plan| placed(plan, &rule), &[&a, &b], &[], table).await;
    }
}

/// All partitions go up as one, and the rows are distributed as before above the operators. Those with an order, or distributed by
/// their values, stay.
#[tokio::test]
async fn partitions_go_up_as_one() {
    let merging = Runs::nodes(&["FilterExec"]).merging(true);
    let rule = rule(merging).with_uploads(any_sim(), 0);
    let table = "
        Filter < DataSource 3
        Repartition < Down < MyFilter < Up < CoalescePartitions < DataSource
        Filter < Repartition a 4 < DataSource 3
        Down < MyFilter < Up < Repartition < DataSource
        Filter < Sort < DataSource 3
        Down < MyFilter < Up < Sort < DataSource
        CoalescePartitions < Filter < DataSource 3
        CoalescePartitions < Down < MyFilter < Up < CoalescePartitions < DataSource
        Filter < CoalescePartitions < DataSource 3
        Down < MyFilter < Up < CoalescePartitions < DataSource
    ";
    assert_becomes(|plan| placed(plan, &rule), &[], &[], table).await;
}

/// DataFusion distributes the batches of few partitions over its tasks. On a device, the work comes first.
#[tokio::test]
async fn a_round_robin_repartition_moves_above_the_device() {
    let a = Sim::new();
    let rule = rule(Runs::nodes(&["FilterExec"]));
    let table = "
        Filter < Repartition 4 < Scan A 2
        Repartition < Down < MyFilter A < Scan A
        Map A < Projection a b s < Filter < Repartition 4 < Scan A 2
        Repartition < Down < Map A < Projection A < MyFilter A < Scan A
        Computed < Filter < Union < (Repartition 4 < Scan A 2, Projection a b s < Scan A 2)
        Projection < Repartition < Down < MyFilter A < Union A < (Scan A, Projection A < Scan A)
        # Not below a limit of each partition, nor one of the host.
        Filter 5 < Repartition 4 < Scan A 2
        Filter < Repartition < Down < Scan A
        Filter < Repartition 4 < DataSource
        Filter < Repartition < DataSource
        Computed < Repartition 4 < Scan A 2
        Projection < Repartition < Down < Scan A
    ";
    assert_becomes(|plan| placed(plan, &rule), &[&a], &[], table).await;
    // Who reads all partitions needs none.
    let spread = || planned("Repartition 4 < Scan A 2", &[&a], &[]);
    let stream = started_on(&spread(), &a);
    let found: Vec<_> = stream.try_collect().await.unwrap();
    assert_eq!(sorted(numbers_on(&found)), multiples(20, 1));
    let table = device_table(&a, &[vec![]]);
    let insert = table.insert_on_device(spread(), InsertOp::Append).unwrap();
    let insert = with_transitions(Arc::new(insert));
    assert_eq!(shape(&insert, &[&a]), "Insert < Scan A");
    drop((found, insert, table));
    a.assert_done();
}

/// The small batches that an operator leaves are joined, also below another, and in a plan with a round robin.
#[tokio::test]
async fn small_batches_of_an_operator_are_joined() {
    let sim = Sim::new();
    let plugin = Runs {
        has_small_batches: true,
        ..Runs::nodes(&["FilterExec"])
    };
    let rule = rule(plugin).with_uploads(any_sim(), 0);
    let table = "
        Filter < Scan A
        Down < CoalesceBatches A < MyFilter A < Scan A
        Filter < Filter < DataSource
        Down < CoalesceBatches A < MyFilter A < CoalesceBatches A < MyFilter A < Up A < DataSource
        Filter < Projection a b s < Scan A
        Down < CoalesceBatches A < MyFilter A < Projection A < Scan A
        Filter < Union < (Scan A, Scan A)
        Down < CoalesceBatches A < MyFilter A < Union A < (Scan A, Scan A)
        Filter < Repartition 4 < Scan A
        Repartition < Down < CoalesceBatches A < MyFilter A < Scan A
    ";
    assert_becomes(|plan| placed(plan, &rule), &[&sim], &[], table).await;
    let plan = placed(planned("Filter < Scan A", &[&sim], &[]), &rule);
    says(&text(&plan, &[]), &["rows=8192"]);
}

/// Ten rows each.
#[tokio::test]
async fn statistics_decide() {
    let unknown = scan(host_stream(|_| None).0).await;
    for (line, min_rows, uploads) in [
        ("Filter < DataSource", 0, 1),
        ("Filter < DataSource", 1, 1),
        ("Filter < DataSource", 10, 1),
        ("Filter < DataSource", 11, 0),
        // With what runs below it, a node reads what goes up: not what a filter is expected to leave.
        ("Union < (Filter < DataSource, DataSource)", 20, 2),
        // The inputs count together, and each node decides for itself.
        ("Union < (DataSource, DataSource)", 20, 2),
        ("Union < (DataSource, DataSource)", 21, 0),
        (
            "Buffer < Union < (Filter < Unknown, Filter < Numbers 1)",
            1,
            1,
        ),
        // Unknown numbers of rows are not enough, unless any number is.
        ("Filter < Unknown", 1, 0),
        ("Filter < Unknown", 0, 1),
    ] {
        let runs = match line.starts_with("Union") {
            true => Runs {
                names: &["UnionExec"],
                there: &["FilterExec"],
                ..Runs::default()
            },
            false => Runs::nodes(&["FilterExec"]),
        };
        let rule = rule(runs).with_uploads(any_sim(), min_rows);
        let plan = placed(planned(line, &[], &[("Unknown", &unknown)]), &rule);
        let found = shape(&plan, &[]).matches("Up <").count();
        assert_eq!(found, uploads, "{line}, {min_rows}");
    }
    // A scan of the plugin's own sends none up, and its rows count all the same.
    let rule = rule(Runs::nodes(&["FilterExec", "DataSourceExec"])).with_uploads(any_sim(), 10);
    let plan = placed(planned("Filter < DataSource", &[], &[]), &rule);
    assert_eq!(shape(&plan, &[]), "Down < MyFilter < MyDataSource");
}

/// The task of a worker in a cluster, which begins and ends on the host.
#[tokio::test]
async fn a_workers_task_keeps_its_partitions_and_exchanges() {
    let none = EmptyExec::new(rows(0, 1).schema()).with_partitions(0);
    let none: Plan = Arc::new(none);
    let merging = Runs::nodes(&["FilterExec"]).merging(true);
    let rule = rule(merging).with_uploads(any_sim(), 0);
    let table = "
        Filter < DataSource
        Down < MyFilter < Up < DataSource
        Filter < DataSource 3
        Down < MyFilter < Up < DataSource
        Filter < None
        Down < MyFilter < Up < Empty
        Computed < Filter < Filter < DataSource
        Projection < Down < MyFilter < MyFilter < Up < DataSource
        # A node of an engine keeps its place, between two operators, too.
        Buffer < Filter < DataSource
        Buffer < Down < MyFilter < Up < DataSource
        Filter < Buffer < Filter < DataSource
        Down < MyFilter < Up < Buffer < Down < MyFilter < Up < DataSource
        # Nodes that keep rows in their partitions may go to the device, those that gather them stay.
        Computed < Filter < Projection a b s < Filter < DataSource
        Projection < Down < MyFilter < Projection < MyFilter < Up < DataSource
        Computed < Filter < CoalescePartitions < Filter < DataSource
        Projection < Down < MyFilter < Up < CoalescePartitions < Down < MyFilter < Up < DataSource
        Computed < Filter < SortPreservingMerge < Filter < Sort < DataSource
        Projection < Down < MyFilter < Up < SortPreservingMerge < Down < MyFilter < Up < Sort < DataSource
    ";
    let rewrite = |plan| rewritten(&plan, &rule).unwrap();
    assert_becomes(rewrite, &[], &[("None", &none)], table).await;
    // Nothing to do, or too few rows: the same plan.
    let eleven = filters().with_uploads(any_sim(), 11);
    for (line, rule) in [
        ("DataSource", &rule),
        ("Computed < DataSource", &rule),
        ("Filter < DataSource", &eleven),
    ] {
        let plan = planned(line, &[], &[]);
        assert!(Arc::ptr_eq(&rewritten(&plan, rule).unwrap(), &plan));
    }
}

#[tokio::test]
async fn a_plugin_that_panics_or_fails_is_an_error() {
    type Make = fn(&Plan) -> Result<Arc<dyn DeviceOperator>>;
    let plan = planned("Filter < DataSource", &[], &[]);
    let fails_with = |make: Make, words: &[&str]| {
        let plugin = Runs::nodes(&["FilterExec"]).making(make);
        let rule = rule(plugin).with_uploads(any_sim(), 0);
        let words = [&["on this worker"], words].concat();
        fails(rewritten(&plan, &rule), &words)
    };
    fails_with(|_| panic!("no luck"), &["panicked", "no luck"]);
    let name: Make = |node| panic!("no {}", node.name());
    fails_with(name, &["panicked", "no FilterExec"]);
    fails_with(|_| panic_any(7), &["panicked"]);
    let error: Make = |_| Err(DataFusionError::ResourcesExhausted("no luck".into()));
    let error = fails_with(error, &["no luck"]);
    let root = error.find_root();
    assert!(matches!(root, DataFusionError::ResourcesExhausted(_)));
}

#[tokio::test]
async fn why_a_node_stays_is_reported() {
    let sim = Sim::new();
    let stays = Runs {
        stays: &[("FilterExec", "it has no kernel"), ("SortExec", "too few")],
        ..Runs::default()
    };
    let stays = rule(stays);
    let filter = |input| planned(&format!("Filter < {input}"), &[&sim], &[]);
    // The node at the top says so, and the report.
    let reported = |plan: Plan, rule: &DeviceRule, why: &str| {
        let plan = placed(plan, rule);
        let found = declined(&plan, rule, &any_sim()).unwrap();
        assert_eq!(found, [("FilterExec".to_owned(), why.to_owned())]);
        let noted = format!("declined=[FilterExec: {why}]");
        says(&text(&plan, &[]), &[&noted]);
    };
    let table = "Filter < Scan A\n Down < Filter < Down < Scan A";
    assert_becomes(|plan| placed(plan, &stays), &[&sim], &[], table).await;
    reported(filter("Scan A"), &stays, "it has no kernel");
    // Another plugin runs it.
    let filters = Arc::new(Runs::nodes(&["FilterExec"]));
    let both = stays.clone().with_plugin(filters);
    let plan = placed(filter("Scan A"), &both);
    assert!(!text(&plan, &[]).contains("declined"));
    assert_eq!(declined(&plan, &both, &any_sim()).unwrap(), []);
    // As well as rows of the host that do not go up: for this node, because they are too few, or an unknown number.
    let there = Runs {
        there: &["FilterExec"],
        ..Runs::default()
    };
    let there = rule(there).with_uploads(any_sim(), 0);
    let why = "not all of its rows are on the device";
    reported(filter("DataSource"), &there, why);
    let filters = rule(Runs::nodes(&["FilterExec"])).with_uploads(any_sim(), 11);
    let why = "it reads 10 rows; uploads begin at 11";
    reported(filter("DataSource"), &filters, why);
    let unknown = scan(host_stream(|_| None).0).await;
    let plan = planned("Filter < Unknown", &[], &[("Unknown", &unknown)]);
    reported(plan, &filters, "nobody knows whether it reads 11 rows");
    // In SQL.
    let stays = stays.with_uploads(any_sim(), 0);
    let ctx = session_of(config(|_| ()), [Arc::new(stays) as _]);
    register(&ctx, "t", host_table(&[vec![rows(0, 100)]]));
    register(&ctx, "u", device_table(&sim, &[vec![rows(0, 100)]]));
    let sql = "SELECT * FROM t WHERE a < 5 ORDER BY b";
    let shown = async |sql: &str| {
        let found = query(&ctx, &format!("EXPLAIN {sql}")).await.unwrap();
        pretty_format_batches(&found).unwrap().to_string()
    };
    let analyzed = shown(&format!("ANALYZE {sql}")).await;
    let both = ["FilterExec: it has no kernel", "SortExec: too few"];
    says(&analyzed, &both);
    let tree = shown("FORMAT TREE SELECT a + 1 FROM u WHERE b < 8").await;
    assert!(!tree.contains(", declined"), "a key with a comma: {tree}");
    assert_eq!(numbers_in(&ctx, sql).await, multiples(5, 1));
}

/// A plugin says how large the batches are to be that go up for it, below both of its sorts of uploads.
#[tokio::test]
async fn a_plugin_wants_large_uploads() {
    let sim = Sim::new();
    let large = Runs {
        target: Some((512_000, 1 << 28)),
        ..Runs::nodes(&["UnionExec"])
    };
    let rule = rule(large).with_uploads(any_sim(), 0);
    for line in [
        "Union < (DataSource, DataSource)",
        "Union < (Scan A, DataSource)",
    ] {
        let shown = text(&placed(planned(line, &[&sim], &[]), &rule), &[]);
        let uploads = shown.matches("HostToDeviceExec").count();
        let large = "upload_rows=512000, upload_bytes=268435456";
        assert_eq!(shown.matches(large).count(), uploads, "{shown}");
    }
}
