//! OpenCL devices for tests, and a program's own calls of OpenCL.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use arrow_device::device::device_error;
use arrow_device::device::engine::Engine;
use arrow_device::{Device, Error, Queue};
use arrow_device_conformance::Hold;
use arrow_device_opencl::{OpenClConfig, OpenClDevice, OpenClMemory, OpenClQueue, devices};
use cl3::command_queue::enqueue_barrier_with_wait_list;
use cl3::event::{create_user_event, release_event, set_user_event_status};
use cl3::types::{cl_event, cl_int};

use crate::stream_suite::Rig;
use crate::suite::{self, limit, rig};

pub(crate) const MEMORIES: [OpenClMemory; 3] =
    [OpenClMemory::Usm, OpenClMemory::Svm, OpenClMemory::Handles];

pub(crate) fn is_required() -> bool {
    suite::is_required("OPENCL")
}

/// Returns whether the first device has this memory. Says why a test is skipped, or fails if it must not be.
#[track_caller]
pub(crate) fn has(memory: OpenClMemory) -> bool {
    limit();
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
    MEMORIES.into_iter().filter(|memory| has(*memory)).collect()
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

/// Returns what of a device is in use, if anything is.
pub(crate) fn unclean(device: &Device) -> Option<String> {
    device.trim();
    let (memory, events, host) = Engine::<OpenClDevice>::of(device).unwrap().in_use();
    let clean = memory == 0 && events == 0 && host == 0;
    (!clean).then(|| {
        format!("{device}: {memory} allocations, {events} events, {host} pieces of host memory")
    })
}

/// A user event of a device's context.
pub(crate) struct Gate(cl_event);

// SAFETY: events may be used on any thread.
unsafe impl Send for Gate {}
// SAFETY: events may be used on several threads at once.
unsafe impl Sync for Gate {}

impl Gate {
    pub(crate) fn new(device: &Device) -> Arc<Self> {
        Self::try_new(device).unwrap()
    }

    pub(crate) fn try_new(device: &Device) -> Result<Arc<Self>, Error> {
        let context = OpenClDevice::of(device)?.context();
        let event = create_user_event(context);
        let event = event.and_then(|event| if event.is_null() { Err(0) } else { Ok(event) });
        let failed = |code| device_error(device.id(), "clCreateUserEvent", code, "");
        Ok(Arc::new(Self(event.map_err(failed)?)))
    }

    pub(crate) fn event(&self) -> cl_event {
        self.0
    }

    /// Ends the event: with 0 it completes, with a negative status it fails.
    pub(crate) fn end(&self, status: cl_int) {
        // The first call may be one that a test lets fail.
        let set = || set_user_event_status(self.0, status);
        set().or_else(|_| set()).unwrap();
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

/// A device for each kind of memory.
pub(crate) fn all() -> Vec<Device> {
    memories().into_iter().map(open).collect()
}

/// What a forked child is refused, beside the core's functions.
pub(crate) fn refused(_queue: &Queue) -> Vec<Error> {
    let opened = OpenClConfig::new(0).open();
    vec![devices().unwrap_err(), opened.unwrap_err()]
}

/// For the suite of streams: a device for each kind of memory whose addresses are exported.
pub(crate) fn rigs() -> Vec<Rig> {
    #[cfg(not(target_os = "linux"))]
    let faults = None;
    #[cfg(target_os = "linux")]
    let faults = Some(crate::fake::faults());
    let memories = memories().into_iter();
    let exported = memories.filter(|memory| *memory != OpenClMemory::Handles);
    exported.map(|memory| rig(open(memory), faults)).collect()
}
