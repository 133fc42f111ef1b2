//! Batches in CUDA memory that another process gets, with two real processes which both have the stand-in: this program starts itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_device::{Device, DeviceRecordBatch};
use arrow_device_share::{
    DeadPeers, Error, Publisher, PublisherOptions, Subscriber, SubscriberOptions, shared_cuda,
};
use arrow_schema::{DataType, Field};

use crate::fake::{Group, LAZY, fake, in_mode};
use crate::gpu_suite::soon;
use crate::rig::{Rig, hold, left};
use crate::support::{Nulls, assert_same_batch, batch};
use crate::two::{Held, Other, alone, role, say, socket, stay};
use crate::vendor::{DEVICE, open_device};

/// What the stand-in's sizes are multiples of.
const GRANULE: u64 = 2 << 20;
/// A GPU that processes share.
const GPU: u64 = 37;

/// A device, and the one over the same GPU whose memory can be shared.
struct Place {
    plain: Rig,
    shared: Device,
}

impl Place {
    /// A GPU that has the ordinal after some others.
    fn new(gpu: u64, others: i32) -> Self {
        crate::vendor::load();
        for _ in 0..others {
            Group::open(1, 0);
        }
        let group = Group::with_capacity(1, 0, 16 << 30);
        let plain = Rig::of(group, open_device(DEVICE, group.ordinal()));
        fake!(fake_cuda_uuid(plain.group.first => i32, gpu => u64) -> i32);
        let shared = shared_cuda(&plain).unwrap();
        Self { plain, shared }
    }

    /// Subscribes at the other end of a socket. The publisher is this program.
    fn subscribe(&self, socket: std::os::fd::OwnedFd) -> Subscriber {
        // SAFETY: the publisher is this program.
        let options = unsafe { SubscriberOptions::trusting() };
        let options = options.with_device(self.plain.device.clone());
        Subscriber::over_with(socket, options).unwrap()
    }

    /// How many allocations are mapped here, how many bytes of addresses are reserved, and how many handles there are.
    fn has(&self) -> [u64; 3] {
        ["mapped", "reserved", "handles"].map(|what| self.plain.group.live(what))
    }

    /// Nothing of any memory is left, once what is kept for reuse is freed.
    #[track_caller]
    fn assert_empty(&self) {
        let is_empty = soon(|| {
            let _ = self.shared.synchronize();
            self.shared.trim();
            self.has() == [0; 3]
        });
        assert!(is_empty, "{:?}: {:?}", self.plain.device, self.has());
    }

    #[track_caller]
    fn end(self) {
        self.assert_empty();
        let Self { plain, shared } = self;
        drop(shared);
        plain.end();
    }
}

/// A lazy device runs nothing that only another process waits for.
fn is_lazy() -> bool {
    in_mode(LAZY)
}

/// Numbers, texts, lists, structs and dictionaries, the same in all processes.
fn values(seed: u64) -> RecordBatch {
    let item = |data_type| Arc::new(Field::new("item", data_type, true));
    let nested = DataType::Struct(vec![item(DataType::Utf8)].into());
    let types = [
        DataType::Int64,
        DataType::Utf8,
        DataType::List(item(nested)),
        DataType::Utf8View,
        DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8)),
    ];
    batch(&types, 300, Nulls::Some, seed)
}

fn numbers(from: i64, rows: i64) -> RecordBatch {
    let column: ArrayRef = Arc::new(Int64Array::from_iter_values(from..from + rows));
    RecordBatch::try_from_iter([("numbers", column)]).unwrap()
}

fn publisher(socket: std::os::fd::OwnedFd) -> Publisher {
    let options = PublisherOptions {
        dead_peers: DeadPeers::Report,
        ..Default::default()
    };
    Publisher::over_with(socket, options).unwrap()
}

/// The device waits until the batch is ready, and nobody else has.
#[track_caller]
fn is_waited_for(batch: &DeviceRecordBatch) -> bool {
    let event = batch.as_struct().ready_event(None).unwrap();
    event.is_some_and(|event| !event.is_complete().unwrap())
}

#[track_caller]
fn until(what: &str, is_so: impl FnMut() -> bool) {
    assert!(soon(is_so), "it never happened: {what}");
}

#[test]
fn every_value_crosses() {
    let test = "processes::every_value_crosses";
    match role() {
        _ if is_lazy() => return,
        Some(role) if role != "alone" => {
            let place = Place::new(GPU, 3);
            let before = Held::now();
            let mut subscriber = place.subscribe(socket());
            for (i, batch) in subscriber.by_ref().enumerate() {
                let batch = batch.unwrap();
                assert_eq!(*batch.device(), place.plain.device);
                assert_same_batch(&values(i as u64), &batch.to_host().unwrap(), "crossed");
            }
            drop(subscriber);
            place.assert_empty();
            before.assert_again("in the end");
            return place.end();
        }
        _ if !alone(test) => return,
        _ => {}
    }
    let place = Place::new(GPU, 0);
    let before = Held::now();
    let (other, socket) = Other::connected(test, "reads").unwrap();
    let publisher = publisher(socket);
    let stats = || (place.plain.stats(), place.shared.stats());
    for seed in 0..6 {
        let lies_there = seed % 2 == 0;
        let on = if lies_there {
            &place.shared
        } else {
            &place.plain.device
        };
        let batch = on.upload(&values(seed)).unwrap();
        let (plain, shared) = stats();
        publisher.send(&batch).unwrap();
        let (plain, shared) = (stats().0.since(&plain), stats().1.since(&shared));
        assert_eq!(shared.bytes_on_device == 0, lies_there, "{seed}");
        assert_eq!(shared.allocations, u64::from(!lies_there), "{seed}");
        let through_the_host = [plain, shared].map(|of| of.bytes_to_host + of.bytes_to_device);
        assert_eq!(through_the_host, [0, 0], "{seed}");
    }
    assert_eq!(publisher.stats().copied_batches, 3);
    publisher.finish().unwrap();
    other.passed();
    place.assert_empty();
    before.assert_again("in the end");
    place.end();
}

/// The subscriber has a batch, and gives work to its device, before the publisher's own work has run. Nobody waits on the host but for the
/// values.
#[test]
fn the_device_waits() {
    let test = "processes::the_device_waits";
    match role() {
        _ if is_lazy() => return,
        Some(_) => {
            let place = Place::new(GPU, 3);
            let mut subscriber = place.subscribe(socket());
            let waits = place.plain.stats().host_waits;
            let batch = subscriber.next().unwrap().unwrap();
            assert!(is_waited_for(&batch));
            let copy = batch.compact().unwrap();
            assert_eq!(place.plain.stats().host_waits, waits);
            say("has it");
            assert_eq!(copy.to_host().unwrap(), numbers(0, 300));
            assert_eq!(batch.to_host().unwrap(), numbers(0, 300));
            assert!(!is_waited_for(&batch));
            // Without an event, the publisher's word is waited for.
            say("has read it");
            drop((batch, copy));
            let batch = subscriber.next().unwrap().unwrap();
            assert!(!is_waited_for(&batch));
            assert_eq!(batch.to_host().unwrap(), numbers(1, 300));
            drop(batch);
            assert!(subscriber.next().is_none());
            drop(subscriber);
            return place.end();
        }
        None => {}
    }
    let place = Place::new(GPU, 0);
    let (mut other, socket) = Other::connected(test, "reads").unwrap();
    let publisher = publisher(socket);
    let held = hold(&place.shared.default_queue());
    publisher
        .send(&place.shared.upload(&numbers(0, 300)).unwrap())
        .unwrap();
    other.expect("has it");
    drop(held);
    other.expect("has read it");
    let held = hold(&place.shared.default_queue());
    place.plain.group.fail("cuIpcGetEventHandle", 1, 801);
    publisher
        .send(&place.shared.upload(&numbers(1, 300)).unwrap())
        .unwrap();
    assert_eq!(place.plain.group.clear(), 1);
    drop(held);
    publisher.finish().unwrap();
    other.passed();
    place.end();
}

/// A batch whose own event has come, but not that of its dictionary, waits for the publisher's word.
#[test]
fn a_dictionary_is_waited_for() {
    let test = "processes::a_dictionary_is_waited_for";
    const WORK: Duration = Duration::from_millis(100);
    match role() {
        _ if is_lazy() => return,
        Some(_) => {
            let place = Place::new(GPU, 3);
            let mut subscriber = place.subscribe(socket());
            place.plain.group.fail("cuIpcOpenEventHandle", 1, 801);
            let asked = Instant::now();
            say("is here");
            let batch = subscriber.next().unwrap().unwrap();
            assert!(asked.elapsed() >= WORK, "it came before its dictionary");
            assert_eq!(place.plain.group.clear(), 1);
            assert_same_batch(&values(0), &batch.to_host().unwrap(), "told");
            drop(batch);
            // Of the same dictionary nothing is sent again.
            let batch = subscriber.next().unwrap().unwrap();
            assert_same_batch(&values(0), &batch.to_host().unwrap(), "again");
            drop(batch);
            assert!(subscriber.next().is_none());
            drop(subscriber);
            return place.end();
        }
        None => {}
    }
    let place = Place::new(GPU, 0);
    let (mut other, socket) = Other::connected(test, "reads").unwrap();
    let publisher = publisher(socket);
    let held = hold(&place.shared.default_queue());
    let batch = place.shared.upload(&values(0)).unwrap();
    publisher.send(&batch).unwrap();
    other.expect("is here");
    // Long enough for a batch that waits for nothing.
    std::thread::sleep(WORK);
    drop(held);
    publisher.send(&batch).unwrap();
    publisher.finish().unwrap();
    other.passed();
    drop(batch);
    place.end();
}

/// Each map reserves exactly the allocation's size. Memory that a subscriber has is not used again before it has returned it, also while
/// its device still reads.
#[test]
fn memory_is_reused_after_the_last_use() {
    let test = "processes::memory_is_reused_after_the_last_use";
    let rows = 400_000;
    match role() {
        _ if is_lazy() => return,
        Some(_) => {
            let place = Place::new(GPU, 3);
            let mut subscriber = place.subscribe(socket());
            let batch = subscriber.next().unwrap().unwrap();
            assert_eq!(place.has(), [1, 2 * GRANULE, 0]);
            say("has it");
            let more = subscriber.next().unwrap().unwrap();
            assert_eq!(batch.to_host().unwrap(), numbers(0, rows), "torn");
            assert_eq!(more.to_host().unwrap(), numbers(1, rows));
            // Work that reads the memory comes late.
            let queue = place.plain.new_queue().unwrap();
            let held = hold(&queue);
            drop(batch.column(0).unwrap().values_on::<i64>(&queue).unwrap());
            drop((batch, more));
            until("the other batch is back", || place.has()[0] == 1);
            say("has work");
            assert!(subscriber.next().is_none(), "the end");
            assert_eq!(place.has()[0], 1, "returned under queued work");
            drop((held, queue, subscriber));
            return place.end();
        }
        None => {}
    }
    let place = Place::new(GPU, 0);
    let (mut other, socket) = Other::connected(test, "reads").unwrap();
    let publisher = publisher(socket);
    let send = |from| {
        let batch = place.shared.upload(&numbers(from, rows)).unwrap();
        publisher.send(&batch).unwrap();
        batch.column(0).unwrap().buffer(1).unwrap().address()
    };
    let first = send(0);
    other.expect("has it");
    assert_ne!(send(1), first);
    other.expect("has work");
    until("one lease is left", || publisher.stats().leases == 1);
    assert_eq!(place.has()[0], 2, "one is idle, and one out");
    publisher.finish().unwrap();
    other.passed();
    place.end();
}

/// What is idle has descriptors, too: without any more, it is freed, and asked again.
#[test]
fn idle_memory_is_freed_for_descriptors() {
    let place = Place::new(GPU, 0);
    drop(place.shared.upload(&numbers(0, 9)).unwrap());
    place.shared.synchronize().unwrap();
    until("it is idle", || place.has() == [1, GRANULE, 0]);
    // The system has failed.
    place
        .plain
        .group
        .fail("cuMemExportToShareableHandle", 1, 304);
    let batch = place.shared.upload(&numbers(1, 400_000)).unwrap();
    assert_eq!(place.plain.group.clear(), 1);
    assert_eq!(place.has(), [1, 2 * GRANULE, 0]);
    drop(batch);
    place.end();
}

/// However a publisher ends, memory that a subscriber has, or has not read yet, is not used again as long as the subscriber lives.
#[test]
fn memory_outlives_its_publisher() {
    let test = "processes::memory_outlives_its_publisher";
    let rows = 400_000;
    match role() {
        _ if is_lazy() => return,
        Some(step) if step != "alone" => {
            let place = Place::new(GPU, 3);
            let before = Held::now();
            let publisher = publisher(socket());
            for from in 0..2 {
                let batch = place.shared.upload(&numbers(from, rows)).unwrap();
                publisher.send(&batch).unwrap();
            }
            place.shared.synchronize().unwrap();
            match &*step {
                "finishes" => publisher.finish().unwrap(),
                "fails" => publisher.fail("on purpose").unwrap(),
                _ => drop(publisher),
            }
            // Nothing that was freed is idle any more after this.
            let more: Vec<_> = (2..6)
                .map(|from| place.shared.upload(&numbers(from, rows)).unwrap())
                .collect();
            place.shared.synchronize().unwrap();
            say("has used as much again");
            drop(more);
            place.assert_empty();
            before.assert_again("in the end");
            say("has all back");
            return place.end();
        }
        _ if !alone(test) => return,
        _ => {}
    }
    let place = Place::new(GPU, 0);
    for step in ["finishes", "fails", "drops"] {
        let (mut other, socket) = Other::connected(test, step).unwrap();
        let mut subscriber = place.subscribe(socket);
        let first = subscriber.next().unwrap().unwrap();
        other.expect("has used as much again");
        let second = subscriber.next().unwrap().unwrap();
        assert_eq!(first.to_host().unwrap(), numbers(0, rows), "{step}: torn");
        assert_eq!(second.to_host().unwrap(), numbers(1, rows), "{step}: torn");
        let end = subscriber.next();
        assert_eq!(end.is_none(), step == "finishes", "{end:?}");
        drop((first, second));
        other.expect("has all back");
        drop(subscriber);
        other.passed();
    }
    place.end();
}

/// Events that have been waited for are given back: ten times as many batches as a subscriber may have are sent before they are ready, more
/// than a process can have events for.
#[test]
fn events_are_not_used_up() {
    let test = "processes::events_are_not_used_up";
    const ROUNDS: usize = 10;
    const LEASES: usize = 16;
    match role() {
        _ if is_lazy() => return,
        Some(role) if role != "alone" => {
            let place = Place::new(GPU, 3);
            let mut subscriber = place.subscribe(socket());
            for _ in 0..ROUNDS {
                let mut some = subscriber.by_ref().map(Result::unwrap);
                let some: Vec<_> = some.by_ref().take(LEASES).collect();
                assert!(some.iter().all(is_waited_for));
                say("has them");
                for (i, batch) in some.iter().enumerate() {
                    assert_eq!(batch.to_host().unwrap(), numbers(i as i64, 9));
                }
            }
            assert!(subscriber.next().is_none());
            drop(subscriber);
            return place.end();
        }
        _ if !alone(test) => return,
        _ => {}
    }
    let place = Place::new(GPU, 0);
    let before = Held::now();
    let (mut other, socket) = Other::connected(test, "reads").unwrap();
    let publisher = publisher(socket);
    for round in 1..=ROUNDS {
        let held = hold(&place.shared.default_queue());
        for i in 0..LEASES as i64 {
            let batch = place.shared.upload(&numbers(i, 9)).unwrap();
            publisher.send(&batch).unwrap();
        }
        // Otherwise the subscriber would wait for the publisher's word.
        let made = place.plain.group.calls("cuIpcGetEventHandle");
        assert_eq!(made, (round * LEASES) as u64);
        other.expect("has them");
        drop(held);
        // The next hold would keep all of the stand-in's streams busy.
        place.shared.synchronize().unwrap();
    }
    publisher.finish().unwrap();
    other.passed();
    place.assert_empty();
    // Nor is an event's file left.
    before.assert_again("in the end");
    place.end();
}

#[test]
fn another_gpu_is_refused() {
    let test = "processes::another_gpu_is_refused";
    match role() {
        _ if is_lazy() => return,
        Some(_) => {
            // The same ordinal, but another GPU.
            let place = Place::new(GPU + 1, 0);
            let mut subscriber = place.subscribe(socket());
            let refused = subscriber.next().unwrap().unwrap_err();
            assert!(matches!(refused, Error::Protocol(_)), "{refused:?}");
            assert!(refused.to_string().contains("GPU"), "{refused}");
            drop(subscriber);
            return place.end();
        }
        None => {}
    }
    let place = Place::new(GPU, 0);
    let (other, socket) = Other::connected(test, "is refused").unwrap();
    let publisher = publisher(socket);
    let batch = place.shared.upload(&values(0)).unwrap();
    publisher.send(&batch).unwrap();
    other.passed();
    until("the lease is back", || publisher.stats().leases == 0);
    drop((publisher, batch));
    place.end();
}

/// `kill -9` of a subscriber that has a batch, one that its device waits for, or one that it has not read.
#[test]
fn a_subscriber_dies() {
    let test = "processes::a_subscriber_dies";
    match role() {
        _ if is_lazy() => return,
        Some(step) if step != "alone" => {
            let place = Place::new(GPU, 3);
            let mut subscriber = place.subscribe(socket());
            let kept = (step != "reads nothing").then(|| subscriber.next().unwrap().unwrap());
            let waits = kept.as_ref().map(is_waited_for);
            assert_eq!(waits.unwrap_or_default(), step == "has one to wait for");
            say(&step);
            stay()
        }
        _ if !alone(test) => return,
        _ => {}
    }
    let place = Place::new(GPU, 0);
    let before = Held::now();
    for step in ["reads nothing", "has one", "has one to wait for"] {
        let (mut other, socket) = Other::connected(test, step).unwrap();
        let publisher = publisher(socket);
        let queue = place.shared.default_queue();
        let held = (step == "has one to wait for").then(|| hold(&queue));
        let batch = place.shared.upload(&values(0)).unwrap();
        if held.is_none() {
            place.shared.synchronize().unwrap();
        }
        publisher.send(&batch).unwrap();
        other.expect(step);
        other.kill();
        until(step, || publisher.stats().died == 1);
        assert_eq!(publisher.stats().leases, 0, "{step}");
        let sent = publisher.send(&batch);
        assert!(matches!(sent, Err(Error::SubscriberDied)), "{sent:?}");
        drop((held, batch, publisher));
        place.assert_empty();
        before.assert_again(step);
    }
    place.end();
}

/// `kill -9` of a publisher: memory that a subscriber has stays, handles of what is dead are errors, and a device that waits for a dead
/// publisher's work says so.
#[test]
fn a_publisher_dies() {
    let test = "processes::a_publisher_dies";
    match role() {
        _ if is_lazy() => return,
        Some(step) if step != "alone" => {
            let place = Place::new(GPU, 3);
            let publisher = publisher(socket());
            let held = (step != "has sent").then(|| hold(&place.shared.default_queue()));
            let batch = place.shared.upload(&values(0)).unwrap();
            if held.is_none() {
                place.shared.synchronize().unwrap();
            }
            publisher.send(&batch).unwrap();
            say(&step);
            stay()
        }
        _ if !alone(test) => return,
        _ => {}
    }
    let place = Place::new(GPU, 0);
    let before = Held::now();
    for step in ["has sent", "dies before it is ready", "is waited for"] {
        let (mut other, socket) = Other::connected(test, step).unwrap();
        let mut subscriber = place.subscribe(socket);
        other.expect(step);
        let early = step != "dies before it is ready";
        let batch = early.then(|| subscriber.next().unwrap().unwrap());
        other.kill();
        let end = subscriber.next().unwrap();
        assert!(matches!(end, Err(Error::PublisherDied)), "{step}: {end:?}");
        assert!(subscriber.next().is_none(), "{step}");
        drop(subscriber);
        match batch {
            Some(batch) if step == "has sent" => {
                assert_same_batch(&values(0), &batch.to_host().unwrap(), step);
            }
            Some(batch) => {
                let failed = batch.to_host().unwrap_err();
                assert!(failed.to_string().contains("719"), "{failed}");
            }
            None => {}
        }
        until(step, || place.has() == [0; 3]);
        before.assert_again(step);
    }
    // The device has failed in the end.
    let (group, failed) = (place.plain.group, place.plain.synchronize());
    assert!(failed.is_err());
    drop(place);
    assert_gone_but(group);
}

/// What the failed device reports is that it waited in vain.
#[track_caller]
fn assert_gone_but(group: Group) {
    let is_expected = |line: &str| line.contains("another process that is gone");
    until("nothing is left", || left(group).lines().all(is_expected));
}
