//! From messages in staging memory to batches on a device.

use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_ipc::MetadataVersion;
use arrow_ipc::reader::FileDecoder;
use arrow_schema::SchemaRef;

use crate::abi::guard;
use crate::data::DeviceRecordBatch;
use crate::device::{Device, DeviceId, Queue};
use crate::error::{Error, Result};
use crate::stream::ipc::IpcOptions;
use crate::stream::ipc::message::Message;
use crate::stream::upload::Uploads;
use crate::transfer::Staged;

/// Decodes messages, and copies the batches to a device.
#[derive(Debug)]
pub(super) struct Batches {
    decoder: FileDecoder,
    /// Of the batches, with the projection.
    schema: SchemaRef,
    /// The memory of dictionaries.
    staged: Staged,
    uploads: Uploads,
    pub(super) max_message_bytes: usize,
}

/// Calls code of arrow-ipc, which panics at some of what is malformed.
pub(super) fn decode<T>(
    work: impl FnOnce() -> std::result::Result<T, arrow_schema::ArrowError>,
) -> Result<T> {
    match guard::call_foreign("decoding Arrow IPC", work) {
        Ok(decoded) => Ok(decoded?),
        Err(Error::Panic { message, .. }) => Err(Error::invalid("message", message)),
        Err(e) => Err(e),
    }
}

/// Converts a schema of arrow-ipc.
pub(super) fn schema(schema: arrow_ipc::Schema<'_>) -> Result<SchemaRef> {
    if !schema.endianness().equals_to_target_endianness() {
        return Err(Error::invalid(
            "schema.endianness",
            "the values have the other order of bytes than this machine's",
        ));
    }
    // Deprecated from 60 on, for a function that 59 does not have.
    #[allow(deprecated)]
    decode(|| Ok(Arc::new(arrow_ipc::convert::fb_to_schema(schema))))
}

impl Batches {
    pub(super) fn new(
        schema: SchemaRef,
        version: MetadataVersion,
        queue: Queue,
        options: IpcOptions,
    ) -> Result<Self> {
        let mut decoder = FileDecoder::new(schema.clone(), version);
        let mut projected = schema.clone();
        if let Some(projection) = options.projection {
            projected = Arc::new(schema.project(&projection)?);
            decoder = decoder.with_projection(projection);
        }
        Ok(Self {
            decoder,
            schema: projected,
            staged: Staged::default(),
            uploads: Uploads::new(queue),
            max_message_bytes: options.max_message_bytes,
        })
    }

    pub(super) fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    pub(super) fn device(&self) -> &Device {
        self.uploads.device()
    }

    /// Keeps the dictionary in a message.
    pub(super) fn dictionary(&mut self, message: Message) -> Result<()> {
        decode(|| self.decoder.read_dictionary(&message.block, &message.bytes))?;
        let Message { body, aligned, .. } = message;
        // What it has replaced is held by nobody else, once it was copied.
        self.staged.sweep();
        if self.copies() {
            self.staged.add(body, aligned);
        }
        Ok(())
    }

    /// Copies the batch in a message to the device; `None` if the message is empty. The copies may run after this call returns. Waits
    /// for the oldest of earlier ones if there are many.
    pub(super) fn batch(&mut self, message: Message) -> Result<Option<DeviceRecordBatch>> {
        let read = decode(|| {
            self.decoder
                .read_record_batch(&message.block, &message.bytes)
        })?;
        let Some(host) = read else {
            return Ok(None);
        };
        self.uploads.make_room();
        self.bring(&host, message).map(Some)
    }

    fn bring(&mut self, host: &RecordBatch, message: Message) -> Result<DeviceRecordBatch> {
        if !self.copies() {
            return self.uploads.upload(host, &mut |_| Ok(()));
        }
        let Message { body, aligned, .. } = message;
        let body = self.staged.add(body, aligned);
        let batch = self.staged.bring_batch(host, self.uploads.queue());
        self.staged.remove(body);
        let batch = batch?;
        self.uploads.keep(&batch);
        Ok(batch)
    }

    /// Whether buffers are copied from staging memory: not on the CPU, which uses them where they are, and not to pages of the host's.
    fn copies(&self) -> bool {
        let device = self.uploads.device();
        device.id() != DeviceId::CPU && !device.has_pages()
    }
}
