//! Sends an input through an async device stream.

use std::pin::Pin;
use std::thread::{self, JoinHandle};

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_device::async_stream::{
    AsyncDeviceRecordBatchStream, DeviceRecordBatchStream, Outcome, produce,
};
use arrow_device::{
    Device, DeviceRecordBatchReader, Error, ExportOptions, HostRecordBatchReader, ImportOptions,
    Result, SyncPolicy, upload_reader,
};
use arrow_schema::{ArrowError, SchemaRef};
use futures::StreamExt;
use futures::executor::block_on;

/// How many batches the consumer requests before it takes the first.
const QUEUE_DEPTH: usize = 4;

/// Returns a reader of the batches of `reader` after they went to the device, through an
/// `ArrowAsyncDeviceStreamHandler`, and back. A thread of its own produces them.
pub(crate) fn host_reader(
    reader: impl RecordBatchReader + Send + 'static,
    device: &Device,
) -> Result<Box<dyn RecordBatchReader>> {
    let batches = upload_reader(reader, device).into_stream(1)?;
    // SAFETY: `handler` requires a producer that follows the specification and sends valid data.
    // `produce` below does, and sends record batches that were just uploaded.
    let (handler, opening) =
        unsafe { AsyncDeviceRecordBatchStream::handler(QUEUE_DEPTH, ImportOptions::default()) };
    let options = ExportOptions::new(SyncPolicy::Event);
    // SAFETY: the handler is this crate's, and goes to this producer alone.
    let producing = unsafe { produce(batches, handler, options) };
    let producer = thread::spawn(move || block_on(producing));
    let stream = block_on(opening)?.into_host_stream();
    let schema = arrow_array::nonblocking::RecordBatchStream::schema(&stream).clone();
    Ok(Box::new(Blocking {
        stream,
        schema,
        producer: Some(producer),
    }))
}

/// Reads the stream on the thread that iterates.
struct Blocking {
    stream: HostRecordBatchReader<Pin<Box<AsyncDeviceRecordBatchStream>>>,
    schema: SchemaRef,
    producer: Option<JoinHandle<Result<Outcome>>>,
}

impl Iterator for Blocking {
    type Item = std::result::Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(batch) = block_on(self.stream.next()) {
            return Some(batch);
        }
        // The stream has ended. Its producer must have ended as well, without an error of its own.
        match self.producer.take()?.join() {
            Ok(Ok(Outcome::Completed)) => None,
            Ok(Ok(outcome)) => {
                let why = format!("the producer ended with {outcome:?}");
                Some(Err(Error::InvalidArgument(why.into()).into()))
            }
            // The stream has returned this error already.
            Ok(Err(_)) => None,
            Err(_) => {
                let why = "the producer panicked".into();
                Some(Err(Error::InvalidArgument(why).into()))
            }
        }
    }
}

impl RecordBatchReader for Blocking {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }
}
