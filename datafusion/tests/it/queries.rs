//! Queries over tables on devices: their results are those over DataFusion's own table.

use std::sync::Arc;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::catalog::TableProvider;
use datafusion::physical_plan::collect;
use datafusion::prelude::SessionContext;

use crate::kit::*;
use crate::ops::lines;

/// The schema of a query over the table t, and its rows, sorted unless the query has an order.
pub(crate) async fn result(ctx: &SessionContext, sql: &str) -> (SchemaRef, Vec<String>) {
    let plan = plan(ctx, sql).await;
    let batches = collect(plan.clone(), ctx.task_ctx()).await.unwrap();
    let mut rows = lines(&batches);
    if !sql.rsplit(')').next().unwrap().contains("ORDER BY") {
        rows.sort_unstable();
    }
    (plan.schema(), rows)
}

/// Runs queries, one a line, over the table t on the host and over others, in so many partitions, with the rule and without.
pub(crate) async fn same_as_on_host(
    host: Arc<dyn TableProvider>,
    others: &[Arc<dyn TableProvider>],
    partitions: &[usize],
    queries: &str,
) {
    for &target in partitions {
        let reference = session_with(target, 0);
        register(&reference, "t", host.clone());
        for sql in queries.trim().lines().map(str::trim) {
            let expected = result(&reference, sql).await;
            for table in others {
                for ctx in [session_with(target, 0), session_without_rule(target)] {
                    register(&ctx, "t", table.clone());
                    let found = result(&ctx, sql).await;
                    assert_eq!(found, expected, "{sql}, {target} partitions");
                }
            }
        }
    }
}

const QUERIES: &str = "
    SELECT * FROM t
    SELECT a FROM t
    SELECT a FROM t LIMIT 3
    SELECT count(*) FROM t
    SELECT count(*) FROM (SELECT * FROM t LIMIT 3)
    SELECT sum(a), min(a), count(a) FROM t
    SELECT a, count(*) FROM t GROUP BY a ORDER BY a
    SELECT x.a FROM t x JOIN t y ON x.a = y.a ORDER BY x.a
    SELECT a FROM t UNION ALL SELECT a + 1 FROM t ORDER BY a
    SELECT a FROM t ORDER BY a
    SELECT a FROM t ORDER BY a DESC LIMIT 2 OFFSET 1
    SELECT a, row_number() OVER (ORDER BY a DESC) FROM t
    SELECT a, sum(a) OVER (PARTITION BY a % 2 ORDER BY a) FROM t
    SELECT count(*) FROM (SELECT a FROM t LIMIT 2 OFFSET 1)
";

/// Over a device's batches, and over readers.
#[tokio::test]
async fn tables_with_few_rows_or_none() {
    let empty = || numbers(0, 0);
    let few = |first| vec![empty(), numbers(first, 2), empty()];
    let tables: [Vec<Vec<RecordBatch>>; 5] = [
        vec![vec![numbers(0, 3), numbers(3, 1)], vec![numbers(1, 2)]],
        vec![vec![]],
        vec![vec![], vec![]],
        vec![vec![empty()]],
        vec![few(0), vec![], vec![empty()]],
    ];
    for partitions in tables {
        let sim = Sim::new();
        let schema = numbers(0, 1).schema();
        let table = datafusion::datasource::MemTable::try_new(schema.clone(), partitions.clone());
        let on_device = device_table_of(&sim, schema, &partitions);
        let n = partitions.len();
        let next = move |p: usize, i| partitions[p].get(i).cloned().map(Ok);
        // Each reader has a count of its own.
        let (readers, _) = readers_table(&sim, n, next);
        let others: [Arc<dyn TableProvider>; 2] = [on_device, readers];
        same_as_on_host(Arc::new(table.unwrap()), &others, &[1, 4], QUERIES).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_partitions() {
    let sim = Sim::new();
    let partitions: Vec<_> = (0..40).map(|i| batches(i * 64, i % 5)).collect();
    let rows: usize = partitions.iter().map(|p| row_count(p)).sum();
    let device = device_table(&sim, &partitions);
    let queries = "
        SELECT a FROM t
        SELECT a FROM t ORDER BY a
        SELECT sum(a) FROM t
    ";
    let others: [Arc<dyn TableProvider>; 1] = [device.clone()];
    same_as_on_host(host_table(&partitions), &others, &[8], queries).await;
    for doubles in [0, 2] {
        let ctx = session_with(8, doubles);
        register(&ctx, "t", device.clone());
        // A limit holds for all of them together.
        for limit in [0, 17, rows, rows + 1] {
            let sql = format!("SELECT a FROM t LIMIT {limit}");
            assert_eq!(numbers_in(&ctx, &sql).await.len(), limit.min(rows), "{sql}");
            let sql = format!("SELECT a FROM t LIMIT {limit} OFFSET 5");
            let expected = limit.min(rows - 5);
            assert_eq!(numbers_in(&ctx, &sql).await.len(), expected, "{sql}");
        }
    }
    drop((device, others));
    sim.assert_done();
}

#[tokio::test]
async fn a_table_of_no_partitions() {
    let sim = Sim::new();
    for ctx in [
        session_without_rule(1),
        session_with(4, 0),
        session_with(4, 2),
    ] {
        let table = device_table_of(&sim, numbers(0, 1).schema(), &[]);
        register(&ctx, "t", table);
        assert_eq!(numbers_in(&ctx, "SELECT a FROM t LIMIT 3").await, [0; 0]);
        assert_eq!(numbers_in(&ctx, "SELECT count(*) FROM t").await, [0]);
    }
}

#[tokio::test]
async fn operators_over_batches_without_rows() {
    let sim = Sim::new();
    let batches = [vec![
        numbers(0, 0),
        numbers(0, 2),
        numbers(2, 0),
        numbers(2, 1),
    ]];
    for child in [
        scan(host_table(&batches)).await,
        scan(device_table(&sim, &batches)).await,
    ] {
        let plan = with_transitions(double(double(child, &sim), &sim));
        assert_eq!(numbers_from(&plan).await, [0, 4, 8]);
    }
    sim.assert_done();
}
