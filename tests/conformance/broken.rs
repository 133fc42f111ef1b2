//! That the suite accepts what backends may do, and refuses each that breaks the contract in one
//! way.

use std::time::Duration;

use arrow_device::Queue;
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device_conformance::{Subject, Verdict, check_all, run};

use super::simulated::{balance, deferred, hold};
use super::wrapped::{Twist, Wrapped, WrappedQueue};
use super::{rule, wrap};

/// A device of which nothing else is known.
fn unknown(config: SimConfig, twist: Twist) -> Subject {
    let sim = SimDevice::new(config).unwrap();
    Subject::new(wrap(Wrapped::new(sim, twist)))
}

fn subject(config: SimConfig, twist: Twist) -> Subject {
    let sim = SimDevice::new(config.clone()).unwrap();
    let hold = |queue: &Queue| {
        let wrapped: &WrappedQueue = queue.raw().as_any().downcast_ref().unwrap();
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
        Twist::NoNotify, // The reaper waits for the events of such a backend itself.
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

/// That each twist breaks its rule on a device that is otherwise whole.
#[test]
fn broken_backends_are_refused() {
    let broken = [
        (Twist::WaitDoesNothing, "event.wait"),
        (Twist::QueueWaitDoesNothing, "event.order"),
        (Twist::QueueWaitDoesNothing, "event.wait-stays"),
        (Twist::CompletesEarly, "event.after-work"),
        (Twist::CompletesEarly, "event.reuse"),
        (Twist::QueryWaits, "event.never-waits"),
        (Twist::CopyDropsLastByte, "copy.exact"),
        (Twist::CopyDropsLastByte, "copy.list"),
        (Twist::CopyDropsLastByte, "copy.heap"),
        (Twist::CopiesRunLastListFirst, "copy.order"),
        (Twist::FillGoesTooFar, "fill.exact"),
        (Twist::FreesAtOnce, "free.in-order"),
        (Twist::FreeWaits, "event.never-waits"),
        (Twist::ShrinksAtOnce, "shrink.in-order"),
        (Twist::ShrinksInName, "shrink.in-order"),
        (Twist::ShrinksElsewhere, "shrink.to-fit"),
        (Twist::Misaligned, "allocate.aligned"),
        (Twist::NeverNotifies, "notify.backend"),
        (Twist::NeverNotifies, "notify.event"),
        (Twist::NotifiesEarly, "notify.backend"),
        (Twist::NotifiesUnderLock, "notify.foreign"),
        (Twist::ClassifiesTooMuch, "host.classify"),
        (Twist::AllocationsTooLong, "host.allocation"),
        (Twist::WithinTwice, "identity.within"),
        (Twist::RefusesOwnEvents, "event.check"),
        (Twist::EventsLeak, "balance"),
        (Twist::SynchronizesOneQueue, "event.synchronize"),
        (Twist::NewDefaultQueues, "identity.stable"),
        (Twist::NoFlush, "queue.progress"),
        (Twist::NoFlush, "notify.backend"),
        (Twist::FlushesWhenQueried, "queue.progress"),
        (Twist::ForgetsDroppedQueues, "queue.dropped"),
        (Twist::SettlesLiveQueues, "queue.dropped"),
        (Twist::EventsLeak, "event.leaks"),
        (Twist::NewQueueIsTheDefault, "queue.own"),
        (Twist::CopyWaits, "queue.never-waits"),
        (Twist::FillWaits, "queue.never-waits"),
        (Twist::DirectFromNull, "host.direct"),
        (Twist::ClaimsOneOrder, "export.handover"),
        (Twist::RefusesWithAnyError, "export.refused"),
    ];
    for (twist, name) in broken {
        let subject = match twist {
            // On the other device, the thread that waits would call the waker.
            Twist::NotifiesUnderLock => subject(SimConfig::default(), twist),
            _ => deferred_subject(twist),
        };
        let subject = subject
            .with_patience(Duration::from_millis(200))
            .with_limit(Duration::from_secs(60));
        if name == "balance" {
            rule("event.reuse").check(&subject).unwrap();
        }
        // That the whole device keeps it: see `simulated`.
        let seen = rule(name).check(&subject).expect_err("kept or skipped");
        assert!(
            !seen.contains("did not return"),
            "{twist:?}, {name}: {seen}"
        );
    }
}

/// Without a balance that counts events.
#[test]
fn leaked_events_are_noticed_by_their_pointers() {
    let leaks = rule("event.leaks");
    for uncounted in [false, true] {
        let told = |twist| match uncounted {
            false => unknown(SimConfig::default(), twist),
            true => unknown(SimConfig::default(), twist).with_balance(|| Ok(())),
        };
        assert_eq!(leaks.check(&told(Twist::NoNotify)), Ok(Verdict::Kept));
        let seen = leaks.check(&told(Twist::EventsLeak)).unwrap_err();
        assert!(seen.contains("with_balance"), "{seen}");
    }
}

/// What would wait for ever is reported, with what came before.
#[test]
fn a_check_that_hangs_is_reported() {
    let hang = |twist, what: &str, first: &str| {
        let subject = deferred_subject(twist)
            .with_patience(Duration::from_secs(1))
            .with_limit(Duration::from_secs(15));
        let report = check_all(&subject);
        // The call itself is tested on a thread of its own.
        let named = format!("{first} waited for the device");
        assert!(report.broken().any(|(_, seen)| seen == named), "{report}");
        // Elsewhere the hold is opened behind it, which never happens.
        let last = format!("did not return within 15s; the last thing it did: {what}");
        assert_eq!(report.broken().last().unwrap().1, last, "{report}");
        assert!(report.kept().any(|rule| rule.name() == "identity.stable"));
        assert!(report.not_run().any(|rule| rule.name() == "balance"));
        let text = report.to_string();
        assert!(text.contains("not run  balance"), "{text}");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| hang(Twist::CopyWaits, "copy", "copy to the device"));
        scope.spawn(|| hang(Twist::FreeWaits, "free", "free"));
    });
}

/// That the table names what is broken.
#[test]
fn the_table_names_the_broken_rule() {
    let subject = deferred_subject(Twist::ClassifiesTooMuch);
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&subject)));
    let text = panic.unwrap_err();
    let text = text.downcast_ref::<String>().unwrap();
    assert!(text.contains("breaks 1 rules"), "{text}");
    assert!(text.contains("BROKEN   host.classify"), "{text}");
    assert!(text.contains("kept     copy.exact"), "{text}");
}
