//! What imports cost, in copies, bytes and waits.

use std::sync::Arc;

use crate::support::assert_same_batch;
use crate::support_c::c;
use crate::support_c::sim::simulated;
use arrow_array::{ArrayRef, RecordBatch, StringArray};
use arrow_device::device::sim::SimMode;
use arrow_device::{DeviceRecordBatch, ExportOptions, SyncPolicy, Validation};
use arrow_schema::{DataType, Field, Schema};

/// Strings of known size: offsets 4 * 17, bytes 16 * 6.
fn strings(columns: usize) -> RecordBatch {
    let fields: Vec<_> = (0..columns)
        .map(|i| Field::new(format!("s{i}"), DataType::Utf8, false))
        .collect();
    let column = |i: usize| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(
            (0..16).map(|r| format!("{i:03}-{r:02}")),
        ))
    };
    RecordBatch::try_new(
        Arc::new(Schema::new(fields)),
        (0..columns).map(column).collect(),
    )
    .unwrap()
}

/// 300 uncut string columns: one read of all lengths, 4 bytes each, then one of all data.
#[test]
fn three_hundred_strings() {
    for mode in [SimMode::Async, SimMode::Deferred] {
        let Some(place) = simulated(mode) else { return };
        let batch = strings(300);
        let up = place.device.upload(&batch).unwrap();
        let import = || {
            let exported = up
                .export_array(&ExportOptions::new(SyncPolicy::Event))
                .unwrap();
            // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type is the exported one.
            unsafe { DeviceRecordBatch::import_as(exported, up.schema(), &place.options) }.unwrap()
        };
        let before = place.device.stats();
        let imported = import();
        let delta = place.device.stats().since(&before);
        assert_eq!(
            (
                delta.copies,
                delta.host_waits,
                delta.events,
                delta.queue_waits
            ),
            (0, 0, 0, 0)
        );

        let before = place.device.stats();
        imported.as_struct().resolve_sizes().unwrap();
        let delta = place.device.stats().since(&before);
        assert_eq!(
            (delta.copies, delta.bytes_to_host, delta.host_waits),
            (300, 1200, 1)
        );
        let before = place.device.stats();
        imported.as_struct().resolve_sizes().unwrap();
        assert_eq!(place.device.stats(), before, "resolved once");
        let back = imported.to_host().unwrap();
        let data = place.device.stats().since(&before);
        assert_eq!((data.host_waits, data.bytes_to_device), (1, 0));
        assert_same_batch(&batch, &back, "resolved first");
        drop((imported, back));

        let imported = import();
        let before = place.device.stats();
        let back = imported.to_host().unwrap();
        let delta = place.device.stats().since(&before);
        assert_eq!(delta.host_waits, 2, "{place}");
        assert_eq!(delta.bytes_to_host, 1200 + data.bytes_to_host, "{place}");
        assert_eq!(data.bytes_to_host, 300 * (4 * 17 + 16 * 6), "{place}");
        assert_same_batch(&batch, &back, "at once");
        drop((up, imported, back));
        place.assert_clean();
    }
}

/// Strings with nulls that nobody has counted: their bitmaps come down with the sizes, if both are needed.
#[test]
fn bitmaps_come_with_sizes() {
    for mode in [SimMode::Async, SimMode::Deferred] {
        let Some(place) = simulated(mode) else { return };
        let text = |i: usize| -> ArrayRef {
            let rows = (0..16).map(|row| (row % 3 != i % 3).then(|| format!("{i}-{row}")));
            Arc::new(StringArray::from_iter(rows))
        };
        let columns = (0..5).map(|i| (format!("s{i}"), text(i)));
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let up = place.device.upload(&batch).unwrap();
        let exact = ExportOptions::new(SyncPolicy::Event);
        let import = |validation| {
            let mut exported = up.export_array(&exact).unwrap();
            let children = c(&mut exported).array.children;
            for i in 0..5 {
                // SAFETY: the export is live and has these children.
                unsafe { (**children.add(i)).null_count = -1 };
            }
            let options = place.options.clone().with_validation(validation);
            // SAFETY: the struct comes from an export of this crate, and the type is the exported one.
            unsafe { DeviceRecordBatch::import_as(exported, up.schema(), &options) }.unwrap()
        };
        let waits = |work: &dyn Fn()| {
            let before = place.device.stats();
            work();
            place.device.stats().since(&before).host_waits
        };
        place.device.synchronize().unwrap();

        let imported = import(Validation::Structure);
        assert_eq!(imported.column(0).unwrap().null_count(), None);
        assert_eq!(
            waits(&|| drop(imported.to_host().unwrap())),
            2,
            "sizes, and data with bitmaps"
        );
        assert_eq!(
            waits(&|| drop(imported.export_array(&exact).unwrap())),
            1,
            "all bitmaps"
        );
        assert_eq!(waits(&|| drop(imported.export_array(&exact).unwrap())), 0);
        drop(imported);

        let imported = import(Validation::Structure);
        assert_eq!(
            waits(&|| drop(imported.export_array(&exact).unwrap())),
            1,
            "all bitmaps"
        );
        assert_eq!(
            waits(&|| drop(imported.compact().unwrap())),
            1,
            "sizes alone"
        );
        drop(imported);

        let full = || import(Validation::Full);
        assert_eq!(
            waits(&|| drop(full())),
            2,
            "bitmaps with sizes, and all values"
        );
        let imported = full();
        assert_eq!(imported.column(0).unwrap().null_count(), Some(6));
        assert_eq!(waits(&|| drop(imported.export_array(&exact).unwrap())), 0);
        assert_eq!(
            waits(&|| assert_same_batch(&batch, &imported.to_host().unwrap(), "full")),
            1
        );
        drop((up, imported));
        place.assert_clean();
    }
}
