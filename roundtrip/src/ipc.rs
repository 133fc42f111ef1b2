//! A look at Arrow IPC data before it is read: what arrow-ipc would panic on, read wrongly or take
//! for the end of the data is an error here.

use std::io::{self, BufRead, ErrorKind, Read, Seek, SeekFrom};

use arrow_ipc::{Endianness, Message, MessageHeader, MetadataVersion, Schema};

const CONTINUATION: [u8; 4] = [0xff; 4];

/// Checks an IPC stream from its start and counts its rows.
pub fn check_stream(file: &mut (impl BufRead + Seek)) -> Result<u64, String> {
    let total = file.seek(SeekFrom::End(0)).map_err(text)?;
    file.seek(SeekFrom::Start(0)).map_err(text)?;
    let (mut rows, mut index) = (0, 0);
    while let Some(metadata) = next_metadata(file, total, index)? {
        let message = parse(&metadata, index)?;
        if index == 0 {
            let schema = message.header_as_schema();
            check_schema(schema.ok_or("the IPC stream does not start with a schema")?)?;
        }
        let body = u64::try_from(message.bodyLength()).unwrap_or(u64::MAX);
        let start = file.stream_position().map_err(text)?;
        if body > total - start {
            return Err(format!(
                "truncated: message {index} has a body of {body} bytes, {} are left",
                total - start
            ));
        }
        rows += check_body(&message, file, start, index)?;
        file.seek(SeekFrom::Start(start + body)).map_err(text)?;
        index += 1;
    }
    if index == 0 {
        return Err("the IPC stream has no schema".to_owned());
    }
    Ok(rows)
}

/// Checks an IPC file's footer and blocks and counts its rows.
pub fn check_file(file: &mut (impl BufRead + Seek)) -> Result<u64, String> {
    let total = file.seek(SeekFrom::End(0)).map_err(text)?;
    let mut tail = [0; 10];
    // The shortest file: magic and padding, footer length, magic.
    if total >= 18 {
        file.seek(SeekFrom::Start(total - 10)).map_err(text)?;
        file.read_exact(&mut tail).map_err(text)?;
    }
    if &tail[4..] != b"ARROW1" {
        return Err("truncated: the Arrow file has no footer".to_owned());
    }
    let length = i32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]);
    let length = u64::try_from(length)
        .ok()
        .filter(|n| (1..=total - 18).contains(n))
        .ok_or_else(|| format!("the Arrow file's footer has an impossible length, {length}"))?;
    let footer = read_at(file, total - 10 - length, length)?;
    let footer = arrow_ipc::root_as_footer(&footer)
        .map_err(|e| format!("the Arrow file's footer is damaged: {e}"))?;
    // The footer's own version is of no matter: that of each message says how it is read, and Arrow 0.14 set none here.
    check_schema(footer.schema().ok_or("the Arrow file has no schema")?)?;

    let mut rows = 0;
    let dictionaries = footer.dictionaries().into_iter().flatten();
    let batches = footer.recordBatches().into_iter().flatten();
    for (index, block) in dictionaries.chain(batches).enumerate() {
        let start = u64::try_from(block.offset()).unwrap_or(u64::MAX);
        let metadata = u64::try_from(block.metaDataLength()).unwrap_or(u64::MAX);
        let body = u64::try_from(block.bodyLength()).unwrap_or(u64::MAX);
        let end = start.saturating_add(metadata).saturating_add(body);
        if end > total || metadata < 8 {
            return Err(format!(
                "truncated or damaged: block {index} (offset {}, {} and {} bytes) does not lie in \
                 the {total} bytes of the file",
                block.offset(),
                block.metaDataLength(),
                block.bodyLength()
            ));
        }
        let bytes = read_at(file, start, metadata)?;
        let prefix = if bytes[..4] == CONTINUATION { 8 } else { 4 };
        let message = parse(&bytes[prefix..], index)?;
        rows += check_body(&message, file, start + metadata, index)?;
    }
    Ok(rows)
}

/// Whether `start`, the first bytes of a file, begin an IPC stream as written before Arrow 0.15,
/// without a continuation marker.
pub fn is_legacy_stream(start: &[u8]) -> bool {
    let Some((length, rest)) = start.split_first_chunk::<4>() else {
        return false;
    };
    usize::try_from(i32::from_le_bytes(*length))
        .ok()
        .and_then(|n| rest.get(..n))
        .and_then(|metadata| arrow_ipc::root_as_message(metadata).ok())
        .is_some_and(|message| message.header_type() == MessageHeader::Schema)
}

/// The metadata of the next message of a stream; `None` at its end.
fn next_metadata(
    file: &mut (impl BufRead + Seek),
    total: u64,
    index: usize,
) -> Result<Option<Vec<u8>>, String> {
    if file.fill_buf().map_err(text)?.is_empty() {
        return Ok(None);
    }
    let cut = |e: io::Error| match e.kind() {
        ErrorKind::UnexpectedEof => format!("truncated: message {index} ends in its length"),
        _ => text(e),
    };
    let mut length = [0; 4];
    file.read_exact(&mut length).map_err(cut)?;
    if length == CONTINUATION {
        file.read_exact(&mut length).map_err(cut)?;
    }
    let length = i32::from_le_bytes(length);
    if length == 0 {
        return Ok(None);
    }
    let left = total - file.stream_position().map_err(text)?;
    let bytes = u64::try_from(length).map_err(|_| {
        format!("damaged: message {index} has metadata of an impossible length, {length}")
    })?;
    if bytes > left {
        return Err(format!(
            "truncated: message {index} has {length} bytes of metadata, {left} are left"
        ));
    }
    let mut metadata = Vec::new();
    file.by_ref()
        .take(bytes)
        .read_to_end(&mut metadata)
        .map_err(text)?;
    Ok(Some(metadata))
}

fn parse(metadata: &[u8], index: usize) -> Result<Message<'_>, String> {
    let message = arrow_ipc::root_as_message(metadata)
        .map_err(|e| format!("damaged: message {index} cannot be decoded: {e}"))?;
    let version = message.version();
    if ![MetadataVersion::V4, MetadataVersion::V5].contains(&version) {
        return Err(format!(
            "IPC metadata version {version:?} is not supported (only V4 and V5)"
        ));
    }
    Ok(message)
}

/// arrow-ipc checks the byte order of files, but not of streams.
fn check_schema(schema: Schema<'_>) -> Result<(), String> {
    if schema.fields().is_none() {
        return Err("the IPC schema has no list of fields".to_owned());
    }
    match schema.endianness() {
        e if e.equals_to_target_endianness() => Ok(()),
        Endianness::Big => Err("big-endian Arrow IPC data is not supported".to_owned()),
        Endianness::Little => Err("little-endian Arrow IPC data is not supported here".to_owned()),
        e => Err(format!("the IPC schema has an unknown byte order, {e:?}")),
    }
}

/// Checks the buffers of a record or dictionary batch against the body, which starts at `start`
/// of the file; gives a record batch's rows.
fn check_body(
    message: &Message<'_>,
    file: &mut (impl Read + Seek),
    start: u64,
    index: usize,
) -> Result<u64, String> {
    let record_batch = message.header_as_record_batch();
    let dictionary = message.header_as_dictionary_batch();
    let Some(batch) = record_batch.or_else(|| dictionary.and_then(|d| d.data())) else {
        return Ok(0);
    };
    let damaged = |what: &str| format!("damaged: message {index}: {what}");
    for buffer in batch.buffers().into_iter().flatten() {
        let end = buffer.offset().checked_add(buffer.length());
        let inside = end.is_some_and(|end| end <= message.bodyLength());
        if !inside || buffer.offset() < 0 || buffer.length() < 0 {
            return Err(damaged("a buffer lies outside its body"));
        }
        if batch.compression().is_none() || buffer.length() < 8 {
            continue;
        }
        // The length that arrow-ipc will allocate for: -1 means not compressed.
        let prefix = read_at(file, start + buffer.offset() as u64, 8)?;
        let length = prefix.try_into().map_or(-2, i64::from_le_bytes);
        let possible = length == -1
            || usize::try_from(length).is_ok_and(|n| Vec::<u8>::new().try_reserve(n).is_ok());
        if !possible {
            return Err(damaged(&format!(
                "a compressed buffer claims a length of {length} bytes"
            )));
        }
    }
    match record_batch {
        Some(batch) => u64::try_from(batch.length()).map_err(|_| damaged("negative row count")),
        None => Ok(0),
    }
}

fn read_at(file: &mut (impl Read + Seek), start: u64, bytes: u64) -> Result<Vec<u8>, String> {
    file.seek(SeekFrom::Start(start)).map_err(text)?;
    let mut data = Vec::new();
    file.by_ref()
        .take(bytes)
        .read_to_end(&mut data)
        .map_err(text)?;
    if data.len() as u64 == bytes {
        Ok(data)
    } else {
        Err("the file became shorter while it was read".to_owned())
    }
}

fn text(e: io::Error) -> String {
    e.to_string()
}
