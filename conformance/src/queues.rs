//! Rules about queues.

use super::kit::{
    Block, Host, LARGE, MOMENT, NO_EVENTS, NO_HOLD, across, assert_bytes, down, fill, finish,
    queue, record, returns_while_held, up,
};
use super::{Subject, Verdict};
use arrow_device::device::ExportSync;
use arrow_device::{Device, Queue};

use std::thread::sleep;
use std::time::Instant;

pub(super) fn own(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if device.is_synchronous() {
        return Verdict::Skipped("on a synchronous device one queue may serve as all");
    }
    // A runtime whose work all runs in one order may have one stream.
    let one_order = device.backend().capabilities().exports == ExportSync::QueueOrder;
    let queues = [device.default_queue(), queue(device), queue(device)];
    for (i, one) in queues.iter().enumerate() {
        for other in &queues[..i] {
            assert!(one != other, "the queue {one:?} once more");
            let handles = [one, other].map(|queue| queue.raw().stream_handle());
            let same = handles[0].is_some() && handles[0] == handles[1];
            assert!(!same || one_order, "the stream of {one:?} once more");
        }
    }
    Verdict::Kept
}

pub(super) fn adopted(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if device.is_synchronous() {
        return NO_EVENTS;
    }
    let theirs = queue(device);
    let Some(handle) = theirs.raw().stream_handle() else {
        return Verdict::Skipped("streams of the device have no handles");
    };
    // SAFETY: the handle is that of a live stream of the device, which outlives the queue.
    let Ok(ours) = (unsafe { Queue::adopt(device, handle) }) else {
        return Verdict::Skipped("the device adopts no streams");
    };
    let back = Host::empty(device, LARGE);
    let block = Block::new(&theirs, LARGE);
    let mut hold = subject.hold(&theirs);
    block.fill(&theirs, 0x1D);
    down(&ours, block.at(0), back.at(0), LARGE);
    let event = record(&ours);
    if hold.holds() {
        let early = event.is_complete().expect("query_event");
        assert!(!early, "complete before the work of its stream");
    }
    hold.open();
    event.wait().expect("wait_event");
    assert_bytes(
        &vec![0x1D; LARGE],
        back.bytes(),
        "read in the stream's order",
    );
    drop((ours, event));
    // The stream lives on.
    finish(&theirs);
    Verdict::Kept
}

pub(super) fn never_waits(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if device.is_synchronous() {
        return NO_EVENTS;
    }
    let queue = queue(device);
    let (one, two) = (Block::new(&queue, LARGE), Block::new(&queue, LARGE));
    let (host, back) = (
        Host::with(device, &vec![0x1B; LARGE]),
        Host::empty(device, LARGE),
    );
    let mut hold = subject.hold(&queue);
    if !hold.holds() {
        return NO_HOLD;
    }
    let mut call = |what: &'static str, call: &mut (dyn FnMut() + Send)| {
        returns_while_held(subject, &mut hold, what, call);
    };
    call("fill", &mut || one.fill(&queue, 0));
    call("copy to the device", &mut || {
        up(&queue, host.at(0), one.at(0), LARGE);
    });
    call("copy within the device", &mut || {
        across(&queue, one.at(0), two.at(0), LARGE);
    });
    call("copy to the host", &mut || {
        down(&queue, two.at(0), back.at(0), LARGE);
    });
    hold.open();
    finish(&queue);
    assert_bytes(
        &vec![0x1B; LARGE],
        back.bytes(),
        "copied while the queue was busy",
    );
    Verdict::Kept
}

pub(super) fn progress(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if device.is_synchronous() {
        return NO_EVENTS;
    }
    if subject.lazy {
        return Verdict::Skipped("the subject says that the device runs only when waited for");
    }
    for two_queues in [false, true] {
        let end = Instant::now() + subject.patience;
        let mut silence = MOMENT;
        loop {
            let one = queue(device);
            let last = if two_queues {
                queue(device)
            } else {
                one.clone()
            };
            let back = Host::empty(device, 64);
            let block = Block::new(&one, 64);
            block.fill(&one, 0x1A);
            if two_queues {
                last.wait(&record(&one)).expect("wait");
            }
            down(&last, block.at(0), back.at(0), 64);
            let event = record(&last);
            sleep(silence);
            // This is the first call since then. If the backend starts the work now, that is too
            // late to count.
            let done = event.is_complete().expect("query_event");
            event.wait().expect("wait_event");
            assert_bytes(&[0x1A; 64], back.bytes(), "read after the event completed");
            if done {
                break;
            }
            let across = if two_queues { " of two queues" } else { "" };
            assert!(
                Instant::now() < end,
                "work{across} had not run {silence:?} after its event was recorded, which nobody waited \
                 for or queried; flush what was recorded"
            );
            // A busy machine may need longer.
            silence *= 2;
        }
    }
    Verdict::Kept
}

pub(super) fn dropped(subject: &Subject) -> Verdict {
    if subject.device.is_synchronous() {
        return NO_EVENTS;
    }
    let held = outlives_its_queue(subject, "synchronize", |device| {
        device.synchronize().expect("synchronize");
    });
    // Otherwise the work may have been done before anything waited.
    if held { Verdict::Kept } else { NO_HOLD }
}

/// Drops a queue while it has work, for which `wait` must wait, but not the drop. Returns whether
/// the queue was certainly busy.
fn outlives_its_queue(subject: &Subject, what: &str, wait: fn(&Device)) -> bool {
    let device = &subject.device;
    let (home, gone) = (device.default_queue(), queue(device));
    let back = Host::empty(device, LARGE);
    let block = Block::new(&home, LARGE);
    finish(&home);
    let mut hold = subject.hold(&gone);
    let held = hold.holds();
    fill(&gone, block.at(0), 0x2A, LARGE);
    down(&gone, block.at(0), back.at(0), LARGE);
    let event = record(&gone);
    returns_while_held(subject, &mut hold, "the drop of a queue", || drop(gone));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            sleep(MOMENT);
            drop(hold);
        });
        wait(device);
        let done = event.is_complete().expect("query_event");
        assert!(done, "{what} did not wait for the work of a dropped queue");
        assert_bytes(
            &vec![0x2A; LARGE],
            back.bytes(),
            "written by a dropped queue",
        );
    });
    held
}
