//! Rules about wakers.

use std::sync::Arc;
use std::task::Wake;

use super::kit::{
    Block, Host, LARGE, MOMENT, NO_EVENTS, Woken, assert_bytes, down, queue, record, soon,
};
use super::watch::note;
use super::{Subject, Verdict};
use arrow_device::Queue;
use arrow_device::device::Notify;

pub(super) fn backend(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if device.is_synchronous() {
        return NO_EVENTS;
    }
    let backend = device.backend();
    let queue = queue(device);
    let (one, two) = (Arc::new(Woken::default()), Arc::new(Woken::default()));
    let host = Host::empty(device, LARGE);
    let block = Block::new(&queue, LARGE);
    let mut hold = subject.hold(&queue);
    block.fill(&queue, 0x44);
    down(&queue, block.at(0), host.at(0), LARGE);
    let event = record(&queue);
    let notify = |woken: &Arc<Woken>| {
        // SAFETY: the event lives until the wakers have been called. If they are not, it is leaked
        // below.
        unsafe { backend.notify_event(event.as_ptr(), &woken.waker()) }.expect("notify_event")
    };
    let answers = [notify(&one), notify(&two)];
    if answers.contains(&Notify::Unsupported) {
        assert_eq!(
            answers,
            [Notify::Unsupported; 2],
            "notify_event is supported, or it is not"
        );
        hold.open();
        event.wait().expect("wait_event");
        assert_eq!(
            one.times() + two.times(),
            0,
            "calls a waker that it did not accept"
        );
        return Verdict::Skipped("the backend cannot notify");
    }
    if hold.holds() {
        assert_eq!(answers, [Notify::Registered; 2], "complete before its work");
        let early = soon(MOMENT, || one.times() + two.times() > 0);
        assert!(!early, "the waker is called before the event completes");
    }
    hold.open();
    let all = || {
        let woken = [&one, &two].into_iter().zip(answers);
        woken
            .filter(|(_, answer)| *answer == Notify::Registered)
            .all(|(woken, _)| woken.times() > 0)
    };
    if subject.lazy {
        event.wait().expect("wait_event");
    }
    if !soon(subject.patience, all) {
        // The backend may still use the event.
        std::mem::forget(event);
        panic!("the waker was not called");
    }
    assert!(
        event.is_complete().expect("query_event"),
        "the waker was called before the event completed"
    );
    assert_bytes(
        &vec![0x44; LARGE],
        host.bytes(),
        "read once the waker was called",
    );

    let late = Arc::new(Woken::default());
    assert_eq!(notify(&late), Notify::Completed);
    std::thread::sleep(MOMENT / 10);
    assert_eq!(late.times(), 0, "called although the event had completed");
    Verdict::Kept
}

/// Uses the device when it is woken, without waiting for it.
struct Busy {
    queue: Queue,
    woken: Woken,
}

impl Wake for Busy {
    fn wake(self: Arc<Self>) {
        let block = Block::new(&self.queue, 64);
        block.fill(&self.queue, 0x46);
        drop(record(&self.queue));
        drop(block);
        self.woken.count();
    }
}

pub(super) fn foreign(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if device.is_synchronous() {
        return NO_EVENTS;
    }
    let wakers = [(); 3].map(|()| {
        Arc::new(Busy {
            queue: queue(device),
            woken: Woken::default(),
        })
    });
    let queue = queue(device);
    let mut all = Vec::new();
    let mut hold = subject.hold(&queue);
    for busy in wakers {
        let event = record(&queue);
        // SAFETY: the event lives until the waker has been called, or it is leaked below.
        let answer = unsafe {
            let backend = device.backend();
            backend.notify_event(event.as_ptr(), &busy.clone().into())
        };
        match answer.expect("notify_event") {
            Notify::Unsupported => {
                // The wakers' queues are dropped here. They are idle, but a runtime may wait for a
                // host function on another queue before it destroys one.
                hold.open();
                return Verdict::Skipped("the backend cannot notify");
            }
            Notify::Completed => {}
            Notify::Registered => all.push((event, busy)),
        }
    }
    hold.open();
    if all.is_empty() {
        return Verdict::Skipped("all events had completed before a waker was registered");
    }
    if subject.lazy {
        queue.synchronize().expect("synchronize");
    }
    note("a waker that records, allocates and frees");
    let called = soon(subject.patience, || {
        all.iter().all(|(_, busy)| busy.woken.times() > 0)
    });
    if !called {
        // The backend may still use the events.
        std::mem::forget(all);
        panic!("a waker that records, allocates and frees has not returned");
    }
    device.synchronize().expect("synchronize");
    Verdict::Kept
}

pub(super) fn event(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if device.is_synchronous() {
        return NO_EVENTS;
    }
    let queue = queue(device);
    let host = Host::empty(device, LARGE);
    let block = Block::new(&queue, LARGE);
    let mut hold = subject.hold(&queue);
    let mut all = Vec::new();
    for _ in 0..20 {
        block.fill(&queue, 0x45);
        down(&queue, block.at(0), host.at(0), 64);
        let (event, woken) = (record(&queue), Arc::new(Woken::default()));
        let complete = event.notify(&woken.waker()).expect("notify");
        assert!(!(complete && hold.holds()), "complete before its work");
        // The event is given up while the waker is registered.
        all.push((complete, woken));
    }
    if hold.holds() {
        let early = soon(MOMENT, || all.iter().any(|(_, woken)| woken.times() > 0));
        assert!(!early, "a waker is called before its event completes");
    }
    hold.open();
    let called = || {
        all.iter()
            .all(|(complete, woken)| *complete || woken.times() > 0)
    };
    if subject.lazy {
        queue.synchronize().expect("synchronize");
    }
    assert!(soon(subject.patience, called), "a waker was not called");
    queue.synchronize().expect("synchronize");
    assert_bytes(
        &[0x45; 64],
        &host.bytes()[..64],
        "read once the wakers were called",
    );
    Verdict::Kept
}
