//! Values survive the way to a device and back, by copies, structs and streams.

use arrow_array::{RecordBatch, RecordBatchIterator, RecordBatchReader};
use arrow_device::{
    DeviceRecordBatchReader, DeviceRecordBatchStreamReader, ExportOptions,
    FFI_ArrowDeviceArrayStream, SyncPolicy, export_reader,
};

use super::{Opened, everywhere};
use crate::support::{assert_same_batch, round_trips, wide_batch};
use crate::vendor::{DEVICE, HOST, MEMORIES, Memory, open_device};

pub(crate) fn every_type(memory: Memory) {
    everywhere(|place| {
        let device = place.open(memory);
        round_trips::every_type(&device, place.share);
        device.assert_done();
    });
}

#[test]
fn every_type_in_device_memory() {
    every_type(DEVICE);
}

#[test]
fn every_type_in_page_locked_memory() {
    every_type(HOST);
}

#[test]
fn batches_whole_and_sliced_on_both_sides() {
    everywhere(|place| {
        for memory in MEMORIES {
            let device = place.open(memory);
            round_trips::batches_whole_and_sliced_on_both_sides(&device);
            device.assert_done();
        }
    });
}

#[test]
fn structs_out_and_in() {
    everywhere(|place| {
        for memory in MEMORIES {
            let device = place.open(memory);
            round_trips::structs_out_and_in(&device, &device.options);
            device.assert_done();
        }
    });
}

#[test]
fn between_devices_and_kinds_of_memory() {
    everywhere(|place| {
        let ordinals = place.others.iter().copied().chain([place.ordinal]);
        for ordinal in ordinals {
            for to in MEMORIES {
                for from in MEMORIES {
                    let two = place.open_with(open_device(to, ordinal));
                    let one = place.open(from);
                    round_trips::there_and_back(&one, &two);
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
        let device = place.open(DEVICE);
        let stream = export_reader(reader(&sent), &device).unwrap();
        let ahead: Vec<_> = open(stream, &device).map(|batch| batch.unwrap()).collect();
        for (i, batch) in ahead.into_iter().enumerate().rev() {
            assert_same_batch(&sent[i], &batch.to_host().unwrap(), format_args!("{i}"));
        }
        device.assert_done();
    });
}
