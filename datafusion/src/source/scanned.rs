//! The stream of a scan.

use std::task::{Poll, ready};

use arrow_device::{DeviceRecordBatch, Error, Result};
use futures::StreamExt;
use futures::stream::poll_fn;

use super::contract::ScanRequest;
use crate::form::limited;
use crate::stream::{SendableDeviceStream, device_stream};

/// What a source returned, checked: the columns that were asked for, and at most so many rows. `promised` is the number of rows that the
/// statistics promise. Nothing is moved.
pub(super) fn scanned(
    mut stream: SendableDeviceStream,
    request: ScanRequest,
    promised: Option<usize>,
) -> Result<SendableDeviceStream> {
    request.is_whole(&stream.schema())?;
    let (schema, device_type, fetch) = (request.schema(), request.device_type(), request.fetch);
    let mut checked = Checked {
        request,
        rows: 0,
        promised,
    };
    let batches = poll_fn(move |cx| {
        Poll::Ready(match ready!(stream.poll_next_unpin(cx)) {
            Some(batch) => Some(batch.and_then(|batch| checked.columns(batch))),
            None => checked.count(true).err().map(Err),
        })
    });
    Ok(limited(
        device_stream(batches, schema, device_type),
        0,
        fetch,
    ))
}

struct Checked {
    request: ScanRequest,
    rows: usize,
    promised: Option<usize>,
}

impl Checked {
    /// The columns of a batch that were asked for.
    fn columns(&mut self, batch: DeviceRecordBatch) -> Result<DeviceRecordBatch> {
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
        // Rows beyond the limit are cut off.
        let most = request.fetch.unwrap_or(usize::MAX);
        self.rows = most.min(self.rows.saturating_add(batch.num_rows()));
        self.count(false)?;
        match request.projection.as_ref().filter(|_| whole) {
            Some(projection) => batch.project(projection),
            None => Ok(batch),
        }
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
