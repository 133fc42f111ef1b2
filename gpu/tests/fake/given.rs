//! What the vendors' own tests have alike: all uses of a device.

use arrow_device::{DeviceRecordBatch, SyncPolicy};

use crate::rig::Rig;
use crate::support::{assert_same_batch, wide_batch};

/// Everything that a program does with a device.
pub(crate) fn everything(rig: &Rig) {
    let batch = wide_batch(8, 300);
    let up = rig.upload(&batch).unwrap();
    let queue = rig.new_queue().unwrap();
    drop(up.column(1).unwrap().validity_on(&queue).unwrap());
    let (array, schema) = up.export(SyncPolicy::Event).unwrap();
    // SAFETY: both structs come from one export of this crate.
    let again = unsafe { DeviceRecordBatch::import(array, &schema, &rig.options) }.unwrap();
    assert_same_batch(&batch, &again.to_host().unwrap(), "everything");
    drop((up, again, queue));
    rig.synchronize().unwrap();
    rig.trim();
}
