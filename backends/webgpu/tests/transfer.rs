//! Values survive the way to a device and back, by copies, structs, streams and between devices: every type of Arrow, in one buffer and
//! over many.
#![cfg(not(miri))]

#[path = "../../../tests/support/mod.rs"]
mod support;
#[path = "support/webgpu.rs"]
mod webgpu;

use std::sync::Arc;

use arrow_array::{Int64Array, RecordBatch, RecordBatchIterator};
use arrow_device::{
    Device, DeviceRecordBatch, DeviceRecordBatchReader, DeviceRecordBatchStreamReader, Devices,
    ImportOptions, SyncPolicy, export_reader,
};
use arrow_device_wgpu::{WgpuDevice, wgpu};

use support::{
    Nulls, all_types, assert_same, assert_same_batch, batch, boolean_with_tight_nulls, cases,
};
use webgpu::{assert_clean, open_with, try_open};

/// A device with the adapter's limits, and one whose allocations have several buffers.
fn devices() -> Vec<Device> {
    let small = open_with(|limits| limits.max_buffer_size = 4096);
    try_open().into_iter().chain(small).collect()
}

#[test]
fn every_type() {
    for device in devices() {
        let tight = ("tight nulls".to_owned(), boolean_with_tight_nulls());
        let types = all_types().into_iter().zip(0..);
        let all = types.flat_map(|((name, data_type), seed)| {
            let cases = cases(&data_type, seed).into_iter();
            cases.map(move |(case, array)| (format!("{name}, {case}"), array))
        });
        for (case, array) in all.chain([tight]) {
            let up = device.upload_array(&array).unwrap();
            assert_same(&array, &up.to_host().unwrap(), &case);
            let rows = array.len();
            for (offset, length) in [(1, rows.saturating_sub(2)), (rows / 3, rows / 2)] {
                if offset + length <= rows {
                    let part = up.slice(offset, length).unwrap().to_host().unwrap();
                    assert_same(
                        &array.slice(offset, length),
                        &part,
                        format!("{case}, slice({offset}, {length})"),
                    );
                }
            }
        }
        assert_clean(&device);
    }
}

/// One column of each type.
fn all_columns(rows: usize, seed: u64) -> RecordBatch {
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    batch(&types, rows, Nulls::Some, seed)
}

#[test]
fn batches_whole_and_sliced_on_both_sides() {
    for device in devices() {
        let all = all_columns(1000, 5);
        for (skip, rows) in [(0, 1000), (0, 0), (3, 517), (13, 64), (999, 1)] {
            let sent = all.slice(skip, rows);
            let up = device.upload(&sent).unwrap();
            assert_same_batch(
                &sent,
                &up.to_host().unwrap(),
                format_args!("{skip}, {rows}"),
            );
            let part = up.slice(rows / 3, rows / 2).unwrap();
            let (sent, what) = (
                sent.slice(rows / 3, rows / 2),
                format!("part of {skip}, {rows}"),
            );
            assert_same_batch(&sent, &part.to_host().unwrap(), &what);
            assert_same_batch(&sent, &part.compact().unwrap().to_host().unwrap(), &what);
        }
        assert_clean(&device);
    }
}

/// An export carries no event: consumers use the device's one queue.
#[test]
fn structs_out_and_in() {
    for device in devices() {
        let devices = Devices::new();
        devices.add(device.clone()).unwrap();
        let sent = all_columns(300, 9);
        for policy in [SyncPolicy::Event, SyncPolicy::Wait] {
            let up = device.upload(&sent).unwrap();
            let (array, schema) = up.slice(7, 290).unwrap().export(policy).unwrap();
            assert!(array.sync_event().is_null());
            drop(up);
            let options = ImportOptions::default().with_devices(devices.clone());
            // SAFETY: both structs come from one export of this crate.
            let again =
                unsafe { DeviceRecordBatch::import_with(array, &schema, &options) }.unwrap();
            let back = again.to_host().unwrap();
            assert_same_batch(&sent.slice(7, 290), &back, format_args!("{policy:?}"));
        }
        assert_clean(&device);
    }
}

#[test]
fn between_two_devices() {
    let [Some(one), Some(two)] = [try_open(), try_open()] else {
        return;
    };
    let sent = all_columns(200, 3);
    let there = one.upload(&sent).unwrap().to_device(&two).unwrap();
    let back = there.slice(5, 190).unwrap().to_device(&one).unwrap();
    drop(there);
    assert_same_batch(
        &sent.slice(5, 190),
        &back.to_host().unwrap(),
        "there and back",
    );
    drop(back);
    assert_clean(&one);
    assert_clean(&two);
}

#[test]
fn a_stream_of_many_batches() {
    for device in devices() {
        let devices = Devices::new();
        devices.add(device.clone()).unwrap();
        let all: Vec<_> = (0..100)
            .map(|seed| all_columns(1 + seed as usize % 50, seed))
            .collect();
        let schema = all[0].schema();
        let reader = RecordBatchIterator::new(all.clone().into_iter().map(Ok), schema);
        let stream = export_reader(reader, &device).unwrap();
        let options = ImportOptions::default().with_devices(devices);
        // SAFETY: the stream is one of this crate's.
        let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, options) }.unwrap();
        let mut count = 0;
        for (back, sent) in reader.into_host_reader().zip(&all) {
            assert_same_batch(sent, &back.unwrap(), format_args!("batch {count}"));
            count += 1;
        }
        assert_eq!(count, all.len());
        assert_clean(&device);
    }
}

/// 300 MiB over two buffers, of which the first ends within the column.
#[test]
fn a_batch_larger_than_the_largest_buffer() {
    let lower = |limits: &mut wgpu::Limits| {
        limits.max_buffer_size = 256 << 20;
        limits.max_storage_buffer_binding_size = 128 << 20;
    };
    let Some(device) = open_with(lower) else {
        return;
    };
    let rows = (300 << 20) / 8;
    let column = Arc::new(Int64Array::from_iter_values(0..rows)) as _;
    let sent = RecordBatch::try_from_iter([("a", column)]).unwrap();
    let up = device.upload(&sent).unwrap();
    assert_eq!(WgpuDevice::of(&device).unwrap().in_use().0, 1);
    assert!(up.to_host().unwrap() == sent, "other values came back");
    let seam = (256 << 20) / 8;
    let part = up.slice(seam - 3, 7).unwrap().to_host().unwrap();
    assert_eq!(part, sent.slice(seam - 3, 7));
    drop(up);
    assert_clean(&device);
}
