//! Heap allocations of export, import and release: a constant, whatever the number of columns.

use crate::support::{count, wide_batch};
use crate::support_c::sim::{Place, cpu, simulated};
use arrow_array::ffi::{FFI_ArrowArray, from_ffi_and_data_type};
use arrow_array::{Array, RecordBatch, StructArray, UInt32Array};
use arrow_device::device::sim::SimMode;
use arrow_device::{
    DeviceRecordBatch, Devices, ExportOptions, FFI_ArrowDeviceArray, ImportOptions, SyncPolicy,
};
use arrow_schema::DataType;

/// Fresh arrays, whose masks start at the same bit as their values: others are repacked, at a price.
fn columns(n: usize) -> RecordBatch {
    static ALL: std::sync::OnceLock<RecordBatch> = std::sync::OnceLock::new();
    let all = ALL.get_or_init(|| {
        let rows = UInt32Array::from_iter_values(0..20);
        arrow_select::take::take_record_batch(&wide_batch(1000, 20), &rows).unwrap()
    });
    all.project(&(0..n).collect::<Vec<_>>()).unwrap()
}

/// Every one on the CPU; some on devices, where an upload takes longer.
fn widths(place: &Place) -> impl Iterator<Item = usize> {
    let simulated = place.sim.is_some();
    (1..=1000usize).filter(move |n| !simulated || *n <= 20 || n % 70 == 20 || n.is_power_of_two())
}

fn check(place: &Place, sync: SyncPolicy, most_export: usize) {
    for columns in widths(place) {
        let context = format!("{columns} columns on {place}, {sync:?}");
        let batch = place.device.upload(&self::columns(columns)).unwrap();
        let options = ExportOptions::new(sync);
        // Pools are warm after the first.
        let exported = batch.export_array(&options).unwrap();
        // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type is the exported one.
        let imported =
            unsafe { DeviceRecordBatch::import_as(exported, batch.schema(), &place.options) };
        drop(imported.unwrap());
        let (exported, n) = count(|| batch.export_array(&options).unwrap());
        assert!(n <= most_export, "{context}: {n} allocations to export");
        assert_eq!(
            exported.sync_event().is_null(),
            place.sim.is_none() || sync == SyncPolicy::Wait
        );
        let schema = batch.schema();
        // SAFETY: the struct comes from an export of this crate, whose values are valid, and the
        // type is the exported one.
        let (imported, n) =
            count(|| unsafe { DeviceRecordBatch::import_as(exported, schema, &place.options) });
        let imported = imported.unwrap();
        assert!(n <= 4, "{context}: {n} allocations to import");
        let ((), n) = count(|| drop(imported));
        assert_eq!(n, 0, "{context}: allocations to release an import");
        let exported = batch.export_array(&options).unwrap();
        let ((), n) = count(|| drop(exported));
        assert_eq!(n, 0, "{context}: allocations to release an export");
        drop(batch);
    }
    place.assert_clean();
}

#[test]
fn constant() {
    if cfg!(miri) {
        return;
    }
    check(&cpu(), SyncPolicy::Event, 2);
    for mode in [SimMode::Async, SimMode::Deferred] {
        let Some(place) = simulated(mode) else { return };
        check(&place, SyncPolicy::Event, 2);
        check(&place, SyncPolicy::Wait, 2);
    }
}

/// Columns, nodes, slots, owner and tree, and a list of the nested ones.
#[test]
fn host_batches() {
    let cpu = Devices::cpu();
    for columns in [1, 10, 100, 1000] {
        let batch = self::columns(columns);
        drop(cpu.upload(&batch).unwrap());
        let (up, n) = count(|| cpu.upload(&batch).unwrap());
        assert!(n <= 6, "{columns} columns: {n} allocations");
        let ((), n) = count(|| drop(up));
        assert_eq!(n, 0, "{columns} columns: allocations to let go");
    }
}

/// C structs to arrays of arrow-rs cost fewer than arrow-rs's own import.
#[test]
fn to_arrow_arrays() {
    use DataType::*;
    // What the first import of a program allocates, it allocates once.
    let first = columns(1);
    let c = FFI_ArrowDeviceArray::new_cpu(&StructArray::from(first.clone()).into_data());
    // SAFETY: arrow-rs exported the struct from a valid batch of this schema.
    let first =
        unsafe { DeviceRecordBatch::import_as(c, first.schema(), &ImportOptions::default()) };
    first.unwrap().to_host().unwrap();
    for types in [vec![Int64], vec![Utf8], vec![Int64, Utf8, Boolean, Float32]] {
        for columns in [1, 10, 100, 1000] {
            let types: Vec<_> = types.iter().cloned().cycle().take(columns).collect();
            let batch = crate::support::batch(&types, 20, crate::support::Nulls::Some, 3);
            let schema = batch.schema();
            let data = StructArray::from(batch.clone()).into_data();
            let (theirs, ours) = (
                FFI_ArrowArray::new(&data),
                FFI_ArrowDeviceArray::new_cpu(&data),
            );
            let (theirs, most) = count(|| {
                let root = DataType::Struct(schema.fields().clone());
                // SAFETY: arrow-rs exported the struct from a valid batch of this schema.
                let data = unsafe { from_ffi_and_data_type(theirs, root) }.unwrap();
                RecordBatch::from(StructArray::from(data))
            });
            let options = ImportOptions::default();
            let (ours, n) = count(|| {
                // SAFETY: arrow-rs made the struct of a batch of this schema.
                let batch = unsafe { DeviceRecordBatch::import_as(ours, schema.clone(), &options) };
                batch.unwrap().to_host().unwrap()
            });
            assert_eq!(theirs.columns(), ours.columns());
            assert!(
                n < most,
                "{columns} columns: {n} allocations, not below {most}"
            );
        }
    }
}
