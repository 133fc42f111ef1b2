//! What a source declares, and what DataFusion leaves out for it.

use std::sync::Arc;

use arrow_device_datafusion::{DeviceExec, DeviceTable};
use datafusion::arrow::array::RecordBatch;
use datafusion::common::stats::Precision;
use datafusion::common::{Constraint, Constraints, ScalarValue, Statistics};
use datafusion::logical_expr::TableProviderFilterPushDown::Exact;
use datafusion::physical_expr::expressions::{Column, col};
use datafusion::physical_expr::{LexOrdering, Partitioning, PhysicalExpr, PhysicalSortExpr};
use datafusion::physical_plan::execution_plan::Boundedness;
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::{collect, displayable};
use futures::StreamExt;

use super::requests::{batches, same_as_host, texts};
use super::watched::Watched;
use crate::joined::joining;
use crate::kit::*;
use crate::ops::device_leaf;

/// The rows of [`batches`], each where DataFusion's repartition by column a puts it.
async fn hashed(partitions: usize) -> (Vec<Vec<RecordBatch>>, Partitioning) {
    let by = Partitioning::Hash(vec![col("a", &schema()).unwrap()], partitions);
    let input = scan(host_table(&batches(partitions))).await;
    let repartition = Arc::new(RepartitionExec::try_new(input, by.clone()).unwrap());
    let context = session().task_ctx();
    let mut found = Vec::new();
    for i in 0..partitions {
        let stream =
            datafusion::physical_plan::ExecutionPlan::execute(&*repartition, i, context.clone());
        found.push(
            datafusion::physical_plan::common::collect(stream.unwrap())
                .await
                .unwrap(),
        );
    }
    (found, by)
}

fn count(plan: &Plan, node: &str) -> usize {
    displayable(plan.as_ref())
        .indent(false)
        .to_string()
        .matches(node)
        .count()
}

#[tokio::test]
async fn declared_hash_partitioning_saves_repartitions() {
    let sim = Sim::new();
    let (partitions, by) = hashed(3).await;
    let sqls = [
        (
            "SELECT a, count(*) AS n, sum(b) AS b FROM t GROUP BY a",
            0,
            1,
        ),
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
                query(&ctx, &format!("SET datafusion.optimizer.{option}"))
                    .await
                    .unwrap();
            }
            register(&ctx, "t", table());
            register(&ctx, "u", table());
            let plan = plan(&ctx, sql).await;
            assert_eq!(
                count(&plan, "RepartitionExec"),
                expected,
                "{}",
                text(&plan, &[&sim])
            );
            let found = texts(&ctx, sql).await;
            for name in ["t", "u"] {
                ctx.deregister_table(name).unwrap();
                register(&ctx, name, host_table(&partitions));
            }
            assert_eq!(found, texts(&ctx, sql).await, "{sql}");
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
    let tree = query(
        &ctx,
        "EXPLAIN FORMAT TREE SELECT a FROM t WHERE b > 2 LIMIT 4",
    )
    .await
    .unwrap();
    let tree = datafusion::arrow::util::pretty::pretty_format_batches(&tree)
        .unwrap()
        .to_string();
    for line in [
        "DeviceScanExec",
        "partitions: 2",
        "projection: a",
        "filters: b@1 > 2",
        "fetch: 4",
    ] {
        assert!(tree.contains(line), "{tree}");
    }
}

fn by_a() -> LexOrdering {
    let options = datafusion::arrow::compute::SortOptions {
        descending: false,
        nulls_first: false,
    };
    let by = PhysicalSortExpr::new(col("a", &schema()).unwrap(), options);
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
                assert_eq!(count(&plan, "SortExec"), sorts, "{text}");
                let merges = usize::from(partitions > 1);
                assert_eq!(count(&plan, "SortPreservingMergeExec"), merges, "{text}");
                let rows = if sql.contains("LIMIT") {
                    20
                } else {
                    partitions as i64 * 48
                };
                let found = collect(plan, ctx.task_ctx()).await.unwrap();
                assert_eq!(numbers_of(&found), (0..rows).collect::<Vec<_>>());
            }
            // By another column: the declared order is of no use.
            let plan = plan(&ctx, "SELECT a, b FROM t ORDER BY b").await;
            assert_eq!(count(&plan, "SortExec"), 1);
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
    let scan = scan(source.table()).await;
    assert!(matches!(
        scan.try_pushdown_sort(&by_a()).unwrap(),
        Exact { .. }
    ));
    let by_b = [PhysicalSortExpr::new_default(col("b", &schema()).unwrap())];
    assert!(matches!(
        scan.try_pushdown_sort(&by_b).unwrap(),
        Unsupported
    ));
}

/// Column b depends on the key a, so it may be selected beside a group by a.
#[tokio::test]
async fn constraints_reach_the_planner() {
    let sim = Sim::new();
    let sql = "SELECT a, b FROM t GROUP BY a";
    let mut source = Watched::new(&sim, &batches(1));
    assert!(
        query(&over(Watched::new(&sim, &batches(1)).table()), sql)
            .await
            .is_err()
    );
    source.constraints = Some(Constraints::new_unverified(vec![Constraint::PrimaryKey(
        vec![0],
    )]));
    let table = source.table();
    let ctx = over(table.clone());
    assert_eq!(
        sorted(numbers_in(&ctx, sql).await),
        (0..48).collect::<Vec<_>>()
    );
    // In the plan, over its own columns.
    let scan = table.scan_on_device(Some(&[2, 0]), None).unwrap();
    let properties = arrow_device_datafusion::DevicePlan::properties(&scan);
    let expected = Constraints::new_unverified(vec![Constraint::PrimaryKey(vec![1])]);
    assert_eq!(*properties.equivalence_properties().constraints(), expected);
    let scan = table.scan_on_device(Some(&[2]), None).unwrap();
    let properties = arrow_device_datafusion::DevicePlan::properties(&scan);
    assert_eq!(
        *properties.equivalence_properties().constraints(),
        Constraints::default()
    );
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
    let error = sorted.create_physical_plan().await.unwrap_err().to_string();
    assert!(
        error.contains("infinite") || error.contains("unbounded"),
        "{error}"
    );
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
    let refused = |change: &dyn Fn(&mut Watched), expected: &str| {
        let mut source = Watched::new(&sim, &batches(1));
        change(&mut source);
        let error = DeviceTable::new(Arc::new(source)).unwrap_err().to_string();
        let device = sim.id().to_string();
        assert!(
            error.contains(expected) && error.contains(&device),
            "{error}"
        );
    };
    let column = |name: &str, i| Arc::new(Column::new(name, i)) as Arc<dyn PhysicalExpr>;
    refused(
        &|source| source.partitioning = Some(Partitioning::Hash(vec![column("z", 7)], 1)),
        "no column z@7",
    );
    refused(
        &|source| {
            source.orderings = Vec::from_iter(LexOrdering::new([PhysicalSortExpr::new_default(
                column("a", 1),
            )]))
        },
        "no column a@1",
    );
    refused(
        &|source| {
            source.constraints = Some(Constraints::new_unverified(vec![Constraint::Unique(vec![
                0, 3,
            ])]))
        },
        "a constraint on column 3 of 3",
    );
    let of_columns = |change: fn(&mut Statistics)| {
        move |_| {
            let mut statistics = Statistics::new_unknown(&schema());
            change(&mut statistics);
            statistics
        }
    };
    refused(
        &|source| source.statistics = Box::new(of_columns(|s| s.column_statistics.truncate(2))),
        "statistics of 2 columns for a table of 3 columns",
    );
    refused(
        &|source| {
            source.statistics = Box::new(of_columns(|s| {
                s.column_statistics[1].max_value = Precision::Exact(ScalarValue::Int32(Some(9)));
            }));
        },
        "a max of type Int32 for column b of type Int64",
    );
}

/// All of it together, over three partitions.
#[tokio::test]
async fn values_are_the_hosts() {
    let sim = Sim::new();
    for sql in [
        "SELECT * FROM t WHERE a % 3 = 1",
        "SELECT b, max(a) AS a, count(s) AS s FROM t GROUP BY b",
        "SELECT x.a, y.s FROM t x JOIN t y ON x.a = y.b",
        "SELECT a, b FROM t ORDER BY b, a LIMIT 7",
        "SELECT count(*) AS n FROM t",
    ] {
        let (partitions, by) = hashed(3).await;
        let mut source = Watched::new(&sim, &partitions);
        source.partitioning = Some(by);
        source.support = |_| Exact;
        same_as_host(source.table(), &partitions, sql).await;
    }
    sim.assert_done();
}
