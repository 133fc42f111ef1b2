//! Values survive the way to a device and back, by copies, structs and between devices: every type of Arrow, on each kind of
//! memory that the first device has.
#![cfg(not(miri))]

#[path = "support/opencl.rs"]
mod opencl;
#[path = "../../../tests/support/mod.rs"]
mod support;

use arrow_array::RecordBatch;
use arrow_device::{DeviceRecordBatch, Devices, ImportOptions, SyncPolicy};
use arrow_device_opencl::OpenClMemory;

use opencl::{assert_clean, assert_error, has, memories, open};
use support::{
    Nulls, all_types, assert_same, assert_same_batch, batch, boolean_with_tight_nulls, cases,
};

fn every_type(memory: OpenClMemory) {
    if !has(memory) {
        return;
    }
    let device = open(memory);
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
                let case = format!("{case}, slice({offset}, {length})");
                assert_same(&array.slice(offset, length), &part, case);
            }
        }
    }
    assert_clean(&device);
}

#[test]
fn every_type_in_unified_shared_memory() {
    every_type(OpenClMemory::Usm);
}

#[test]
fn every_type_in_coarse_shared_virtual_memory() {
    every_type(OpenClMemory::Svm);
}

#[test]
fn every_type_in_fine_shared_virtual_memory() {
    every_type(OpenClMemory::FineSvm);
}

#[test]
fn every_type_in_handles() {
    every_type(OpenClMemory::Handles);
}

/// One column of each type.
fn all_columns(rows: usize, seed: u64) -> RecordBatch {
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    batch(&types, rows, Nulls::Some, seed)
}

#[test]
fn batches_whole_and_sliced_on_both_sides() {
    for memory in memories() {
        let device = open(memory);
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
            let sent = sent.slice(rows / 3, rows / 2);
            assert_same_batch(
                &sent,
                &part.to_host().unwrap(),
                format_args!("part of {skip}, {rows}"),
            );
        }
        assert_clean(&device);
    }
}

#[test]
fn structs_out_and_in() {
    for memory in memories() {
        let device = open(memory);
        let devices = Devices::new();
        devices.add(device.clone()).unwrap();
        let sent = all_columns(300, 9);
        for policy in [SyncPolicy::Event, SyncPolicy::Wait] {
            let up = device.upload(&sent).unwrap();
            let exported = up.slice(7, 290).unwrap().export(policy);
            if memory == OpenClMemory::Handles {
                assert_error(
                    exported,
                    "its addresses stand for cl_mem buffers, which no other library knows",
                );
                continue;
            }
            let (array, schema) = exported.unwrap();
            drop(up);
            let options = ImportOptions::default().with_devices(devices.clone());
            // SAFETY: both structs come from one export of this crate.
            let again =
                unsafe { DeviceRecordBatch::import_with(array, &schema, &options) }.unwrap();
            assert_same_batch(
                &sent.slice(7, 290),
                &again.to_host().unwrap(),
                format_args!("{policy:?}"),
            );
        }
        assert_clean(&device);
    }
}

#[test]
fn between_kinds_of_memory() {
    let sent = all_columns(200, 3);
    for to in memories() {
        for from in memories() {
            let (one, two) = (open(from), open(to));
            let there = one.upload(&sent).unwrap().to_device(&two).unwrap();
            let back = there.slice(5, 190).unwrap().to_device(&one).unwrap();
            drop(there);
            assert_same_batch(
                &sent.slice(5, 190),
                &back.to_host().unwrap(),
                format_args!("{from:?} to {to:?}"),
            );
            drop(back);
            assert_clean(&one);
            assert_clean(&two);
        }
    }
}
