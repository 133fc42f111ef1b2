//! Rules about events of other libraries of the program.

use std::panic::AssertUnwindSafe;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::{scope, sleep};

use arrow_device::arrow_array::ffi::{FFI_ArrowArray, FFI_ArrowSchema};
use arrow_device::arrow_array::{Array, Int64Array};
use arrow_device::arrow_buffer::Buffer;
use arrow_device::arrow_schema::{DataType, Field, Schema};

use super::exports::{is_refused, options};
use super::help::assert_works;
use super::kit::{Block, Host, LARGE, MOMENT, assert_bytes, down, join, queue, record, soon};
use super::subject::{Foreign, MakeForeign};
use super::watch::note;
use super::{Subject, Verdict};
use arrow_device::device::EventPtr;
use arrow_device::{DeviceArray, DeviceRecordBatch, FFI_ArrowDeviceArray, Queue, SyncPolicy};

const NONE: Verdict = Verdict::Skipped("the subject has no events of other libraries");
const NEVER: Verdict = Verdict::Skipped("events of other libraries cannot fail");

/// Makes a queue wait for an event. Returns whether it does that by itself.
fn wait(queue: &Queue, event: EventPtr) -> arrow_device::Result<bool> {
    note("wait for an event of another library");
    // SAFETY: the event is one of the device's type, and lives until its `Foreign` is dropped (see `Foreign::new`).
    unsafe { queue.raw().wait(event) }
}

fn values() -> Int64Array {
    Int64Array::from_iter_values(0..1000)
}

pub(super) fn order(subject: &Subject) -> Verdict {
    subject.foreign.iter().for_each(|make| waits(subject, make));
    if subject.foreign.is_empty() {
        NONE
    } else {
        Verdict::Kept
    }
}

fn waits(subject: &Subject, make: &MakeForeign) {
    let device = &subject.device;
    let queue = queue(device);
    let back = Host::empty(device, LARGE);
    let block = Block::new(&queue, LARGE);
    let mut moment = 5 * MOMENT;
    loop {
        let Foreign {
            event, end, _keep, ..
        } = make(device);
        let (says, hears) = channel();
        let ended = AtomicBool::new(false);
        let is_seen = scope(|scope| {
            let ends = scope.spawn(|| {
                let hears = hears;
                // Once the queue waits, the event stays pending until all has been looked at.
                let is_told = hears.recv_timeout(moment) == Ok(());
                if is_told {
                    let _: Result<(), _> = hears.recv();
                }
                ended.store(true, Ordering::SeqCst);
                end(true);
                is_told
            });
            let waits = wait(&queue, event).expect("wait");
            match waits {
                true => drop(says.send(())),
                false => {
                    // As the core does then.
                    // SAFETY: the event lives until `_keep` is dropped.
                    let waited = unsafe { device.backend().wait_event(event) };
                    waited.expect("wait_event");
                    assert!(ended.load(Ordering::SeqCst), "the host did not wait");
                }
            }
            block.fill(&queue, 0x4F);
            down(&queue, block.at(0), back.at(0), LARGE);
            let last = record(&queue);
            assert_works(device);
            let early = waits && last.is_complete().expect("query_event");
            drop(says);
            let is_told = ends.join().expect("the event is ended");
            assert!(!(early && is_told), "the queue did not wait");
            last.wait().expect("wait_event");
            !waits || is_told
        });
        assert_bytes(&vec![0x4F; LARGE], back.bytes(), "written after the event");
        if is_seen {
            return;
        }
        // A busy machine may need longer.
        moment *= 2;
    }
}

pub(super) fn failed(subject: &Subject) -> Verdict {
    let device = &subject.device;
    for make in &subject.foreign {
        let Foreign {
            event,
            end,
            fails,
            _keep,
        } = make(device);
        if !fails {
            end(true);
            return NEVER;
        }
        let backend = device.backend();
        scope(|scope| {
            scope.spawn(move || {
                sleep(MOMENT);
                end(false);
            });
            note("wait_event for an event that fails");
            // SAFETY: the event lives until `_keep` is dropped.
            let waited = unsafe { backend.wait_event(event) };
            assert!(waited.is_err(), "a failed event is taken for complete");
        });
        for _ in 0..2 {
            // SAFETY: the event lives until `_keep` is dropped.
            let (asked, waited) =
                unsafe { (backend.query_event(event), backend.wait_event(event)) };
            assert!(asked.is_err(), "query_event of a failed event: {asked:?}");
            assert!(waited.is_err(), "wait_event of a failed event");
            // Or a host thread is to wait.
            let queued = wait(&queue(device), event).is_ok_and(|queued| queued);
            assert!(!queued, "a queue waits for a failed event");
        }
        assert_works(device);
    }
    if subject.foreign.is_empty() {
        NONE
    } else {
        Verdict::Kept
    }
}

pub(super) fn fails(subject: &Subject) -> Verdict {
    let Some(another) = &subject.another else {
        return Verdict::Skipped("there is only one device of the type");
    };
    for make in &subject.foreign {
        let (device, other) = (another(), another());
        let Foreign {
            event,
            end,
            fails,
            _keep,
        } = make(&device);
        if !fails {
            end(true);
            return NEVER;
        }
        let (ours, theirs) = (queue(&device), queue(&other));
        let before = record(&ours);
        before.wait().expect("wait_event");
        if !wait(&ours, event).expect("wait") {
            end(true);
            return Verdict::Skipped("the host waits for events of other libraries");
        }
        let up = device.upload_array_on(&values(), &ours).expect("upload");
        let after = record(&ours);
        theirs.wait(&after).expect("wait");
        let there = other.upload_array_on(&values(), &theirs).expect("upload");
        let early = after.is_complete().expect("query_event");
        assert!(!early, "complete before the event");
        end(false);
        note("waits after a failure");
        let is_final = |what: &str, error: Option<arrow_device::Error>| {
            let text = error.map_or("no error".into(), |e| e.to_string());
            assert!(text.contains("cannot be used any more"), "{what}: {text}");
        };
        for _ in 0..2 {
            is_final("wait_event", after.wait().err());
            is_final("query_event", after.is_complete().err());
            is_final("to_host", up.to_host().err());
            is_final("upload", device.upload_array(&values()).err());
            is_final("record", ours.record().err());
            is_final("wait", wait(&ours, event).err());
            is_final("synchronize", device.synchronize().err());
        }
        // Nor is what waited for that device taken for complete.
        is_final("a device that waits", there.to_host().err());
        is_final("a device that waits", other.synchronize().err());
        let third = another();
        is_final("a later wait", third.default_queue().wait(&after).err());
        assert_works(&third);
        assert_works(&subject.device);
    }
    if subject.foreign.is_empty() {
        NONE
    } else {
        Verdict::Kept
    }
}

/// Imports an array of another library, which has this event. Its memory is that of `up`, which it keeps.
fn import(up: &Arc<DeviceArray>, event: EventPtr) -> DeviceArray {
    let (device, there) = (up.device(), up.buffer(1).expect("the values"));
    let address = NonNull::new(there.address().as_ptr().cast()).expect("an address");
    let owner = Arc::new(AssertUnwindSafe(up.clone()));
    // SAFETY: only the address is used, and the owner keeps the memory, in which the values are.
    let data = unsafe {
        let buffer = Buffer::from_custom_allocation(address, there.len(), owner);
        let data = values().into_data().into_builder();
        data.buffers(vec![buffer]).build_unchecked()
    };
    let (array, id) = (FFI_ArrowArray::new(&data), device.id());
    let schema = FFI_ArrowSchema::try_from(&DataType::Int64).expect("a schema");
    // SAFETY: array and schema describe the values; the event lives until its `Foreign` is dropped.
    let imported = unsafe {
        let array = FFI_ArrowDeviceArray::new(array, id.device_type, id.id, event.as_ptr());
        DeviceArray::import(array, &schema, &options(device))
    };
    imported.expect("import")
}

pub(super) fn imported(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if is_refused(device) {
        return Verdict::Skipped("arrays of the device are not exported");
    }
    for make in &subject.foreign {
        let foreign = [make(device), make(device)];
        let events = foreign.each_ref().map(|foreign| foreign.event);
        let foreign = foreign.map(|foreign| (foreign.end, foreign._keep));
        let (ends, _kept): (Vec<_>, Vec<_>) = foreign.into_iter().unzip();
        let up = Arc::new(device.upload_array(&values()).expect("upload"));
        up.wait().expect("wait");
        let before = device.stats();
        let columns = events.map(|event| import(&up, event));
        let pending = |column: &DeviceArray| !column.is_ready().expect("is_ready");
        assert!(columns.iter().all(pending), "ready before the event");
        let fields = ["a", "b"].map(|name| Field::new(name, DataType::Int64, true));
        let schema = Arc::new(Schema::new(fields.to_vec()));
        let batch = DeviceRecordBatch::try_new(schema, &columns).expect("a batch");
        let waits = device.stats().since(&before).host_waits;
        assert_eq!(waits, 0, "an import waited");
        let ended = AtomicBool::new(false);
        scope(|scope| {
            scope.spawn(|| {
                sleep(MOMENT);
                ended.store(true, Ordering::SeqCst);
                ends.into_iter().for_each(|end| end(true));
            });
            let exports = scope.spawn(|| {
                let (array, _schema) = batch.export(SyncPolicy::Event).expect("export");
                if let Some(event) = EventPtr::new(array.sync_event()) {
                    // SAFETY: the event is of this device, and lives as long as the export.
                    let waited = unsafe { device.backend().wait_event(event) };
                    waited.expect("wait_event");
                }
                assert!(ended.load(Ordering::SeqCst), "exported as ready too early");
            });
            let queue = queue(device);
            let back = columns[0].start_to_host(&queue).expect("start_to_host");
            let back = back.wait().expect("a download");
            assert!(ended.load(Ordering::SeqCst), "read before the event");
            assert!(*back == values(), "other values came back");
            join([exports]);
        });
        drop((columns, batch));
        let released = soon(subject.patience, || Arc::strong_count(&up) == 1);
        assert!(released, "the array of the other library is not released");
    }
    if subject.foreign.is_empty() {
        NONE
    } else {
        Verdict::Kept
    }
}
