//! What plugins run, and where the rest of the plan runs.

use std::fmt;
use std::sync::Arc;

use arrow_device_datafusion::{
    DeviceOperator, DevicePlugin, DeviceRule, DeviceSpec, Verdict, declined, execute_on_device,
};
use datafusion::common::Result;
use datafusion::common::config::ConfigOptions;
use datafusion::error::DataFusionError;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_optimizer::limit_pushdown::LimitPushdown;
use datafusion::physical_plan::buffer::BufferExec;
use datafusion::physical_plan::empty::EmptyExec;
use datafusion::physical_plan::filter::{FilterExec, FilterExecBuilder};
use datafusion::physical_plan::limit::GlobalLimitExec;
use datafusion::physical_plan::union::UnionExec;
use datafusion::physical_plan::{collect, collect_partitioned, replace_children_if_necessary};
use futures::TryStreamExt;

use crate::kit::*;
use crate::nodes::*;
use crate::operator::doubling;
use crate::plans::assert_becomes;

/// A plugin of a closure, whose operators double, and how far it wants uploads joined.
struct Doubles(fn(&Plan) -> Verdict, Option<(usize, usize)>);

impl fmt::Debug for Doubles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Doubles")
    }
}

impl DevicePlugin for Doubles {
    fn can_run(&self, node: &Plan, _: &DeviceSpec) -> Verdict {
        (self.0)(node)
    }

    fn replace(&self, node: &Plan) -> Result<Arc<dyn DeviceOperator>> {
        match node.fetch() {
            Some(7) => Err(DataFusionError::ResourcesExhausted("no luck".into())),
            fetch => Ok(doubling(fetch == Some(8))),
        }
    }

    fn upload_target(&self) -> Option<(usize, usize)> {
        self.1
    }
}

fn is_filter(node: &Plan) -> Verdict {
    match node.is::<FilterExec>() {
        true => Verdict::Runs,
        false => Verdict::Unknown,
    }
}

fn is_union(node: &Plan) -> Verdict {
    match node.is::<UnionExec>() {
        true => Verdict::Runs,
        false => Verdict::Unknown,
    }
}

fn with(plugin: fn(&Plan) -> Verdict) -> DeviceRule {
    DeviceRule::default().with_plugin(Arc::new(Doubles(plugin, None)))
}

/// A plugin that runs filters, wherever the rows are.
fn filters() -> DeviceRule {
    with(is_filter).with_uploads(any_sim(), 0)
}

fn rewritten(plan: &Plan, rule: DeviceRule) -> Result<Plan> {
    rule.rewrite(plan.clone(), &ConfigOptions::default())
}

/// What the rule makes of a plan; a second run changes nothing.
fn placed(plan: &Plan, rule: &DeviceRule) -> Plan {
    let run = |plan: &Plan| rule.optimize(plan.clone(), &ConfigOptions::default());
    let placed = run(plan).unwrap();
    let again = run(&placed).unwrap();
    assert!(Arc::ptr_eq(&again, &placed), "{}", text(&again, &[]));
    placed
}

fn limited(plan: Plan, fetch: usize) -> Plan {
    let of = filter(plan);
    let of = FilterExecBuilder::from(of.downcast_ref::<FilterExec>().unwrap());
    Arc::new(of.with_fetch(Some(fetch)).build().unwrap())
}

/// A node of which the crate knows nothing, as those of engines.
fn unknown(input: Plan) -> Plan {
    Arc::new(BufferExec::new(input, 1 << 20))
}

#[tokio::test]
async fn operators_move_to_the_device_and_the_rest_stays() {
    let task = unknown(filter(host_scan().await));
    let plan = rewritten(&task, filters()).unwrap();
    let expected = "Buffer < Down < Map < Up < DataSource";
    assert_eq!(shape(&plan, &[]), expected);
    // Such a node keeps its place between two operators, too: it may not be lifted to the device.
    let task = filter(unknown(filter(host_scan().await)));
    let plan = rewritten(&task, filters()).unwrap();
    let expected = "Down < Map < Up < Buffer < Down < Map < Up < DataSource";
    assert_eq!(shape(&plan, &[]), expected);
}

/// Nodes that keep rows in their partitions may go to the device on a worker, those that gather them stay.
#[tokio::test]
async fn exchanges_stay_on_the_host_of_a_worker() {
    let columns = |plan: Plan| project(plan, &[(0, "a"), (1, "b"), (2, "s")]);
    type Between = (fn(Plan) -> Plan, &'static str);
    let between: [Between; 3] = [
        (columns, "Projection"),
        (on_host, "CoalescePartitions"),
        (|plan| merge(plan, None), "SortPreservingMerge"),
    ];
    for (node, name) in between {
        let scan: Plan = match name {
            "SortPreservingMerge" => sort(host_scan().await),
            _ => host_scan().await,
        };
        let top = if name == "SortPreservingMerge" {
            "Sort < DataSource"
        } else {
            "DataSource"
        };
        let task = computed(filter(node(filter(scan))));
        let plan = rewritten(&task, filters()).unwrap();
        let expected = match name {
            "Projection" => format!("Down < Map < Projection < Map < Up < {top}"),
            _ => format!("Down < Map < Up < {name} < Down < Map < Up < {top}"),
        };
        assert_eq!(shape(&plan, &[]), format!("Projection < {expected}"));
        // In a session, all of them go.
        let all = shape(&placed(&task, &filters()), &[]);
        let expected = format!("Projection < Down < Map < {name} < Map < Up < {top}");
        assert_eq!(all, expected);
    }
}

#[tokio::test]
async fn the_result_is_as_good_as_new() {
    // Nothing to do: the same plan.
    for plan in [host_scan().await, computed(host_scan().await)] {
        assert!(Arc::ptr_eq(&rewritten(&plan, filters()).unwrap(), &plan));
        let none = rewritten(&plan, DeviceRule::default()).unwrap();
        assert!(Arc::ptr_eq(&none, &plan));
    }
    // Too few rows: the same plan.
    let task = filter(host_scan().await);
    let plan = rewritten(&task, filters().with_uploads(any_sim(), 11)).unwrap();
    assert!(Arc::ptr_eq(&plan, &task));
    // Done already: the same plan. Two operators in a row have one upload.
    let task = computed(filter(filter(host_scan().await)));
    let plan = rewritten(&task, filters()).unwrap();
    let again = rewritten(&plan, filters()).unwrap();
    assert!(Arc::ptr_eq(&again, &plan), "{}", text(&again, &[]));
    let expected = "Projection < Down < Map < Map < Up < DataSource";
    assert_eq!(shape(&plan, &[]), expected);
}

#[tokio::test]
async fn it_runs() {
    let sim = Sim::new();
    let context = offering([&sim]);
    for partitions in 0..3 {
        let input: Plan = match partitions {
            0 => Arc::new(EmptyExec::new(numbers(0, 1).schema()).with_partitions(0)),
            _ => scan(host_table(&vec![vec![numbers(0, 16)]; partitions])).await,
        };
        let task = filter(input);
        let plan = rewritten(&task, filters()).unwrap();
        let count = |plan: &Plan| plan.properties().output_partitioning().partition_count();
        assert_eq!((count(&task), count(&plan)), (partitions, partitions));
        let found = collect_partitioned(plan, context.clone()).await.unwrap();
        assert_eq!(found.len(), partitions);
        for batches in found {
            assert_eq!(numbers_of(&batches), multiples(16, 2));
        }
    }
    drop(context);
    sim.assert_done();
}

#[tokio::test]
async fn a_plugin_that_panics_or_fails_is_an_error() {
    let task = filter(host_scan().await);
    type Panics = (fn(&Plan) -> Verdict, &'static [&'static str]);
    let panics: [Panics; 3] = [
        (|_| panic!("no luck"), &["panicked", "no luck"]),
        (
            |node| panic!("no {}", node.name()),
            &["panicked", "no DataSourceExec"],
        ),
        (|_| std::panic::panic_any(7), &["panicked"]),
    ];
    for (plugin, words) in panics {
        let rule = with(plugin).with_uploads(any_sim(), 0);
        fails(
            rewritten(&task, rule),
            &[&["on this worker"], words].concat(),
        );
    }
    let task = limited(host_scan().await, 7);
    let error = fails(rewritten(&task, filters()), &["on this worker", "no luck"]);
    let root = error.find_root();
    assert!(matches!(root, DataFusionError::ResourcesExhausted(_)));
}

#[tokio::test]
async fn rows_of_the_host_go_up_and_those_of_a_device_do_not() {
    let sim = Sim::new();
    let (on_device, host) = (device_scan(&sim).await, host_scan().await);
    let plan = filter(host.clone());
    for (plan, rule, expected) in [
        (&plan, filters(), "Down < Map A < Up A < DataSource"),
        (&plan, with(is_filter), "Filter < DataSource"),
        (
            &plan,
            with(is_union).with_uploads(any_sim(), 0),
            "Filter < DataSource",
        ),
        (
            &filter(on_device.clone()),
            filters(),
            "Down < Map A < Scan A",
        ),
        (
            &filter(down(on_device.clone())),
            with(is_filter),
            "Down < Map A < Scan A",
        ),
        (
            &computed(filter(project(on_device.clone(), &[(0, "a"), (1, "b")]))),
            with(is_filter),
            "Projection < Down < Map A < Projection A < Scan A",
        ),
        // Of two inputs only the one on the host goes up.
        (
            &union([down(on_device.clone()), host.clone()]),
            with(is_union),
            "Down < Map A < (Scan A, Up A < DataSource)",
        ),
    ] {
        assert_eq!(shape(&placed(plan, &rule), &[&sim]), expected);
    }
    // Rows do not go up for a node that is not worth it, but with one that is, and what it reads is worth it then.
    let there: fn(&Plan) -> Verdict = |node| match node {
        node if node.is::<FilterExec>() => Verdict::RunsThere,
        node => is_union(node),
    };
    let rule = with(there).with_uploads(any_sim(), 0);
    assert_eq!(shape(&placed(&plan, &rule), &[]), "Filter < DataSource");
    let both = union([plan, filter(down(on_device))]);
    let expected = "Down < Map A < (Up A < Filter < DataSource, Map A < Scan A)";
    assert_eq!(shape(&placed(&both, &rule), &[&sim]), expected);
    let both = union([filter(host.clone()), host]);
    let expected = "Down < Map < (Map < Up < DataSource, Up < DataSource)";
    assert_eq!(shape(&placed(&both, &rule), &[]), expected);
}

/// Ten rows each.
#[tokio::test]
async fn statistics_decide() {
    let ups = |plan: &Plan, supported, rows| {
        let rule = with(supported).with_uploads(any_sim(), rows);
        shape(&placed(plan, &rule), &[]).matches("Up <").count()
    };
    let (endless, _) = host_stream(|i| (i == 0).then(|| Ok(numbers(0, 16))));
    let unknown = filter(scan(endless).await);
    let one = filter(host_scan().await);
    // The inputs count together, and each node decides for itself.
    let two = union([host_scan().await, host_scan().await]);
    let both = union([
        unknown.clone(),
        filter(scan(host_table(&[vec![numbers(0, 10)]])).await),
    ]);
    for (plan, supported, rows, expected) in [
        (&one, is_filter as fn(&Plan) -> Verdict, 0, 1),
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

#[tokio::test]
async fn why_a_node_stays_is_reported() {
    let stays: fn(&Plan) -> Verdict = |node| match node.is::<FilterExec>() {
        true => Verdict::stays("it has no kernel"),
        false => Verdict::Unknown,
    };
    let sim = Sim::new();
    let rule = with(stays);
    let plan = placed(&filter(device_scan(&sim).await), &rule);
    // The node at the top says so.
    assert_eq!(shape(&plan, &[&sim]), "Down < Filter < Down < Scan A");
    says(
        &text(&plan, &[]),
        &["declined=[FilterExec: it has no kernel]"],
    );
    let found = declined(&plan, &rule, &any_sim()).unwrap();
    let expected = ("FilterExec".to_owned(), "it has no kernel".to_owned());
    assert_eq!(found, [expected]);
    let plan = placed(&plan, &with(is_filter));
    assert_eq!(declined(&plan, &rule, &any_sim()).unwrap(), []);
    // As well as too few rows of the host, or an unknown number.
    let rule = with(is_filter).with_uploads(any_sim(), 11);
    let (unknown, _) = host_stream(|_| None);
    for (input, why) in [
        (
            host_scan().await,
            "it reads 10 rows, and they go up from 11 on",
        ),
        (scan(unknown).await, "nobody knows whether it reads 11 rows"),
    ] {
        let plan = placed(&filter(input), &rule);
        let found = declined(&plan, &rule, &any_sim()).unwrap();
        assert_eq!(found, [("FilterExec".to_owned(), why.to_owned())]);
    }
}

#[tokio::test]
async fn small_batches_of_an_operator_are_joined() {
    let sim = Sim::new();
    let plan = placed(&limited(device_scan(&sim).await, 8), &with(is_filter));
    let expected = "Down < CoalesceBatches A < Map A < Scan A";
    assert_eq!(shape(&plan, &[&sim]), expected);
    says(&text(&plan, &[]), &["rows=8192"]);
}

/// DataFusion distributes the batches of few partitions over its tasks. On a device, the work comes first.
#[tokio::test]
async fn a_round_robin_repartition_moves_above_the_device() {
    let a = Sim::new();
    let two = vec![vec![rows(0, 16), rows(16, 32)], vec![rows(1000, 48)]];
    let leaf = device_leaf(device_table(&a, &two)).await;
    let columns = |plan| project(plan, &[(0, "a"), (1, "b"), (2, "s")]);
    let spread = || round_robin(leaf.clone(), 4);
    let rule = with(is_filter);
    for (plan, expected, count) in [
        (filter(spread()), "Repartition < Down < Map A < Scan A", 96),
        (
            double(columns(filter(spread())), &a),
            "Repartition < Down < Map A < Projection A < Map A < Scan A",
            96,
        ),
        (
            computed(filter(union([spread(), columns(leaf.clone())]))),
            "Projection < Repartition < Down < Map A < Union A < (Scan A, Projection A < Scan A)",
            192,
        ),
        // Not below a limit of each partition.
        (
            limited(spread(), 5),
            "Filter < Repartition < Down < Scan A",
            5,
        ),
        // Nor one of the host.
        (
            filter(round_robin(host_scan().await, 4)),
            "Filter < Repartition < DataSource",
            5,
        ),
        (
            computed(spread()),
            "Projection < Repartition < Down < Scan A",
            96,
        ),
    ] {
        let after = placed(&plan, &rule);
        assert_eq!(shape(&after, &[&a]), expected);
        let partitions = |plan: &Plan| plan.properties().partitioning.partition_count();
        assert_eq!(partitions(&after), partitions(&plan));
        let found = collect(after, session().task_ctx()).await.unwrap();
        assert_eq!(row_count(&found), count, "{expected}");
    }
    // Who reads all partitions needs none.
    let stream = execute_on_device(spread(), session().task_ctx(), &a).unwrap();
    let found: Vec<_> = stream.try_collect().await.unwrap();
    let expected: Vec<i64> = (0..48).chain(1000..1048).collect();
    assert_eq!(sorted(numbers_on(&found)), expected);
    let table = device_table(&a, &[vec![]]);
    let insert = table.insert_on_device(spread(), InsertOp::Append).unwrap();
    assert_becomes(Arc::new(insert), &[&a], "Insert < Scan A");
    drop((found, leaf, table));
    a.assert_done();
}

/// Through transitions and nodes that need no kernel, and no further.
#[tokio::test]
async fn nodes_that_need_no_kernel_stay_on_the_device() {
    let (a, b) = (Sim::new(), Sim::new());
    let (scan, host) = (device_scan(&a).await, host_scan().await);
    let below = down(scan.clone());
    let transitions = |plan| {
        let shown = shape(&with_transitions(double(plan, &a)), &[&a, &b]);
        (shown.matches("Up").count(), shown.matches("Down").count())
    };
    for plan in [
        scan.clone(),
        below.clone(),
        round_robin(below.clone(), 3),
        on_host(below.clone()),
        union([below.clone(), scan.clone()]),
        down(double(below.clone(), &a)),
    ] {
        assert_eq!(transitions(plan), (0, 1));
    }
    for (plan, expected) in [
        (round_robin(host.clone(), 3), (1, 1)),
        (sort(below.clone()), (1, 2)),
        (filter(below.clone()), (1, 2)),
        (union([below.clone(), down(device_scan(&b).await)]), (1, 3)),
        (union([below, host]), (1, 2)),
    ] {
        assert_eq!(transitions(plan), expected);
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
        fails(wide, &["columns of types Int64, Int64, Utf8 to insert"]);
        let found = numbers_in(&ctx, "SELECT a FROM u").await;
        assert_eq!(found, (0..64).rev().collect::<Vec<_>>(), "{partitions}");
    }
}

/// A plugin says how large the batches are to be that go up for it, below both of its sorts of uploads.
#[tokio::test]
async fn a_plugin_wants_large_uploads() {
    let sim = Sim::new();
    let plugin = Arc::new(Doubles(is_union, Some((512_000, 1 << 28))));
    let rule = DeviceRule::default().with_plugin(plugin);
    let rule = rule.with_uploads(any_sim(), 0);
    let host = host_scan().await;
    for plan in [
        union([host.clone(), host.clone()]),
        union([device_scan(&sim).await, host]),
    ] {
        let shown = text(&placed(&plan, &rule), &[]);
        says(
            &shown,
            &[
                "HostToDeviceExec: device=",
                "upload_rows=512000, upload_bytes=268435456",
            ],
        );
        assert!(!shown.contains("HostToDeviceExec: device=sim\n"), "{shown}");
    }
}
