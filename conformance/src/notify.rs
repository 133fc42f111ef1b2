//! The rule about wakers.

use std::sync::Arc;

use super::kit::{
    Block, Host, LARGE, MOMENT, NO_EVENTS, Woken, assert_bytes, down, queue, record, soon,
};
use super::{Subject, Verdict};

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
