//! What an export of an import costs.

use arrow_device::{DeviceRecordBatch, ExportOptions, SyncPolicy, TransferStats};

use crate::rig::{MODES, Rig};
use crate::support::{assert_same_batch, wide_batch};
use crate::vendor::MEMORIES;

/// What was imported goes out again for nothing, whatever memory it is.
#[test]
fn exports_again() {
    for memory in MEMORIES {
        for mode in MODES {
            let rig = Rig::with(mode, memory);
            let source = wide_batch(100, 50);
            let up = rig.upload(&source).unwrap();
            let export = || ExportOptions::new(SyncPolicy::Event);
            let (array, schema) = (up.export_array(&export()).unwrap(), up.schema());
            drop(up);
            // SAFETY: the struct comes from an export of this crate, whose values are valid, and
            // the type is the exported one.
            let imported = unsafe { DeviceRecordBatch::import_as(array, schema, &rig.options) };
            let imported = imported.unwrap();
            let before = rig.stats();
            let array = imported.export_array(&export()).unwrap();
            let cost = rig.stats().since(&before);
            assert_eq!(cost, TransferStats::default(), "{memory:?} {mode}");
            drop(array);
            assert_same_batch(&source, &imported.to_host().unwrap(), "again");
            drop(imported);
            rig.assert_done();
            rig.end();
        }
    }
}
