//! What imports cost, in copies, bytes and waits.

mod support;
mod support_c;

use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use arrow_device::device::sim::SimMode;
use arrow_device::{DeviceRecordBatch, ExportOptions, SyncPolicy};
use arrow_schema::{DataType, Field, Schema};
use support::assert_same_batch;
use support_c::sim::simulated;

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
