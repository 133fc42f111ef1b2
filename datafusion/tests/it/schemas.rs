//! Schemas: DataFusion's streams may differ from their plan in what may be null.

use std::sync::Arc;

use datafusion::arrow::array::{Int64Array, RecordBatch, StringArray};
use datafusion::arrow::datatypes::{DataType, Field, Schema};
use datafusion::datasource::MemTable;

use crate::kit::*;

/// One column of numbers that may be null, and none is.
fn nullable(first: i64, rows: usize) -> RecordBatch {
    let field = Field::new("a", DataType::Int64, true);
    let column = Int64Array::from_iter_values(first..first + rows as i64);
    RecordBatch::try_new(Arc::new(Schema::new(vec![field])), vec![Arc::new(column)]).unwrap()
}

/// Plans of a column that may be null, with batches that say no: a union, a table, and a stream, which DataFusion does not look at.
#[tokio::test]
async fn batches_that_may_not_hold_nulls_of_plans_that_may() {
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
}

/// What fits gets the stream's schema, and the rest is an error.
#[tokio::test]
async fn a_stream_that_does_not_keep_to_its_schema() {
    let sim = Sim::new();
    let names = || {
        let names = StringArray::from(vec!["a", "b"]);
        RecordBatch::try_from_iter([("a", Arc::new(names) as _)]).unwrap()
    };
    let (table, _) = host_stream(move |i| (i < 2).then(|| Ok(names())));
    let plan = with_transitions(double(scan(table).await, &sim));
    fails(run(&plan).await, &["column types must match"]);
}
