//! [`IpcFileReader`].

use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

use arrow_ipc::reader::read_footer_length;
use arrow_ipc::{Block, MessageHeader, root_as_footer};
use arrow_schema::{ArrowError, SchemaRef};

use crate::abi::ArrowDeviceType;
use crate::data::DeviceRecordBatch;
use crate::device::{Device, Queue};
use crate::error::{Error, Result};
use crate::stream::ipc::IpcOptions;
use crate::stream::ipc::message::{Message, flatbuffer, read_body, read_bytes};
use crate::stream::ipc::staged::{Batches, schema};
use crate::stream::reader::DeviceRecordBatchReader;

/// The length of the footer, and the format's magic, at the end of a file.
const TRAILER: u64 = 10;

/// Reads a file in the [IPC file format] (Feather version 2) to a device: see the [module](super).
///
/// [IPC file format]: https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format
///
/// ```
/// use std::io::Cursor;
/// use arrow_array::record_batch;
/// use arrow_device::{Devices, ipc::IpcFileReader};
/// use arrow_ipc::writer::FileWriter;
///
/// let batch = record_batch!(("id", Int64, [1, 2, 3]), ("name", Utf8, ["a", "b", "c"]))?;
/// let mut file = Vec::new();
/// let mut writer = FileWriter::try_new(&mut file, &batch.schema())?;
/// writer.write(&batch)?;
/// writer.finish()?;
/// drop(writer);
///
/// # if cfg!(any(miri, not(target_os = "linux"))) { return Ok(()) }
/// let device = Devices::simulated()?;
/// let before = device.stats();
/// for on_device in IpcFileReader::try_new(Cursor::new(file), &device)? {
///     assert_eq!(on_device?.to_host()?, batch);
/// }
/// assert_eq!(device.stats().since(&before).host_copied_bytes, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct IpcFileReader<R> {
    reader: R,
    /// The length of the file in bytes.
    length: u64,
    blocks: Vec<Block>,
    /// The batches that are still to be read.
    next: Range<usize>,
    batches: Batches,
}

impl<R: Read + Seek> IpcFileReader<R> {
    /// Reads the file's schema and dictionaries. Batches are copied on the default queue of `device`.
    ///
    /// # Errors
    /// Returns [`Error::InvalidInput`] or [`Error::Arrow`] for a malformed file, the reader's error as [`Error::Arrow`], and what
    /// [`Device::upload`] returns.
    pub fn try_new(reader: R, device: &Device) -> Result<Self> {
        Self::try_new_on(reader, device.default_queue(), IpcOptions::default())
    }

    /// As [`try_new`](Self::try_new), with options. Batches are copied on `queue`.
    ///
    /// # Errors
    /// As [`try_new`](Self::try_new); also if the projection names a column that is not there.
    pub fn try_new_on(mut reader: R, queue: Queue, options: IpcOptions) -> Result<Self> {
        let length = reader.seek(SeekFrom::End(0)).map_err(ArrowError::from)?;
        let Some(end) = length.checked_sub(TRAILER) else {
            let message = format!("a file of {length} bytes is no Arrow IPC file");
            return Err(Error::invalid("footer", message));
        };
        let mut trailer = [0; TRAILER as usize];
        read_at(&mut reader, end)?
            .read_exact(&mut trailer)
            .map_err(ArrowError::from)?;
        let bytes = read_footer_length(trailer)?;
        let Some(start) = end.checked_sub(bytes as u64) else {
            let message = format!("{bytes} bytes in a file of {length}");
            return Err(Error::invalid("footer", message));
        };
        let footer = read_bytes(&mut read_at(&mut reader, start)?, bytes)?;
        let footer = root_as_footer(&footer)
            .map_err(|e| Error::invalid("footer", format!("no footer: {e:?}")))?;
        let of_file = footer
            .schema()
            .ok_or_else(|| Error::invalid("footer.schema", "missing"))?;
        let batches = Batches::new(schema(of_file, bytes)?, queue, options)?;
        let blocks: Vec<Block> = footer
            .recordBatches()
            .into_iter()
            .flatten()
            .copied()
            .collect();
        let all = blocks
            .iter()
            .chain(footer.dictionaries().into_iter().flatten());
        let all = all.flat_map(|block| [block.metaDataLength().into(), block.bodyLength()]);
        let all = all.map(|bytes: i64| u64::try_from(bytes).unwrap_or(u64::MAX));
        let all = all.fold(0, u64::saturating_add);
        // Else they overlap, and a small file stands for any number of large messages.
        if all > length {
            let message = format!("messages of {all} bytes in a file of {length}");
            return Err(Error::invalid("footer", message));
        }
        let mut this = Self {
            reader,
            length,
            next: 0..blocks.len(),
            blocks,
            batches,
        };
        for block in footer.dictionaries().into_iter().flatten() {
            let message = this.message(block)?;
            this.batches.dictionary(message)?;
        }
        Ok(this)
    }

    /// Returns how many batches the file has.
    pub fn num_batches(&self) -> usize {
        self.blocks.len()
    }

    /// Goes on with batch `index`, counted from 0.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the file has no such batch.
    pub fn set_index(&mut self, index: usize) -> Result<()> {
        if index >= self.blocks.len() {
            let count = self.blocks.len();
            return Err(Error::argument(format!("batch {index} of {count}")));
        }
        self.next = index..self.blocks.len();
        Ok(())
    }

    fn message(&mut self, block: &Block) -> Result<Message> {
        let (offset, body) = (
            u64::try_from(block.offset()),
            usize::try_from(block.bodyLength()),
        );
        let metadata = usize::try_from(block.metaDataLength());
        let (Ok(offset), Ok(metadata), Ok(body)) = (offset, metadata, body) else {
            return Err(Error::invalid("footer", "a negative number of bytes"));
        };
        let end = offset
            .checked_add(metadata as u64)
            .and_then(|end| end.checked_add(body as u64));
        if end.is_none_or(|end| end > self.length) {
            let message = format!(
                "a message of {metadata} and {body} bytes from {offset} on, in a file of {}",
                self.length
            );
            return Err(Error::invalid("footer", message));
        }
        let reader = read_at(&mut self.reader, offset)?;
        let metadata = read_bytes(reader, metadata)?;
        let most = self.batches.max_message_bytes;
        read_body(reader, self.batches.device(), metadata, body, most)
    }

    fn read(&mut self) -> Result<Option<DeviceRecordBatch>> {
        while let Some(i) = self.next.next() {
            let block = self.blocks[i];
            let message = self.message(&block)?;
            let header = flatbuffer(&message.metadata)?.header_type();
            if !matches!(header, MessageHeader::RecordBatch | MessageHeader::NONE) {
                let message = format!("a message {header:?} in place of a batch");
                return Err(Error::invalid("footer", message));
            }
            if let Some(batch) = self.batches.batch(message)? {
                return Ok(Some(batch));
            }
        }
        Ok(None)
    }
}

fn read_at<R: Seek>(reader: &mut R, offset: u64) -> Result<&mut R> {
    reader
        .seek(SeekFrom::Start(offset))
        .map_err(ArrowError::from)?;
    Ok(reader)
}

impl<R: Read + Seek> Iterator for IpcFileReader<R> {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let read = self.read().transpose();
        if !matches!(read, Some(Ok(_))) {
            self.next = 0..0;
        }
        read
    }
}

impl<R: Read + Seek> DeviceRecordBatchReader for IpcFileReader<R> {
    fn schema(&self) -> SchemaRef {
        self.batches.schema().clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.batches.device().id().device_type
    }
}
