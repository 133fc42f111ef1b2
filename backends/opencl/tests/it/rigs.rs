//! OpenCL devices for tests, and a program's own calls of OpenCL.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use arrow_device::device::EventPtr;
use arrow_device::{Device, Queue};
use arrow_device_conformance::{Foreign, Hold, abort_if_hung, assert_balanced};
use arrow_device_opencl::{OpenClConfig, OpenClDevice, OpenClMemory, OpenClQueue, devices};
use cl3::command_queue::enqueue_barrier_with_wait_list;
use cl3::event::{create_user_event, release_event, set_user_event_status};
use cl3::types::{cl_event, cl_int};

pub(crate) fn is_required() -> bool {
    std::env::var_os("ARROW_DEVICE_OPENCL_REQUIRED").is_some_and(|value| value != "0")
}

/// Returns whether the first device has this memory. Says why a test is skipped, or fails if it must not be.
#[track_caller]
pub(crate) fn has(memory: OpenClMemory) -> bool {
    abort_if_hung();
    match devices() {
        Ok(found) => {
            let first = found.first().expect("a platform without devices");
            let has = first.memory.contains(&memory);
            // PoCL and NVIDIA's runtime have no unified shared memory.
            let may_lack = match memory {
                OpenClMemory::Usm => !first.platform.contains("Intel"),
                _ => false,
            };
            assert!(
                has || may_lack || !is_required(),
                "{first} has no {memory:?}"
            );
            if !has {
                eprintln!("skipped: {first} has no {memory:?}");
            }
            has
        }
        Err(e) => {
            assert!(!is_required(), "{e}");
            eprintln!("skipped: {e}");
            false
        }
    }
}

/// The kinds of memory to test on.
#[track_caller]
pub(crate) fn memories() -> Vec<OpenClMemory> {
    let all = [OpenClMemory::Usm, OpenClMemory::Svm, OpenClMemory::Handles];
    all.into_iter().filter(|memory| has(*memory)).collect()
}

/// The first device, with an id that no other device of this process has.
#[track_caller]
pub(crate) fn open(memory: OpenClMemory) -> Device {
    static ID: AtomicI64 = AtomicI64::new(0);
    let config = OpenClConfig::new(0).with_memory(memory);
    config
        .with_id(ID.fetch_add(1, Ordering::Relaxed))
        .open()
        .unwrap()
}

/// A user event of a device's context.
pub(crate) struct Gate(cl_event);

// SAFETY: events may be used on any thread.
unsafe impl Send for Gate {}
// SAFETY: events may be used on several threads at once.
unsafe impl Sync for Gate {}

impl Gate {
    pub(crate) fn new(device: &Device) -> Arc<Self> {
        let context = OpenClDevice::of(device).unwrap().context();
        Arc::new(Self(create_user_event(context).unwrap()))
    }

    pub(crate) fn event(&self) -> cl_event {
        self.0
    }

    /// Ends the event: with 0 it completes, with a negative status it fails.
    pub(crate) fn end(&self, status: cl_int) {
        set_user_event_status(self.0, status).unwrap();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // SAFETY: this is the reference of `new`.
        unsafe { release_event(self.0) }.unwrap();
    }
}

/// Keeps a queue busy.
pub(crate) fn hold(queue: &Queue) -> Hold {
    let gate = Gate::new(queue.device());
    let handle = OpenClQueue::of(queue).unwrap().handle();
    let event = gate.event();
    // SAFETY: queue and event are live and of one context.
    let barrier = unsafe { enqueue_barrier_with_wait_list(handle, 1, &raw const event) }.unwrap();
    // SAFETY: the barrier's event is not used.
    unsafe { release_event(barrier) }.unwrap();
    Hold::new(move || gate.end(0))
}

/// An event of another library, in a device's context.
pub(crate) fn foreign(device: &Device) -> Foreign {
    let gate = Gate::new(device);
    // Where `sync_event` points to.
    let mut place = Box::new(gate.event());
    let event = EventPtr::new((&raw mut *place).cast()).unwrap();
    let keep = (place, gate.clone());
    // SAFETY: `keep` has the event, and the place of its handle.
    unsafe {
        Foreign::new(event, keep, move |works| {
            gate.end(if works { 0 } else { -5 })
        })
    }
}

#[track_caller]
pub(crate) fn assert_clean(device: &Device) {
    assert_balanced::<OpenClDevice>(device);
}
