//! What the rule must keep of a plan when a plugin runs some of its nodes: orders, partitions, and all rows.

use datafusion::physical_plan::replace_children_if_necessary;
use datafusion::prelude::col;

use crate::kit::*;
use crate::nodes::*;
use crate::operator::{Operator, Runs};
use crate::placed::rule;
use crate::plans::assert_becomes;

fn session_with_rule(rule: DeviceRule, partitions: usize) -> SessionContext {
    let config = config(|options| options.fallback = true)
        .with_target_partitions(partitions)
        .with_batch_size(32);
    session_of(config, [Arc::new(rule) as _])
}

/// Plugins that run these nodes, over uploads that they merge and that they do not.
fn merging_and_not(names: &'static [&'static str], min_rows: usize) -> [DeviceRule; 2] {
    [false, true].map(|merges| {
        let plugin = Runs::nodes(names).merging(merges);
        rule(plugin).with_uploads(any_sim(), min_rows)
    })
}

/// `n` batches of 16 rows in no order.
fn shuffled(first: i64, n: i64) -> Vec<RecordBatch> {
    let firsts = (0..n).map(|i| first + ((i * 7) % n) * 16);
    firsts.map(|first| rows(first, 16)).collect()
}

/// Above partitions of which each has an order, a round robin would lose it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sorted_rows_are_not_distributed_above_the_device() {
    let sim = Sim::new();
    let rule = rule(Runs::nodes(&["FilterExec", "SortExec"]));
    // A filter and a sort over two partitions, four tasks.
    let ctx = session_with_rule(rule.clone(), 4);
    let table = device_table(&sim, &[shuffled(0, 20), shuffled(100, 20)]);
    register(&ctx, "t", table);
    let found = numbers_in(&ctx, "SELECT a FROM t WHERE b < 8 ORDER BY a").await;
    assert!(found.is_sorted() && found.len() == 512, "{found:?}");
    // A union of ordered partitions below a merge.
    let one = device_leaf(device_table(&sim, &[shuffled(0, 20)])).await;
    let two = device_leaf(device_table(&sim, &[shuffled(50, 20)])).await;
    let table = "
        SortPreservingMerge < Union < (Repartition 4 < Sort < One, Repartition 4 < Sort < Two)
        SortPreservingMerge < Union < (Repartition < Down < MySort A < Scan A, Repartition < Down < MySort A < Scan A)
    ";
    let own = [("One", &one), ("Two", &two)];
    let placed = |plan| crate::placed::placed(plan, &rule);
    assert_becomes(placed, &[&sim], &own, table).await;
}

/// Two orders of a table on the host, each partition in both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn merged_uploads_keep_all_orders() {
    let numbers = |of: fn(i64) -> i64| Arc::new(Int64Array::from_iter_values((0..100).map(of)));
    let partition = |a, b| {
        let columns: [(&str, ArrayRef); 2] = [("a", numbers(a)), ("b", numbers(b))];
        vec![RecordBatch::try_from_iter(columns).unwrap()]
    };
    let one = partition(|i| i * 2, |i| i * 2 + 1);
    let other = partition(|i| i * 2 + 1, |i| i * 2);
    for rule in merging_and_not(&["FilterExec"], 0) {
        let ctx = session_with_rule(rule, 2);
        let schema = one[0].schema();
        let table = MemTable::try_new(schema, vec![one.clone(), other.clone()]).unwrap();
        let orders = ["a", "b"].map(|name| vec![col(name).sort(true, false)]);
        register(&ctx, "t", Arc::new(table.with_sort_order(orders.to_vec())));
        let found = numbers_in(&ctx, "SELECT b FROM t WHERE a >= 0 ORDER BY b").await;
        assert_eq!(found, multiples(200, 1));
    }
}

/// A projection that drops the key of its input's hash partitioning.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn merged_uploads_keep_the_partitions_of_groups() {
    for rule in merging_and_not(&["ProjectionExec", "AggregateExec"], 0) {
        let ctx = session_with_rule(rule, 2);
        register(&ctx, "t", host_table(&[shuffled(0, 4), shuffled(50, 4)]));
        let found = query(&ctx, "SELECT sum(a) FROM t GROUP BY b").await;
        assert_eq!(row_count(&found.unwrap()), 10);
    }
}

/// A store in memory to which these statements have copied rows of the table t.
pub(crate) async fn written(copies: &[&str]) -> Arc<InMemory> {
    let store = Arc::new(InMemory::new());
    let ctx = SessionContext::new();
    open_store(&ctx, &store);
    register(&ctx, "t", host_table(&[vec![rows(0, 100)]]));
    for sql in copies {
        query(&ctx, sql).await.unwrap();
    }
    store
}

pub(crate) fn open_store(ctx: &SessionContext, store: &Arc<InMemory>) {
    let url = ListingTableUrl::parse("memory:///").unwrap().object_store();
    ctx.register_object_store(url.as_ref(), store.clone());
}

/// Joins are of partitions by their rows' values.
const PARTITIONED: [&str; 2] = [
    "SET datafusion.optimizer.hash_join_single_partition_threshold = 0",
    "SET datafusion.optimizer.hash_join_single_partition_threshold_rows = 0",
];

/// Joins of two tables whose files are in partitions by a column. One has a filter that goes up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn merged_uploads_keep_declared_partitions() {
    let store = written(&[
        "COPY (SELECT a, b FROM t) TO 'memory:///x/' STORED AS PARQUET PARTITIONED BY (b)",
        "COPY (SELECT a, b FROM t) TO 'memory:///y/' STORED AS PARQUET PARTITIONED BY (b)",
    ])
    .await;
    for rule in merging_and_not(&["FilterExec"], 10) {
        let ctx = session_with_rule(rule, 3);
        open_store(&ctx, &store);
        for sql in PARTITIONED.into_iter().chain([
            "SET datafusion.optimizer.preserve_file_partitions = 1",
            "SET datafusion.optimizer.enable_dynamic_filter_pushdown = false",
            "SET datafusion.execution.parquet.pushdown_filters = false",
            "CREATE EXTERNAL TABLE x (a BIGINT, b BIGINT) STORED AS PARQUET PARTITIONED BY (b) LOCATION 'memory:///x/'",
            "CREATE EXTERNAL TABLE y (a BIGINT, b BIGINT) STORED AS PARQUET PARTITIONED BY (b) LOCATION 'memory:///y/'",
        ]) {
            query(&ctx, sql).await.unwrap();
        }
        let sql = "SELECT count(*) FROM (SELECT * FROM x WHERE a + 0 >= 0) x JOIN y ON x.b = y.b";
        assert_eq!(numbers_in(&ctx, sql).await, [1000]);
    }
}

/// The device of one of a join's partitions cannot be opened. The others would wait for its part of the dynamic filter for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_partition_of_a_join_falls_back_alone() {
    let store = written(&[
        "COPY (SELECT a, b FROM t WHERE a % 2 = 0) TO 'memory:///x/0.parquet' STORED AS PARQUET",
        "COPY (SELECT a, b FROM t WHERE a % 2 = 1) TO 'memory:///x/1.parquet' STORED AS PARQUET",
    ])
    .await;
    let sim = Sim::new();
    let device = sim.device.clone();
    let resolver = DeviceResolver::new(move |spec, partition| match partition {
        0 => Ok(device.clone()),
        _ => Err(Error::DeviceNotAvailable {
            device: DeviceId::new(spec.device_type(), 9),
            reason: "gone".into(),
        }),
    });
    // It reads all that it has, and finds nothing.
    let nothing = |state: &mut crate::operator::State, cx: &mut std::task::Context<'_>| {
        while let Some(batch) = ready!(state.next(cx)) {
            batch?;
        }
        Poll::Ready(None)
    };
    let plugin = Runs::nodes(&["HashJoinExec"]).making(move |_| {
        let mut operator = Operator::new("NothingExec", nothing);
        operator.runs_on_host = true;
        Ok(Arc::new(operator))
    });
    let config = config(|options| options.fallback = true).with_target_partitions(2);
    let rule = rule(plugin).with_uploads(any_sim(), 0);
    let config = config.with_extension(Arc::new(resolver));
    let ctx = session_of(config, [Arc::new(rule) as _]);
    open_store(&ctx, &store);
    for sql in PARTITIONED.into_iter().chain([
        "SET datafusion.execution.parquet.pushdown_filters = true",
        "CREATE EXTERNAL TABLE x STORED AS PARQUET LOCATION 'memory:///x/'",
    ]) {
        query(&ctx, sql).await.unwrap();
    }
    let sql = "SELECT x.a, y.b FROM x JOIN x y ON x.a = y.a";
    let found = tokio::time::timeout(LONG, query(&ctx, sql)).await;
    fails(found.expect("it hangs"), &["gone"]);
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
        let wide = replace_children_if_necessary(insertion, vec![planned("DataSource", &[], &[])]);
        fails(wide, &["columns of types Int64, Int64, Utf8 to insert"]);
        let found = numbers_in(&ctx, "SELECT a FROM u").await;
        assert_eq!(found, (0..64).rev().collect::<Vec<_>>(), "{partitions}");
    }
}

/// Each round of a recursive query runs the plan again, as it was before it ran.
#[tokio::test]
async fn a_recursive_query_runs_operators_again() {
    let sim = Sim::new();
    let ctx = session_with(4, 1);
    let batches: Vec<_> = (0..4).map(|i| rows(i * 16, 16)).collect();
    register(&ctx, "t", device_table(&sim, &[batches]));
    let sql = "WITH RECURSIVE r AS (SELECT 2 AS a UNION ALL \
               SELECT t.a + 2 FROM r JOIN t ON r.a = t.a WHERE t.a < 8) SELECT a FROM r";
    assert_eq!(sorted(numbers_in(&ctx, sql).await), [2, 4, 6, 8]);
    drop(ctx);
    sim.assert_done();
}
