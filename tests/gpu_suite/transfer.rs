//! Values survive the way to a device and back, by copies, structs and streams.

use arrow_array::{RecordBatch, RecordBatchIterator, RecordBatchReader};
use arrow_device::{
    DeviceRecordBatch, DeviceRecordBatchReader, DeviceRecordBatchStreamReader, ExportOptions,
    FFI_ArrowDeviceArrayStream, SyncPolicy, export_reader,
};

use super::{Opened, everywhere};
use crate::support::{
    Nulls, all_types, assert_same, assert_same_batch, batch, boolean_with_tight_nulls, cases,
    wide_batch,
};
use crate::vendor::{Config, MEMORIES, Memory};

pub(crate) fn every_type(memory: Memory) {
    everywhere(|place| {
        let device = place.open(memory);
        let tight = ("tight nulls".to_owned(), boolean_with_tight_nulls());
        let all = all_types()
            .into_iter()
            .zip(0..)
            .flat_map(|((name, t), seed)| {
                let cases = cases(&t, seed).into_iter();
                cases.map(move |(case, array)| (format!("{name}, {case}"), array))
            });
        for (case, array) in all.chain([tight]).step_by(place.share) {
            let up = device.upload_array(&array).unwrap();
            assert_same(&array, &up.to_host().unwrap(), &case);
            let rows = array.len();
            for (offset, length) in [(1, rows.saturating_sub(2)), (rows / 3, rows / 2)] {
                if offset + length <= rows {
                    let part = up.slice(offset, length).unwrap().to_host().unwrap();
                    let case = format!("{case}, slice({offset}, {length})");
                    assert_same(&array.slice(offset, length), &part, case);
                }
            }
        }
        device.assert_done();
    });
}

#[test]
fn every_type_in_device_memory() {
    every_type(Memory::Device);
}

#[test]
fn every_type_in_page_locked_memory() {
    every_type(Memory::Host);
}

/// One column of each type.
fn all_columns(rows: usize, seed: u64) -> RecordBatch {
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    batch(&types, rows, Nulls::Some, seed)
}

#[test]
fn batches_whole_and_sliced_on_both_sides() {
    everywhere(|place| {
        for memory in MEMORIES {
            let device = place.open(memory);
            let all = all_columns(1000, 5);
            for (skip, rows) in [(0, 1000), (0, 0), (3, 517), (13, 64), (999, 1)] {
                let sent = all.slice(skip, rows);
                let up = device.upload(&sent).unwrap();
                let back = up.to_host().unwrap();
                assert_same_batch(&sent, &back, format_args!("{skip}, {rows}"));
                let part = up.slice(rows / 3, rows / 2).unwrap();
                let back = part.to_host().unwrap();
                let sent = sent.slice(rows / 3, rows / 2);
                assert_same_batch(&sent, &back, format_args!("part of {skip}, {rows}"));
            }
            device.assert_done();
        }
    });
}

#[test]
fn structs_out_and_in() {
    everywhere(|place| {
        for memory in MEMORIES {
            let device = place.open(memory);
            let sent = all_columns(300, 9);
            for policy in [SyncPolicy::Event, SyncPolicy::Wait] {
                let up = device.upload(&sent).unwrap();
                let (array, schema) = up.slice(7, 290).unwrap().export(policy).unwrap();
                drop(up);
                let again = import(&device, array, &schema);
                let back = again.to_host().unwrap();
                assert_same_batch(&sent.slice(7, 290), &back, format_args!("{policy:?}"));
            }
            device.assert_done();
        }
    });
}

fn import(
    device: &Opened,
    array: arrow_device::FFI_ArrowDeviceArray,
    schema: &arrow_schema::ffi::FFI_ArrowSchema,
) -> DeviceRecordBatch {
    // SAFETY: both structs come from one export of this crate.
    unsafe { DeviceRecordBatch::import_with(array, schema, &device.options) }.unwrap()
}

#[test]
fn between_devices_and_kinds_of_memory() {
    everywhere(|place| {
        let sent = all_columns(200, 3);
        let ordinals = place.others.iter().copied().chain([place.ordinal]);
        for ordinal in ordinals {
            for to in MEMORIES {
                for from in MEMORIES {
                    let config = Config::new(ordinal).with_memory(to);
                    let (one, two) = (place.open(from), place.open_with(&config));
                    let there = one.upload(&sent).unwrap().to_device(&two).unwrap();
                    let back = there.slice(5, 190).unwrap().to_device(&one).unwrap();
                    drop(there);
                    let context = format!("{one:?} to {two:?}", one = one.device, two = two.device);
                    assert_same_batch(&sent.slice(5, 190), &back.to_host().unwrap(), context);
                    drop(back);
                    one.assert_done();
                    two.assert_done();
                }
            }
        }
    });
}

/// `n` batches, each with other rows than the last.
fn many(n: usize) -> Vec<RecordBatch> {
    let all = wide_batch(12, 3000);
    let cut = |i: usize| all.slice(i * 7 % 1500, 200 + i * 13 % 1300);
    (0..n).map(cut).collect()
}

fn reader(batches: &[RecordBatch]) -> impl RecordBatchReader + Send + 'static {
    let (batches, schema) = (batches.to_vec(), batches[0].schema());
    RecordBatchIterator::new(batches.into_iter().map(Ok), schema)
}

fn open(stream: FFI_ArrowDeviceArrayStream, device: &Opened) -> DeviceRecordBatchStreamReader {
    // SAFETY: this crate exported the stream, and this is its only owner.
    unsafe { DeviceRecordBatchStreamReader::new(stream, device.options.clone()) }.unwrap()
}

#[test]
fn streams_of_a_hundred_batches_out_and_in() {
    everywhere(|place| {
        let sent = many(100);
        for memory in MEMORIES {
            let device = place.open(memory);
            let uploading = export_reader(reader(&sent), &device).unwrap();
            assert_eq!(uploading.device_type(), memory.device_type());
            // In, out again without a copy, and in.
            let options = ExportOptions::new(SyncPolicy::Event);
            let passed = open(uploading, &device);
            let passed = FFI_ArrowDeviceArrayStream::new(passed, options).unwrap();
            let before = device.stats();
            let down = open(passed, &device).into_host_reader();
            let mut batches = 0;
            for (i, batch) in down.enumerate() {
                assert_same_batch(&sent[i], &batch.unwrap(), format_args!("batch {i}"));
                batches += 1;
            }
            assert_eq!(batches, sent.len());
            let stats = device.stats().since(&before);
            assert_eq!(stats.allocations, 100, "{memory:?}");
            device.assert_done();
        }
    });
}

/// All batches of a stream are on the device before the first is read.
#[test]
fn a_stream_that_is_read_ahead() {
    everywhere(|place| {
        let sent = many(100);
        let device = place.open(Memory::Device);
        let stream = export_reader(reader(&sent), &device).unwrap();
        let ahead: Vec<_> = open(stream, &device).map(|batch| batch.unwrap()).collect();
        for (i, batch) in ahead.into_iter().enumerate().rev() {
            assert_same_batch(&sent[i], &batch.to_host().unwrap(), format_args!("{i}"));
        }
        device.assert_done();
    });
}
