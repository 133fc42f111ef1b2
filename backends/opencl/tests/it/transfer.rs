//! Values survive the way to a device and back, by copies, structs and between devices: every type of Arrow, on each kind of
//! memory that the first device has.

use arrow_device::{Devices, ImportOptions, SyncPolicy};
use arrow_device_opencl::OpenClMemory;

use crate::rigs::{assert_clean, assert_error, has, memories, open};
use crate::support::round_trips;

fn every_type(memory: OpenClMemory) {
    if !has(memory) {
        return;
    }
    let device = open(memory);
    round_trips::every_type(&device, 1);
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

#[test]
fn batches_whole_and_sliced_on_both_sides() {
    for memory in memories() {
        let device = open(memory);
        round_trips::batches_whole_and_sliced_on_both_sides(&device);
        assert_clean(&device);
    }
}

#[test]
fn structs_out_and_in() {
    for memory in memories() {
        let device = open(memory);
        if memory == OpenClMemory::Handles {
            let up = device.upload(&round_trips::all_columns(300, 9)).unwrap();
            assert_error(
                up.export(SyncPolicy::Event),
                "its addresses stand for cl_mem buffers, which no other library knows",
            );
            continue;
        }
        let devices = Devices::new();
        devices.add(device.clone()).unwrap();
        let options = ImportOptions::default().with_devices(devices);
        round_trips::structs_out_and_in(&device, &options);
        drop(options);
        assert_clean(&device);
    }
}

#[test]
fn between_kinds_of_memory() {
    for to in memories() {
        for from in memories() {
            let (one, two) = (open(from), open(to));
            round_trips::there_and_back(&one, &two);
            assert_clean(&one);
            assert_clean(&two);
        }
    }
}
