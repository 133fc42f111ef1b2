//! [`IpcStreamReader`].

use std::io::Read;

use arrow_ipc::MessageHeader;
use arrow_schema::SchemaRef;

use crate::abi::ArrowDeviceType;
use crate::data::DeviceRecordBatch;
use crate::device::{Device, Queue};
use crate::error::{Error, Result};
use crate::stream::ipc::IpcOptions;
use crate::stream::ipc::message::{flatbuffer, next_metadata, read_body, read_bytes};
use crate::stream::ipc::staged::{Batches, schema};
use crate::stream::reader::DeviceRecordBatchReader;

/// Reads a stream in the [IPC streaming format] to a device: see the [module](super).
///
/// Besides each body, a few bytes are read at a time: a source for which that is slow, such as a socket, is best wrapped in a
/// [`BufReader`](std::io::BufReader), which passes large reads on.
///
/// [IPC streaming format]: https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format
///
/// ```
/// use arrow_array::record_batch;
/// use arrow_device::{Devices, ipc::IpcStreamReader};
/// use arrow_ipc::writer::StreamWriter;
///
/// let batch = record_batch!(("id", Int64, [1, 2, 3]), ("name", Utf8, ["a", "b", "c"]))?;
/// let mut stream = Vec::new();
/// let mut writer = StreamWriter::try_new(&mut stream, &batch.schema())?;
/// writer.write(&batch)?;
/// writer.finish()?;
/// drop(writer);
///
/// for on_device in IpcStreamReader::try_new(stream.as_slice(), &Devices::cpu())? {
///     assert_eq!(on_device?.to_host()?, batch);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct IpcStreamReader<R> {
    reader: R,
    ended: bool,
    batches: Batches,
}

impl<R: Read> IpcStreamReader<R> {
    /// Reads the stream's schema. Batches are copied on the default queue of `device`.
    ///
    /// # Errors
    /// Returns [`Error::InvalidInput`] or [`Error::Arrow`] for a malformed stream, and the reader's error as [`Error::Arrow`].
    pub fn try_new(reader: R, device: &Device) -> Result<Self> {
        Self::try_new_on(reader, device.default_queue(), IpcOptions::default())
    }

    /// As [`try_new`](Self::try_new), with options. Batches are copied on `queue`.
    ///
    /// # Errors
    /// As [`try_new`](Self::try_new); also if the projection names a column that is not there.
    pub fn try_new_on(mut reader: R, queue: Queue, options: IpcOptions) -> Result<Self> {
        let no_schema = || Error::invalid("schema", "the stream does not begin with a schema");
        let metadata = next_metadata(&mut reader)?.ok_or_else(no_schema)?;
        let message = flatbuffer(&metadata)?;
        let of_stream = message.header_as_schema().ok_or_else(no_schema)?;
        let batches = Batches::new(schema(of_stream, metadata.len())?, queue, options)?;
        // The format gives a schema no body; what is there all the same says nothing.
        read_bytes(&mut reader, body_bytes(message, &batches)?)?;
        Ok(Self {
            reader,
            ended: false,
            batches,
        })
    }

    fn read(&mut self) -> Result<Option<DeviceRecordBatch>> {
        while let Some(metadata) = next_metadata(&mut self.reader)? {
            let message = flatbuffer(&metadata)?;
            let (header, body) = (message.header_type(), body_bytes(message, &self.batches)?);
            let (device, most) = (self.batches.device(), self.batches.max_message_bytes);
            let message = read_body(&mut self.reader, device, metadata, body, most)?;
            match header {
                MessageHeader::DictionaryBatch => self.batches.dictionary(message)?,
                MessageHeader::RecordBatch => {
                    if let Some(batch) = self.batches.batch(message)? {
                        return Ok(Some(batch));
                    }
                }
                MessageHeader::NONE => {}
                other => {
                    let message = format!("a message {other:?} after the schema");
                    return Err(Error::invalid("message", message));
                }
            }
        }
        Ok(None)
    }
}

/// Returns the length of a message's body.
fn body_bytes(message: arrow_ipc::Message<'_>, batches: &Batches) -> Result<usize> {
    let bytes = usize::try_from(message.bodyLength());
    bytes
        .ok()
        .filter(|bytes| *bytes <= batches.max_message_bytes)
        .ok_or_else(|| {
            let text = format!(
                "a body of {} bytes; see IpcOptions::with_max_message_bytes",
                message.bodyLength()
            );
            Error::invalid("message", text)
        })
}

impl<R: Read> Iterator for IpcStreamReader<R> {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let read = self.read().transpose();
        self.ended = !matches!(read, Some(Ok(_)));
        read
    }
}

impl<R: Read> DeviceRecordBatchReader for IpcStreamReader<R> {
    fn schema(&self) -> SchemaRef {
        self.batches.schema().clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.batches.device().id().device_type
    }
}
