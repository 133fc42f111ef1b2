//! Streams of sources, and tables of closures that make them.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatchReader, DeviceRecordBatches, Error, Result,
};
use arrow_schema::SchemaRef;
use datafusion_physical_expr::Partitioning;
use futures::Stream;

use super::contract::{DeviceSource, ScanRequest};
use crate::spec::DeviceSpec;
use crate::stream::SendableDeviceStream;

impl ScanRequest {
    /// Makes the stream that answers the request of any stream of batches of
    /// [`schema`](Self::schema).
    pub fn stream(
        &self,
        batches: impl Stream<Item = Result<DeviceRecordBatch>> + Send + 'static,
    ) -> SendableDeviceStream {
        Box::pin(DeviceRecordBatches::from_stream(
            batches,
            self.schema(),
            self.device_type(),
        ))
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
            Ok(Box::pin(stream) as SendableDeviceStream)
        };
        Box::pin(Later {
            schema: self.schema(),
            device_type: self.device_type(),
            state: State::Opening(Box::pin(opening)),
        })
    }
}

/// The stream of a future.
struct Later {
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    state: State,
}

enum State {
    Opening(Pin<Box<dyn Future<Output = Result<SendableDeviceStream>> + Send>>),
    Open(SendableDeviceStream),
    Ended,
}

impl Stream for Later {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let State::Opening(opening) = &mut self.state {
            match ready!(opening.as_mut().poll(cx)) {
                Ok(stream) => self.state = State::Open(stream),
                Err(e) => {
                    self.state = State::Ended;
                    return Poll::Ready(Some(Err(e)));
                }
            }
        }
        let State::Open(stream) = &mut self.state else {
            return Poll::Ready(None);
        };
        let next = ready!(stream.as_mut().poll_next(cx));
        if !matches!(next, Some(Ok(_))) {
            self.state = State::Ended;
        }
        Poll::Ready(next)
    }
}

impl DeviceRecordBatchStream for Later {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
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
    /// The closure returns a future of each stream.
    pub(super) fn of_futures<S, F>(
        schema: SchemaRef,
        device: DeviceSpec,
        partitions: usize,
        open: impl Fn(ScanRequest) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<S>> + Send + 'static,
        S: DeviceRecordBatchStream + Stream<Item = Result<DeviceRecordBatch>> + Send + 'static,
    {
        let open = move |request: ScanRequest| Ok(request.stream_later(open(request.clone())));
        Self {
            schema,
            device,
            partitions,
            open: Arc::new(open),
        }
    }

    /// None of them can be opened here.
    pub(super) fn of_nobody(
        name: Arc<str>,
        schema: SchemaRef,
        device: DeviceSpec,
        partitions: usize,
    ) -> Self {
        let open = move |request: ScanRequest| -> Result<SendableDeviceStream> {
            Err(Error::NotSupported {
                device: request.device.id(),
                operation: "scan of a DeviceTable",
                reason: format!(
                    "this process has only declared the table {name:?}, to plan with it, and its rows are elsewhere; but the engine runs \
                     this part of the plan here"
                )
                .into(),
            })
        };
        Self {
            schema,
            device,
            partitions,
            open: Arc::new(open),
        }
    }

    /// The closure returns readers, each of which a thread of its own reads.
    pub(super) fn of_readers<R: DeviceRecordBatchReader + Send + 'static>(
        schema: SchemaRef,
        device: DeviceSpec,
        partitions: usize,
        open: impl Fn(ScanRequest) -> Result<R> + Send + Sync + 'static,
    ) -> Self {
        let open = move |request| -> Result<SendableDeviceStream> {
            Ok(Box::pin(open(request)?.into_stream(1)?))
        };
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
