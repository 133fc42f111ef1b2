//! Leases: what is kept until when, back-pressure, ends, and what may be done with memory that was sent.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device::{Device, DeviceRecordBatchReader, DeviceRecordBatches, Devices};
use arrow_device_share::{
    DeadPeers, Error, Publisher, PublisherOptions, PublisherStats, Subscriber, shared_cpu,
    socket_pair,
};
use futures::StreamExt;
use rustix::mm::{MapFlags, ProtFlags};

use crate::deaths::{LONG, numbers, shared, until};
use crate::raw::{DONE, END, OFFER, Raw, SCHEMA};
use crate::round_trips::batch_of;
use crate::support::fork_kit;
use crate::two::{Held, Other, alone, role};

fn pair(options: PublisherOptions) -> (Publisher, Subscriber) {
    let (here, there) = socket_pair().unwrap();
    let publisher = Publisher::over_with(here, options).unwrap();
    (publisher, Subscriber::over(there).unwrap())
}

#[test]
fn memory_lives_as_long_as_somebody_has_it() {
    if !alone("leases::memory_lives_as_long_as_somebody_has_it") {
        return;
    }
    drop(shared(0));
    let before = Held::now();
    let (publisher, mut subscriber) = pair(PublisherOptions::default());
    let connected = Held::now();
    publisher.send(&shared(0)).unwrap();
    // The publisher's own batch is gone: the lease keeps it.
    let batch = subscriber.next().unwrap().unwrap();
    assert_eq!(publisher.stats().leases, 1);
    let column = batch.column(0).unwrap();
    drop(batch);
    let slice = column.slice(10, 5).unwrap();
    drop(column);
    assert_eq!(publisher.stats().leases, 1);
    assert_eq!(slice.to_host().unwrap().len(), 5);
    drop(slice);
    until("the lease is back", || publisher.stats().leases == 0);
    until("the memory is free", || Held::now() == connected);

    // A batch outlives its subscriber, and its publisher.
    publisher.send(&shared(7)).unwrap();
    let batch = subscriber.next().unwrap().unwrap();
    drop(subscriber);
    until("it has gone", || publisher.stats().subscribers == 0);
    assert_eq!((publisher.stats().leases, publisher.stats().died), (1, 0));
    drop(publisher);
    assert_eq!(batch.to_host().unwrap(), numbers(7));
    drop(batch);
    until("nothing is left", || Held::now() == before);
}

#[test]
fn a_full_subscriber_makes_the_publisher_wait() {
    let options = PublisherOptions {
        leases: 2,
        patience: Duration::from_millis(200),
        ..Default::default()
    };
    let (publisher, mut subscriber) = pair(options);
    publisher
        .wait_for_subscribers(1, Duration::from_secs(60))
        .unwrap();
    publisher.send(&shared(0)).unwrap();
    publisher.send(&shared(1)).unwrap();
    let full = publisher.send(&shared(2));
    assert!(matches!(full, Err(Error::TimedOut(_))), "{full:?}");
    let full = publisher.wait_for_room(Duration::from_millis(10));
    assert!(matches!(full, Err(Error::TimedOut(_))), "{full:?}");
    drop(subscriber.next().unwrap().unwrap());
    publisher.wait_for_room(LONG).unwrap();
    assert_eq!(publisher.stats().leases, 1);
    publisher.send(&shared(2)).unwrap();
    let rest: Vec<_> = (0..2)
        .map(|_| subscriber.next().unwrap().unwrap())
        .collect();
    assert_eq!(rest[1].to_host().unwrap(), numbers(2));
}

#[test]
fn waits_for_room_and_for_batches_have_an_end() {
    const SHORT: Duration = Duration::from_millis(10);
    let (here, there) = socket_pair().unwrap();
    let publisher = Publisher::over(here).unwrap();
    // The only one there will ever be has not begun.
    let early = publisher.wait_for_room(SHORT);
    assert!(matches!(early, Err(Error::TimedOut(_))), "{early:?}");
    let mut subscriber = Subscriber::over(there).unwrap();
    publisher.wait_for_room(LONG).unwrap();
    // Waits that were too short end nothing.
    for time in [Duration::ZERO, SHORT] {
        let early = subscriber.next_timeout(time);
        assert!(matches!(early, Some(Err(Error::TimedOut(_)))), "{early:?}");
    }
    publisher.send(&shared(1)).unwrap();
    let batch = subscriber.next_timeout(Duration::MAX).unwrap().unwrap();
    assert_eq!(batch.to_host().unwrap(), numbers(1));
    publisher.finish().unwrap();
    assert!(subscriber.next_timeout(LONG).is_none());
}

#[test]
fn room_is_not_waited_for_where_nobody_takes_batches() {
    let folder = tempfile::tempdir().unwrap();
    let publisher = Publisher::bind(folder.path().join("socket")).unwrap();
    publisher.wait_for_room(Duration::ZERO).unwrap();
    let (here, there) = socket_pair().unwrap();
    let publisher = Publisher::over(here).unwrap();
    let subscriber = Subscriber::over(there).unwrap();
    publisher.wait_for_room(LONG).unwrap();
    drop(subscriber);
    publisher.wait_for_room(LONG).unwrap();
}

/// What a subscriber that leaves has not seen yet is free at once.
#[test]
fn a_subscriber_leaves_without_reading() {
    let (publisher, mut subscriber) = pair(PublisherOptions {
        leases: 8,
        ..Default::default()
    });
    for i in 0..8 {
        publisher.send(&shared(i)).unwrap();
    }
    let kept = subscriber.next().unwrap().unwrap();
    drop(subscriber);
    until("only what it has", || publisher.stats().leases == 1);
    assert_eq!(publisher.send(&shared(9)).unwrap(), 0);
    drop(kept);
    until("everything", || publisher.stats().leases == 0);
    until("in order", || publisher.stats().left == 1);
    assert_eq!(publisher.stats().died, 0);
}

/// It closes its end while batches are sent to it, which is no death.
#[test]
fn a_subscriber_leaves_while_batches_come() {
    let batch = shared(0);
    for round in 0..300 {
        let (publisher, mut subscriber) = pair(PublisherOptions {
            dead_peers: DeadPeers::Report,
            ..Default::default()
        });
        let leaves = std::thread::spawn(move || drop(subscriber.next().unwrap().unwrap()));
        while publisher.send(&batch).unwrap() > 0 {}
        leaves.join().unwrap();
        until("it has left", || publisher.stats().left == 1);
        assert_eq!(publisher.stats().died, 0, "round {round}");
        publisher.finish().unwrap();
    }
}

/// The end of the stream does not wait for what a subscriber still has that has left, also if it left while batches were sent to it.
#[test]
fn a_subscriber_leaves_with_a_batch_while_others_come() {
    let batch = shared(0);
    for round in 0..300 {
        let (publisher, mut subscriber) = pair(PublisherOptions {
            patience: Duration::from_secs(5),
            ..Default::default()
        });
        let leaves = std::thread::spawn(move || subscriber.next().unwrap().unwrap());
        while publisher.send(&batch).unwrap() > 0 {}
        let kept = leaves.join().unwrap();
        let stats = publisher.stats();
        publisher.finish().unwrap();
        assert_eq!((stats.died, stats.left), (0, 0), "round {round}");
        drop(kept);
    }
}

#[test]
fn ends_are_distinct() {
    for (end, expected) in [
        ("finish", None),
        ("fail", Some("failed: no more")),
        ("drop", Some("has gone")),
    ] {
        let (publisher, mut subscriber) = pair(PublisherOptions::default());
        publisher.send(&shared(1)).unwrap();
        publisher.send(&shared(2)).unwrap();
        match end {
            "finish" => publisher.finish().unwrap(),
            "fail" => publisher.fail("no more").unwrap(),
            _ => drop(publisher),
        }
        // What was sent before is read first.
        for i in [1, 2] {
            let batch = subscriber.next().unwrap();
            assert_eq!(batch.unwrap().to_host().unwrap(), numbers(i), "{end}");
        }
        let last = subscriber.next().map(|last| last.unwrap_err().to_string());
        assert_eq!(last.is_some(), expected.is_some(), "{end}: {last:?}");
        assert!(
            last.unwrap_or_default()
                .contains(expected.unwrap_or_default()),
            "{end}"
        );
        assert!(subscriber.next().is_none(), "{end}");
    }
}

#[test]
fn several_subscribers_get_everything() {
    let test = "leases::several_subscribers_get_everything";
    if let Some(path) = role() {
        let received = Subscriber::connect(path).unwrap();
        let received = received.map(|batch| batch.unwrap().to_host().unwrap());
        assert!(received.eq((0..50).map(numbers)));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let publisher = Publisher::bind(&path).unwrap();
    let start = |_| Other::start(test, path.to_str().unwrap(), std::process::Stdio::null());
    let others: Vec<_> = (0..3).map(start).collect();
    publisher
        .wait_for_subscribers(3, Duration::from_secs(60))
        .unwrap();
    for i in 0..50 {
        assert_eq!(publisher.send(&shared(i)).unwrap(), 3);
    }
    publisher.finish().unwrap();
    others.into_iter().for_each(Other::passed);
}

/// As a stream, and as one of the core's readers.
#[test]
fn streams_and_readers() {
    let (publisher, subscriber) = pair(PublisherOptions {
        leases: 20,
        ..Default::default()
    });
    let sent = std::thread::spawn(move || {
        (0..20).for_each(|i| _ = publisher.send(&shared(i)).unwrap());
        publisher.finish().unwrap();
    });
    let received = subscriber
        .into_stream()
        .map(|batch| batch.unwrap().to_host().unwrap());
    let received: Vec<_> = futures::executor::block_on(received.collect());
    assert_eq!(received, (0..20).map(numbers).collect::<Vec<_>>());
    sent.join().unwrap();

    let (publisher, mut subscriber) = pair(PublisherOptions::default());
    publisher.send(&shared(3)).unwrap();
    publisher.finish().unwrap();
    let schema = subscriber.schema().unwrap().unwrap();
    let batches = subscriber.map(|batch| batch.map_err(arrow_device::Error::from));
    let reader = DeviceRecordBatches::new(batches, schema, arrow_device::ArrowDeviceType::CPU);
    let read: Vec<_> = reader.into_host_reader().map(Result::unwrap).collect();
    assert_eq!(read, [numbers(3)]);
}

/// Says that it was called, and panics.
struct Panics(Mutex<Sender<()>>);

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        let _ = self.0.lock().unwrap().send(());
        std::panic::resume_unwind(Box::new("a waker's own panic"));
    }
}

/// Wakers that panic do not end the wait for what comes next.
#[test]
fn a_stream_whose_wakers_panic() {
    let (publisher, subscriber) = pair(PublisherOptions::default());
    let mut stream = subscriber.into_stream();
    let (called, calls) = channel();
    for i in 0..2 {
        let waker = Waker::from(Arc::new(Panics(Mutex::new(called.clone()))));
        let polled = stream.poll_next_unpin(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
        publisher.send(&shared(i)).unwrap();
        calls.recv_timeout(LONG).unwrap();
        let batch = futures::executor::block_on(stream.next());
        assert_eq!(batch.unwrap().unwrap().to_host().unwrap(), numbers(i));
    }
}

/// Long manifests and schemas travel apart.
#[test]
fn wide_batches() {
    let columns = (0..2000).map(|i| (format!("column {i}"), numbers(i).column(0).clone()));
    let wide = arrow_array::RecordBatch::try_from_iter(columns).unwrap();
    let (publisher, mut subscriber) = pair(PublisherOptions::default());
    publisher
        .send(&shared_cpu().upload(&wide).unwrap())
        .unwrap();
    assert_eq!(subscriber.next().unwrap().unwrap().to_host().unwrap(), wide);
}

#[test]
fn another_schema_is_refused() {
    let (publisher, mut subscriber) = pair(PublisherOptions::default());
    // A first batch that cannot be sent does not count.
    let sim = Device::new(SimDevice::new(SimConfig::default()).unwrap()).unwrap();
    let column: arrow_array::ArrayRef = std::sync::Arc::new(arrow_array::Int8Array::from(vec![1]));
    assert!(
        publisher
            .send(&sim.upload(&batch_of(column)).unwrap())
            .is_err()
    );
    publisher.send(&shared(0)).unwrap();
    let other = batch_of(std::sync::Arc::new(arrow_array::BooleanArray::from(vec![
        true,
    ])));
    let refused = publisher.send(&Devices::cpu().upload(&other).unwrap());
    assert!(refused.unwrap_err().to_string().contains("another schema"));
    publisher.send(&shared(1)).unwrap();
    assert_eq!(subscriber.by_ref().take(2).filter(Result::is_ok).count(), 2);
}

/// Sending works while other threads start processes, which have the publisher's mappings for a moment.
#[test]
fn processes_that_start_meanwhile() {
    let test = "leases::processes_that_start_meanwhile";
    if role().is_some() {
        return;
    }
    let (publisher, mut subscriber) = pair(PublisherOptions::default());
    let starts = std::thread::spawn(move || {
        (0..10).for_each(|_| Other::start(test, "nothing", std::process::Stdio::null()).passed());
    });
    let mut i = 0;
    while !starts.is_finished() {
        publisher.send(&shared(i)).unwrap();
        assert_eq!(subscriber.next().unwrap().unwrap().num_rows(), 1000);
        i += 1;
    }
    starts.join().unwrap();
    assert!(i > 0);
}

/// Of publishers that start at one time where a dead one has left its socket, one listens, and subscribers find it.
#[test]
fn one_publisher_takes_the_place_of_a_dead_one() {
    const PUBLISHERS: usize = 4;
    let folder = tempfile::tempdir().unwrap();
    for round in 0..100 {
        let path = folder.path().join(round.to_string());
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let start = std::sync::Barrier::new(PUBLISHERS);
        let bind = || {
            start.wait();
            Publisher::bind(&path)
        };
        let all: Vec<_> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..PUBLISHERS).map(|_| scope.spawn(bind)).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let bound: Vec<_> = all.into_iter().filter_map(Result::ok).collect();
        assert_eq!(bound.len(), 1, "round {round}");
        let _subscriber = Subscriber::connect(&path).unwrap();
        bound[0].wait_for_subscribers(1, LONG).unwrap();
    }
}

/// A packet that the socket can never take ends the connection: the stream does not go on without it.
#[test]
fn a_packet_that_cannot_be_sent() {
    let columns = (0..80).map(|i| (format!("column {i}"), numbers(i).column(0).clone()));
    let wide = arrow_array::RecordBatch::try_from_iter(columns).unwrap();
    let wide = shared_cpu().upload(&wide).unwrap();
    let (here, there) = socket_pair().unwrap();
    // Less than the batch's description, which is not long enough to travel apart.
    rustix::net::sockopt::set_socket_send_buffer_size(&here, 1).unwrap();
    let options = PublisherOptions {
        dead_peers: DeadPeers::Report,
        ..Default::default()
    };
    let publisher = Publisher::over_with(here, options).unwrap();
    let mut subscriber = Subscriber::over(there).unwrap();
    let sent = publisher.send(&wide).and_then(|_| publisher.finish());
    assert!(matches!(sent, Err(Error::SubscriberDied)), "{sent:?}");
    let end = subscriber.next().unwrap();
    assert!(matches!(end, Err(Error::PublisherDied)), "{end:?}");
}

/// Leases go back although the publisher does not read for a while, so that the socket is full.
#[test]
fn a_publisher_that_does_not_read() {
    const BATCHES: u64 = 2000;
    let (raw, there) = Raw::pair();
    let real = Publisher::over(there).unwrap();
    raw.subscribe();
    real.send(&shared(0)).unwrap();
    let packets = [raw.expect(SCHEMA), raw.expect(OFFER)];
    let (raw, there) = Raw::pair();
    let mut subscriber = Subscriber::over(there).unwrap();
    let publisher = std::thread::spawn(move || {
        raw.welcome();
        raw.pass(&packets[0]);
        let [_, mut offer] = packets;
        for lease in 0..BATCHES {
            offer.number = lease;
            raw.pass(&offer);
        }
        let returned = (0..BATCHES).map(|_| raw.expect(DONE).number);
        assert!(returned.eq(0..BATCHES));
        raw.send(END, 0, &[], None);
        raw
    });
    assert_eq!(
        subscriber.by_ref().filter(Result::is_ok).count() as u64,
        BATCHES
    );
    drop(publisher.join().unwrap());
}

/// A child that was forked has the connections of both sides, but neither leases nor a say in them.
#[test]
fn children_that_were_forked() {
    fork_kit::alone("leases::children_that_were_forked", || {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let publisher = Publisher::bind(&path).unwrap();
        let mut subscriber = Subscriber::connect(&path).unwrap();
        publisher
            .wait_for_subscribers(1, Duration::from_secs(60))
            .unwrap();
        publisher.send(&shared(0)).unwrap();
        let batch = subscriber.next().unwrap().unwrap();
        let unsent = shared(2);
        let start = unsent.column(0).unwrap().buffer(1).unwrap().address();
        let mut all = Some((publisher, subscriber, batch, unsent));
        fork_kit::forked(|| {
            // The child does not have this memory: something else may take its place, and is not freed along with it.
            let hole = std::ptr::without_provenance_mut(start.address() & !4095);
            let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            // SAFETY: a new mapping, which nobody else uses; the address is a wish.
            let taken = unsafe { rustix::mm::mmap_anonymous(hole, 4096, access, flags) };
            let taken = taken.unwrap().cast::<u8>();
            assert_eq!(taken.addr(), hole.addr());
            let (publisher, mut subscriber, batch, unsent) = all.take().unwrap();
            let refused = |e: Error| assert!(matches!(e, Error::Refused(_)), "{e}");
            refused(publisher.send(&batch).unwrap_err());
            refused(publisher.wait_for_subscribers(9, LONG).unwrap_err());
            assert_eq!(publisher.stats(), PublisherStats::default());
            refused(subscriber.next().unwrap().unwrap_err());
            assert!(shared_cpu().upload(&numbers(0)).is_err());
            // Nor can it send memory of its parent's with a publisher of its own.
            let own = Publisher::over(socket_pair().unwrap().0).unwrap();
            assert!(own.send(&unsent).is_err());
            refused(publisher.finish().unwrap_err());
            drop((subscriber, batch, unsent));
            // SAFETY: as above.
            unsafe { taken.write(1) };
        });
        let (publisher, mut subscriber, batch, _unsent) = all.unwrap();
        assert!(path.exists());
        publisher.send(&shared(1)).unwrap();
        assert_eq!(
            subscriber.next().unwrap().unwrap().to_host().unwrap(),
            numbers(1)
        );
        until("one lease is back", || publisher.stats().leases == 1);
        drop(batch);
        until("both leases are back", || publisher.stats().leases == 0);
    });
}
