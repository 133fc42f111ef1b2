//! Arrow IPC files to a device as the example does it, and what it refuses.

#[path = "../ipc_to_device.rs"]
mod example;

use std::io::Cursor;
use std::sync::Arc;

use arrow_array::builder::StringDictionaryBuilder;
use arrow_array::types::Int8Type;
use arrow_array::{ArrayRef, Decimal128Array, Int8Array, Int64Array, NullArray, RecordBatch};
use arrow_device::Devices;
use arrow_ipc::reader::read_footer_length;
use arrow_ipc::writer::{DictionaryHandling, FileWriter, IpcWriteOptions};
use arrow_ipc::{Block, CompressionType, MetadataVersion, root_as_footer};
use arrow_schema::{ArrowError, DataType, Field, Fields, Schema};

fn aligned(bytes: usize) -> IpcWriteOptions {
    IpcWriteOptions::try_new(bytes, false, MetadataVersion::V5).unwrap()
}

fn write(batches: &[RecordBatch], options: IpcWriteOptions) -> Vec<u8> {
    let (mut file, schema) = (Vec::new(), batches[0].schema());
    let mut writer = FileWriter::try_new_with_options(&mut file, &schema, options).unwrap();
    batches
        .iter()
        .for_each(|batch| writer.write(batch).unwrap());
    writer.finish().unwrap();
    drop(writer);
    file
}

/// To the simulated device and back.
fn read(file: &[u8]) -> Result<Vec<RecordBatch>, ArrowError> {
    let device = Devices::simulated()?;
    let batches = example::read_file(Cursor::new(file), &device)?;
    batches
        .map(|batch| Ok(device.upload(&batch?)?.to_host()?))
        .collect()
}

#[track_caller]
fn assert_refused(file: &[u8], why: &str) {
    let error = read(file).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
}

fn dictionary(values: &[&str]) -> ArrayRef {
    let mut builder = StringDictionaryBuilder::<Int8Type>::new();
    builder.extend(values.iter().map(Some));
    Arc::new(builder.finish())
}

fn of(columns: &[ArrayRef]) -> RecordBatch {
    let names = (0..).map(|i| format!("{i}"));
    let columns = names
        .zip(columns)
        .map(|(name, column)| (name, column.clone(), true));
    RecordBatch::try_from_iter_with_nullable(columns).unwrap()
}

/// Puts bytes in the place of others, which are there.
#[track_caller]
fn patch(bytes: &mut [u8], old: &[u8], new: &[u8]) {
    let places = bytes.windows(old.len()).enumerate();
    let places = places.filter(|(_, found)| *found == old).map(|(at, _)| at);
    let places: Vec<_> = places.collect();
    assert!(!places.is_empty());
    for at in places {
        bytes[at..at + new.len()].copy_from_slice(new);
    }
}

fn words<const N: usize>(numbers: [i64; N]) -> Vec<u8> {
    numbers.map(i64::to_le_bytes).concat()
}

#[test]
fn there_and_back() {
    let column = |n: i8| Arc::new(Int8Array::from_iter((0..n).map(|i| (i > 1).then_some(i)))) as _;
    let names = ["a", "bc", "a", "d", "a", "bc", "a"];
    let all = of(&[column(7), dictionary(&names), Arc::new(NullArray::new(7))]);
    let batches = [all.clone(), all.slice(1, 0), all.slice(2, 4)];
    assert_eq!(read(&write(&batches, aligned(64))).unwrap(), batches);
    let none = [all.project(&[]).unwrap()];
    assert_eq!(read(&write(&none, aligned(64))).unwrap(), none);
}

#[test]
fn what_cannot_be_used_where_it_is() {
    let batches = [of(&[dictionary(&["a"])]), of(&[dictionary(&["a", "b"])])];
    let lz4 = aligned(64).try_with_compression(Some(CompressionType::LZ4_FRAME));
    let delta = aligned(64).with_dictionary_handling(DictionaryHandling::Delta);
    assert_refused(
        &write(&batches[..1], lz4.unwrap()),
        "arrow-ipc's FileReader",
    );
    assert_refused(&write(&batches, delta), "arrow-ipc's FileReader");
    // One of the decimals, which are 8 bytes further than a multiple of 16 apart, does not begin at one.
    let decimals: ArrayRef = Arc::new(Decimal128Array::from_iter_values(0..101));
    let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values(0..101));
    let batch = of(&[decimals.clone(), numbers, decimals]);
    assert_refused(&write(&[batch], aligned(8)), "aligned");
}

/// A few bytes that stand for any number.
#[test]
fn what_claims_more_than_there_is() {
    let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values(0..8));
    let nulls: ArrayRef = Arc::new(NullArray::new(8));
    let batch = of(&[numbers.clone(), numbers, nulls]);
    let file = write(&[batch.clone(), batch], aligned(64));
    let changed = |old: &[u8], new: &[u8]| {
        let mut file = file.clone();
        patch(&mut file, old, new);
        file
    };
    // The place and the length of each column's validity and values.
    let buffers = words([0, 0, 0, 64, 64, 0, 64, 64]);
    for other in [[0, 0, 0, 128, 64, 0, 64, 64], [0, 0, 0, 64, 64, 0, 64, -64]] {
        assert_refused(&changed(&buffers, &words(other)), "buffers overlap");
    }
    for rows in [i64::MAX, -1] {
        let file = changed(&words([8, 8]), &words([rows, rows]));
        assert_refused(&file, "more rows than bits");
    }
    let footer = root_as_footer(footer(&file)).unwrap();
    let block = *footer.recordBatches().unwrap().get(1);
    // The whole file, which the other block is in too; and beyond any file.
    let rest = file.len() as i64 - 8 - i64::from(block.metaDataLength());
    for (offset, body) in [(8, rest), (i64::MAX, block.bodyLength())] {
        let other = Block::new(offset, block.metaDataLength(), body);
        assert_refused(&changed(&block.0, &other.0), "messages overlap");
    }
    assert_refused(&file[..file.len() - 1], "correct footer");
    assert_refused(&[], "no footer");
    assert_refused(b"\xff\xff\xff\x7fARROW1", "no footer");
}

#[test]
fn the_guide_shows_the_example() {
    let (example, guide) = (
        include_str!("../ipc_to_device.rs"),
        include_str!("../../docs/guide/streams.md"),
    );
    let (_, functions) = example
        .split_once("/// Reads an Arrow IPC file into")
        .unwrap();
    let (functions, _) = functions.split_once("fn refused").unwrap();
    assert!(guide.contains(functions), "the guide has another program");
}

fn footer(file: &[u8]) -> &[u8] {
    let end = file.len() - 10;
    let length = read_footer_length(file[end..].try_into().unwrap());
    &file[end - length.unwrap()..end]
}

/// Each struct's children are the same one.
#[test]
fn a_schema_whose_fields_share_their_children() {
    let leaf = Arc::new(Field::new("i", DataType::Int32, true));
    let nested = (0..17).fold(leaf.clone(), |child, _| {
        let fields = Fields::from(vec![child, leaf.clone()]);
        Arc::new(Field::new("s", DataType::Struct(fields), true))
    });
    let batch = RecordBatch::new_empty(Arc::new(Schema::new(vec![nested])));
    let mut file = write(std::slice::from_ref(&batch), aligned(64));
    assert_eq!(read(&file).unwrap(), [batch]);
    let schema = root_as_footer(footer(&file)).unwrap().schema();
    let (mut fields, mut vectors) = (schema.unwrap().fields(), vec![]);
    while let Some(children) = fields.and_then(|fields| fields.get(0).children()) {
        if children.len() == 2 {
            vectors.push(children.bytes().as_ptr().addr() - file.as_ptr().addr());
        }
        fields = Some(children).filter(|children| !children.is_empty());
    }
    assert_eq!(vectors.len(), 17);
    for at in vectors {
        // Each offset counts from its own place.
        let first = u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
        file[at + 4..at + 8].copy_from_slice(&(first - 4).to_le_bytes());
    }
    assert_refused(&file, "Apparent size too large");
}
