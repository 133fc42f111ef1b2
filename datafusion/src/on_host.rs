//! Streams of a device that begin anew on the host.

use std::task::{Poll, ready};

use datafusion_common::{DataFusionError, Result};
use datafusion_execution::SendableRecordBatchStream;
use datafusion_physical_plan::stream::RecordBatchStreamAdapter;
use futures::StreamExt;
use futures::stream::poll_fn;

/// A partition on a device, which `host` starts on the host, for a reason, if there is too little memory for its start or its first batch.
pub(super) fn until_first(
    started: Result<SendableRecordBatchStream>,
    host: impl FnOnce(&str) -> Result<SendableRecordBatchStream> + Send + 'static,
) -> Result<SendableRecordBatchStream> {
    let mut stream = match started {
        Err(e) if is_exhausted(&e) => return host(&e.to_string()),
        started => started?,
    };
    let (schema, mut host) = (stream.schema(), Some(host));
    let batches = poll_fn(move |cx| {
        let next = ready!(stream.poll_next_unpin(cx));
        match (&next, host.take()) {
            (Some(Err(e)), Some(host)) if is_exhausted(e) => match host(&e.to_string()) {
                Ok(started) => stream = started,
                Err(e) => return Poll::Ready(Some(Err(e))),
            },
            _ => return Poll::Ready(next),
        }
        stream.poll_next_unpin(cx)
    });
    Ok(Box::pin(RecordBatchStreamAdapter::new(schema, batches)))
}

/// Whether it is a lack of memory.
fn is_exhausted(e: &DataFusionError) -> bool {
    matches!(e.find_root(), DataFusionError::ResourcesExhausted(_))
}
