//! Small host batches, which are joined before they are uploaded.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll, Waker};

use arrow_device::DeviceRecordBatch;
use arrow_device_datafusion::{DeviceOptions, execute_on_device};
use datafusion::arrow::array::{
    Array, ArrayRef, Int32Array, NullArray, RecordBatch, StringArray, StructArray,
};
use datafusion::arrow::datatypes::{DataType, Field, Schema};
use datafusion::arrow::error::ArrowError;
use datafusion::common::DataFusionError;
use datafusion::execution::TaskContext;
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::StreamExt;

use crate::kit::*;
use crate::nodes::{down, on_host, up};
use crate::ops::no_columns;
use crate::support::compare::assert_same_batch;
use crate::support::r#gen::{Nulls, batch};
use crate::support::types::all_types;

type Given = Result<RecordBatch, ArrowError>;

/// What comes up of a host plan that gives these batches, in a session that joins them to so many rows.
async fn uploaded(
    given: Vec<Given>,
    rows: usize,
    sim: &Sim,
) -> Vec<arrow_device::Result<DeviceRecordBatch>> {
    let schema = given.iter().flatten().next().unwrap().schema();
    let next = move |i: usize| match given.get(i)? {
        Ok(batch) => Some(Ok(batch.clone())),
        Err(e) => {
            let e = ArrowError::ParseError(e.to_string());
            Some(Err(DataFusionError::ArrowError(Box::new(e), None)))
        }
    };
    let host = scan(host_stream_of(schema, next).0).await;
    let stream = execute_on_device(host, context(rows), sim).unwrap();
    stream.collect().await
}

/// The same, all of which must come, back on the host.
async fn back(given: &[RecordBatch], rows: usize, sim: &Sim) -> Vec<RecordBatch> {
    let given = given.iter().cloned().map(Ok).collect();
    let up = uploaded(given, rows, sim).await.into_iter();
    up.map(|batch| batch.unwrap().to_host().unwrap()).collect()
}

fn context(rows: usize) -> Arc<TaskContext> {
    let config = SessionConfig::new().with_option_extension(joined_to(rows));
    SessionContext::new_with_config(config).task_ctx()
}

/// A session whose uploads wait no longer than by default.
fn impatient() -> Arc<TaskContext> {
    let config = SessionConfig::new().with_option_extension(DeviceOptions::default());
    SessionContext::new_with_config(config).task_ctx()
}

/// The sizes of what comes up.
async fn sizes(given: &[RecordBatch], rows: usize) -> Vec<usize> {
    let up = back(given, rows, &Sim::new()).await;
    up.iter().map(RecordBatch::num_rows).collect()
}

fn ints(rows: usize) -> RecordBatch {
    let values: ArrayRef = Arc::new(Int32Array::from_iter_values(0..rows as i32));
    RecordBatch::try_from_iter([("i", values)]).unwrap()
}

/// Every type: whole batches and slices, with and without nulls.
#[tokio::test]
async fn values_are_those_of_the_parts() {
    let sim = Sim::new();
    let sizes = [7, 1, 30, 5];
    let nulls = [Nulls::Some, Nulls::None, Nulls::Some, Nulls::All];
    let mut joined_types = 0;
    for (name, data_type) in all_types() {
        let types = [data_type.clone(), DataType::Int32];
        let part = |i: usize| {
            let rows = sizes[i];
            batch(&types, rows + 4, nulls[i], i as u64 + 1).slice(3, rows)
        };
        let parts: Vec<_> = (0..4).map(part).collect();
        let up = back(&parts, 1000, &sim).await;
        if up.len() == 4 {
            for (part, up) in parts.iter().zip(&up) {
                assert_same_batch(part, up, &name);
            }
            continue;
        }
        let data_type = format!("{data_type:?}");
        let fails_at_times = ["Dictionary", "RunEndEncoded"];
        assert!(!fails_at_times.iter().any(|kind| data_type.contains(kind)));
        joined_types += 1;
        assert_eq!((up.len(), up[0].num_rows()), (1, 43), "{name}");
        let mut first = 0;
        for (i, part) in parts.iter().enumerate() {
            let rows = up[0].slice(first, part.num_rows());
            assert_same_batch(part, &rows, format!("{name}, part {i}"));
            first += part.num_rows();
        }
    }
    assert!(joined_types > 30, "{joined_types} types");
}

#[tokio::test]
async fn where_batches_end() {
    let list = |nullable| DataType::List(Arc::new(Field::new("item", DataType::Int32, nullable)));
    for (given, target, expected) in [
        // They are not cut.
        (&[3, 3, 3, 3, 3][..], 8, &[6, 6, 3][..]),
        // Half is not small.
        (&[4, 4, 4], 8, &[4, 4, 4]),
        // Large ones pass.
        (&[3, 20, 3, 3], 8, &[3, 20, 6]),
        (&[3, 3, 20], 8, &[6, 20]),
        // No empty ones.
        (&[0, 3, 0, 0, 2, 0], 8, &[5]),
        (&[0, 0], 8, &[]),
        // Nothing is joined.
        (&[2, 0, 2], 1, &[2, 0, 2]),
    ] {
        let given: Vec<_> = given.iter().map(|rows| ints(*rows)).collect();
        assert_eq!(sizes(&given, target).await, expected);
    }
    assert_eq!(sizes(&[no_columns(5), no_columns(5)], 100).await, [10]);
    // arrow-rs lets a column's type differ from its schema's in what nested fields may be null.
    let schema = |nullable| Arc::new(Schema::new(vec![Field::new("l", list(nullable), true)]));
    let made = |nullable| {
        let batch = batch(&[list(nullable)], 5, Nulls::None, 3);
        let batch = RecordBatch::try_new(schema(nullable), batch.columns().to_vec());
        batch.unwrap().with_schema(schema(true)).unwrap()
    };
    let given = [true, true, false, true].map(made);
    assert_eq!(sizes(&given, 100).await, [10, 5, 5]);
    // Batches of much text stay as they are: they could be more than one array holds.
    let text = |bytes: usize| {
        let text: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(bytes)]));
        RecordBatch::try_from_iter([("t", text)]).unwrap()
    };
    let (wide, wider) = (text(9 << 20), text(17 << 20));
    let given = [wide.clone(), wide.clone(), wider, wide];
    assert_eq!(sizes(&given, 100).await, [1, 1, 1, 1]);
}

/// What passes is not copied on the host, and nothing is lost or out of order.
#[tokio::test]
async fn rows_keep_their_order() {
    let given = [3, 1, 20, 2, 2, 2, 9, 1];
    let given = given.iter().scan(0, |first, rows| {
        *first += *rows as i64;
        Some(numbers(*first - *rows as i64, *rows))
    });
    let up = back(&given.collect::<Vec<_>>(), 8, &Sim::new()).await;
    assert_eq!(numbers_of(&up), multiples(40, 1));
}

/// A batch of another schema is an error, too, after the rows before it.
#[tokio::test]
async fn errors_and_other_schemas_keep_their_place() {
    let text: ArrayRef = Arc::new(StringArray::from(vec!["x"]));
    let other = RecordBatch::try_from_iter([("t", text)]);
    let error = Err(ArrowError::ParseError("line 7".into()));
    for (item, says) in [(error, "line 7"), (other, "column types must match")] {
        let given = vec![Ok(ints(2)), Ok(ints(3)), item, Ok(ints(4))];
        let mut up = uploaded(given, 100, &Sim::new()).await;
        fails(up.pop().unwrap(), &[says]);
        assert_eq!((up.len(), up[0].as_ref().unwrap().num_rows()), (1, 5));
    }
}

/// A plan that has ended is not asked again.
#[tokio::test]
async fn the_end_is_the_end() {
    let (table, asked) = host_stream(|i| (i == 0).then(|| Ok(numbers(0, 2))));
    let host = scan(table).await;
    let mut stream = execute_on_device(host, context(100), &Sim::new()).unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap().num_rows(), 2);
    for _ in 0..2 {
        assert!(stream.next().await.is_none());
    }
    assert_eq!(asked.load(SeqCst), 2);
}

/// One allocation where there were many.
#[tokio::test]
async fn one_upload_for_many_batches() {
    let sim = Sim::new();
    let before = sim.stats();
    let up = uploaded((0..100).map(|_| Ok(ints(50))).collect(), 1000, &sim).await;
    let cost = sim.stats().since(&before);
    assert_eq!((cost.allocations, up.len()), (5, 5));
    drop(up);
    sim.assert_done();
}

/// A plan without an end gives what it has.
#[tokio::test]
async fn nothing_waits_in_an_unbounded_plan() {
    let table = stream_table(numbers(0, 1).schema(), || {
        let first = futures::stream::iter([Ok(numbers(0, 2))]);
        first.chain(futures::stream::pending())
    });
    let host = scan(Arc::new(table.with_infinite_table(true))).await;
    let mut stream = execute_on_device(host, context(100), &Sim::new()).unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap().num_rows(), 2);
    let mut cx = Context::from_waker(Waker::noop());
    assert!(matches!(stream.poll_next_unpin(&mut cx), Poll::Pending));
}

/// The same where the plan may end: what has waited goes up without more.
#[tokio::test]
async fn rows_wait_a_while_for_more() {
    let table = stream_table(numbers(0, 1).schema(), || {
        let first = futures::stream::iter([Ok(numbers(0, 2))]);
        first.chain(futures::stream::pending())
    });
    let host = scan(Arc::new(table)).await;
    let mut stream = execute_on_device(host, impatient(), &Sim::new()).unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap().num_rows(), 2);
}

/// An input that is always ready, and slow.
#[tokio::test]
async fn slow_rows_go_up_before_they_are_many() {
    let (table, asked) = host_stream(|i| {
        std::thread::sleep(std::time::Duration::from_millis(2));
        Some(Ok(numbers(i as i64, 1)))
    });
    let host = scan(table).await;
    let mut stream = execute_on_device(host, impatient(), &Sim::new()).unwrap();
    let first = stream.next().await.unwrap().unwrap().num_rows();
    assert!(first > 1 && asked.load(SeqCst) < 10_000, "{first} rows");
}

/// DataFusion's placeholder for a row has columns of nulls, whatever its schema says.
#[tokio::test]
async fn nulls_without_a_type_take_the_plans() {
    for (nullable, null_count) in [(true, 3), (false, 0)] {
        let fields = vec![
            Field::new("a", DataType::Int64, nullable),
            Field::new("b", DataType::Utf8, nullable),
        ];
        let schema = Arc::new(Schema::new(fields));
        let nulls = Arc::new(NullArray::new(3)) as ArrayRef;
        let nulls = RecordBatch::try_from_iter([("a", nulls.clone()), ("b", nulls)]).unwrap();
        let (table, _) =
            host_stream_of(schema.clone(), move |i| (i == 0).then(|| Ok(nulls.clone())));
        let stream = execute_on_device(scan(table).await, context(100), &Sim::new()).unwrap();
        let up: Vec<_> = stream.collect().await;
        let up = up[0].as_ref().unwrap().to_host().unwrap();
        assert_eq!(up.schema(), schema);
        assert!(
            up.columns()
                .iter()
                .all(|c| c.null_count() == null_count && c.len() == 3)
        );
    }
}

/// Of an aggregate's states, DataFusion's `percentile_cont` reads one of each batch.
#[tokio::test]
async fn states_of_aggregates_are_not_joined() {
    let config = SessionConfig::new().with_target_partitions(4);
    let ctx = SessionContext::new_with_config(config.with_batch_size(10));
    let rows = (0..10).map(|i| numbers(i * 10, 10)).collect::<Vec<_>>();
    let parts: Vec<_> = rows.chunks(3).map(<[_]>::to_vec).collect();
    ctx.register_table("t", host_table(&parts)).unwrap();
    let sql = "SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY a) FROM t";
    let mut node = plan(&ctx, sql).await;
    while node.name() != "CoalescePartitionsExec" {
        node = node.children()[0].clone();
    }
    // What has come down from a device is what it was.
    let again = on_host(down(up(node.children()[0].clone(), &Sim::new())));
    for states in [node, again] {
        let stream = execute_on_device(states, ctx.task_ctx(), &Sim::new()).unwrap();
        let up: Vec<_> = stream.collect().await;
        let sizes: Vec<_> = up
            .iter()
            .map(|up| up.as_ref().unwrap().num_rows())
            .collect();
        assert_eq!(sizes, [1; 4]);
    }
}

/// What comes down has the batch size of the session, whatever is on the device.
#[tokio::test]
async fn what_comes_down_has_the_batch_size() {
    let sim = Sim::new();
    let ctx = over(device_table(&sim, &[vec![numbers(0, 100)]]));
    let down = ctx
        .sql("SELECT a FROM t")
        .await
        .unwrap()
        .collect()
        .await
        .unwrap();
    let sizes: Vec<_> = down.iter().map(RecordBatch::num_rows).collect();
    assert_eq!(
        (sizes, numbers_of(&down)),
        (vec![32, 32, 32, 4], multiples(100, 1))
    );
}

/// Rows of which nothing is null fit columns that may be, within structs as well.
#[test]
fn rows_without_nulls_fit_what_may_be_null() {
    let structs = |nullable| {
        let fields: Vec<_> = vec![Field::new("x", DataType::Int32, nullable)];
        let ints = Arc::new(Int32Array::from(vec![1, 2])) as ArrayRef;
        let column = StructArray::new(fields.into(), vec![ints], None);
        let field = Field::new("s", column.data_type().clone(), nullable);
        let schema = Arc::new(Schema::new(vec![field]));
        RecordBatch::try_new(schema, vec![Arc::new(column)]).unwrap()
    };
    let sim = Sim::new();
    device_table_of(&sim, structs(true).schema(), &[vec![structs(false)]]);
    device_table_of(&sim, structs(false).schema(), &[vec![structs(true)]]);
}
