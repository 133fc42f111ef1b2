//! UPDATE, DELETE and DEFAULT, as DataFusion's own table in memory has them.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_device_datafusion::DeviceTable;
use datafusion::arrow::array::{ArrayRef, Int32Array, RecordBatch, StringArray};
use datafusion::arrow::datatypes::{DataType, Field, Schema};
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::catalog::MemTable;
use datafusion::prelude::{SessionContext, lit};

use crate::kit::*;

fn batch(ids: &[i32], texts: &[Option<&str>]) -> RecordBatch {
    let schema = Schema::new(vec![
        Field::new("a", DataType::Int32, false),
        Field::new("b", DataType::Utf8, true),
    ]);
    let ids = Arc::new(Int32Array::from(ids.to_vec())) as ArrayRef;
    let texts = Arc::new(StringArray::from(texts.to_vec()));
    RecordBatch::try_new(Arc::new(schema), vec![ids, texts]).unwrap()
}

/// The rows of a statement as text, or its error.
async fn outcome(ctx: &SessionContext, sql: &str) -> String {
    let run = async { ctx.sql(sql).await?.collect().await };
    match run.await {
        Ok(batches) => pretty_format_batches(&batches).unwrap().to_string(),
        Err(e) => e.strip_backtrace(),
    }
}

#[tokio::test]
async fn statements_do_what_they_do_to_a_table_in_memory() {
    let parts = [
        vec![
            batch(&[1, 2, 3], &[Some("x"), None, Some("z")]),
            batch(&[4], &[None]),
        ],
        vec![batch(&[5, 6], &[Some("x"), Some("y")])],
        vec![],
    ];
    let schema = parts[0][0].schema();
    let defaults = HashMap::from([("a".to_owned(), lit(7))]);
    let host = MemTable::try_new(schema.clone(), parts.to_vec()).unwrap();
    let host = host.with_column_defaults(defaults.clone());
    let sim = Sim::new();
    let on_device = DeviceTable::clone(&*device_table_of(&sim, schema, &parts));
    let on_device = on_device.with_column_defaults(defaults);
    let (plain, device) = (session_with(2, 0), session_with(2, 0));
    register(&plain, "t", Arc::new(host));
    register(&device, "t", Arc::new(on_device));
    for sql in [
        "INSERT INTO t(b) VALUES ('default')",
        "UPDATE t SET b = upper(b), a = a + 10 WHERE a > 2",
        "DELETE FROM t WHERE b IS NULL",
        "DELETE FROM t WHERE b = 'nothing'",
        "UPDATE t SET b = 'all'",
        "UPDATE t SET a = NULL WHERE a = 1",
        "UPDATE t SET a = 1 / 0 WHERE a = 1",
        "UPDATE t SET nothing = 1",
        "DELETE FROM t WHERE nothing = 1",
        "DELETE FROM t",
        "INSERT INTO t VALUES (9, 'again')",
    ] {
        let (expected, found) = (outcome(&plain, sql).await, outcome(&device, sql).await);
        assert_eq!(found, expected, "{sql}");
        let all = "SELECT * FROM t ORDER BY a, b";
        let (expected, found) = (outcome(&plain, all).await, outcome(&device, all).await);
        assert_eq!(found, expected, "after {sql}");
    }
    drop(device);
    sim.assert_done();
}

/// A query keeps the rows that it was planned with.
#[tokio::test]
async fn a_planned_query_does_not_change() {
    let sim = Sim::new();
    let ctx = over(device_table(&sim, &[vec![numbers(0, 10)]]));
    let before = plan(&ctx, "SELECT a FROM t").await;
    query(&ctx, "DELETE FROM t WHERE a < 5").await.unwrap();
    let found = datafusion::physical_plan::collect(before, ctx.task_ctx()).await;
    assert_eq!(numbers_of(&found.unwrap()), multiples(10, 1));
    assert_eq!(numbers_in(&ctx, "SELECT a FROM t").await, [5, 6, 7, 8, 9]);
}

#[tokio::test]
async fn rows_that_cannot_change_are_refused() {
    let sim = Sim::new();
    let (reader, _) = reader_table(&sim, |i| (i == 0).then(|| Ok(numbers(0, 2))));
    let ctx = over(reader);
    fails(
        query(&ctx, "UPDATE t SET a = 1").await,
        &["the source", "does not support UPDATE"],
    );
}
