//! What a source declares, and what DataFusion leaves out for it.

use datafusion::common::Constraint;
use datafusion::common::stats::Precision;
use datafusion::physical_plan::SortOrderPushdownResult::{Exact, Unsupported};

use super::batches;
use super::watched::{Watched, declaring};
use crate::kit::*;
use crate::nodes::*;
use crate::queries::result;

const UNBOUNDED: Boundedness = Boundedness::Unbounded {
    requires_infinite_memory: false,
};

/// The rows of [`batches`], each where DataFusion's repartition by column a puts it.
async fn hashed(partitions: usize) -> (Vec<Vec<RecordBatch>>, Partitioning) {
    let by = Partitioning::Hash(vec![col("a", &schema()).unwrap()], partitions);
    let input = scan(host_table(&batches(partitions))).await;
    let repartition = Arc::new(RepartitionExec::try_new(input, by.clone()).unwrap());
    let context = session().task_ctx();
    let found = collect_partitioned(repartition, context).await.unwrap();
    (found, by)
}

fn by(column: &str) -> LexOrdering {
    let by = PhysicalSortExpr::new(col(column, &schema()).unwrap(), Default::default());
    [by.nulls_last()].into()
}

fn count(plan: &Plan, node: &str) -> usize {
    shape(plan, &[]).matches(node).count()
}

#[tokio::test]
async fn declared_hash_partitioning_saves_repartitions() {
    let sim = Sim::new();
    let (partitions, by) = hashed(3).await;
    let unknown = Partitioning::UnknownPartitioning(3);
    for (sql, declared, undeclared) in [
        ("SELECT a, count(*), sum(b) FROM t GROUP BY a", 0, 1),
        ("SELECT t.a, u.s FROM t JOIN t u ON t.a = u.a", 0, 2),
        // Column a is not returned, so the rows of a group may be anywhere.
        ("SELECT b, count(*) AS n FROM t GROUP BY b", 1, 1),
    ] {
        for (partitioning, expected) in [(&by, declared), (&unknown, undeclared)] {
            let (table, _) = declaring(&sim, &partitions, |source| {
                source.partitioning = partitioning.clone();
            });
            let (device, host) = (session_with(3, 0), session_with(3, 0));
            // Not a join that collects one side.
            for option in [
                "prefer_hash_join = true",
                "hash_join_single_partition_threshold = 0",
                "hash_join_single_partition_threshold_rows = 0",
            ] {
                let set = format!("SET datafusion.optimizer.{option}");
                query(&device, &set).await.unwrap();
            }
            register(&device, "t", table);
            register(&host, "t", host_table(&partitions));
            let plan = plan(&device, sql).await;
            assert_eq!(count(&plan, "Repartition"), expected, "{plan:?}");
            assert_eq!(result(&device, sql).await, result(&host, sql).await);
        }
    }
    sim.assert_done();
}

#[tokio::test]
async fn explain_shows_what_is_declared() {
    let sim = Sim::new();
    let (partitions, hash) = hashed(2).await;
    let (table, _) = declaring(&sim, &partitions, |source| {
        source.partitioning = hash;
        source.orderings = vec![by("a")];
        source.support = |_| TableProviderFilterPushDown::Exact;
    });
    let ctx = session_with(2, 0);
    register(&ctx, "t", table);
    let plan = plan(&ctx, "SELECT s, a FROM t WHERE b > 2 ORDER BY a LIMIT 4").await;
    let expected = "DeviceScanExec: device=A, partitions=2, projection=[s, a], filters=[b@1 > 2], fetch=4, \
                    partitioning=Hash([a@1], 2), order=[a@1 ASC NULLS LAST]";
    says(&text(&plan, &[&sim]), &[expected]);
    let tree = "EXPLAIN FORMAT TREE SELECT a FROM t WHERE b > 2 LIMIT 4";
    let tree = pretty_format_batches(&query(&ctx, tree).await.unwrap()).unwrap();
    #[rustfmt::skip]
    says(&tree, &["partitions: 2", "projection: [a]", "filters: [b@1 > 2]", "fetch: 4"]);
}

#[tokio::test]
async fn a_declared_order_saves_the_sort() {
    let sim = Sim::new();
    for (partitions, declared) in [(1, true), (1, false), (3, true), (3, false)] {
        let (table, _) = declaring(&sim, &batches(partitions), |source| {
            source.orderings = Vec::from_iter(declared.then(|| by("a")));
        });
        let ctx = session_with(partitions, 0);
        register(&ctx, "t", table);
        let merges = usize::from(partitions > 1);
        let all = multiples(partitions as i64 * 48, 1);
        let some = multiples(20, 1);
        for (sql, sorts, expected) in [
            ("SELECT a FROM t ORDER BY a", !declared, all),
            ("SELECT a, s FROM t ORDER BY a LIMIT 20", !declared, some),
            // The declared order is of no use.
            ("SELECT b FROM t ORDER BY b LIMIT 3", true, vec![0; 3]),
        ] {
            let plan = plan(&ctx, sql).await;
            let text = text(&plan, &[]);
            assert_eq!(count(&plan, "Sort <"), usize::from(sorts), "{text}");
            assert_eq!(count(&plan, "SortPreservingMerge <"), merges, "{text}");
            let found = collect(plan, ctx.task_ctx()).await.unwrap();
            assert_eq!(numbers_of(&found), expected, "{sql}");
        }
    }
    sim.assert_done();
    // Asked directly, as `PushdownSort` does.
    let (table, _) = declaring(&sim, &batches(1), |source| source.orderings = vec![by("a")]);
    let scan = device_leaf(table).await;
    let own = scan.try_pushdown_sort(&by("a")).unwrap();
    let other = scan.try_pushdown_sort(&by("b")).unwrap();
    assert!(matches!((own, other), (Exact { .. }, Unsupported)));
}

/// Column b depends on the key a, so it may be selected beside a group by a.
#[tokio::test]
async fn constraints_reach_the_planner() {
    let sim = Sim::new();
    let key = |i| Constraints::new_unverified(vec![Constraint::PrimaryKey(vec![i])]);
    let sql = "SELECT a, b FROM t GROUP BY a";
    let undeclared = over(device_table(&sim, &batches(1)));
    fails(query(&undeclared, sql).await, &["t.b"]);
    let (table, _) = declaring(&sim, &batches(1), |source| {
        source.constraints = Some(key(0))
    });
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
    let (table, seen) = declaring(&sim, &batches(1), |source| source.boundedness = UNBOUNDED);
    let ctx = over(table);
    let found = numbers_in(&ctx, "SELECT a FROM t WHERE b = 3 LIMIT 12").await;
    assert_eq!(found, [3, 13, 23, 33, 43, 3, 13, 23, 33, 43, 3, 13]);
    assert!(seen.uploaded().len() < 20);
    let plan = plan(&ctx, "SELECT a FROM t").await;
    says(&text(&plan, &[]), &[", unbounded"]);
    let sorted = ctx.sql("SELECT a FROM t ORDER BY a").await.unwrap();
    fails(sorted.create_physical_plan().await, &["pipeline breaking"]);
}

/// Rows do not wait for others that may never come.
#[tokio::test]
async fn batches_of_an_unbounded_source_are_not_joined() {
    let sim = Sim::new();
    let (table, seen) = declaring(&sim, &[vec![rows(0, 4)]], |source| {
        source.boundedness = UNBOUNDED;
    });
    let plan = joining(device_leaf(table).await, &sim, 1000);
    let node = DeviceExec::of(&plan).unwrap();
    let mut stream = node.execute_device(0, session().task_ctx()).unwrap();
    for asked in 1..=3 {
        assert_eq!(stream.next().await.unwrap().unwrap().num_rows(), 4);
        assert_eq!(seen.uploaded().len(), asked);
    }
}

/// A declaration that does not fit the schema is refused before anything is planned with it.
#[test]
fn wrong_declarations_are_refused() {
    let sim = Sim::new();
    let device = sim.id().to_string();
    let column = |name: &str, i| Arc::new(Column::new(name, i)) as Arc<dyn PhysicalExpr>;
    let refused = |expected: &str, declare: &dyn Fn(&mut Watched)| {
        let mut source = Watched::new(&sim, &batches(1));
        declare(&mut source);
        fails(DeviceTable::new(Arc::new(source)), &[expected, &device]);
    };
    refused("no column z@7", &|source| {
        source.partitioning = Partitioning::Hash(vec![column("z", 7)], 1);
    });
    refused("no column a@1", &|source| {
        source.orderings = vec![[PhysicalSortExpr::new_default(column("a", 1))].into()];
    });
    refused("a constraint on column 3 of 3", &|source| {
        let unique = Constraint::Unique(vec![0, 3]);
        source.constraints = Some(Constraints::new_unverified(vec![unique]));
    });
    let text = "statistics of 2 columns for a table of 3 columns";
    refused(text, &|source| {
        source.statistics[0].column_statistics.truncate(2);
    });
    let text = "a max of type Int32 for column b of type Int64";
    refused(text, &|source| {
        let max = Precision::Exact(ScalarValue::Int32(Some(9)));
        source.statistics[1].column_statistics[1].max_value = max;
    });
}
