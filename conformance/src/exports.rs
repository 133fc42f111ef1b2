//! Rules about what an export hands over.

use std::sync::Arc;
use std::thread::{scope, sleep};

use arrow_device::arrow_array::{ArrayRef, Int64Array, RecordBatch};

use super::kit::{LARGE, MOMENT, queue, returns_while_held, soon};
use super::samples::{ROWS, all, assert_same};
use super::subject::Consumer;
use super::watch::note;
use super::{Hold, Subject, Verdict};
use arrow_device::device::{DevicePtr, EventPtr, ExportSync};
use arrow_device::{Device, DeviceArray, Devices, Error, ImportOptions, SyncPolicy};

fn values() -> Int64Array {
    (0..LARGE as i64 / 8).collect()
}

pub(super) fn handover(subject: &Subject) -> Verdict {
    if is_refused(&subject.device) {
        return Verdict::Skipped("arrays of the device are not exported");
    }
    exported(subject, SyncPolicy::Event);
    exported(subject, SyncPolicy::Wait);
    Verdict::Kept
}

pub(super) fn types(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if is_refused(device) {
        return Verdict::Skipped("arrays of the device are not exported");
    }
    let options = options(device);
    for (array, sync) in all()
        .iter()
        .zip([SyncPolicy::Event, SyncPolicy::Wait].iter().cycle())
    {
        let what = array.data_type();
        let up = device.upload_array(array).expect("upload");
        let cut = up.slice(1, ROWS - 3).expect("slice");
        let (exported, schema) = cut.export(*sync).unwrap_or_else(|e| panic!("{what}: {e}"));
        drop((up, cut));
        // SAFETY: both come from `export`, and the array is not released.
        let again = unsafe { DeviceArray::import(exported, &schema, &options) };
        let back = again.and_then(|again| again.to_host());
        let back = back.unwrap_or_else(|e| panic!("{what}: {e}"));
        let expected = array.slice(1, ROWS - 3);
        assert_same(&expected, &back, format_args!("{what}, exported"));
    }
    Verdict::Kept
}

/// Whether the device exports nothing.
pub(super) fn is_refused(device: &Device) -> bool {
    let exports = device.backend().capabilities().exports;
    matches!(exports, ExportSync::Refused(_))
}

/// What imports find the device by.
pub(super) fn options(device: &Device) -> ImportOptions {
    let devices = Devices::new();
    devices.add(device.clone()).expect("add");
    ImportOptions {
        devices: Some(devices),
        ..Default::default()
    }
}

/// Exports an array while its upload is held up, and imports it again.
fn exported(subject: &Subject, sync: SyncPolicy) {
    let device = &subject.device;
    let backend = device.backend();
    let options = options(device);
    let (queue, array) = (queue(device), values());
    let mut hold = subject.hold(&queue);
    let pending = hold.holds();
    let up = device.upload_array_on(&array, &queue);
    let up = up.expect("upload");
    let exports = backend.capabilities().exports;
    let waits = match exports {
        _ if sync == SyncPolicy::Wait => true,
        ExportSync::Wait => true,
        // The host reads such memory without a queue.
        ExportSync::QueueOrder => device.is_host_readable(),
        _ => false,
    };
    let mut made = None;
    let mut export = || made = Some(up.export(sync).expect("export"));
    if waits {
        note("export that waits");
        while_opening(hold, export);
        hold = Hold::default();
        assert!(
            up.is_ready().expect("is_ready"),
            "the export has not waited"
        );
    } else {
        returns_while_held(subject, &mut hold, "export", &mut export);
    }
    let (exported, schema) = made.expect("exported above");
    drop(up);
    let mut consumed = None;
    match EventPtr::new(exported.sync_event()) {
        Some(event) => {
            assert!(!waits, "an event of data that is ready");
            assert_eq!(exports, ExportSync::Event, "an event");
            // SAFETY: the event is one of this device, and lives until the export is released.
            let (checked, done) =
                unsafe { (backend.check_event(event), backend.query_event(event)) };
            checked.expect("check_event refused what was exported");
            let done = done.expect("query_event");
            assert!(!(pending && done), "the exported event completed early");
            // The address that the struct has: all that another library knows.
            let address = DevicePtr::new(exported.array().buffer(1).cast_mut().cast());
            let read = |read: &Consumer| read(device, event, address, 8 * array.len());
            consumed = subject.consumer.as_ref().map(read);
            if let Some(consumed) = consumed.as_mut().filter(|_| pending) {
                sleep(MOMENT);
                assert!(consumed().is_none(), "another library has not waited");
            }
        }
        None => {
            let needed = pending && !waits && exports == ExportSync::Event;
            assert!(!needed, "no event though the data is not ready");
        }
    }
    while_opening(hold, || {
        // SAFETY: both come from `export`, and the array is not released.
        let again = unsafe { DeviceArray::import(exported, &schema, &options) };
        let again = again.expect("import");
        let back = again.to_host().expect("to_host");
        assert!(*back == array, "other values came back");
        // The import keeps the event and the memory.
        if let Some(mut consumed) = consumed {
            let mut read = None;
            let is_read = || {
                read = consumed();
                read.is_some()
            };
            let seen = soon(subject.patience, is_read);
            assert!(seen, "another library waits for ever");
            let expected = array.values().inner().as_slice();
            let same = read.as_deref() == Some(expected);
            assert!(same, "another library has read other values");
        }
    });
}

/// Runs `work`, during which the hold is opened.
fn while_opening(hold: Hold, work: impl FnOnce()) {
    scope(|scope| {
        scope.spawn(move || {
            sleep(MOMENT);
            drop(hold);
        });
        work();
    });
}

pub(super) fn refused(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if !is_refused(device) {
        return Verdict::Skipped("arrays of the device are exported");
    }
    let kept = || {
        let stats = device.stats();
        stats.allocations - stats.frees
    };
    // The release thread may not have freed earlier memory yet.
    let before = kept();
    let column: ArrayRef = Arc::new(values());
    let batch = RecordBatch::try_from_iter([("a", column.clone())]).expect("a batch");
    let up = device.upload_array(&column).expect("upload");
    let batch = device.upload(&batch).expect("upload");
    for sync in [SyncPolicy::Event, SyncPolicy::Wait] {
        for refused in [up.export(sync).err(), batch.export(sync).err()] {
            let why = refused.expect("an export that is refused");
            assert!(matches!(why, Error::NotSupported { .. }), "{why:?}");
        }
    }
    let back = up.to_host().expect("to_host");
    assert!(*back == *column, "other values came back");
    drop((up, batch));
    let freed = soon(subject.patience, || kept() <= before);
    assert!(freed, "memory of refused exports is not freed");
    Verdict::Kept
}
