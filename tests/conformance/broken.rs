//! That the suite accepts what backends may do, and refuses each that breaks the contract in one
//! way.

use std::time::Duration;

use arrow_device::Queue;
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device_conformance::{Subject, check_all, run};

use super::simulated::{balance, deferred, hold};
use super::wrapped::{Twist, Wrapped, WrappedQueue};
use super::{rule, wrap};

fn subject(config: SimConfig, twist: Twist) -> Subject {
    let sim = SimDevice::new(config.clone()).unwrap();
    let hold = |queue: &Queue| {
        let wrapped: &WrappedQueue = queue.raw().downcast_ref().unwrap();
        hold(wrapped.sim())
    };
    let device = wrap(Wrapped::new(sim.clone(), twist));
    let another = move || {
        let sim = SimDevice::new(config.clone()).unwrap();
        wrap(Wrapped::new(sim, twist))
    };
    Subject::new(device)
        .with_another(another)
        .with_hold(hold)
        .with_balance(move || balance(&sim))
        .strict()
}

/// As [`subject`], of a device that runs nothing until it is waited for, and says so.
fn deferred_subject(twist: Twist) -> Subject {
    let subject = subject(deferred(), twist);
    match twist {
        Twist::NoFlush | Twist::FlushesWhenQueried => subject,
        _ => subject.runs_only_when_waited_for(),
    }
}

/// What backends may do.
#[test]
fn other_backends_pass() {
    let twists = [
        Twist::HandsOverByWaiting,
        Twist::HasOneOrder,
        Twist::RefusesExports,
    ];
    for twist in twists {
        let reports = [
            run(&subject(SimConfig::default(), twist)),
            run(&deferred_subject(twist)),
        ];
        for report in reports {
            let exports = report.kept().filter(|rule| rule.name() == "export.refused");
            assert_eq!(exports.count(), usize::from(twist == Twist::RefusesExports));
        }
    }
}

/// That each twist breaks its rule on a device that is otherwise whole, and what the suite sees then.
#[test]
fn broken_backends_are_refused() {
    #[rustfmt::skip] // a table
    let broken = [
        (Twist::WaitDoesNothing, "event.wait", "not complete after wait_event"),
        (Twist::QueueWaitDoesNothing, "event.order", "read by the queue that waits: byte 0"),
        (Twist::QueueWaitDoesNothing, "event.wait-stays", "read by the queue that waits: byte 0"),
        (Twist::CompletesEarly, "event.after-work", "complete before its work"),
        (Twist::CompletesEarly, "event.reuse", "events complete before their work"),
        (Twist::QueryWaits, "event.never-waits", "query_event waited for the device"),
        (Twist::CopyDropsLastByte, "copy.exact", "1 bytes at 0, on the device: byte 5 of 6"),
        (Twist::CopyDropsLastByte, "copy.list", "copy 1 of 1000: byte 1 of 2"),
        (Twist::CopyDropsLastByte, "copy.heap", "ordinary host memory: byte 1048576 of 1048577"),
        (Twist::CopyDropsLastByte, "copy.random", "round 0, place 0 of the"),
        (Twist::CopyDropsLastByte, "export.types", "Int64, exported"),
        (Twist::CopyDropsLastByte, "stream.types", "null_count"),
        (Twist::CopiesRunLastListFirst, "copy.order", "read before the second upload: byte 0"),
        (Twist::FillGoesTooFar, "fill.exact", "fill of 1 bytes at 0: byte 1"),
        (Twist::FreesAtOnce, "free.in-order", "not allocated, or freed"),
        (Twist::FreeWaits, "event.never-waits", "free waited for the device"),
        (Twist::Misaligned, "allocate.aligned", "1 bytes at 0x"),
        (Twist::ClassifiesTooMuch, "host.classify", "more than there is"),
        (Twist::AllocationsTooLong, "host.allocation", "which was returned for 0x"),
        (Twist::RefusesOwnEvents, "event.check", "a live event: InvalidArgument"),
        (Twist::EventsLeak, "balance", "live_events: 1"),
        (Twist::SynchronizesOneQueue, "event.synchronize", "read after synchronize: byte 0"),
        (Twist::NewDefaultQueues, "identity.stable", "another default queue"),
        (Twist::NoFlush, "queue.progress", "work had not run"),
        (Twist::NoFlush, "notify.event", "a waker was not called"),
        (Twist::CompletesEarly, "notify.event", "complete before its work"),
        (Twist::FlushesWhenQueried, "queue.progress", "work had not run"),
        (Twist::ForgetsDroppedQueues, "queue.dropped", "synchronize did not wait for the work of a dropped queue"),
        (Twist::DroppingQueuesWaits, "queue.dropped", "the drop of a queue waited for the device"),
        (Twist::EventsLeak, "event.leaks", "after all were released: not clean"),
        (Twist::NewQueueIsTheDefault, "queue.own", "the queue Queue"),
        (Twist::QueuesShareAStream, "queue.own", "the stream of Queue"),
        (Twist::CopyWaits, "queue.never-waits", "copy to the device waited for the device"),
        (Twist::FillWaits, "queue.never-waits", "fill waited for the device"),
        (Twist::DirectFromNull, "host.direct", "0 bytes at null"),
        (Twist::ClaimsOneOrder, "export.handover", "other values came back"),
    ];
    for (twist, name, expected) in broken {
        // A call that takes long is taken for one that waits: a busy machine gets more time.
        let seen = with_more_time(|scale| {
            let seen = seen(twist, name, Duration::from_millis(200) * scale);
            seen.contains(expected).then_some(()).ok_or(seen)
        });
        assert_eq!(seen, Ok(()), "{twist:?}, {name}: not {expected:?}");
    }
}

/// What a rule says about a device that is broken in this way.
fn seen(twist: Twist, name: &str, patience: Duration) -> String {
    let subject = deferred_subject(twist)
        .with_patience(patience)
        .with_limit(Duration::from_secs(60));
    if name == "balance" {
        rule("event.reuse").check(&subject).unwrap();
    }
    // That the whole device keeps it: see `simulated`.
    let seen = rule(name).check(&subject);
    seen.err()
        .unwrap_or_else(|| panic!("{twist:?} keeps {name}"))
}

/// Tries again with ten times and a hundred times the time, as long as the outcome is another.
fn with_more_time<E>(attempt: impl Fn(u32) -> Result<(), E>) -> Result<(), E> {
    attempt(1)
        .or_else(|_| attempt(10))
        .or_else(|_| attempt(100))
}

/// What would wait for ever is reported, with what came before.
#[test]
fn a_check_that_hangs_is_reported() {
    let hang = |twist, what: &str, first: &str, scale: u32| {
        let limit = Duration::from_secs(5) * scale;
        let subject = deferred_subject(twist)
            .with_patience(Duration::from_secs(1) * scale)
            .with_limit(limit);
        let report = check_all(&subject);
        // The call itself is tested on a thread of its own.
        let named = format!("{first} waited for the device");
        // Elsewhere the hold is opened behind it, which never happens.
        let last = format!("did not return within {limit:?}; the last thing it did: {what}");
        let is_reported = report.broken().any(|(_, seen)| seen == named)
            && report.broken().last().is_some_and(|(_, seen)| seen == last)
            && report.kept().any(|rule| rule.name() == "identity.stable")
            && report.not_run().any(|rule| rule.name() == "balance")
            && report.to_string().contains("not run  balance");
        is_reported.then_some(()).ok_or(report.to_string())
    };
    let hangs = |twist, what, first| {
        // A slow rule before it may not return within the limit either.
        let reported = with_more_time(|scale| hang(twist, what, first, scale));
        reported.unwrap_or_else(|report| panic!("{twist:?}: {report}"));
    };
    std::thread::scope(|scope| {
        scope.spawn(|| hangs(Twist::CopyWaits, "copy", "copy to the device"));
        scope.spawn(|| hangs(Twist::FreeWaits, "free", "free"));
    });
}
