//! The stream of a scan.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{ArrowDeviceType, DeviceRecordBatch, Error, Result};
use arrow_schema::SchemaRef;
use futures::Stream;

use super::contract::ScanRequest;
use crate::stream::SendableDeviceStream;

/// What a source returned, checked: the columns that were asked for, and at most so many rows.
/// Nothing is moved.
pub(super) struct Scanned {
    /// `None` once enough rows have come, which ends their producer.
    stream: Option<SendableDeviceStream>,
    request: ScanRequest,
    rows: usize,
    /// The number of rows that the statistics promise.
    promised: Option<usize>,
}

impl Scanned {
    pub(super) fn new(
        stream: SendableDeviceStream,
        request: ScanRequest,
        promised: Option<usize>,
    ) -> Result<Self> {
        request.is_whole(&stream.schema())?;
        Ok(Self {
            stream: Some(stream),
            request,
            rows: 0,
            promised,
        })
    }

    /// What is returned of a partition that is not read: no rows.
    pub(super) fn none(request: ScanRequest) -> Self {
        Self {
            stream: None,
            request,
            rows: 0,
            promised: None,
        }
    }

    fn is_enough(&self) -> bool {
        self.request.fetch.is_some_and(|fetch| self.rows >= fetch)
    }

    fn cut(&mut self, mut batch: DeviceRecordBatch) -> Result<DeviceRecordBatch> {
        let request = &self.request;
        if *batch.device() != request.device {
            return Err(Error::InvalidArgument(
                format!(
                    "DeviceScanExec on {}: partition {} returned a batch on {}, another device than the one that was opened for \
                     it; a source allocates on ScanRequest::device",
                    request.device,
                    request.partition,
                    batch.device()
                )
                .into(),
            ));
        }
        let whole = request.is_whole(batch.schema_ref())?;
        if let Some(projection) = request.projection.as_ref().filter(|_| whole) {
            batch = batch.project(projection)?;
        }
        if let Some(fetch) = request.fetch {
            let left = fetch - self.rows;
            if batch.num_rows() > left {
                batch = batch.slice(0, left)?;
            }
        }
        self.rows = self.rows.saturating_add(batch.num_rows());
        Ok(batch)
    }

    /// Checks the number of rows against the statistics, from which DataFusion may have answered
    /// already.
    fn count(&self, ended: bool) -> Result<()> {
        match self.promised {
            Some(promised) if self.rows > promised || (ended && self.rows < promised) => {
                Err(Error::InvalidArgument(
                    format!(
                        "DeviceScanExec on {}: partition {} has {}{} rows, but the statistics of its source promise exactly {promised}; \
                         declare an inexact number, or none",
                        self.request.device,
                        self.request.partition,
                        if ended { "" } else { "at least " },
                        self.rows,
                    )
                    .into(),
                ))
            }
            _ => Ok(()),
        }
    }
}

impl Stream for Scanned {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_enough() {
            self.stream = None;
        }
        let Some(stream) = &mut self.stream else {
            return Poll::Ready(None);
        };
        let next = match ready!(stream.as_mut().poll_next(cx)) {
            Some(batch) => Some(batch.and_then(|batch| {
                let batch = self.cut(batch)?;
                self.count(false).map(|()| batch)
            })),
            None => self.count(true).err().map(Err),
        };
        if !matches!(next, Some(Ok(_))) || self.is_enough() {
            self.stream = None;
        }
        Poll::Ready(next)
    }
}

impl DeviceRecordBatchStream for Scanned {
    fn schema(&self) -> SchemaRef {
        self.request.schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.request.device_type()
    }
}
