//! Queries over tables on devices: their results are those over DataFusion's own table.

use crate::kit::*;

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
        let table = MemTable::try_new(schema.clone(), partitions.clone());
        let on_device = device_table_of(&sim, schema, &partitions);
        let n = partitions.len();
        let next = move |p: usize, i| partitions[p].get(i).cloned().map(Ok);
        // Each reader has a count of its own.
        let (readers, ..) = readers_table(&sim, n, next);
        let others: [Arc<dyn TableProvider>; 2] = [on_device, readers];
        let queries = include_str!("../queries/few_rows.sql");
        same_as_on_host(Arc::new(table.unwrap()), &others, &[1, 4], queries).await;
    }
}

#[tokio::test]
async fn operators_over_batches_without_rows() {
    let sim = Sim::new();
    let sizes = [(0, 0), (0, 2), (2, 0), (2, 1)];
    let batches = [sizes.map(|(first, rows)| numbers(first, rows)).to_vec()];
    let there = scan(device_table(&sim, &batches)).await;
    for child in [scan(host_table(&batches)).await, there] {
        let plan = with_transitions(double(double(child, &sim), &sim));
        assert_eq!(numbers_from(&plan).await, [0, 4, 8]);
    }
    // In no partition at all.
    for ctx in [session_without_rule(1), session_with(4, 2)] {
        let table = device_table_of(&sim, numbers(0, 1).schema(), &[]);
        register(&ctx, "t", table);
        assert_eq!(numbers_in(&ctx, "SELECT a FROM t LIMIT 3").await, [0; 0]);
        assert_eq!(numbers_in(&ctx, "SELECT count(*) FROM t").await, [0]);
    }
    sim.assert_done();
}

/// No column moves for them, though the number of rows is known to nobody.
#[tokio::test]
async fn rows_without_columns_are_counted() {
    let sim = Sim::new();
    let ctx = over(reader_table(&sim, |i| (i < 5).then(|| Ok(numbers(0, 16)))).0);
    let counting = plan(&ctx, "SELECT count(*) FROM t").await;
    says(&text(&counting, &[&sim]), &["projection=[]"]);
    let before = sim.stats();
    assert_eq!(numbers_in(&ctx, "SELECT count(*) FROM t").await, [80]);
    assert_eq!(sim.stats().since(&before).bytes_to_host, 0);
    // A table that has none.
    let schema = Arc::new(Schema::empty());
    let batch = |n| DeviceRecordBatch::try_new_with_rows(&sim, schema.clone(), &[], n).unwrap();
    let partitions = vec![vec![batch(3), batch(0)], vec![batch(4)]];
    let table = DeviceTable::from_batches(schema.clone(), sim.device.clone(), partitions);
    let ctx = over(Arc::new(table.unwrap()));
    assert_eq!(numbers_in(&ctx, "SELECT count(*) FROM t").await, [7]);
    assert_eq!(numbers_in(&ctx, "SELECT 1 FROM t").await, [1; 7]);
    assert_eq!(numbers_in(&ctx, "SELECT 1 FROM t LIMIT 5").await, [1; 5]);
}

/// Columns named twice are not all columns, though there may be as many.
#[tokio::test]
async fn columns_in_any_order_and_twice() {
    let sim = Sim::new();
    let table = device_table(&sim, &[vec![rows(0, 3)]]);
    for projection in [&[2, 0][..], &[1], &[2, 1, 0], &[], &[0, 0], &[0, 0, 1]] {
        let expected = rows(0, 3).project(projection).unwrap();
        let node = table.scan_on_device(Some(projection), None).unwrap();
        let plan = with_transitions(Arc::new(DeviceExec::from(node)));
        assert_eq!(run(&plan).await.unwrap(), [expected]);
    }
    assert!(table.scan_on_device(Some(&[3]), None).is_err());
}

/// One column of numbers that may be null, and none is.
fn nullable(first: i64, rows: usize) -> RecordBatch {
    let field = Field::new("a", DataType::Int64, true);
    let column = Int64Array::from_iter_values(first..first + rows as i64);
    RecordBatch::try_new(Arc::new(Schema::new(vec![field])), vec![Arc::new(column)]).unwrap()
}

/// Plans of a column that may be null, with batches that say no: a union, a table, and a stream, which DataFusion does not look at.
/// What fits gets the plan's schema, and the rest is an error.
#[tokio::test]
async fn batches_of_other_schemas_than_their_plans() {
    let sim = Sim::new();
    let ctx = session();
    register(&ctx, "t", host_table(&[vec![numbers(0, 16)]]));
    register(&ctx, "u", host_table(&[vec![nullable(16, 16)]]));
    let union = plan(&ctx, "SELECT a FROM t UNION ALL SELECT a FROM u").await;
    let partition = vec![numbers(0, 16), nullable(16, 16)];
    let table = MemTable::try_new(nullable(0, 1).schema(), vec![partition]);
    let table = scan(Arc::new(table.unwrap())).await;
    let (stream, _) = host_stream(|i| (i < 2).then(|| Ok(nullable(i as i64 * 16, 16))));
    for plan in [union, table, scan(stream).await] {
        let doubled = with_transitions(double(plan.clone(), &sim));
        let found = sorted(numbers_from(&doubled).await);
        assert_eq!(found, multiples(32, 2));
        let batches = on_device(&plan, &sim).await.unwrap();
        assert_eq!(sorted(numbers_on(&batches)), multiples(32, 1));
        for batch in batches {
            assert_eq!(batch.schema().fields(), plan.schema().fields());
        }
        // Through the C stream.
        let reader = reader(export(plan, session().task_ctx(), &sim), &sim);
        let batches = tokio::task::spawn_blocking(|| reader.collect::<Result<Vec<_>, _>>());
        let batches = batches.await.unwrap().unwrap();
        assert_eq!(sorted(numbers_on(&batches)), multiples(32, 1));
    }
    let names = StringArray::from(vec!["a", "b"]);
    let names = RecordBatch::try_from_iter([("a", Arc::new(names) as _)]).unwrap();
    let (table, _) = host_stream(move |i| (i < 2).then(|| Ok(names.clone())));
    let plan = with_transitions(double(scan(table).await, &sim));
    fails(run(&plan).await, &["column types must match"]);
}
