//! Heap allocations of export, import and release: a constant, whatever the number of columns.

mod support;
mod support_c;

use arrow_array::{RecordBatch, UInt32Array};
use arrow_device::device::sim::SimMode;
use arrow_device::{DeviceRecordBatch, ExportOptions, SyncPolicy};
use support::{CountingAllocator, count, wide_batch};
use support_c::sim::{Place, cpu, simulated};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

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
        // SAFETY: of an export.
        let imported = unsafe {
            DeviceRecordBatch::import_as(exported, batch.schema().clone(), &place.options)
        };
        drop(imported.unwrap());
        let (exported, n) = count(|| batch.export_array(&options).unwrap());
        assert!(n <= most_export, "{context}: {n} allocations to export");
        assert_eq!(
            exported.sync_event().is_null(),
            place.sim.is_none() || sync == SyncPolicy::Wait
        );
        let schema = batch.schema().clone();
        // SAFETY: both come from an export.
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
