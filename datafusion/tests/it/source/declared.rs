//! What a source declares, and what DataFusion leaves out for it.

use std::sync::Arc;

use arrow_device_datafusion::{DeviceExec, DeviceTable};
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::common::stats::Precision;
use datafusion::common::{Constraint, Constraints, ScalarValue, Statistics};
use datafusion::logical_expr::TableProviderFilterPushDown::Exact;
use datafusion::physical_expr::expressions::{Column, col};
use datafusion::physical_expr::{LexOrdering, Partitioning, PhysicalExpr, PhysicalSortExpr};
use datafusion::physical_plan::execution_plan::Boundedness;
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::{ExecutionPlanProperties, collect, collect_partitioned};
use futures::StreamExt;

use super::requests::{batches, same_as_host};
use super::watched::Watched;
use crate::kit::*;
use crate::nodes::*;
use crate::queries::result;

/// The rows of [`batches`], each where DataFusion's repartition by column a puts it.
async fn hashed(partitions: usize) -> (Vec<Vec<RecordBatch>>, Partitioning) {
    let by = Partitioning::Hash(vec![col("a", &schema()).unwrap()], partitions);
    let input = scan(host_table(&batches(partitions))).await;
    let repartition = Arc::new(RepartitionExec::try_new(input, by.clone()).unwrap());
    let context = session().task_ctx();
    let found = collect_partitioned(repartition, context).await.unwrap();
    (found, by)
}

fn count(plan: &Plan, node: &str) -> usize {
    shape(plan, &[]).matches(node).count()
}

#[tokio::test]
async fn declared_hash_partitioning_saves_repartitions() {
    let sim = Sim::new();
    let (partitions, by) = hashed(3).await;
    let sqls = [
        ("SELECT a, count(*), sum(b) FROM t GROUP BY a", 0, 1),
        ("SELECT t.a, u.s FROM t JOIN u ON t.a = u.a", 0, 2),
        // Column a is not returned, so the rows of a group may be anywhere.
        ("SELECT b, count(*) AS n FROM t GROUP BY b", 1, 1),
    ];
    for (sql, declared, undeclared) in sqls {
        for (partitioning, expected) in [(Some(by.clone()), declared), (None, undeclared)] {
            let table = || {
                let mut source = Watched::new(&sim, &partitions);
                source.partitioning = partitioning.clone();
                source.table()
            };
            let ctx = session_with(3, 0);
            // Not a join that collects one side.
            for option in [
                "prefer_hash_join = true",
                "hash_join_single_partition_threshold = 0",
                "hash_join_single_partition_threshold_rows = 0",
            ] {
                let set = format!("SET datafusion.optimizer.{option}");
                query(&ctx, &set).await.unwrap();
            }
            register(&ctx, "t", table());
            register(&ctx, "u", table());
            let plan = plan(&ctx, sql).await;
            assert_eq!(count(&plan, "Repartition"), expected, "{plan:?}");
            let found = result(&ctx, sql).await;
            for name in ["t", "u"] {
                ctx.deregister_table(name).unwrap();
                register(&ctx, name, host_table(&partitions));
            }
            assert_eq!(found, result(&ctx, sql).await, "{sql}");
        }
    }
    sim.assert_done();
}

#[tokio::test]
async fn explain_shows_what_is_declared() {
    let sim = Sim::new();
    let (partitions, by) = hashed(2).await;
    let mut source = Watched::new(&sim, &partitions);
    source.partitioning = Some(by);
    source.orderings = vec![by_a()];
    source.support = |_| Exact;
    let ctx = session_with(2, 0);
    register(&ctx, "t", source.table());
    let plan = plan(&ctx, "SELECT s, a FROM t WHERE b > 2 ORDER BY a LIMIT 4").await;
    let text = text(&plan, &[&sim]);
    let expected = "DeviceScanExec: device=A, partitions=2, projection=[s, a], filters=[b@1 > 2], fetch=4, \
                    partitioning=Hash([a@1], 2), order=[a@1 ASC NULLS LAST]";
    assert!(text.contains(expected), "{text}");
    let tree = "EXPLAIN FORMAT TREE SELECT a FROM t WHERE b > 2 LIMIT 4";
    let tree = query(&ctx, tree).await.unwrap();
    let tree = pretty_format_batches(&tree).unwrap();
    let parts = [
        "partitions: 2",
        "projection: [a]",
        "filters: [b@1 > 2]",
        "fetch: 4",
    ];
    says(&tree, &parts);
}

fn by_a() -> LexOrdering {
    let by = PhysicalSortExpr::new(col("a", &schema()).unwrap(), Default::default()).nulls_last();
    LexOrdering::new([by]).unwrap()
}

#[tokio::test]
async fn a_declared_order_saves_the_sort() {
    let sim = Sim::new();
    for partitions in [1, 3] {
        for (declared, sorts) in [(true, 0), (false, 1)] {
            let mut source = Watched::new(&sim, &batches(partitions));
            source.orderings = Vec::from_iter(declared.then(by_a));
            let ctx = session_with(partitions, 0);
            register(&ctx, "t", source.table());
            for sql in [
                "SELECT a FROM t ORDER BY a",
                "SELECT a, s FROM t ORDER BY a LIMIT 20",
            ] {
                let plan = plan(&ctx, sql).await;
                let text = text(&plan, &[&sim]);
                assert_eq!(count(&plan, "Sort <"), sorts, "{text}");
                let merges = usize::from(partitions > 1);
                assert_eq!(count(&plan, "SortPreservingMerge <"), merges, "{text}");
                let rows = if sql.contains("LIMIT") {
                    20
                } else {
                    partitions as i64 * 48
                };
                let found = collect(plan, ctx.task_ctx()).await.unwrap();
                assert_eq!(numbers_of(&found), multiples(rows, 1));
            }
            // By another column: the declared order is of no use.
            let plan = plan(&ctx, "SELECT a, b FROM t ORDER BY b").await;
            assert_eq!(count(&plan, "Sort <"), 1);
        }
    }
    sim.assert_done();
}

/// Asked directly, as `PushdownSort` does.
#[tokio::test]
async fn a_sort_is_pushed_into_a_scan_that_has_its_order() {
    use datafusion::physical_plan::SortOrderPushdownResult::{Exact, Unsupported};
    let sim = Sim::new();
    let mut source = Watched::new(&sim, &batches(1));
    source.orderings = vec![by_a()];
    let scan = device_leaf(source.table()).await;
    let own = scan.try_pushdown_sort(&by_a()).unwrap();
    assert!(matches!(own, Exact { .. }));
    let by_b = [PhysicalSortExpr::new_default(col("b", &schema()).unwrap())];
    let other = scan.try_pushdown_sort(&by_b).unwrap();
    assert!(matches!(other, Unsupported));
}

/// Column b depends on the key a, so it may be selected beside a group by a.
#[tokio::test]
async fn constraints_reach_the_planner() {
    let sim = Sim::new();
    let sql = "SELECT a, b FROM t GROUP BY a";
    let mut source = Watched::new(&sim, &batches(1));
    let undeclared = over(Watched::new(&sim, &batches(1)).table());
    assert!(query(&undeclared, sql).await.is_err());
    let key = |i| Constraints::new_unverified(vec![Constraint::PrimaryKey(vec![i])]);
    source.constraints = Some(key(0));
    let table = source.table();
    let found = numbers_in(&over(table.clone()), sql).await;
    assert_eq!(sorted(found), multiples(48, 1));
    // In the plan, over its own columns.
    for (columns, expected) in [(&[2, 0][..], key(1)), (&[2], Constraints::default())] {
        let scan = table.scan_on_device(Some(columns), None).unwrap();
        let scan: Plan = Arc::new(DeviceExec::from(scan));
        let properties = scan.equivalence_properties().clone();
        assert_eq!(*properties.constraints(), expected);
    }
}

#[tokio::test]
async fn an_unbounded_source_streams_and_cannot_be_sorted() {
    let sim = Sim::new();
    let mut source = Watched::new(&sim, &batches(1));
    source.boundedness = Boundedness::Unbounded {
        requires_infinite_memory: false,
    };
    let uploaded = source.uploaded.clone();
    let ctx = over(source.table());
    let found = numbers_in(&ctx, "SELECT a FROM t WHERE b = 3 LIMIT 12").await;
    assert_eq!(found[..6], [3, 13, 23, 33, 43, 3]);
    assert_eq!(found.len(), 12);
    assert!(uploaded.lock().unwrap().len() < 20);
    assert!(text(&plan(&ctx, "SELECT a FROM t").await, &[&sim]).contains(", unbounded"));
    let sorted = ctx.sql("SELECT a FROM t ORDER BY a").await.unwrap();
    assert!(sorted.create_physical_plan().await.is_err());
}

/// Rows do not wait for others that may never come.
#[tokio::test]
async fn batches_of_an_unbounded_source_are_not_joined() {
    let sim = Sim::new();
    let mut source = Watched::new(&sim, &[vec![rows(0, 4)]]);
    source.boundedness = Boundedness::Unbounded {
        requires_infinite_memory: false,
    };
    let uploaded = source.uploaded.clone();
    let plan = joining(device_leaf(source.table()).await, &sim, 1000);
    let node = DeviceExec::of(&plan).unwrap();
    let mut stream = node.execute_device(0, session().task_ctx()).unwrap();
    for asked in 1..=3 {
        assert_eq!(stream.next().await.unwrap().unwrap().num_rows(), 4);
        assert_eq!(uploaded.lock().unwrap().len(), asked);
    }
}

/// A declaration that does not fit the schema is refused before anything is planned with it.
#[test]
fn wrong_declarations_are_refused() {
    let sim = Sim::new();
    let device = sim.id().to_string();
    let refused = |expected: &str, change: &dyn Fn(&mut Watched)| {
        let mut source = Watched::new(&sim, &batches(1));
        change(&mut source);
        fails(DeviceTable::new(Arc::new(source)), &[expected, &device]);
    };
    let column = |name: &str, i| Arc::new(Column::new(name, i)) as Arc<dyn PhysicalExpr>;
    refused("no column z@7", &|source| {
        source.partitioning = Some(Partitioning::Hash(vec![column("z", 7)], 1));
    });
    refused("no column a@1", &|source| {
        let by = PhysicalSortExpr::new_default(column("a", 1));
        source.orderings = Vec::from_iter(LexOrdering::new([by]));
    });
    refused("a constraint on column 3 of 3", &|source| {
        let unique = Constraint::Unique(vec![0, 3]);
        source.constraints = Some(Constraints::new_unverified(vec![unique]));
    });
    let statistics = |change: fn(&mut Statistics)| {
        let mut statistics = Statistics::new_unknown(&schema());
        change(&mut statistics);
        Box::new(move |_: Option<usize>| statistics.clone())
    };
    let text = "statistics of 2 columns for a table of 3 columns";
    refused(text, &|source| {
        source.statistics = statistics(|s| s.column_statistics.truncate(2));
    });
    let text = "a max of type Int32 for column b of type Int64";
    refused(text, &|source| {
        source.statistics = statistics(|s| {
            s.column_statistics[1].max_value = Precision::Exact(ScalarValue::Int32(Some(9)));
        });
    });
}

/// All of it together, over three partitions.
#[tokio::test]
async fn values_are_the_hosts() {
    let sim = Sim::new();
    let (partitions, by) = hashed(3).await;
    let mut source = Watched::new(&sim, &partitions);
    source.partitioning = Some(by);
    source.support = |_| Exact;
    let queries = "
        SELECT * FROM t WHERE a % 3 = 1
        SELECT b, max(a) AS a, count(s) AS s FROM t GROUP BY b
        SELECT x.a, y.s FROM t x JOIN t y ON x.a = y.b
        SELECT a, b FROM t ORDER BY b, a LIMIT 7
        SELECT count(*) AS n FROM t
    ";
    same_as_host(source.table(), &partitions, queries).await;
    sim.assert_done();
}
