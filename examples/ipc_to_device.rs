//! Reads an Arrow IPC file to a device without a copy on the host: into page-locked memory, where arrow-ipc decodes the batches, and
//! from where they are uploaded.
//!
//! ```sh
//! cargo run -p examples --features ipc --example ipc_to_device
//! ```

use std::fmt::Display;
use std::io::{Cursor, Read, Seek, SeekFrom};
use std::sync::Arc;

use arrow_array::{
    ArrayRef, Int64Array, LargeStringArray, RecordBatch, RecordBatchIterator, RecordBatchReader,
};
use arrow_buffer::Buffer;
use arrow_device::{Device, Devices};
use arrow_ipc::convert::fb_to_schema;
use arrow_ipc::reader::{FileDecoder, read_footer_length};
use arrow_ipc::writer::FileWriter;
use arrow_ipc::{Block, root_as_footer_with_opts, root_as_message};
use arrow_schema::ArrowError;
use flatbuffers::VerifierOptions;

/// Reads an Arrow IPC file into page-locked memory of `device`. The batches refer to it there.
pub(crate) fn read_file(
    mut file: impl Read + Seek,
    device: &Device,
) -> Result<impl RecordBatchReader, ArrowError> {
    let bytes = file.seek(SeekFrom::End(0))?;
    file.rewind()?;
    let mut host = device.host_buffer(usize::try_from(bytes).map_err(refused)?)?;
    file.read_exact(&mut host)?;
    let file = Buffer::from(host);

    let no_footer = || refused("the file has no footer");
    let (rest, trailer) = file.split_last_chunk().ok_or_else(no_footer)?;
    let start = rest.len().checked_sub(read_footer_length(*trailer)?);
    let footer = &rest[start.ok_or_else(no_footer)?..];
    // Fields may share their children and names: this bounds what a small footer stands for.
    let limits = VerifierOptions {
        max_apparent_size: footer.len().saturating_mul(8),
        ..Default::default()
    };
    let footer = root_as_footer_with_opts(&limits, footer).map_err(refused)?;
    let schema = footer
        .schema()
        .filter(|schema| schema.endianness().equals_to_target_endianness())
        .ok_or_else(|| refused("the file has no schema in this machine's byte order"))?;
    let schema = Arc::new(fb_to_schema(schema));

    let mut left = file.len();
    let mut decoder =
        FileDecoder::new(schema.clone(), footer.version()).with_require_alignment(true);
    for block in footer.dictionaries().into_iter().flatten() {
        decoder.read_dictionary(block, &message(&file, block, &mut left)?)?;
    }
    let blocks: Vec<Block> = footer
        .recordBatches()
        .into_iter()
        .flatten()
        .copied()
        .collect();
    let batches = blocks.into_iter().filter_map(move |block| {
        message(&file, &block, &mut left)
            .and_then(|message| decoder.read_record_batch(&block, &message))
            .transpose()
    });
    Ok(RecordBatchIterator::new(batches, schema))
}

/// Returns the message of a block, if its buffers can be used where they are, and stand for no more memory than the file takes.
/// `left` is how many bytes of the file no other block has.
fn message(file: &Buffer, block: &Block, left: &mut usize) -> Result<Buffer, ArrowError> {
    let number = |number: i64| usize::try_from(number).map_err(refused);
    let (start, body) = (number(block.offset())?, number(block.bodyLength())?);
    let bytes = number(block.metaDataLength().into())?.saturating_add(body);
    *left = left
        .checked_sub(bytes)
        .filter(|_| start <= file.len() - bytes)
        .ok_or_else(|| refused("messages overlap, or are longer than the file"))?;
    let message = file.slice_with_length(start, bytes);
    let prefix = if message.starts_with(&[0xff; 4]) {
        8
    } else {
        4
    };
    let header = root_as_message(message.get(prefix..).unwrap_or_default()).map_err(refused)?;
    let dictionary = header.header_as_dictionary_batch();
    let batch = dictionary.and_then(|dictionary| dictionary.data());
    let Some(batch) = batch.or(header.header_as_record_batch()) else {
        return Ok(message); // which the decoder refuses or passes over
    };
    if batch.compression().is_some() || dictionary.is_some_and(|one| one.isDelta()) {
        return Err(refused(
            "what is compressed, or a dictionary in parts, is not used where it is: read the file with arrow-ipc's FileReader, \
             and upload its batches",
        ));
    }
    // Without a sign, a negative length is too large.
    let buffers = batch.buffers().into_iter().flatten();
    let claimed = buffers.fold(0, |sum: u64, one| sum.saturating_add(one.length() as u64));
    if claimed > body as u64 {
        return Err(refused("buffers overlap, or are longer than their message"));
    }
    // Rows of nulls or of one run take no memory before arrow-rs asks which of them are null.
    let mut nodes = batch.nodes().into_iter().flatten();
    if nodes.any(|node| node.length() as u64 / 8 > file.len() as u64) {
        return Err(refused("there are more rows than bits in the file"));
    }
    Ok(message)
}

fn refused(why: impl Display) -> ArrowError {
    ArrowError::IpcError(why.to_string())
}

#[allow(dead_code, reason = "a test includes this file")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let id = Int64Array::from_iter_values(0..300_000);
    let name =
        LargeStringArray::from_iter_values(id.values().iter().map(|id| format!("customer {id}")));
    let columns: [(_, ArrayRef); 2] = [("id", Arc::new(id)), ("name", Arc::new(name))];
    let batch = RecordBatch::try_from_iter(columns)?;
    let written = [batch.slice(0, 140_000), batch.slice(140_000, 160_000)];
    let mut file = Vec::new(); // or a `File`
    let mut writer = FileWriter::try_new(&mut file, &batch.schema())?;
    written.iter().try_for_each(|batch| writer.write(batch))?;
    writer.finish()?;
    drop(writer);

    let device = Devices::simulated()?;
    let before = device.stats();
    let mut uploaded = Vec::new();
    for batch in read_file(Cursor::new(file), &device)? {
        uploaded.push(device.upload(&batch?)?);
    }
    let stats = device.stats().since(&before);
    let (up, copied) = (stats.bytes_to_device, stats.host_copied_bytes);
    println!("{up} bytes went to {device}, of which the host has copied {copied}");
    // Of each buffer the bytes at its end that do not fill a block of 64; buffers of less than 1 MiB would be joined.
    assert!(copied <= 64 * 3 * 2, "{copied}");
    for (batch, on_device) in written.iter().zip(&uploaded) {
        assert_eq!(on_device.to_host()?, *batch);
    }
    Ok(())
}
