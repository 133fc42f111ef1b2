//! Wakers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arrow_device::device::{Backend, Notify, SyncEvent};
use arrow_device_oneapi::OneApiConfig;

use crate::first::{config, number};
use crate::gate::hold_by_event;
use crate::programs::OWN_CONTEXT;
use crate::suite::{Count, soon};
use crate::traps::{Held, backend};

/// Wakers are called on a thread that calls nothing that blocks.
#[test]
fn many_wakers() {
    let Some(config) = config() else { return };
    let device = config.open().unwrap();
    let queue = device.new_queue().unwrap();
    let called = Arc::new(Count::default());
    let gate = hold_by_event(&queue);
    for _ in 0..100 {
        let event = queue.record().unwrap().unwrap();
        assert!(!event.notify(&called.clone().into()).unwrap());
    }
    assert_eq!(called.get(), 0);
    gate.open();
    assert!(soon(|| called.get() == 100), "{called:?}");
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
    assert!(soon(|| happened(0)), "the waker is not called");
    foreign.open();
    assert!(soon(|| happened(1)), "the waker waits");
    // SAFETY: released once, and not used any more.
    unsafe { backend(&device).release_event(event) };
}
