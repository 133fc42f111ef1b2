//! Schemas: DataFusion's streams may differ from their plan in what may be null.

use std::sync::Arc;

use arrow_device::{
    DeviceRecordBatchStreamReader, Devices, ExportOptions, ImportOptions, SyncPolicy,
};
use arrow_device_datafusion::{execute_on_device, export_plan};
use datafusion::arrow::array::{Int64Array, RecordBatch, StringArray};
use datafusion::arrow::datatypes::{DataType, Field, Schema};
use datafusion::datasource::MemTable;
use datafusion::physical_plan::collect;
use futures::TryStreamExt;

use crate::kit::*;

/// One column of numbers that may be null, and none is.
fn nullable(first: i64, rows: usize) -> RecordBatch {
    let field = Field::new("a", DataType::Int64, true);
    let column = Int64Array::from_iter_values(first..first + rows as i64);
    RecordBatch::try_new(Arc::new(Schema::new(vec![field])), vec![Arc::new(column)]).unwrap()
}

/// A union of a column that cannot be null and one that may: the union may, and the first one's
/// batches say no.
async fn union() -> Plan {
    let ctx = session();
    register(&ctx, "t", host_table(&[vec![numbers(0, 16)]]));
    register(&ctx, "u", host_table(&[vec![nullable(16, 16)]]));
    let plan = plan(&ctx, "SELECT a FROM t UNION ALL SELECT a FROM u").await;
    assert!(plan.schema().field(0).is_nullable());
    plan
}

#[tokio::test]
async fn an_operator_over_a_union() {
    let sim = Sim::new();
    let plan = with_transitions(double(union().await, &sim));
    let batches = collect(plan, session().task_ctx()).await.unwrap();
    let expected: Vec<i64> = (0..32).map(|i| i * 2).collect();
    assert_eq!(sorted(numbers_of(&batches)), expected);
}

#[tokio::test]
async fn a_union_as_a_device_stream() {
    let sim = Sim::new();
    let plan = union().await;
    let schema = plan.schema();
    let stream = execute_on_device(plan, session().task_ctx(), &sim).unwrap();
    let batches: Vec<_> = stream.try_collect().await.unwrap();
    assert_eq!(batches.len(), 2);
    for batch in batches {
        assert_eq!(batch.schema().fields(), schema.fields());
    }
}

/// Rows that a consumer of the C stream gets.
async fn exported(plan: Plan, sim: &Sim) -> usize {
    let options = ExportOptions::new(SyncPolicy::Event);
    let stream = export_plan(plan, session().task_ctx(), sim, options).unwrap();
    let devices = Devices::new();
    devices.add(sim.device.clone()).unwrap();
    let options = ImportOptions::default().with_devices(devices);
    // SAFETY: the stream is this crate's.
    let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, options) }.unwrap();
    let batches = tokio::task::spawn_blocking(|| reader.collect::<Result<Vec<_>, _>>());
    let batches = batches.await.unwrap().unwrap();
    batches.iter().map(|batch| batch.num_rows()).sum()
}

#[tokio::test]
async fn a_union_as_a_c_stream() {
    assert_eq!(exported(union().await, &Sim::new()).await, 32);
}

#[tokio::test]
async fn a_table_that_may_hold_nulls_of_batches_that_may_not() {
    let sim = Sim::new();
    let schema = nullable(0, 1).schema();
    let partition = vec![numbers(0, 16), nullable(16, 16)];
    let table = Arc::new(MemTable::try_new(schema, vec![partition]).unwrap());
    let host = scan(table).await;
    let batches = collect(host.clone(), session().task_ctx()).await.unwrap();
    assert_eq!(numbers_of(&batches).len(), 32);
    let plan = with_transitions(double(host, &sim));
    let batches = collect(plan, session().task_ctx()).await.unwrap();
    assert_eq!(numbers_of(&batches).len(), 32);
}

#[tokio::test]
async fn the_same_table_as_a_c_stream() {
    let schema = nullable(0, 1).schema();
    let partition = vec![numbers(0, 16), nullable(16, 16)];
    let table = Arc::new(MemTable::try_new(schema, vec![partition]).unwrap());
    assert_eq!(exported(scan(table).await, &Sim::new()).await, 32);
}

/// All batches of a stream have its schema, says DataFusion, and does not look. Here what fits gets
/// it, and the rest is an error.
#[tokio::test]
async fn a_stream_that_does_not_keep_to_its_schema() {
    let sim = Sim::new();
    let host = async || scan(host_stream(|i| (i < 2).then(|| Ok(nullable(0, 16)))).0).await;
    let plan = with_transitions(double(host().await, &sim));
    let batches = collect(plan, session().task_ctx()).await.unwrap();
    assert_eq!(numbers_of(&batches).len(), 32);
    let names = || -> RecordBatch {
        let names = StringArray::from(vec!["a", "b"]);
        RecordBatch::try_from_iter([("a", Arc::new(names) as _)]).unwrap()
    };
    let host = scan(host_stream(move |i| (i < 2).then(|| Ok(names()))).0).await;
    let plan = with_transitions(double(host, &sim));
    let error = collect(plan, session().task_ctx()).await.unwrap_err();
    assert!(
        error.to_string().contains("column types must match"),
        "{error}"
    );
}

/// The node itself, which no rule has put a transition above.
#[tokio::test]
async fn a_device_node_gives_host_batches_to_who_asks() {
    let sim = Sim::new();
    let scan = scan(device_table(&sim, &[vec![numbers(0, 16)]])).await;
    let node = double(scan.children()[0].clone(), &sim);
    assert_eq!(node.name(), "MapExec");
    let stream = node.execute(0, session().task_ctx()).unwrap();
    let batches: Vec<_> = stream.try_collect().await.unwrap();
    let expected: Vec<i64> = (0..16).map(|i| i * 2).collect();
    assert_eq!(numbers_of(&batches), expected);
}
