//! Wakers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use arrow_device::device::{Backend, Notify, SyncEvent};
use arrow_device_oneapi::OneApiConfig;

use crate::gate::hold_by_event;
use crate::programs::OWN_CONTEXT;
use crate::rigs::{config, number};
use crate::traps::{Held, backend, eventually};

/// Wakers are called on a thread that calls nothing that blocks.
#[test]
fn many_wakers() {
    let Some(config) = config() else { return };
    let device = config.open().unwrap();
    let queue = device.new_queue().unwrap();
    let called: Arc<[AtomicBool]> = (0..100).map(|_| AtomicBool::new(false)).collect();
    let gate = hold_by_event(&queue);
    let events: Vec<_> = (0..called.len())
        .map(|_| queue.record().unwrap().unwrap())
        .collect();
    struct Waker(Arc<[AtomicBool]>, usize);
    impl std::task::Wake for Waker {
        fn wake(self: Arc<Self>) {
            self.0[self.1].store(true, Ordering::SeqCst);
        }
    }
    for (i, event) in events.iter().enumerate() {
        assert!(
            !event
                .notify(&Arc::new(Waker(called.clone(), i)).into())
                .unwrap()
        );
    }
    drop(events);
    assert!(called.iter().all(|called| !called.load(Ordering::SeqCst)));
    gate.open();
    let start = Instant::now();
    while !called.iter().all(|called| called.load(Ordering::SeqCst)) {
        assert!(start.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A waker is foreign code: it may wait for work that waits for another event.
#[test]
fn a_waker_waits() {
    let Some(number) = number() else { return };
    let device = OneApiConfig::new(number).open().unwrap();
    let (queue, other) = (device.new_queue().unwrap(), device.new_queue().unwrap());
    let held = Held::new(number, OWN_CONTEXT);
    let foreign = held.gate(0);
    // SAFETY: the event is live.
    unsafe { queue.raw().wait(held.event()) }.unwrap();
    let behind = queue.record().unwrap().unwrap();
    let gate = hold_by_event(&other);
    // The backend's own, since the core calls wakers on another thread.
    let event = other.raw().record().unwrap();
    struct Waker(SyncEvent, [AtomicBool; 2]);
    impl std::task::Wake for Waker {
        fn wake(self: Arc<Self>) {
            self.1[0].store(true, Ordering::SeqCst);
            self.0.wait().unwrap();
            self.1[1].store(true, Ordering::SeqCst);
        }
    }
    let waker = Arc::new(Waker(behind, Default::default()));
    // SAFETY: the event is live until it is released at the end.
    let notified = unsafe { backend(&device).notify_event(event, &waker.clone().into()) };
    assert_eq!(notified.unwrap(), Notify::Registered);
    gate.open();
    let happened = |i: usize| waker.1[i].load(Ordering::SeqCst);
    eventually("the waker is not called", || happened(0));
    foreign.open();
    eventually("the waker waits", || happened(1));
    // SAFETY: released once, and not used any more.
    unsafe { backend(&device).release_event(event) };
}
