//! Arrow IPC files and streams to devices: every type, straight copies, dictionaries, what is malformed.
#![cfg(not(miri))]

mod failures;
mod limits;

use std::io::Cursor;
use std::sync::Arc;

use crate::simkit::*;
use crate::support::*;
use arrow_array::types::Int32Type;
use arrow_array::{
    ArrayRef, Decimal128Array, DictionaryArray, Int64Array, RecordBatch, StringArray, UInt8Array,
};
use arrow_device::device::sim::SimMode;
use arrow_device::ipc::{IpcFileReader, IpcOptions, IpcStreamReader};
use arrow_device::{
    Device, DeviceArray, DeviceRecordBatch, DeviceRecordBatchReader, Devices, Error, Result,
    TransferStats,
};
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_ipc::writer::{DictionaryHandling, FileWriter, IpcWriteOptions, StreamWriter};
use arrow_ipc::{CompressionType, MetadataVersion};
use arrow_schema::{ArrowError, DataType};

const FORMATS: [Format; 2] = [Format::File, Format::Stream];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Format {
    File,
    Stream,
}

fn aligned(bytes: usize) -> IpcWriteOptions {
    IpcWriteOptions::try_new(bytes, false, MetadataVersion::V5).unwrap()
}

impl Format {
    fn write(self, batches: &[RecordBatch], options: IpcWriteOptions) -> Vec<u8> {
        self.try_write(batches, options).unwrap()
    }

    fn try_write(
        self,
        batches: &[RecordBatch],
        options: IpcWriteOptions,
    ) -> std::result::Result<Vec<u8>, ArrowError> {
        let (mut out, schema) = (Vec::new(), batches[0].schema());
        match self {
            Self::File => {
                let mut writer = FileWriter::try_new_with_options(&mut out, &schema, options)?;
                batches.iter().try_for_each(|batch| writer.write(batch))?;
                writer.finish()?;
            }
            Self::Stream => {
                let mut writer = StreamWriter::try_new_with_options(&mut out, &schema, options)?;
                batches.iter().try_for_each(|batch| writer.write(batch))?;
                writer.finish()?;
            }
        }
        Ok(out)
    }

    fn read_with(
        self,
        bytes: &[u8],
        device: &Device,
        options: IpcOptions,
    ) -> Result<Vec<DeviceRecordBatch>> {
        let queue = device.default_queue();
        match self {
            Self::File => IpcFileReader::try_new_on(Cursor::new(bytes), queue, options)?.collect(),
            Self::Stream => IpcStreamReader::try_new_on(bytes, queue, options)?.collect(),
        }
    }

    fn read(self, bytes: &[u8], device: &Device) -> Result<Vec<DeviceRecordBatch>> {
        self.read_with(bytes, device, IpcOptions::default())
    }

    /// The batches as arrow-rs reads them.
    fn theirs(self, bytes: &[u8]) -> std::result::Result<Vec<RecordBatch>, ArrowError> {
        match self {
            Self::File => FileReader::try_new(Cursor::new(bytes), None)
                .and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>),
            Self::Stream => StreamReader::try_new(bytes, None).and_then(|reader| reader.collect()),
        }
    }
}

fn counted<T>(device: &Device, work: impl FnOnce() -> T) -> (T, TransferStats) {
    let before = device.stats();
    let result = work();
    (result, device.stats().since(&before))
}

#[track_caller]
fn assert_batches(expected: &[RecordBatch], actual: &[DeviceRecordBatch], context: &str) {
    assert_eq!(expected.len(), actual.len(), "{context}");
    for (expected, actual) in expected.iter().zip(actual) {
        assert_same_batch(expected, &actual.to_host().unwrap(), context);
    }
}

/// All buffers begin at multiples of 64, and are padded with zeros.
#[track_caller]
fn assert_aligned(batches: &[DeviceRecordBatch]) {
    fn check(array: &DeviceArray) {
        for buffer in (0..array.num_buffers()).filter_map(|i| array.buffer(i)) {
            let bytes = layout::raw(&buffer, &array.device().default_queue());
            let padding = &bytes[buffer.len()..];
            assert!(
                padding.iter().all(|byte| *byte == 0),
                "{buffer:?}: {padding:?}"
            );
            let address = buffer.address().address();
            assert!(buffer.is_empty() || address % 64 == 0, "{buffer:?}");
        }
        (0..array.num_children()).for_each(|i| check(&array.child(i).unwrap()));
    }
    batches.iter().for_each(|batch| check(batch.as_struct()));
}

/// Every type that arrow-rs writes and reads, with and without nulls, at both alignments of the format, which take turns with the
/// devices.
#[test]
fn every_type() {
    let places: Vec<Sim> = MODES.into_iter().map(Sim::new).collect();
    let (mut n, mut read, mut straight) = (0, 0, 0);
    for (i, (name, data_type)) in all_types().into_iter().enumerate() {
        for (case, array) in cases(&data_type, i as u64) {
            n += 1;
            let (format, alignment) = [(Format::File, 64), (Format::Stream, 8)][n % 2];
            let sim = &places[n / 2 % 2];
            let batch = RecordBatch::try_from_iter_with_nullable([("c", array, true)]).unwrap();
            let context = format!("{name}, {case}, {format:?}, {alignment}");
            let two = [batch.clone(), batch.slice(0, batch.num_rows() / 2)];
            let Ok(bytes) = format.try_write(&two, aligned(alignment)) else {
                continue;
            };
            // arrow-rs writes some of the slices in ways that it does not read.
            let Ok(theirs) = format.theirs(&bytes) else {
                assert!(format.read(&bytes, &Devices::cpu()).is_err(), "{context}");
                continue;
            };
            let cpu = format.read(&bytes, &Devices::cpu()).unwrap();
            assert_batches(&theirs, &cpu, &context);
            let (ours, stats) = counted(sim, || format.read(&bytes, sim));
            let ours = ours.unwrap_or_else(|e| panic!("{context}: {e}"));
            assert_batches(&theirs, &ours, &context);
            assert_aligned(&ours);
            straight += usize::from(stats.host_copied_bytes == 0);
            read += 1;
        }
        places.iter().for_each(Sim::assert_done);
    }
    assert!(read > 500, "{read} were read");
    // The others are without rows, whose offsets arrow-rs makes itself, or misaligned.
    assert!(
        straight * 10 > read * 8,
        "{straight} of {read} were copied straight"
    );
}

fn mixed(rows: usize) -> RecordBatch {
    let types = [
        DataType::Int64,
        DataType::Utf8,
        DataType::Boolean,
        DataType::Float32,
        DataType::Utf8View,
        DataType::List(Arc::new(arrow_schema::Field::new(
            "item",
            DataType::Int16,
            true,
        ))),
    ];
    batch(&types, rows, Nulls::Some, 7)
}

/// One allocation, one copy and one event for each batch, and not a byte is copied on the host.
#[test]
fn straight_copies() {
    let batches = [mixed(1000), mixed(3000), mixed(20)];
    for format in FORMATS {
        for mode in MODES {
            let bytes = format.write(&batches, aligned(64));
            let sim = Sim::new(mode);
            let (read, stats) = counted(&sim, || format.read(&bytes, &sim).unwrap());
            assert_batches(&batches, &read, "straight");
            let mut expected = TransferStats::default();
            (expected.allocations, expected.copies, expected.events) = (3, 3, 3);
            expected.bytes_to_device = stats.bytes_to_device;
            expected.allocated_bytes = stats.bytes_to_device;
            expected.host_allocations = stats.host_allocations;
            assert_eq!(stats, expected, "{format:?} {mode:?}");
            assert!(stats.bytes_to_device <= bytes.len() as u64);
            // Once warm, no staging memory is created. What an asynchronous device has given back at a time differs.
            drop(read);
            sim.synchronize().unwrap();
            while sim.sim.report().live_events > 0 {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let (read, stats) = counted(&sim, || format.read(&bytes, &sim).unwrap());
            let created = stats.host_allocations;
            assert!(mode == SimMode::Async || created == 0, "{stats:?}");
            drop(read);
            sim.assert_done();
        }
    }
}

/// Buffers that begin at multiples of 8 are copied one by one. Writers need not clear what is between the buffers. In a compressed
/// file, one that does not become smaller stands as it is behind a prefix, so nowhere at a multiple of 64.
#[test]
fn buffers_are_aligned_on_the_device() {
    let of = |values: &[u8]| -> ArrayRef { Arc::new(UInt8Array::from(values.to_vec())) };
    let (a, b) = ([0xA1, 0xB2, 0xC3], [0xD4, 0xE5, 0xF6]);
    let pair = RecordBatch::try_from_iter([("a", of(&a)), ("b", of(&b))]).unwrap();
    let lz4 = Some(CompressionType::LZ4_FRAME);
    let lz4 = aligned(64).try_with_compression(lz4).unwrap();
    let sim = Sim::new(SimMode::Async);
    for format in FORMATS {
        for (batch, options, fewest, most) in [
            (&mixed(77), aligned(8), 9, u64::MAX),
            (&pair, aligned(64), 1, 1),
            (&pair, lz4.clone(), 2, 2),
        ] {
            let mut bytes = format.write(std::slice::from_ref(batch), options);
            for values in [a, b].into_iter().filter(|_| most == 1) {
                let at = bytes.windows(3).position(|window| window == values);
                bytes[at.unwrap() + 3..][..61].fill(0xEE);
            }
            let (read, stats) = counted(&sim, || format.read(&bytes, &sim).unwrap());
            assert_eq!(stats.host_copied_bytes, 0, "{stats:?}");
            assert!((fewest..=most).contains(&stats.copies), "{stats:?}");
            assert_batches(std::slice::from_ref(batch), &read, "aligned");
            assert_aligned(&read);
        }
    }
    sim.assert_done();
}

/// A decimal needs 16 bytes on the host, which the format does not promise: it is moved, and nothing else is.
#[test]
fn misaligned_values_are_moved() {
    let decimals = |n| Arc::new(Decimal128Array::from_iter_values(n..n + 101)) as ArrayRef;
    let numbers = Arc::new(Int64Array::from_iter_values(0..101)) as ArrayRef;
    let columns = [("a", numbers), ("d", decimals(0)), ("e", decimals(7))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let bytes = Format::File.write(std::slice::from_ref(&batch), aligned(8));
    let sim = Sim::new(SimMode::Deferred);
    let (read, stats) = counted(&sim, || Format::File.read(&bytes, &sim).unwrap());
    assert_batches(&[batch], &read, "misaligned");
    let moved = stats.host_copied_bytes;
    assert!([0, 1616, 3232].contains(&moved), "{stats:?}");
    drop(read);
    sim.assert_done();
}

#[test]
fn projections() {
    let batch = mixed(500);
    let sim = Sim::new(SimMode::Async);
    for format in FORMATS {
        for alignment in [8, 64] {
            let bytes = format.write(&[batch.clone(), batch.slice(100, 50)], aligned(alignment));
            let (_, all) = counted(&sim, || format.read(&bytes, &sim).unwrap());
            let projections: [&[usize]; 5] = [&[], &[2], &[4, 0], &[1, 1, 3], &[5, 4, 3, 2, 1, 0]];
            for columns in projections {
                let columns = columns.to_vec();
                let options = IpcOptions::default().with_projection(columns.clone());
                let read = || format.read_with(&bytes, &sim, options).unwrap();
                let (read, stats) = counted(&sim, read);
                let expected = [
                    batch.project(&columns).unwrap(),
                    batch.slice(100, 50).project(&columns).unwrap(),
                ];
                assert_batches(&expected, &read, &format!("{columns:?}"));
                // Views need 16 bytes.
                let moved = stats.host_copied_bytes;
                assert!(
                    moved == 0 || (alignment == 8 && columns.contains(&4)),
                    "{stats:?}"
                );
                // The other columns stay behind.
                assert_eq!(
                    stats.bytes_to_device < all.bytes_to_device,
                    columns.len() < 6,
                    "{columns:?} at {alignment}: {stats:?} of {all:?}"
                );
            }
            let options = IpcOptions::default().with_projection(vec![6]);
            assert!(format.read_with(&bytes, &sim, options).is_err());
        }
    }
    sim.assert_done();
}

fn dictionary(rows: usize, words: &[&str]) -> ArrayRef {
    let keys = (0..rows).map(|i| (i % 5 != 0).then_some((i % words.len()) as i32));
    let words = Arc::new(StringArray::from(words.to_vec()));
    Arc::new(DictionaryArray::<Int32Type>::new(keys.collect(), words))
}

/// A dictionary is copied once, and all batches share it.
#[test]
fn dictionaries_are_shared() {
    let long = "x".repeat(10_000);
    let of = |rows| RecordBatch::try_from_iter([("d", dictionary(rows, &["a", &long, "c"]))]);
    let batches = [
        of(10).unwrap(),
        of(20).unwrap(),
        of(30).unwrap(),
        of(4).unwrap(),
    ];
    for format in FORMATS {
        for mode in MODES {
            let bytes = format.write(&batches, aligned(64));
            let sim = Sim::new(mode);
            let (read, stats) = counted(&sim, || format.read(&bytes, &sim).unwrap());
            assert_eq!(
                (stats.host_copied_bytes, stats.allocations),
                (0, 5),
                "{stats:?}"
            );
            assert!(stats.bytes_to_device < 12_000, "{stats:?}");
            assert_batches(&batches, &read, "shared");
            drop(read);
            sim.synchronize().unwrap();
            sim.assert_done();
        }
    }
}

/// A stream may replace dictionaries, or add to them.
#[test]
fn dictionaries_that_change() {
    let of = |words: &[&str]| RecordBatch::try_from_iter([("d", dictionary(20, words))]).unwrap();
    let words: [&[&str]; 4] = [&["a", "b"], &["c"], &["c", "d", "e"], &["c", "d", "e"]];
    let batches = words.map(of);
    for handling in [DictionaryHandling::Resend, DictionaryHandling::Delta] {
        let options = aligned(64).with_dictionary_handling(handling);
        let bytes = Format::Stream.write(&batches, options);
        let sim = Sim::new(SimMode::Async);
        for device in [&sim.device, &Devices::cpu()] {
            let read = Format::Stream.read(&bytes, device).unwrap();
            assert_batches(&batches, &read, "changing");
        }
        sim.assert_done();
    }
}

#[test]
fn compressed() {
    let batches = [mixed(3000), mixed(5)];
    for format in FORMATS {
        for codec in [CompressionType::LZ4_FRAME, CompressionType::ZSTD] {
            let options = aligned(64).try_with_compression(Some(codec)).unwrap();
            // This package's tests have no zstd, unless another's are built along with them.
            let Ok(bytes) = format.try_write(&batches, options) else {
                assert_eq!(codec, CompressionType::ZSTD);
                continue;
            };
            for device in [Devices::cpu(), Device::clone(&Sim::new(SimMode::Async))] {
                let read = format.read(&bytes, &device).unwrap();
                assert_batches(&batches, &read, &format!("{format:?} {codec:?}"));
            }
            let options = IpcOptions::default().with_max_message_bytes(10_000);
            let refused = format
                .read_with(&bytes, &Devices::cpu(), options)
                .unwrap_err();
            assert!(
                refused.to_string().contains("with_max_message_bytes"),
                "{refused}"
            );
        }
    }
}

/// Without the marker before the lengths, as before Arrow 0.15.
#[test]
fn old_streams() {
    let batch = mixed(30);
    for format in FORMATS {
        let options = IpcWriteOptions::try_new(8, true, MetadataVersion::V4).unwrap();
        let bytes = format.write(&[batch.clone(), batch.clone()], options);
        let read = format.read(&bytes, &Devices::cpu()).unwrap();
        assert_batches(&[batch.clone(), batch.clone()], &read, "old");
    }
}

#[test]
fn batches_of_a_file_by_number() {
    let batches: Vec<RecordBatch> = (1..6).map(mixed).collect();
    let bytes = Format::File.write(&batches, aligned(64));
    let mut reader = IpcFileReader::try_new(Cursor::new(&bytes), &Devices::cpu()).unwrap();
    assert_eq!(reader.num_batches(), 5);
    assert_eq!(
        DeviceRecordBatchReader::schema(&reader),
        batches[0].schema()
    );
    for i in [3, 0, 4] {
        reader.set_index(i).unwrap();
        assert_eq!(reader.next().unwrap().unwrap().num_rows(), i + 1);
    }
    assert!(reader.next().is_none());
    assert!(matches!(
        reader.set_index(5),
        Err(Error::InvalidArgument(_))
    ));
    reader.set_index(0).unwrap();
    assert_eq!(reader.count(), 5);
}

/// Batches without columns, and none at all.
#[test]
fn nothing_to_read() {
    let empty = zero_column_batch(7);
    let two = [empty.clone(), empty];
    for format in FORMATS {
        let bytes = format.write(&two, aligned(64));
        let read = format.read(&bytes, &Devices::cpu()).unwrap();
        assert_batches(&two, &read, "no columns");
        let sim = Sim::new(SimMode::Async);
        let read = format.read(&bytes, &sim).unwrap();
        assert_batches(&two, &read, "no columns");
    }
    let mut out = Vec::new();
    let mut writer = StreamWriter::try_new(&mut out, &mixed(1).schema()).unwrap();
    writer.finish().unwrap();
    drop(writer);
    // A stream may end without its mark.
    for bytes in [&out[..], &out[..out.len() - 8]] {
        let read = Format::Stream.read(bytes, &Devices::cpu()).unwrap();
        assert!(read.is_empty());
    }
}

/// Files of the Arrow project (`ARROW_TEST_DATA`), beside arrow-rs.
#[test]
fn files_of_the_arrow_project() {
    let Ok(root) = std::env::var("ARROW_TEST_DATA") else {
        return;
    };
    let folder = std::path::Path::new(&root).join("arrow-ipc-stream/integration");
    let mut read = 0;
    let versions = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{folder:?}: {e}"));
    for version in versions
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
    {
        if version.to_string_lossy().contains("bigendian") {
            continue;
        }
        for path in std::fs::read_dir(version)
            .unwrap()
            .map(|entry| entry.unwrap().path())
        {
            let format = match path.extension().and_then(|extension| extension.to_str()) {
                Some("arrow_file") => Format::File,
                Some("stream") => Format::Stream,
                _ => continue,
            };
            let bytes = std::fs::read(&path).unwrap();
            let theirs = format.theirs(&bytes).unwrap();
            for device in [Devices::cpu(), Device::clone(&Sim::new(SimMode::Async))] {
                let (ours, stats) = counted(&device, || format.read(&bytes, &device));
                let ours = ours.unwrap_or_else(|e| panic!("{path:?} on {device}: {e}"));
                assert_batches(&theirs, &ours, &format!("{path:?} on {device}"));
                println!(
                    "{path:?}: {} bytes were copied on the host",
                    stats.host_copied_bytes
                );
            }
            read += 1;
        }
    }
    assert!(read > 0, "no files in {folder:?}");
}
