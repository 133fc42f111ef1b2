//! Messages of Arrow IPC: how they are read into staging memory, and what is checked before arrow-rs decodes them.

use std::io::Read;

use arrow_buffer::Buffer;
use arrow_ipc::{CompressionType, MessageHeader, RecordBatch, root_as_message};
use arrow_schema::ArrowError;

use crate::device::{ALIGNMENT, Device};
use crate::error::{Error, Result};
use crate::stream::ipc::lz4;

/// The prefix of metadata: the marker, which old files lack, and the length.
const CONTINUATION_MARKER: [u8; 4] = [0xff; 4];
const MARKER: usize = CONTINUATION_MARKER.len();
const LENGTH: usize = 4;
/// What stands before the bytes of a compressed buffer: their length when they are decompressed, or -1 if they are not compressed.
const COMPRESSED: usize = 8;

/// A message whose body is in staging memory.
#[derive(Debug)]
pub(super) struct Message {
    /// Prefix and metadata, which were checked.
    pub(super) metadata: Vec<u8>,
    /// The body with its padding to a multiple of 64.
    pub(super) body: Buffer,
    /// All buffers begin at multiples of 64, with zeros between them.
    pub(super) aligned: bool,
    /// How many bytes the compressed buffers are when they are decompressed.
    pub(super) decompressed: usize,
}

fn malformed(message: impl Into<String>) -> Error {
    Error::invalid("message", message.into())
}

/// Reads exactly `bytes` bytes, without a larger allocation than there are bytes to read.
pub(super) fn read_bytes(reader: &mut impl Read, bytes: usize) -> Result<Vec<u8>> {
    let mut read = Vec::new();
    let limit = u64::try_from(bytes).unwrap_or(u64::MAX);
    reader
        .take(limit)
        .read_to_end(&mut read)
        .map_err(ArrowError::from)?;
    if read.len() < bytes {
        return Err(malformed(format!(
            "{bytes} bytes are announced, {} are there",
            read.len()
        )));
    }
    Ok(read)
}

/// Reads prefix and metadata of the next message of a stream; `None` at its end.
pub(super) fn next_metadata(reader: &mut impl Read) -> Result<Option<Vec<u8>>> {
    let mut metadata = Vec::new();
    let first = reader.take(MARKER as u64).read_to_end(&mut metadata);
    match first.map_err(ArrowError::from)? {
        // An end without a mark.
        0 => return Ok(None),
        MARKER => {}
        _ => return Err(malformed("the stream ends within a length")),
    }
    if metadata == CONTINUATION_MARKER {
        metadata.extend(read_bytes(reader, LENGTH)?);
    }
    let (_, length) = metadata.split_at(metadata.len() - LENGTH);
    let length = length
        .iter()
        .rev()
        .fold(0u32, |length, byte| length << 8 | u32::from(*byte));
    let Ok(length) = i32::try_from(length) else {
        return Err(malformed("a negative length of metadata"));
    };
    if length == 0 {
        return Ok(None);
    }
    metadata.extend(read_bytes(reader, length.unsigned_abs() as usize)?);
    Ok(Some(metadata))
}

/// The flatbuffer in prefix and metadata.
pub(super) fn flatbuffer(metadata: &[u8]) -> Result<arrow_ipc::Message<'_>> {
    let prefix = match metadata.starts_with(&CONTINUATION_MARKER) {
        true => MARKER + LENGTH,
        false => LENGTH,
    };
    let flatbuffer = metadata.get(prefix..).unwrap_or_default();
    root_as_message(flatbuffer).map_err(|e| malformed(format!("no message: {e:?}")))
}

/// Reads the body of a message, whose prefix and metadata were read, into staging memory of `device`. `most` bounds what compressed
/// buffers decompress to, in bytes.
pub(super) fn read_body(
    reader: &mut impl Read,
    device: &Device,
    metadata: Vec<u8>,
    body: usize,
    most: usize,
) -> Result<Message> {
    let message = flatbuffer(&metadata)?;
    if usize::try_from(message.bodyLength()) != Ok(body) {
        return Err(malformed(format!(
            "a body of {} bytes in a block of {body}",
            message.bodyLength()
        )));
    }
    let padded = body.checked_next_multiple_of(ALIGNMENT);
    let padded = padded.ok_or_else(|| malformed(format!("a body of {body} bytes")))?;
    let mut slab = device.host_slab(padded)?;
    reader
        .read_exact(&mut slab[..body])
        .map_err(ArrowError::from)?;
    let batch = match message.header_type() {
        MessageHeader::RecordBatch => message.header_as_record_batch(),
        MessageHeader::DictionaryBatch => message
            .header_as_dictionary_batch()
            .and_then(|dictionary| dictionary.data()),
        _ => None,
    };
    let (aligned, decompressed) = match batch {
        Some(batch) => {
            let (buffers, decompressed) = check(&batch, &slab[..body], most)?;
            let aligned = clear_between(buffers, &mut slab)?;
            // Buffers that are not compressed in a compressed message stand behind a prefix.
            (aligned && batch.compression().is_none(), decompressed)
        }
        None => (true, 0),
    };
    Ok(Message {
        metadata,
        body: slab.into_buffer(),
        aligned,
        decompressed,
    })
}

/// Checks the numbers of a batch for which arrow-rs would panic, or ask for more memory than there is. Returns the ranges of the
/// buffers in the body, and the bytes of the compressed ones when they are decompressed.
fn check(
    batch: &RecordBatch<'_>,
    body: &[u8],
    most: usize,
) -> Result<(Vec<(usize, usize)>, usize)> {
    if batch.length() < 0 {
        return Err(malformed("a negative number of rows"));
    }
    for node in batch.nodes().into_iter().flatten() {
        if node.length() < 0 || !(0..=node.length()).contains(&node.null_count()) {
            let (nulls, rows) = (node.null_count(), node.length());
            return Err(malformed(format!("{nulls} nulls in {rows} rows")));
        }
    }
    let codec = batch.compression().map(|compression| compression.codec());
    let mut buffers = Vec::new();
    let mut decompressed = 0usize;
    for (i, buffer) in batch.buffers().into_iter().flatten().enumerate() {
        let (offset, length) = (
            usize::try_from(buffer.offset()),
            usize::try_from(buffer.length()),
        );
        let bytes = match (offset, length) {
            (Ok(offset), Ok(length)) => body.get(offset..).and_then(|from| from.get(..length)),
            _ => None,
        };
        let Some(bytes) = bytes else {
            return Err(malformed(format!(
                "buffer {i}, of {} bytes from {} on, is not in the body of {} bytes",
                buffer.length(),
                buffer.offset(),
                body.len()
            )));
        };
        let start = buffer.offset() as usize;
        buffers.push((start, start + bytes.len()));
        if codec.is_some() && !bytes.is_empty() {
            let length = bytes
                .first_chunk::<COMPRESSED>()
                .map(|length| i64::from_le_bytes(*length));
            let Some(length) = length.filter(|length| *length >= -1) else {
                return Err(malformed(format!("buffer {i} does not say its length")));
            };
            // Other codecs' decoders stop there.
            if codec == Some(CompressionType::LZ4_FRAME)
                && length > 0
                && lz4::decompressed(&bytes[COMPRESSED..]) != u64::try_from(length).ok()
            {
                return Err(malformed(format!(
                    "buffer {i} does not decompress to the {length} bytes that it announces"
                )));
            }
            decompressed = decompressed.saturating_add(usize::try_from(length).unwrap_or(0));
            if decompressed > most {
                return Err(malformed(format!(
                    "buffers of {decompressed} bytes or more when they are decompressed; see IpcOptions::with_max_message_bytes"
                )));
            }
        }
    }
    let variadic = batch.variadicBufferCounts().into_iter().flatten();
    let most = i64::try_from(buffers.len()).unwrap_or(i64::MAX);
    match variadic
        .into_iter()
        .find(|count| !(0..=most).contains(count))
    {
        Some(count) => Err(malformed(format!("{count} buffers of a view column"))),
        None => Ok((buffers, decompressed)),
    }
}

/// Writes zeros to all bytes of a body that belong to no buffer. Returns whether all buffers begin at multiples of 64. Refuses those
/// that overlap, which no writer makes: what is copied of each could be any multiple of the body.
fn clear_between(mut buffers: Vec<(usize, usize)>, body: &mut [u8]) -> Result<bool> {
    if !buffers.is_sorted() {
        buffers.sort_unstable();
    }
    let (mut end, mut aligned) = (0, true);
    for (start, next) in buffers.into_iter().filter(|(start, end)| start < end) {
        if start < end {
            return Err(malformed(format!("buffers overlap at byte {start}")));
        }
        body[end..start].fill(0);
        aligned = aligned && start % ALIGNMENT == 0;
        end = next;
    }
    body[end..].fill(0);
    Ok(aligned)
}
