//! Much that is pending at once: each piece costs the same, however many there are.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use arrow_array::record_batch;
use arrow_device::device::sim::{FaultOp, SimConfig, SimDevice, SimMode};
use arrow_device::device::{Backend, DevicePtr, EventPtr, Notify, RawQueue};
use arrow_device::{Device, DeviceBuffer, DeviceId, Result};

const N: usize = 500;

/// Work that runs only when it is waited for.
fn held() -> Arc<SimDevice> {
    SimDevice::new(SimConfig::default().with_mode(SimMode::Deferred)).unwrap()
}

fn until(what: &str, done: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Uploads `N` batches and keeps none: their staging memory waits for the copies.
fn upload(device: &Device) {
    let batch = record_batch!(("a", Int32, [1, 2, 3])).unwrap();
    for _ in 0..N {
        device.upload(&batch).unwrap();
    }
}

/// A simulated device that cannot notify, and counts how often each event is asked about.
#[derive(Debug)]
struct Mute {
    sim: Arc<SimDevice>,
    /// It says that it will call wakers, and drops them.
    forgetful: bool,
    queries: Mutex<HashMap<EventPtr, usize>>,
}

impl Mute {
    /// The numbers of questions, the largest first.
    fn queries(&self) -> Vec<usize> {
        let mut all: Vec<usize> = self.queries.lock().unwrap().values().copied().collect();
        all.sort_unstable_by(|a, b| b.cmp(a));
        all
    }
}

// SAFETY: every method passes its call on to the simulated device, except `notify_event`, which drops
// the waker.
unsafe impl Backend for Mute {
    fn id(&self) -> DeviceId {
        self.sim.id()
    }

    fn host_readable(&self) -> bool {
        self.sim.host_readable()
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        self.sim.default_queue()
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        self.sim.new_queue()
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        *self.queries.lock().unwrap().entry(event).or_default() += 1;
        // SAFETY: the event is live, as this method's contract asks, and the simulated device's.
        unsafe { self.sim.query_event(event) }
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        // SAFETY: the caller guarantees a live event of this device, which is the simulated device's.
        unsafe { self.sim.wait_event(event) }
    }

    unsafe fn notify_event(&self, _: EventPtr, _: &Waker) -> Result<Notify> {
        Ok(match self.forgetful {
            true => Notify::Registered,
            false => Notify::Unsupported,
        })
    }

    unsafe fn release_event(&self, event: EventPtr) {
        // SAFETY: recorded by a queue of the simulated device and not used again, as this method's contract asks.
        unsafe { self.sim.release_event(event) }
    }

    fn synchronize(&self) -> Result<()> {
        self.sim.synchronize()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Of a queue's pending events only the first is asked about again and again.
#[test]
fn the_first_event_of_a_queue_is_asked() {
    let (sim, queries) = (held(), Mutex::default());
    let forgetful = false;
    let mute = Arc::new(Mute {
        sim,
        forgetful,
        queries,
    });
    let device = Device::new(mute.clone()).unwrap();
    upload(&device);
    until("the first event is asked about", || {
        mute.queries().first().is_some_and(|n| *n >= 20)
    });
    let queries = mute.queries();
    // The others are not asked about at all, nor when the upload hands its source over.
    assert_eq!(queries.len(), 1);

    // Another queue's event is not held up.
    let queue = device.new_queue().unwrap();
    let event = queue.record().unwrap().unwrap();
    let woken = Arc::new(Woken::default());
    assert!(!event.notify(&Waker::from(woken.clone())).unwrap());
    event.wait().unwrap();
    until("the other queue's waker is called", || {
        woken.0.load(Ordering::SeqCst) == 1
    });
    assert_eq!(mute.sim.report().live_events, N + 1);

    // All completed: each is asked about once more.
    device.synchronize().unwrap();
    let before: usize = mute.queries().iter().sum();
    drop(event);
    until("all are let go", || mute.sim.report().live_events == 0);
    let after: usize = mute.queries().iter().sum();
    assert!(after - before <= N, "{} questions", after - before);
    device.synchronize().unwrap();
    mute.sim.assert_clean();
}

/// A waker that is dropped and not called counts as an event that has to be asked about.
#[test]
fn wakers_that_are_dropped() {
    let (sim, queries) = (held(), Mutex::default());
    let forgetful = true;
    let mute = Arc::new(Mute {
        sim,
        forgetful,
        queries,
    });
    let device = Device::new(mute.clone()).unwrap();
    upload(&device);
    until("the first event is asked about", || {
        mute.queries().first().is_some_and(|n| *n >= 20)
    });
    assert_eq!(mute.sim.report().live_events, N);
    device.synchronize().unwrap();
    until("all are freed", || mute.sim.report().live_events == 0);
    mute.sim.assert_clean();
}

/// With notifications: an event is asked about when it is given up, registered for, and asked about when it has completed.
#[test]
fn three_questions_an_upload() {
    let sim = held();
    let device = Device::new(sim.clone()).unwrap();
    upload(&device);
    device.synchronize().unwrap();
    until("all are let go", || sim.report().live_events == 0);
    let questions = sim.faults().seen(FaultOp::Query);
    assert!(questions <= 3 * N as u64, "{questions} questions");
    device.synchronize().unwrap();
    device.trim();
    sim.assert_clean();
}

/// Uses that have completed are dropped on the way, and pending ones are not asked about at each further use.
#[test]
fn uses_of_one_buffer() {
    let sim = held();
    let device = Device::new(sim.clone()).unwrap();
    // SAFETY: the buffer has no bytes, so nothing is read at null.
    let buffer = unsafe { DeviceBuffer::from_raw(&device, DevicePtr::NULL, 0, Box::new(()), None) };
    let queue = device.new_queue().unwrap();
    for _ in 0..N {
        drop(buffer.on(&queue).unwrap());
    }
    assert_eq!(sim.report().live_events, N);
    let questions = sim.faults().seen(FaultOp::Query);
    assert!(questions <= 2 * N as u64, "{questions} questions");

    device.synchronize().unwrap();
    for _ in 0..4 * N {
        drop(buffer.on(&queue).unwrap());
        queue.synchronize().unwrap();
    }
    let live = sim.report().live_events;
    assert!(live < 10, "{live} uses are kept");
    let questions = sim.faults().seen(FaultOp::Query);
    assert!(questions <= 8 * N as u64, "{questions} questions");
    drop(buffer);
    until("all are let go", || sim.report().live_events == 0);
    sim.assert_clean();
}
