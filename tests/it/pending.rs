//! Much that is pending at once: each piece costs the same, however many there are.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use crate::altered::Altered;
use arrow_array::record_batch;
use arrow_device::device::DevicePtr;
use arrow_device::device::sim::{FaultOp, SimConfig, SimDevice, SimMode};
use arrow_device::{Device, DeviceBuffer};

const N: usize = 500;

/// Work that runs only when it is waited for.
fn held() -> Arc<SimDevice> {
    SimDevice::new(SimConfig {
        mode: SimMode::Deferred,
        ..SimConfig::default()
    })
    .unwrap()
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

/// The numbers of questions about each event, the largest first.
fn queries(device: &Altered) -> Vec<usize> {
    let mut all: Vec<usize> = device.queries.lock().unwrap().values().copied().collect();
    all.sort_unstable_by(|a, b| b.cmp(a));
    all
}

#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Pending events are asked about a few times, at growing intervals. None holds up another one.
#[test]
fn pending_events() {
    let mute = Arc::new(Altered::new(held()));
    let device = Device::new(mute.clone()).unwrap();
    upload(&device);
    let most = || queries(&mute).first().copied().unwrap_or(0);
    let (start, before) = (Instant::now(), most());
    until("events are asked about again and again", || {
        most() >= before + 20
    });
    let (asked, ms) = (most() - before, start.elapsed().as_millis() as usize);
    assert!(asked <= 50 + ms, "{asked} questions in {ms} ms");
    assert_eq!(mute.sim.report().live_events, N);
    // The last one completes first, on a queue of its own.
    let queue = device.new_queue().unwrap();
    let event = queue.record().unwrap().unwrap();
    let woken = Arc::new(Woken::default());
    assert!(!event.notify(&Waker::from(woken.clone())).unwrap());
    event.wait().unwrap();
    until("its waker is called", || {
        woken.0.load(Ordering::SeqCst) == 1
    });
    assert_eq!(mute.sim.report().live_events, N + 1);
    drop((event, queue));
    device.synchronize().unwrap();
    let before: usize = queries(&mute).iter().sum();
    until("all are let go", || mute.sim.report().live_events == 0);
    let after: usize = queries(&mute).iter().sum();
    assert!(after - before <= 2 * N, "{} questions", after - before);
    device.trim();
    mute.sim.assert_clean();
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
