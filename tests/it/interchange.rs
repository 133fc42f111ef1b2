//! Arrays and batches out through the C structs and in again: every type, sliced and unsliced, on the
//! CPU and on the simulated device.

use std::sync::Arc;

use crate::support::{
    Nulls, all_types, assert_same, assert_same_batch, batch, batch_variants, cases, whole_batch,
    wide_batch,
};
use arrow_array::{Array, RecordBatch, make_array};
use arrow_device::device::sim::{SimConfig, SimDevice, SimMode};
use arrow_device::{
    Device, DeviceArray, DeviceRecordBatch, Devices, ExportOptions, FFI_ArrowDeviceArray,
    ImportOptions, NullCounts, SyncPolicy, Validation,
};

/// The CPU and one simulated device of each mode, with options that find them.
fn devices() -> Vec<(Device, Option<Arc<SimDevice>>, ImportOptions)> {
    let mut all = vec![(Devices::cpu(), None, ImportOptions::default())];
    for mode in [SimMode::Async, SimMode::Deferred] {
        let Ok(sim) = SimDevice::new(SimConfig::default().with_mode(mode)) else {
            continue;
        };
        let device = Device::new(sim.clone()).unwrap();
        let devices = Devices::new();
        devices.add(device.clone()).unwrap();
        let options = ImportOptions::default().with_devices(devices);
        all.push((device, Some(sim), options));
    }
    all
}

/// Waits until nothing is left on the device.
fn assert_clean(device: &Device, sim: &SimDevice) {
    // The reaper lets go of sources and events a little later.
    for _ in 0..5000 {
        device.synchronize().unwrap();
        device.trim();
        if sim.report().is_clean() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    sim.assert_clean();
}

fn through(array: &DeviceArray, options: &ImportOptions, export: &ExportOptions) -> DeviceArray {
    let field = Arc::new(arrow_schema::Field::new(
        "",
        array.data_type().clone(),
        true,
    ));
    let exported = array.export_array(export).unwrap();
    // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type
    // is the exported one.
    unsafe { DeviceArray::import_as(exported, field, options) }.unwrap()
}

#[test]
fn every_type_and_case() {
    if cfg!(miri) {
        return;
    }
    for (device, sim, options) in devices() {
        for (i, (name, data_type)) in all_types().into_iter().enumerate() {
            for (case, array) in cases(&data_type, i as u64) {
                let context = format!("{name}, {case} on {device}");
                let up = device.upload_array(&array).unwrap();
                for export in [
                    ExportOptions::new(SyncPolicy::Event),
                    ExportOptions::new(SyncPolicy::Wait),
                    ExportOptions::new(SyncPolicy::Event)
                        .with_null_counts(NullCounts::AllowUnknown),
                ] {
                    let again = through(&up, &options, &export);
                    let back = again.to_host().unwrap();
                    assert_same(&array, &back, &context);
                }
                let full = options.clone().with_validation(Validation::Full);
                let again = through(&up, &full, &ExportOptions::new(SyncPolicy::Event));
                assert_same(&array, &again.to_host().unwrap(), &context);
                // Sliced on the device, then out and in twice.
                let n = array.len();
                for (offset, length) in [(0, n), (n / 3, n / 2), (n, 0), (n / 7, n - n / 7)] {
                    let slice = up.slice(offset, length).unwrap();
                    let export = ExportOptions::new(SyncPolicy::Event);
                    let again = through(&slice, &options, &export);
                    let again = through(&again, &options, &export);
                    let expected = array.slice(offset, length);
                    let context = format!("{context}, slice({offset}, {length})");
                    assert_same(&expected, &again.to_host().unwrap(), &context);
                }
            }
        }
        if let Some(sim) = sim {
            assert_clean(&device, &sim);
        }
    }
}

fn batches() -> Vec<RecordBatch> {
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    let mut all = vec![
        batch(&types, 100, Nulls::Some, 1),
        batch(&types, 0, Nulls::None, 2),
        batch(&types[..7], 33, Nulls::All, 3),
        wide_batch(300, 20),
        crate::support::zero_column_batch(5),
    ];
    all.extend(batch_variants(&whole_batch(&types, 30, Nulls::Some, 4), 5));
    all
}

#[test]
fn batches_and_slices() {
    if cfg!(miri) {
        return;
    }
    for (device, sim, options) in devices() {
        for batch in batches() {
            let up = device.upload(&batch).unwrap();
            for (offset, length) in [
                (0, batch.num_rows()),
                (batch.num_rows() / 3, batch.num_rows() / 2),
            ] {
                let slice = up.slice(offset, length).unwrap();
                let (array, _) = slice.export(SyncPolicy::Event).unwrap();
                assert_eq!(array.array().offset(), 0);
                assert_eq!(array.array().null_count(), 0);
                // SAFETY: the struct comes from an export of this crate, whose values are valid,
                // and the type is the exported one.
                let again =
                    unsafe { DeviceRecordBatch::import_as(array, up.schema(), &options) }.unwrap();
                let expected = batch.slice(offset, length);
                assert_same_batch(&expected, &again.to_host().unwrap(), device.to_string());
            }
        }
        if let Some(sim) = sim {
            assert_clean(&device, &sim);
        }
    }
}

/// arrow-rs takes what we export on the CPU, and we take what it exports: all types and cases, masks at other bits
/// than the values included.
#[test]
fn arrow_takes_ours_and_we_take_arrows() {
    if cfg!(miri) {
        return;
    }
    let cpu = Devices::cpu();
    for (i, (name, data_type)) in all_types().into_iter().enumerate() {
        for (case, array) in cases(&data_type, i as u64) {
            let context = format!("{name}, {case}");
            let up = cpu.upload_array(&array).unwrap();
            let exported = up
                .export_array(&ExportOptions::new(SyncPolicy::Event))
                .unwrap();
            drop(up);
            let exported = exported.into_array().unwrap();
            let data_type = data_type.clone();
            // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type is the exported one.
            let data = unsafe { arrow_array::ffi::from_ffi_and_data_type(exported, data_type) }
                .expect(&context);
            assert_same(&array, &make_array(data), &context);
            let theirs = FFI_ArrowDeviceArray::new_cpu(&array.to_data());
            let field = Arc::new(arrow_schema::Field::new(
                "",
                array.data_type().clone(),
                true,
            ));
            // SAFETY: arrow-rs exported the struct from an array of this type.
            let ours = unsafe { DeviceArray::import_as(theirs, field, &ImportOptions::default()) }
                .unwrap();
            assert_same(&array, &ours.to_host().unwrap(), &context);
        }
    }
}
