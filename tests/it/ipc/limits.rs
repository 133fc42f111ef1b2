//! What small inputs cost: memory up to the limit, time in proportion, dictionaries once.

use std::sync::Arc;

use arrow_array::types::Int8Type;
use arrow_array::{ArrayRef, DictionaryArray, Int32Array, RecordBatch, StringArray, UInt8Array};
use arrow_device::device::sim::SimMode;
use arrow_device::ipc::IpcOptions;
use arrow_device::{DeviceRecordBatch, Devices, Result};
use arrow_ipc::writer::{DictionaryHandling, IpcWriteOptions};
use arrow_ipc::{Block, CompressionType, root_as_footer, root_as_message};
use arrow_schema::{DataType, Field, Fields, Schema};

use crate::ipc::{FORMATS, Format, aligned, assert_aligned, assert_batches, counted, dictionary};
use crate::simkit::Sim;
use crate::support::{alloc, count};

fn lz4() -> IpcWriteOptions {
    let lz4 = Some(CompressionType::LZ4_FRAME);
    aligned(64).try_with_compression(lz4).unwrap()
}

/// Puts bytes in the place of others, which are there once at least.
#[track_caller]
fn patch(bytes: &mut [u8], old: &[u8], new: &[u8]) {
    let places = bytes.windows(old.len()).enumerate();
    let places: Vec<_> = places.filter(|(_, found)| *found == old).collect();
    let places: Vec<_> = places.into_iter().map(|(at, _)| at).collect();
    assert!(!places.is_empty());
    for at in places {
        bytes[at..at + new.len()].copy_from_slice(new);
    }
}

/// Reads with a limit of a MiB; the bytes that this thread allocated meanwhile.
fn limited(format: Format, bytes: &[u8]) -> (Result<Vec<DeviceRecordBatch>>, usize) {
    let options = IpcOptions::default().with_max_message_bytes(1 << 20);
    let read = || format.read_with(bytes, &Devices::cpu(), options);
    let (read, allocated, _) = alloc::bytes(read);
    (read, allocated)
}

/// A buffer says that it decompresses to 8 bytes, and decompresses to 64 MiB.
#[test]
fn compressed_buffers_that_say_too_little() {
    let zeros = Arc::new(Int32Array::from(vec![0; 16 << 20])) as ArrayRef;
    let batch = RecordBatch::try_from_iter([("a", zeros)]).unwrap();
    for format in FORMATS {
        let mut bytes = format.write(std::slice::from_ref(&batch), lz4());
        let prefix = |bytes: i64| [&bytes.to_le_bytes()[..], &[0x04, 0x22, 0x4D, 0x18]].concat();
        let (read, _) = limited(format, &bytes);
        let error = read.unwrap_err().to_string();
        assert!(error.contains("with_max_message_bytes"), "{error}");
        patch(&mut bytes, &prefix(64 << 20), &prefix(8));
        assert!(bytes.len() < 1 << 20, "{}", bytes.len());
        let (read, allocated) = limited(format, &bytes);
        let error = read.unwrap_err().to_string();
        assert!(error.contains("the 8 bytes that it announces"), "{error}");
        assert!(allocated < 2 << 20, "{allocated} bytes");
    }
}

/// Dictionaries stay, so the limit holds for all of them.
#[test]
fn all_dictionaries_are_limited() {
    let words = |n: usize| format!("{}", n % 10).repeat(100_000);
    let column = |i| (format!("{i}"), dictionary(4, &[&words(i), &words(i + 1)]));
    let of = |n| RecordBatch::try_from_iter((0..n).map(column)).unwrap();
    for format in FORMATS {
        let (read, _) = limited(format, &format.write(&[of(5)], lz4()));
        assert_batches(&[of(5)], &read.unwrap(), "five");
        let (read, _) = limited(format, &format.write(&[of(200)], lz4()));
        let error = read.unwrap_err().to_string();
        assert!(error.contains("dictionaries of 1200"), "{error}");
    }
    // Those that take the place of others do not add up.
    let one = |i| RecordBatch::try_from_iter([("d", dictionary(4, &[&words(i)]))]).unwrap();
    let batches: Vec<_> = (0..20).map(one).collect();
    let (read, _) = limited(Format::Stream, &Format::Stream.write(&batches, lz4()));
    assert_batches(&batches, &read.unwrap(), "replaced");
}

/// Values may have no bytes, but joined ones have bits.
#[test]
fn values_without_bytes_are_limited() {
    let of = |words: &[&str]| RecordBatch::try_from_iter([("d", dictionary(7, words))]).unwrap();
    let words: Vec<_> = (0..24).map(|i| format!("{i}")).collect();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let batches = [of(&words[..1]), of(&words)];
    let delta = aligned(64).with_dictionary_handling(DictionaryHandling::Delta);
    let mut bytes = Format::Stream.write(&batches, delta);
    let node = |values: i64| [values, 0].map(i64::to_le_bytes).concat();
    patch(&mut bytes, &node(23), &node(1 << 60));
    let (read, allocated) = limited(Format::Stream, &bytes);
    let error = read.unwrap_err().to_string();
    assert!(
        error.contains("a dictionary of 1152921504606846977 values"),
        "{error}"
    );
    assert!(allocated < 1 << 20, "{allocated} bytes");
}

/// A schema whose structs share their children.
#[test]
fn schemas_that_share_their_parts() {
    let leaf = Arc::new(Field::new("i", DataType::Int32, true));
    let nested = (0..17).fold(leaf.clone(), |child, _| {
        let fields = Fields::from(vec![child, leaf.clone()]);
        Arc::new(Field::new("s", DataType::Struct(fields), true))
    });
    let batch = RecordBatch::new_empty(Arc::new(Schema::new(vec![nested])));
    let mut bytes = Format::Stream.write(&[batch], aligned(64));
    assert!(Format::Stream.read(&bytes, &Devices::cpu()).is_ok());
    let mut vectors = vec![];
    let message = root_as_message(&bytes[8..]).unwrap();
    let mut fields = message.header_as_schema().unwrap().fields();
    while let Some(children) = fields.and_then(|fields| fields.get(0).children()) {
        if children.len() == 2 {
            vectors.push(children.bytes().as_ptr().addr() - bytes.as_ptr().addr());
        }
        fields = Some(children).filter(|children| !children.is_empty());
    }
    assert_eq!(vectors.len(), 17);
    for at in vectors {
        // Each offset counts from its own place.
        let first = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        bytes[at + 4..at + 8].copy_from_slice(&(first - 4).to_le_bytes());
    }
    let (read, allocated) = limited(Format::Stream, &bytes);
    let error = read.unwrap_err().to_string();
    assert!(error.contains("more than 16 times"), "{error}");
    assert!(allocated < 1 << 16, "{allocated} bytes");
}

/// Many columns over the same bytes: each of them would be moved to where its values are aligned.
#[test]
fn buffers_that_overlap() {
    let column = |i| {
        (
            format!("{i}"),
            Arc::new(UInt8Array::from(vec![i; 40])) as ArrayRef,
        )
    };
    let batch = RecordBatch::try_from_iter([1, 2].map(column)).unwrap();
    for format in FORMATS {
        let mut bytes = format.write(std::slice::from_ref(&batch), aligned(64));
        let buffer = |offset: i64| [offset.to_le_bytes(), 40i64.to_le_bytes()].concat();
        patch(&mut bytes, &buffer(64), &buffer(20));
        for device in [&Devices::cpu(), &*Sim::new(SimMode::Async)] {
            let error = format.read(&bytes, device).unwrap_err().to_string();
            assert!(error.contains("buffers overlap at byte 20"), "{error}");
        }
        // Those that follow each other without padding are aligned on the device.
        patch(&mut bytes, &buffer(20), &buffer(44));
        let sim = Sim::new(SimMode::Async);
        assert_aligned(&format.read(&bytes, &sim).unwrap());
    }
}

/// A footer lists messages that lie within each other.
#[test]
fn messages_that_overlap() {
    let batch = RecordBatch::try_from_iter([("d", dictionary(4, &["a", "b"]))]).unwrap();
    let mut bytes = Format::File.write(&[batch.clone(), batch], aligned(64));
    let end = bytes.len() - 10;
    let length = u32::from_le_bytes(bytes[end..end + 4].try_into().unwrap()) as usize;
    let footer = root_as_footer(&bytes[end - length..end]).unwrap();
    let block = *footer.recordBatches().unwrap().get(0);
    let longer = (end - block.offset() as usize) as i64 - i64::from(block.metaDataLength());
    let longer = Block::new(block.offset(), block.metaDataLength(), longer);
    patch(&mut bytes, &block.0, &longer.0);
    let error = Format::File.read(&bytes, &Devices::cpu()).unwrap_err();
    assert!(error.to_string().contains("messages of"), "{error}");
}

/// Whether they are compressed, joined of several messages, or moved to where they are aligned.
#[test]
fn dictionaries_go_up_once_per_change() {
    let words: Vec<String> = (0..2000).map(|i| format!("word {i:08}")).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (bytes, n) = (2000 * (13 + 4), 30usize);
    let of = |words| RecordBatch::try_from_iter([("d", dictionary(20, words))]).unwrap();
    let mut batches = vec![of(&words[..1999])];
    batches.resize(n, of(&words));
    let delta = aligned(64).with_dictionary_handling(DictionaryHandling::Delta);
    for options in [aligned(64), aligned(8), lz4(), delta] {
        let written = Format::Stream.write(&batches, options);
        for mode in [SimMode::Async, SimMode::Deferred] {
            let sim = Sim::new(mode);
            let (read, stats) = counted(&sim, || Format::Stream.read(&written, &sim).unwrap());
            assert_batches(&batches, &read, "shared");
            assert_aligned(&read);
            let up = stats.bytes_to_device;
            assert!(up < 2 * bytes + 400 * n as u64, "{stats:?}");
            assert!(stats.host_copied_bytes < up, "{stats:?}");
            // Two dictionaries, and for each batch what is compressed in it.
            assert!(stats.allocations <= 2 + 2 * n as u64, "{stats:?}");
            drop(read);
            sim.assert_done();
        }
    }
}

/// A column with a dictionary costs as much as the one before.
#[test]
fn many_dictionaries() {
    let cost = |n: usize| {
        let one = || -> ArrayRef {
            let values = Arc::new(StringArray::from(vec!["a"]));
            Arc::new(DictionaryArray::<Int8Type>::new(vec![0].into(), values))
        };
        let batch = RecordBatch::try_from_iter((0..n).map(|i| (format!("{i}"), one()))).unwrap();
        let bytes = Format::Stream.write(&[batch], aligned(64));
        let sim = Sim::new(SimMode::Deferred);
        let (read, allocations) = count(|| Format::Stream.read(&bytes, &sim).unwrap());
        assert_eq!(read[0].num_columns(), n);
        drop(read);
        sim.assert_done();
        allocations
    };
    let (few, many) = (cost(100), cost(800));
    assert!(many < 10 * few, "{few} and {many} allocations");
}
