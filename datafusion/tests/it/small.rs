//! Small host batches, which are joined before they are uploaded.

use std::sync::Arc;
use std::task::{Context, Poll};

use arrow_device::DeviceRecordBatch;
use arrow_device_datafusion::execute_on_device;
use datafusion::arrow::array::{
    ArrayRef, Int32Array, RecordBatch, RecordBatchOptions, StringArray,
};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::arrow::error::ArrowError;
use datafusion::catalog::streaming::StreamingTable;
use datafusion::common::DataFusionError;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::PartitionStream;
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::StreamExt;

use crate::kit::*;
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

fn context(rows: usize) -> Arc<TaskContext> {
    let config = SessionConfig::new().with_option_extension(joined_to(rows));
    SessionContext::new_with_config(config).task_ctx()
}

/// The sizes of what comes up.
async fn sizes(given: Vec<Given>, rows: usize) -> Vec<usize> {
    let batches = uploaded(given, rows, &Sim::new()).await;
    batches
        .iter()
        .map(|b| b.as_ref().unwrap().num_rows())
        .collect()
}

fn ints(rows: usize) -> RecordBatch {
    let values: ArrayRef = Arc::new(Int32Array::from_iter_values(0..rows as i32));
    RecordBatch::try_from_iter([("i", values)]).unwrap()
}

/// Every type: whole batches and slices, with and without nulls.
#[tokio::test]
async fn values_are_those_of_the_parts() {
    let sim = Sim::new();
    let mut joined_types = 0;
    for (name, data_type) in all_types() {
        let types = [data_type.clone(), DataType::Int32];
        let parts: Vec<_> = [
            (7, Nulls::Some),
            (1, Nulls::None),
            (30, Nulls::Some),
            (5, Nulls::All),
        ]
        .into_iter()
        .zip(1..)
        .map(|((rows, nulls), seed)| batch(&types, rows + 4, nulls, seed).slice(3, rows))
        .collect();
        let given = parts.iter().cloned().map(Ok).collect();
        let up: Vec<_> = uploaded(given, 1000, &sim).await;
        let up: Vec<_> = up
            .into_iter()
            .map(|batch| batch.unwrap().to_host().unwrap())
            .collect();
        let fails_at_times = ["Dictionary", "RunEndEncoded"]
            .iter()
            .any(|kind| format!("{data_type:?}").contains(kind));
        if up.len() == 4 {
            for (part, up) in parts.iter().zip(&up) {
                assert_same_batch(part, up, &name);
            }
            continue;
        }
        assert!(!fails_at_times, "{name}");
        joined_types += 1;
        let [joined] = up.as_slice() else {
            panic!("{name}: {} batches", up.len());
        };
        assert_eq!(joined.num_rows(), 43);
        let mut first = 0;
        for (i, part) in parts.iter().enumerate() {
            let rows = joined.slice(first, part.num_rows());
            assert_same_batch(part, &rows, format!("{name}, part {i}"));
            first += part.num_rows();
        }
    }
    assert!(joined_types > 30, "{joined_types} types");
}

#[tokio::test]
async fn where_batches_end() {
    let joined =
        async |rows: &[usize], n| sizes(rows.iter().map(|n| Ok(ints(*n))).collect(), n).await;
    assert_eq!(joined(&[3, 3, 3, 3, 3], 8).await, [8, 7]);
    assert_eq!(joined(&[4, 4, 4], 8).await, [4, 4, 4], "half is not small");
    assert_eq!(
        joined(&[3, 20, 3, 3], 8).await,
        [3, 20, 6],
        "large ones pass"
    );
    assert_eq!(joined(&[3, 3, 20], 8).await, [6, 20]);
    assert_eq!(joined(&[0, 3, 0, 0, 2, 0], 8).await, [5], "no empty ones");
    assert_eq!(joined(&[0, 0], 8).await, [0; 0]);
    assert_eq!(joined(&[2, 0, 2], 1).await, [2, 0, 2], "nothing is joined");
}

/// What passes is not copied on the host, and nothing is lost or out of order.
#[tokio::test]
async fn rows_keep_their_order() {
    let sim = Sim::new();
    let sizes = [3, 1, 20, 2, 2, 2, 9, 1];
    let given = sizes.iter().scan(0, |first, rows| {
        *first += *rows as i64;
        Some(Ok(numbers(*first - *rows as i64, *rows)))
    });
    let up = uploaded(given.collect(), 8, &sim).await;
    let up: Vec<_> = up
        .into_iter()
        .map(|batch| batch.unwrap().to_host().unwrap())
        .collect();
    assert_eq!(numbers_of(&up), (0..40).collect::<Vec<i64>>());
}

#[tokio::test]
async fn batches_without_columns() {
    let options = RecordBatchOptions::new().with_row_count(Some(5));
    let schema = Arc::new(Schema::empty());
    let part = RecordBatch::try_new_with_options(schema, vec![], &options).unwrap();
    assert_eq!(sizes(vec![Ok(part.clone()), Ok(part)], 100).await, [10]);
}

#[tokio::test]
async fn errors_and_other_schemas_keep_their_place() {
    let error = || Err(ArrowError::ParseError("line 7".into()));
    let given = vec![Ok(ints(2)), Ok(ints(3)), error(), Ok(ints(4))];
    let up = uploaded(given, 100, &Sim::new()).await;
    let [Ok(rows), Err(e)] = up.as_slice() else {
        panic!("{up:?}");
    };
    assert_eq!(rows.num_rows(), 5);
    assert!(e.to_string().contains("line 7"), "{e}");
    // A batch of another schema is an error, after the rows before it.
    let text: ArrayRef = Arc::new(StringArray::from(vec!["x"]));
    let other = RecordBatch::try_from_iter([("t", text)]).unwrap();
    let given = vec![Ok(ints(2)), Ok(ints(3)), Ok(other), Ok(ints(4))];
    let up = uploaded(given, 100, &Sim::new()).await;
    let [Ok(rows), Err(e)] = up.as_slice() else {
        panic!("{up:?}");
    };
    assert_eq!(rows.num_rows(), 5);
    assert!(e.to_string().contains("column types must match"), "{e}");
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
    assert_eq!(asked.load(std::sync::atomic::Ordering::SeqCst), 2);
}

/// One allocation, one list of copies, one event where there were many.
#[tokio::test]
async fn one_upload_for_many_batches() {
    let sim = Sim::new();
    let before = sim.stats();
    let up = uploaded((0..100).map(|_| Ok(ints(50))).collect(), 1000, &sim).await;
    let cost = sim.stats().since(&before);
    assert_eq!((cost.allocations, up.len()), (5, 5));
    for up in &up {
        let back = up.as_ref().unwrap().to_host().unwrap();
        for i in 0..20 {
            assert_same_batch(&ints(50), &back.slice(i * 50, 50), i);
        }
    }
    drop(up);
    sim.assert_done();
}

/// arrow-rs lets a column's type differ from its schema's in what nested fields may be null.
#[tokio::test]
async fn columns_of_other_types_pass_as_they_are() {
    let list = |nullable| DataType::List(Arc::new(Field::new("item", DataType::Int32, nullable)));
    let schema = |nullable| Arc::new(Schema::new(vec![Field::new("l", list(nullable), true)]));
    let made = |nullable| {
        let mut batch = batch(&[list(nullable)], 5, Nulls::None, 3);
        batch = RecordBatch::try_new(schema(nullable), batch.columns().to_vec()).unwrap();
        batch.with_schema(schema(true)).unwrap()
    };
    let given = [made(true), made(true), made(false), made(true)];
    assert_eq!(sizes(given.map(Ok).into(), 100).await, [10, 5, 5]);
}

/// Batches of much text stay as they are: they could be more than one array holds.
#[tokio::test]
async fn few_rows_of_many_bytes_are_not_joined() {
    let text = "x".repeat(9 << 20);
    let texts: ArrayRef = Arc::new(StringArray::from(vec![text]));
    let wide = RecordBatch::try_from_iter([("t", texts)]).unwrap();
    let two: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(17 << 20)]));
    let wider = RecordBatch::try_from_iter([("t", two)]).unwrap();
    let given = [&wide, &wide, &wider, &wide].map(|batch| Ok(batch.clone()));
    assert_eq!(sizes(given.into(), 100).await, [1, 1, 1, 1]);
}

/// A plan without an end gives what it has.
#[tokio::test]
async fn nothing_waits_in_an_unbounded_plan() {
    #[derive(Debug)]
    struct Slow(SchemaRef);

    impl PartitionStream for Slow {
        fn schema(&self) -> &SchemaRef {
            &self.0
        }

        fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
            let first = futures::stream::iter([Ok(numbers(0, 2))]);
            let batches = first.chain(futures::stream::pending());
            Box::pin(RecordBatchStreamAdapter::new(self.0.clone(), batches))
        }
    }

    let slow = Arc::new(Slow(numbers(0, 1).schema()));
    let table = StreamingTable::try_new(slow.0.clone(), vec![slow]).unwrap();
    let host = scan(Arc::new(table.with_infinite_table(true))).await;
    let sim = Sim::new();
    let mut stream = execute_on_device(host, context(100), &sim).unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap().num_rows(), 2);
    let mut cx = Context::from_waker(std::task::Waker::noop());
    assert!(matches!(stream.poll_next_unpin(&mut cx), Poll::Pending));
}
