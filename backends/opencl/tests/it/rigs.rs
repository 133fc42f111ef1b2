//! OpenCL devices for tests, and a program's own calls of OpenCL.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use arrow_device::device::device_error;
use arrow_device::{Device, Error, Queue};
use arrow_device_conformance::Hold;
use arrow_device_opencl::{OpenClConfig, OpenClDevice, OpenClMemory, OpenClQueue, devices};
use cl3::command_queue::enqueue_barrier_with_wait_list;
use cl3::event::{create_user_event, release_event, set_user_event_status};
use cl3::types::{cl_event, cl_int};

pub(crate) const MEMORIES: [OpenClMemory; 4] = [
    OpenClMemory::Usm,
    OpenClMemory::Svm,
    OpenClMemory::FineSvm,
    OpenClMemory::Handles,
];

/// Whether a missing runtime is an error: in CI.
pub(crate) fn is_required() -> bool {
    std::env::var_os("ARROW_DEVICE_OPENCL_REQUIRED").is_some_and(|value| value != "0")
}

/// Ends the process if its tests hang.
fn limit() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_secs(600));
            eprintln!("the tests have hung: ten minutes are over");
            std::process::abort();
        });
    });
}

/// Returns whether the first device has this memory. Says why a test is skipped, or fails if it must not be.
#[track_caller]
pub(crate) fn has(memory: OpenClMemory) -> bool {
    limit();
    match devices() {
        Ok(found) => {
            let first = found.first().expect("a platform without devices");
            let has = first.memory.contains(&memory);
            // PoCL has no unified shared memory.
            let may_lack = memory == OpenClMemory::Usm && !first.platform.contains("Intel");
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
    let (memory, events, host) = OpenClDevice::of(device).unwrap().in_use();
    let clean = memory == 0 && events == 0 && host == 0;
    (!clean).then(|| {
        format!("{device}: {memory} allocations, {events} events, {host} pieces of host memory")
    })
}

/// Returns whether `done` becomes true within ten seconds.
pub(crate) fn soon(mut done: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(10) {
        if done() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

/// Waits until a device has given everything back, which a thread of its own does.
#[track_caller]
pub(crate) fn assert_clean(device: &Device) {
    assert!(soon(|| unclean(device).is_none()), "{:?}", unclean(device));
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

/// Asserts an error that says this.
#[track_caller]
pub(crate) fn assert_error<T: std::fmt::Debug>(result: Result<T, Error>, text: &str) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(text), "{error}");
}

#[cfg(target_os = "linux")]
pub(crate) use streams::rigs;

#[cfg(target_os = "linux")]
mod streams {
    use std::cell::Cell;
    use std::rc::Rc;
    use std::sync::OnceLock;

    use arrow_device::{Devices, ImportOptions};
    use arrow_device_opencl::OpenClMemory;

    use super::{memories, open, unclean};
    use crate::fake;
    use crate::fork_kit::is_alone;
    use crate::stream_suite::Rig;

    /// For the suite of streams: a device for each kind of memory whose addresses are exported.
    pub(crate) fn rigs() -> Vec<Rig> {
        const TEST: &str = "stream_suite::every_failure_in_a_stream_is_an_error_and_leaks_nothing";
        static FAILS: OnceLock<bool> = OnceLock::new();
        if is_alone() {
            fake::load();
        }
        let memories = memories().into_iter();
        let memories = memories.filter(|memory| *memory != OpenClMemory::Handles);
        let rigs = memories.map(|memory| {
            let device = open(memory);
            let devices = Devices::new();
            devices.add(device.clone()).unwrap();
            let (subject, nth) = (device.clone(), Rc::new(Cell::new(0)));
            let asked = nth.clone();
            Rig {
                device,
                options: ImportOptions::default().with_devices(devices),
                unclean: Box::new(move || {
                    let misused = is_alone() && fake::misuses() > 0;
                    unclean(&subject).or_else(|| misused.then(|| "given back twice".into()))
                }),
                fail_nth: Box::new(move |n| {
                    nth.set(n);
                    if *FAILS.get_or_init(|| fake::is_loaded(TEST)) {
                        fake::fail("*", n, -5);
                    }
                }),
                // Here nothing fails, and the suite wants to see a few failures.
                failed: Box::new(move || match is_alone() {
                    true => fake::clear(),
                    false => asked.get() <= 5,
                }),
            }
        });
        rigs.collect()
    }
}
