//! Batches whose memory is counted, sources of them for either side, and waits that have an end.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, Int64Array, RecordBatch, cast::AsArray};
use arrow_buffer::{Buffer, ScalarBuffer};
use arrow_device::async_stream::{AsyncDeviceRecordBatchStream, DeviceRecordBatchStream};
use arrow_device::{Device, Devices, ExportOptions, ImportOptions, SyncPolicy, Validation};
use arrow_schema::{ArrowError, DataType, SchemaRef};
use datafusion_common::DataFusionError;
use datafusion_physical_plan::SendableRecordBatchStream;
use datafusion_physical_plan::stream::RecordBatchStreamAdapter;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};

use crate::support::{self, Nulls};

/// What does not come in so long does not come.
const LONG: Duration = Duration::from_secs(20);

pub(crate) async fn within<T>(what: impl Future<Output = T>) -> T {
    let result = tokio::time::timeout(LONG, what).await;
    result.expect("nothing comes in time")
}

#[track_caller]
pub(crate) fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) type Batches = BoxStream<'static, Result<RecordBatch, ArrowError>>;

/// How a source ends after its batches.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Last {
    End,
    Error,
    Panic,
    /// It does not end, nor give more.
    Nothing,
}

/// A source of batches of one row each, which counts how many it has made and how many are alive.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counted {
    alive: Arc<()>,
    made: Arc<AtomicI64>,
}

impl Counted {
    /// The batch with this number.
    fn batch(&self, number: i64) -> RecordBatch {
        let values = Buffer::from_vec(vec![number]);
        let address = NonNull::new(values.as_ptr().cast_mut()).unwrap();
        let owner = Arc::new((values.clone(), self.alive.clone()));
        // SAFETY: the owner holds the buffer, and so the memory.
        let values = unsafe { Buffer::from_custom_allocation(address, values.len(), owner) };
        let column = Int64Array::new(ScalarBuffer::new(values, 0, 1), None);
        RecordBatch::try_from_iter([("number", Arc::new(column) as ArrayRef)]).unwrap()
    }

    pub(crate) fn schema(&self) -> SchemaRef {
        Self::default().batch(0).schema()
    }

    fn batches(&self, count: i64, last: Last) -> Batches {
        let this = self.clone();
        let batches = stream::iter(0..count).map(move |number| {
            this.made.fetch_add(1, SeqCst);
            Ok(this.batch(number))
        });
        let last: Batches = match last {
            Last::End => stream::empty().boxed(),
            Last::Error => {
                let error = ArrowError::ComputeError("the disk is gone".into());
                stream::iter([Err(error)]).boxed()
            }
            Last::Panic => stream::poll_fn(|_| panic!("inside the source")).boxed(),
            Last::Nothing => stream::pending().boxed(),
        };
        batches.chain(last).boxed()
    }

    /// As a stream of this crate's.
    pub(crate) fn ours(
        &self,
        count: i64,
        last: Last,
    ) -> impl DeviceRecordBatchStream + Send + Unpin + use<> {
        upload(self.batches(count, last), self.schema(), &Devices::cpu())
    }

    /// As a stream of DataFusion's.
    pub(crate) fn theirs(&self, count: i64, last: Last) -> SendableRecordBatchStream {
        for_datafusion(self.batches(count, last), self.schema())
    }

    pub(crate) fn made(&self) -> i64 {
        self.made.load(SeqCst)
    }

    pub(crate) fn alive(&self) -> usize {
        Arc::strong_count(&self.alive) - 1
    }

    /// Fails if a side keeps a batch, or a source.
    #[track_caller]
    pub(crate) fn assert_gone(&self) {
        eventually("a batch or a source is kept", || {
            self.alive() == 0 && Arc::strong_count(&self.made) == 1
        });
    }
}

/// A batch's number.
#[track_caller]
pub(crate) fn number(batch: &RecordBatch) -> i64 {
    batch.column(0).as_primitive::<Int64Type>().value(0)
}

/// Batches with a column of each type, with and without nulls, empty ones too, and their schema. Each column is sliced, or made in another way.
pub(crate) fn of_types(types: &[DataType]) -> (Vec<RecordBatch>, SchemaRef) {
    let mut batches = vec![];
    for (seed, rows) in [0, 1, 5, 64, 150].into_iter().enumerate() {
        for nulls in [Nulls::None, Nulls::Some, Nulls::All] {
            batches.push(support::batch(types, rows, nulls, seed as u64 * 7));
        }
    }
    let schema = batches[0].schema();
    (batches, schema)
}

pub(crate) fn upload(
    batches: Batches,
    schema: SchemaRef,
    device: &Device,
) -> impl DeviceRecordBatchStream + Send + Unpin + use<> {
    arrow_device::upload_stream(batches, schema, device.default_queue())
}

pub(crate) fn for_datafusion(batches: Batches, schema: SchemaRef) -> SendableRecordBatchStream {
    let batches = batches.map(|batch| batch.map_err(DataFusionError::from));
    Box::pin(RecordBatchStreamAdapter::new(schema, batches))
}

pub(crate) fn export() -> ExportOptions {
    ExportOptions::new(SyncPolicy::Event)
}

pub(crate) type Opening = BoxFuture<'static, arrow_device::Result<AsyncDeviceRecordBatchStream>>;

/// A handler of ours, as a pointer of theirs, and the stream that it opens, which checks all values.
pub(crate) fn handler<T>(depth: usize) -> (*mut T, Opening) {
    let options = ImportOptions {
        validation: Validation::Full,
        ..ImportOptions::default()
    };
    // SAFETY: the tests give the handler to SedonaDB's producer, which keeps to the interface.
    let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(depth, options) };
    (handler.cast(), opening)
}
