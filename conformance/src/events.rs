//! Rules about events and waits.

use super::kit::{
    Block, Host, LARGE, MOMENT, NO_EVENTS, NO_HOLD, assert_bytes, down, fill, finish, join,
    pattern, queue, record, returns_while_held, soon, up,
};
use super::memory::is_balanced;
use super::{Subject, Verdict};
use arrow_device::device::EventPtr;
use arrow_device::{Device, SyncEvent};

fn complete(event: &SyncEvent) -> bool {
    event.is_complete().expect("query_event")
}

/// As [`complete`], of the backend itself: a [`SyncEvent`] that was seen complete asks it no more.
fn asked(device: &Device, event: &SyncEvent) -> bool {
    // SAFETY: the event is live and the device's.
    unsafe { device.backend().query_event(event.as_ptr()) }.expect("query_event")
}

pub(super) fn synchronous(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if !device.is_synchronous() {
        return Verdict::Skipped("the device is asynchronous");
    }
    let queue = queue(device);
    assert!(queue.record().expect("record").is_none());
    let host = Host::empty(device, LARGE);
    let block = Block::new(&queue, LARGE);
    block.fill(&queue, 0x42);
    down(&queue, block.at(0), host.at(0), LARGE);
    assert_bytes(&vec![0x42; LARGE], host.bytes(), "without a wait");
    let before = device.stats();
    queue.synchronize().expect("synchronize the queue");
    device.synchronize().expect("synchronize the device");
    assert_eq!(device.stats().since(&before).host_waits, 0);
    Verdict::Kept
}

pub(super) fn after_work(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if device.is_synchronous() {
        return NO_EVENTS;
    }
    let queue = queue(device);
    for round in 0..4 {
        let data = pattern(round, LARGE);
        let (host, back) = (Host::with(device, &data), Host::empty(device, LARGE));
        let block = Block::new(&queue, LARGE);
        let mut hold = subject.hold(&queue);
        up(&queue, host.at(0), block.at(0), LARGE);
        down(&queue, block.at(0), back.at(0), LARGE);
        let event = record(&queue);
        if hold.holds() {
            let early = soon(MOMENT / 4, || complete(&event));
            assert!(!early, "complete before its work");
        }
        hold.open();
        // Some devices run nothing until somebody waits.
        if !soon(MOMENT, || complete(&event)) {
            event.wait().expect("wait_event");
        }
        assert_bytes(&data, back.bytes(), "read after the event completed");
        assert!(asked(device, &event), "complete no longer");
    }
    // An event of a queue without work.
    let event = record(&queue);
    event.wait().expect("wait_event");
    assert!(asked(device, &event));
    Verdict::Kept
}

pub(super) fn wait(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if device.is_synchronous() {
        return NO_EVENTS;
    }
    let queue = queue(device);
    let back = Host::empty(device, LARGE);
    let block = Block::new(&queue, LARGE);
    let hold = subject.hold(&queue);
    block.fill(&queue, 0x66);
    down(&queue, block.at(0), back.at(0), LARGE);
    let event = record(&queue);
    // Work behind the event does not matter.
    block.fill(&queue, 0);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(MOMENT);
            drop(hold);
        });
        let before = device.stats();
        event.wait().expect("wait_event");
        assert_eq!(device.stats().since(&before).host_waits, 1);
        assert!(asked(device, &event), "not complete after wait_event");
        assert_bytes(&vec![0x66; LARGE], back.bytes(), "read after wait_event");
        // SAFETY: the event is live and the device's.
        let waited = unsafe { device.backend().wait_event(event.as_ptr()) };
        waited.expect("wait_event for a completed event");
    });
    finish(&queue);
    Verdict::Kept
}

pub(super) fn never_waits(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if device.is_synchronous() {
        return NO_EVENTS;
    }
    let backend = device.backend();
    let queue = queue(device);
    let block = Block::new(&queue, LARGE);
    let idle = backend.allocate_host(4096).expect("allocate_host");
    let mut hold = subject.hold(&queue);
    let held = hold.holds();
    block.fill(&queue, 1);
    let event = record(&queue);
    let mut call = |what: &'static str, call: &mut (dyn FnMut() + Send)| {
        returns_while_held(subject, &mut hold, what, call);
    };
    call("query_event", &mut || {
        for _ in 0..100 {
            let _: bool = complete(&event);
        }
    });
    call("record and wait", &mut || {
        queue.wait(&record(&queue)).expect("wait");
    });
    call("notify", &mut || {
        let _: bool = event.notify(std::task::Waker::noop()).expect("notify");
    });
    let mut event = Some(event);
    call("release_event", &mut || event = None);
    let mut block = Some(block);
    call("free", &mut || block = None);
    call("free_host", &mut || {
        if let Some(idle) = idle {
            // SAFETY: the memory was allocated above with this size, no copy uses it, and this
            // frees it once.
            unsafe { backend.free_host(idle, 4096) };
        }
    });
    call("classify", &mut || {
        let _ = backend.classify(arrow_device::device::DevicePtr::NULL, 1);
    });
    hold.open();
    finish(&queue);
    // On an idle queue, calls that wait for it return, too.
    if held { Verdict::Kept } else { NO_HOLD }
}

pub(super) fn reuse(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if device.is_synchronous() {
        return NO_EVENTS;
    }
    let queue = queue(device);
    let block = Block::new(&queue, 64);
    for i in 0..1000 {
        fill(&queue, block.at(0), i as u8, 64);
        let event = record(&queue);
        if i % 100 == 0 {
            event.wait().expect("wait_event");
        }
    }
    finish(&queue);
    // Completed events were released; none of their state may show now.
    let mut hold = subject.hold(&queue);
    for _ in 0..3 {
        let events: Vec<_> = (0..100).map(|_| record(&queue)).collect();
        let mut pointers: Vec<_> = events.iter().map(|e| e.as_ptr().as_ptr().addr()).collect();
        pointers.sort_unstable();
        pointers.dedup();
        assert_eq!(pointers.len(), 100, "live events with one pointer");
        if hold.holds() {
            let early = events.iter().filter(|event| complete(event)).count();
            assert_eq!(early, 0, "events complete before their work");
        }
    }
    let last = record(&queue);
    hold.open();
    last.wait().expect("wait_event");
    assert!(asked(device, &last));
    Verdict::Kept
}

pub(super) fn leaks(subject: &Subject) -> Verdict {
    const ROUNDS: usize = if cfg!(miri) { 100 } else { 2_000 };
    const NOT_COUNTED: Verdict =
        Verdict::Skipped("the subject has no balance check that counts events");
    let device = &subject.device;
    if device.is_synchronous() {
        return NO_EVENTS;
    }
    // Pointers tell nothing: an allocator need not reuse those of freed events.
    let Some(balance) = &subject.balance else {
        return NOT_COUNTED;
    };
    if !is_balanced(subject) {
        return Verdict::Skipped("something was not freed before: see the rule balance");
    }
    let queue = queue(device);
    let live = record(&queue);
    let counts_events = balance().is_err();
    live.wait().expect("wait_event");
    drop(live);
    if !counts_events {
        return NOT_COUNTED;
    }
    for i in 1..=ROUNDS {
        let event = record(&queue);
        if i % 50 == 0 {
            event.wait().expect("wait_event");
        }
    }
    let balanced = is_balanced(subject);
    assert!(
        balanced,
        "after all were released: {}",
        balance().err().unwrap_or_default()
    );
    Verdict::Kept
}

/// One queue waits for another, which works on the same memory.
fn ordered(subject: &Subject, release_early: bool) -> Verdict {
    let device = &subject.device;
    if device.is_synchronous() {
        return NO_EVENTS;
    }
    let (one, two) = (queue(device), queue(device));
    for round in 0..4 {
        let data = pattern(round, LARGE);
        let (host, back) = (Host::with(device, &data), Host::empty(device, LARGE));
        let block = Block::new(&one, LARGE);
        block.fill(&one, 0);
        finish(&one);
        let mut hold = subject.hold(&one);
        up(&one, host.at(0), block.at(0), LARGE);
        let event = record(&one);
        two.wait(&event).expect("wait");
        if release_early {
            drop(event);
            // These reuse the released event, which must not end the wait.
            let reused: Vec<_> = (0..100).map(|_| record(&two)).collect();
            drop(reused);
        }
        down(&two, block.at(0), back.at(0), LARGE);
        let last = record(&two);
        if hold.holds() {
            assert!(!complete(&last), "the queue did not wait for the other");
        }
        hold.open();
        last.wait().expect("wait_event");
        assert_bytes(&data, back.bytes(), "read by the queue that waits");
    }
    finish(&one);
    Verdict::Kept
}

pub(super) fn order(subject: &Subject) -> Verdict {
    ordered(subject, false)
}

pub(super) fn wait_stays(subject: &Subject) -> Verdict {
    ordered(subject, true)
}

pub(super) fn threads(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if device.is_synchronous() {
        return NO_EVENTS;
    }
    let (one, other) = (queue(device), queue(device));
    let back = Host::empty(device, LARGE);
    let block = Block::new(&one, LARGE);
    let hold = subject.hold(&one);
    block.fill(&one, 0x31);
    down(&one, block.at(0), back.at(0), LARGE);
    let event = record(&one);
    std::thread::scope(|scope| {
        let threads = [0, 1, 2, 3].map(|i| {
            let (event, other, back) = (event.clone(), &other, &back);
            scope.spawn(move || {
                if i % 2 == 0 {
                    other.wait(&event).expect("wait");
                }
                // SAFETY: the event is live and the device's.
                let waited = unsafe { device.backend().wait_event(event.as_ptr()) };
                waited.expect("wait_event");
                assert!(asked(device, &event));
                assert_bytes(&vec![0x31; LARGE], back.bytes(), "read on another thread");
                // The last one releases the event, on whatever thread that is.
            })
        });
        drop((event, hold));
        join(threads);
    });
    // Released before it completes, by a thread that has not used the device.
    let hold = subject.hold(&one);
    block.fill(&one, 0x32);
    let event = record(&one);
    std::thread::scope(|scope| {
        scope.spawn(move || drop(event));
    });
    drop(hold);
    finish(&one);
    finish(&other);
    Verdict::Kept
}

pub(super) fn check(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let backend = device.backend();
    let mut foreign = 0u128;
    let foreign = EventPtr::new((&raw mut foreign).cast()).expect("not null");
    // SAFETY: the pointers below are live events of the device, or point to memory that is as large
    // as the events of all known runtimes, which is all that `check_event` may read.
    let check = |event| unsafe { backend.check_event(event) };
    if device.is_synchronous() {
        assert!(
            check(foreign).is_err(),
            "a synchronous device accepted an event"
        );
        return Verdict::Kept;
    }
    let queue = queue(device);
    let mut hold = subject.hold(&queue);
    let event = record(&queue);
    check(event.as_ptr()).expect("a live event");
    hold.open();
    event.wait().expect("wait_event");
    check(event.as_ptr()).expect("a completed event");
    if subject.refuses_foreign_events {
        assert!(check(foreign).is_err(), "not an event at all");
    }
    Verdict::Kept
}

pub(super) fn synchronize(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if device.is_synchronous() {
        return NO_EVENTS;
    }
    let queues = [device.default_queue(), queue(device), queue(device)];
    let blocks = queues.each_ref().map(|queue| Block::new(queue, LARGE));
    let hosts = queues.each_ref().map(|_| Host::empty(device, LARGE));
    let hold = subject.hold(&queues[1]);
    for ((queue, block), host) in queues.iter().zip(&blocks).zip(&hosts) {
        block.fill(queue, 0x17);
        down(queue, block.at(0), host.at(0), LARGE);
    }
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(MOMENT);
            drop(hold);
        });
        device.synchronize().expect("synchronize");
        for host in &hosts {
            assert_bytes(&vec![0x17; LARGE], host.bytes(), "read after synchronize");
        }
    });
    Verdict::Kept
}
