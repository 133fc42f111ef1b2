//! Values survive the way to a device and back, by copies, structs, streams and between devices: every type of Arrow, in one buffer and
//! over many.

use std::sync::Arc;

use arrow_array::{Int64Array, RecordBatch, RecordBatchIterator};
use arrow_device::{
    Device, DeviceRecordBatchReader, DeviceRecordBatchStreamReader, Devices, ImportOptions,
    SyncPolicy, export_reader,
};
use arrow_device_wgpu::{WgpuDevice, wgpu};

use crate::rigs::{assert_clean, open_with, try_open};
use crate::support::assert_same_batch;
use crate::support::round_trips::{self, all_columns};

/// A device with the adapter's limits, and one whose allocations have several buffers.
fn devices() -> Vec<Device> {
    let small = open_with(|limits| limits.max_buffer_size = 4096);
    try_open().into_iter().chain(small).collect()
}

#[test]
fn every_type() {
    for device in devices() {
        round_trips::every_type(&device, 1);
        assert_clean(&device);
    }
}

#[test]
fn batches_whole_and_sliced_on_both_sides() {
    for device in devices() {
        round_trips::batches_whole_and_sliced_on_both_sides(&device);
        assert_clean(&device);
    }
}

/// An export carries no event: consumers use the device's one queue.
#[test]
fn structs_out_and_in() {
    for device in devices() {
        let devices = Devices::new();
        devices.add(device.clone()).unwrap();
        let options = ImportOptions::default().with_devices(devices);
        round_trips::structs_out_and_in(&device, &options);
        let (array, _) = device
            .upload(&all_columns(300, 9))
            .unwrap()
            .export(SyncPolicy::Event)
            .unwrap();
        assert!(array.sync_event().is_null());
        drop((array, options));
        assert_clean(&device);
    }
}

#[test]
fn between_two_devices() {
    let [Some(one), Some(two)] = [try_open(), try_open()] else {
        return;
    };
    round_trips::there_and_back(&one, &two);
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
