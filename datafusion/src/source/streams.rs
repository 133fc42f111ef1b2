//! Streams of sources, tables of closures that make them, and the checks of a scan.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::task::{Poll, ready};

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{DeviceRecordBatch, Result};
use arrow_schema::SchemaRef;
use datafusion_physical_expr::Partitioning;
use futures::stream::poll_fn;
use futures::{Stream, StreamExt, TryFutureExt};

use super::contract::{DeviceSource, ScanRequest};
use crate::form::limited;
use crate::spec::DeviceSpec;
use crate::stream::{SendableDeviceStream, device_stream};

impl ScanRequest {
    /// Makes the stream that answers the request of any stream of batches of
    /// [`schema`](Self::schema).
    pub fn stream(
        &self,
        batches: impl Stream<Item = Result<DeviceRecordBatch>> + Send + 'static,
    ) -> SendableDeviceStream {
        device_stream(batches, self.schema(), self.device_type())
    }

    /// Makes the stream that answers the request of a future, whose stream may have the table's
    /// schema instead. Nothing of the future runs before the stream is polled, and it runs on the
    /// task that polls it: it needs no thread.
    pub fn stream_later<S>(
        &self,
        opening: impl Future<Output = Result<S>> + Send + 'static,
    ) -> SendableDeviceStream
    where
        S: DeviceRecordBatchStream + Stream<Item = Result<DeviceRecordBatch>> + Send + 'static,
    {
        let request = self.clone();
        let opening = async move {
            let stream = opening.await?;
            request.is_whole(&stream.schema())?;
            Ok(Box::pin(stream))
        };
        let batches = opening.try_flatten_stream();
        device_stream(batches, self.schema(), self.device_type())
    }
}

type Open = dyn Fn(ScanRequest) -> Result<SendableDeviceStream> + Send + Sync;

/// Partitions that a closure opens.
pub(super) struct StreamSource {
    schema: SchemaRef,
    device: DeviceSpec,
    partitions: usize,
    open: Arc<Open>,
}

impl StreamSource {
    pub(super) fn shared(
        schema: SchemaRef,
        device: impl Into<DeviceSpec>,
        partitions: usize,
        open: impl Fn(ScanRequest) -> Result<SendableDeviceStream> + Send + Sync + 'static,
    ) -> Arc<dyn DeviceSource> {
        Arc::new(Self {
            schema,
            device: device.into(),
            partitions,
            open: Arc::new(open),
        })
    }
}

impl fmt::Debug for StreamSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamSource")
            .field("device", &self.device)
            .field("partitions", &self.partitions)
            .finish_non_exhaustive()
    }
}

impl DeviceSource for StreamSource {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn partitioning(&self) -> Partitioning {
        Partitioning::UnknownPartitioning(self.partitions)
    }

    fn open(&self, request: ScanRequest) -> Result<SendableDeviceStream> {
        (self.open)(request)
    }
}

/// What a source returned, checked: the columns that were asked for, and at most so many rows. `promised` is the number of rows that the
/// statistics promise. Nothing is moved.
pub(super) fn scanned(
    mut stream: SendableDeviceStream,
    request: ScanRequest,
    promised: Option<usize>,
) -> Result<SendableDeviceStream> {
    request.is_whole(&stream.schema())?;
    let (schema, device_type, fetch) = (request.schema(), request.device_type(), request.fetch);
    let mut rows = 0_usize;
    let batches = poll_fn(move |cx| {
        let Some(batch) = ready!(stream.poll_next_unpin(cx)?) else {
            let checked = check_count(&request, promised, rows, true);
            return Poll::Ready(checked.err().map(Err));
        };
        // Rows beyond the limit are cut off.
        let most = fetch.unwrap_or(usize::MAX);
        rows = most.min(rows.saturating_add(batch.num_rows()));
        let columns = columns(&request, batch)?;
        check_count(&request, promised, rows, false)?;
        Poll::Ready(Some(Ok(columns)))
    });
    let checked = device_stream(batches, schema, device_type);
    Ok(limited(checked, 0, fetch))
}

/// The columns of a batch that were asked for.
fn columns(request: &ScanRequest, batch: DeviceRecordBatch) -> Result<DeviceRecordBatch> {
    if *batch.device() != request.device {
        let what = format!(
            "a batch on {}, another device than the one that was opened for it; a source allocates on ScanRequest::device",
            batch.device()
        );
        return Err(request.returned(what));
    }
    let whole = request.is_whole(batch.schema_ref())?;
    match request.projection.as_ref().filter(|_| whole) {
        Some(projection) => batch.project(projection),
        None => Ok(batch),
    }
}

/// Checks the number of rows against the statistics, from which DataFusion may have answered
/// already.
fn check_count(
    request: &ScanRequest,
    promised: Option<usize>,
    rows: usize,
    ended: bool,
) -> Result<()> {
    match promised {
        Some(promised) if rows > promised || (ended && rows < promised) => {
            let at_least = if ended { "" } else { "at least " };
            Err(request.returned(format!(
                "{at_least}{rows} rows, but the statistics of its source promise exactly {promised}; declare an inexact number, or none"
            )))
        }
        _ => Ok(()),
    }
}
