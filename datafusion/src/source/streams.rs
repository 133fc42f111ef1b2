//! Streams of sources, and tables of closures that make them.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{DeviceRecordBatch, Result};
use arrow_schema::SchemaRef;
use datafusion_physical_expr::Partitioning;
use futures::{Stream, TryFutureExt};

use super::contract::{DeviceSource, ScanRequest};
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
    pub(super) fn new(
        schema: SchemaRef,
        device: DeviceSpec,
        partitions: usize,
        open: impl Fn(ScanRequest) -> Result<SendableDeviceStream> + Send + Sync + 'static,
    ) -> Self {
        Self {
            schema,
            device,
            partitions,
            open: Arc::new(open),
        }
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
