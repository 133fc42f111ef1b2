//! Checks the lengths that Arrow IPC data claims, before arrow-ipc allocates memory for them: an
//! allocation that fails aborts the process. arrow-ipc reports most other damage, or panics, which
//! the callers of this module turn into an error.

use std::io::{self, Read, Seek, SeekFrom};

use arrow_ipc::reader::read_footer_length;
use arrow_ipc::{Endianness, Message, MessageHeader, Schema};

/// Checks an IPC stream, and returns its number of rows.
pub(crate) fn check_stream(file: impl Read + Seek) -> Result<u64, String> {
    let mut data = Data::new(file)?;
    let (mut rows, mut at) = (0, 0);
    // A stream may end with or without a length of zero.
    while at < data.bytes {
        let (length, metadata) = data.length(at)?;
        if length == 0 {
            break;
        }
        let message = data.read(metadata, length)?;
        let message = arrow_ipc::root_as_message(&message).map_err(damaged)?;
        if let Some(schema) = message.header_as_schema() {
            check_byte_order(schema)?;
        }
        let body = metadata + length;
        rows += data.check_body(message, body)?;
        at = data.end(body, message.bodyLength() as u64)?;
    }
    Ok(rows)
}

/// Checks an IPC file, and returns its number of rows.
pub(crate) fn check_file(file: impl Read + Seek) -> Result<u64, String> {
    let mut data = Data::new(file)?;
    // The last ten bytes: the footer's length, and the magic.
    let end = data.bytes.saturating_sub(10);
    let length = data.read(end, 10)?.try_into().map(read_footer_length);
    let Ok(Ok(length)) = length else {
        return Err("truncated: the Arrow file has no footer".to_owned());
    };
    let footer = data.read(end.saturating_sub(length as u64), length as u64)?;
    let footer = arrow_ipc::root_as_footer(&footer).map_err(damaged)?;
    if let Some(schema) = footer.schema() {
        check_byte_order(schema)?;
    }
    let dictionaries = footer.dictionaries().into_iter().flatten();
    let batches = footer.recordBatches().into_iter().flatten();
    let mut rows = 0;
    for block in dictionaries.chain(batches) {
        let (start, length) = (block.offset() as u64, block.metaDataLength() as u64);
        let body = data.end(start, length)?;
        data.end(body, block.bodyLength() as u64)?;
        let (_, metadata) = data.length(start)?;
        let message = data.read(metadata, body.saturating_sub(metadata))?;
        let message = arrow_ipc::root_as_message(&message).map_err(damaged)?;
        rows += data.check_body(message, body)?;
    }
    Ok(rows)
}

/// Whether `start`, the first bytes of a file, begin an IPC stream as written before Arrow 0.15,
/// without a continuation marker.
pub(crate) fn is_legacy_stream(start: &[u8]) -> bool {
    let Some((length, rest)) = start.split_first_chunk::<4>() else {
        return false;
    };
    rest.get(..u32::from_le_bytes(*length) as usize)
        .and_then(|metadata| arrow_ipc::root_as_message(metadata).ok())
        .is_some_and(|message| message.header_type() == MessageHeader::Schema)
}

/// arrow-ipc checks the byte order of files, but not of streams.
fn check_byte_order(schema: Schema<'_>) -> Result<(), String> {
    match schema.endianness() {
        order if order.equals_to_target_endianness() => Ok(()),
        Endianness::Big => Err("big-endian Arrow IPC data is not supported".to_owned()),
        _ => Err("the byte order of this Arrow IPC data is not supported".to_owned()),
    }
}

/// Places and lengths are in bytes. A negative length is a very large one here, which no file has.
struct Data<F> {
    file: F,
    bytes: u64,
}

impl<F: Read + Seek> Data<F> {
    fn new(mut file: F) -> Result<Self, String> {
        let bytes = file.seek(SeekFrom::End(0)).map_err(text)?;
        Ok(Self { file, bytes })
    }

    /// Returns where `length` bytes from `start` end, which is not behind the end of the data.
    fn end(&self, start: u64, length: u64) -> Result<u64, String> {
        let end = start.checked_add(length).filter(|end| *end <= self.bytes);
        end.ok_or_else(|| {
            let bytes = self.bytes;
            format!("truncated or damaged: there are {bytes} bytes, not {length} more from {start}")
        })
    }

    fn read(&mut self, start: u64, length: u64) -> Result<Vec<u8>, String> {
        self.end(start, length)?;
        self.file.seek(SeekFrom::Start(start)).map_err(text)?;
        let mut data = vec![0; length as usize];
        self.file.read_exact(&mut data).map_err(text)?;
        Ok(data)
    }

    /// Reads the length of a message's metadata at `start`; returns it, and where the metadata
    /// starts.
    fn length(&mut self, mut start: u64) -> Result<(u64, u64), String> {
        let mut length = self.read(start, 4)?;
        start += 4;
        if length == [0xff; 4] {
            length = self.read(start, 4)?;
            start += 4;
        }
        let length = length.try_into().map_or(0, u32::from_le_bytes);
        Ok((u64::from(length), start))
    }

    /// Checks the lengths to which compressed buffers expand; returns the rows of a record batch.
    /// The body starts at `body`.
    fn check_body(&mut self, message: Message<'_>, body: u64) -> Result<u64, String> {
        let batch = message.header_as_record_batch();
        let dictionary = message.header_as_dictionary_batch().and_then(|d| d.data());
        let compressed = batch.or(dictionary).filter(|b| b.compression().is_some());
        let buffers = compressed.and_then(|batch| batch.buffers());
        for buffer in buffers.into_iter().flatten().filter(|b| b.length() >= 8) {
            let start = self.end(body, buffer.offset() as u64)?;
            let length = self.read(start, 8)?;
            let length = length.try_into().map_or(0, i64::from_le_bytes);
            let room =
                usize::try_from(length).map_or(Ok(()), |n| Vec::<u8>::new().try_reserve_exact(n));
            if room.is_err() {
                return Err(damaged(format!(
                    "a compressed buffer claims a length of {length} bytes"
                )));
            }
        }
        let rows = batch.map_or(0, |batch| batch.length());
        u64::try_from(rows).map_err(|_| damaged("negative row count"))
    }
}

fn damaged(e: impl std::fmt::Display) -> String {
    format!("damaged Arrow IPC data: {e}")
}

fn text(e: io::Error) -> String {
    e.to_string()
}
