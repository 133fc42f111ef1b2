//! When memory may be read: work of a device that has not run yet, and devices that fail.

use arrow_device::Device;
use arrow_device::device::sim::{SimConfig, SimDevice, SimMode};
use arrow_device_share::{
    Error, Publisher, PublisherOptions, Subscriber, SubscriberOptions, SubscriberStream,
    shared_sim, socket_pair,
};
use futures::{FutureExt, StreamExt};

use crate::deaths::{LONG, numbers, until};
use crate::two::{Held, Other, alone, role};

fn deferred() -> Device {
    let config = SimConfig {
        mode: SimMode::Deferred,
        ..SimConfig::default()
    };
    Device::new(SimDevice::new(shared_sim(config)).unwrap()).unwrap()
}

fn pair() -> (Publisher, SubscriberStream) {
    let (here, there) = socket_pair().unwrap();
    let publisher = Publisher::over(here).unwrap();
    let sim = Device::new(SimDevice::new(SimConfig::default()).unwrap()).unwrap();
    // SAFETY: the publisher is this program.
    let options = unsafe { SubscriberOptions::trusting() }.with_device(sim);
    let subscriber = Subscriber::over_with(there, options).unwrap();
    (publisher, subscriber.into_stream())
}

#[test]
fn a_batch_is_read_once_it_is_ready() {
    let (publisher, mut stream) = pair();
    let device = deferred();
    let before = device.stats();
    publisher
        .send(&device.upload(&numbers(1)).unwrap())
        .unwrap();
    // Sending waits for nothing.
    assert_eq!(device.stats().since(&before).host_waits, 0);
    let mut received = stream.next();
    assert!((&mut received).now_or_never().is_none());
    device.synchronize().unwrap();
    let batch = futures::executor::block_on(received).unwrap().unwrap();
    assert_eq!(batch.to_host().unwrap(), numbers(1));
    assert_eq!(device.stats().since(&before).bytes_to_host, 0);
}

/// The thread that waits for a stream ends with it, although nothing comes.
#[test]
fn nobody_waits_for_a_stream_that_is_gone() {
    if !alone("order::nobody_waits_for_a_stream_that_is_gone") {
        return;
    }
    let before = Held::now();
    let (publisher, mut stream) = pair();
    assert!(stream.next().now_or_never().is_none());
    drop((stream, publisher));
    before.assert_again("its thread has its socket");
}

/// Nor does it wait for another subscriber that the publisher waits for.
#[test]
fn a_slow_subscriber_keeps_nobody_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let options = PublisherOptions {
        leases: 1,
        ..Default::default()
    };
    let publisher = Publisher::bind_with(&path, options).unwrap();
    let sim = Device::new(SimDevice::new(SimConfig::default()).unwrap()).unwrap();
    let mut both = [1, 2].map(|of| {
        // SAFETY: the publisher is this program.
        let options = unsafe { SubscriberOptions::trusting() }.with_device(sim.clone());
        let subscriber = Subscriber::connect_with(&path, options).unwrap();
        publisher.wait_for_subscribers(of, LONG).unwrap();
        subscriber
    });
    let device = deferred();
    publisher
        .send(&device.upload(&numbers(1)).unwrap())
        .unwrap();
    device.synchronize().unwrap();
    drop(both[0].next().unwrap().unwrap());
    until("one has returned it", || publisher.stats().leases == 1);
    let late = device.upload(&numbers(3)).unwrap();
    std::thread::scope(|scope| {
        let sends = scope.spawn(|| publisher.send(&late));
        until("one has the next", || publisher.stats().leases == 2);
        device.synchronize().unwrap();
        let batch = both[0].next().unwrap().unwrap();
        assert_eq!(batch.to_host().unwrap(), numbers(3));
        // The other one has not returned the first batch yet.
        drop(both[1].next().unwrap().unwrap());
        assert_eq!(sends.join().unwrap().unwrap(), 2);
    });
}

/// A second one, which is ready before, does not overtake it.
#[test]
fn batches_stay_in_order() {
    let (publisher, mut stream) = pair();
    let (late, early) = (deferred(), deferred());
    publisher.send(&late.upload(&numbers(1)).unwrap()).unwrap();
    publisher.send(&early.upload(&numbers(2)).unwrap()).unwrap();
    early.synchronize().unwrap();
    assert!(stream.next().now_or_never().is_none());
    late.synchronize().unwrap();
    let both = futures::executor::block_on(stream.by_ref().take(2).collect::<Vec<_>>());
    let both = both
        .into_iter()
        .map(|batch| batch.unwrap().to_host().unwrap());
    assert!(both.eq([numbers(1), numbers(2)]));
}

#[test]
fn a_device_that_fails() {
    let (publisher, mut stream) = pair();
    let device = deferred();
    let batch = device.upload(&numbers(1)).unwrap();
    publisher.send(&batch).unwrap();
    let queue = device.default_queue();
    // SAFETY: the kernel writes nothing.
    unsafe { queue.as_sim().unwrap().launch(|_| Err("broken".into())) }.unwrap();
    // The upload was queued before, so that the batch is ready; the next one never will be.
    let next = device.upload(&numbers(2)).unwrap();
    publisher.send(&next).unwrap();
    assert!(device.synchronize().is_err());
    let received = futures::executor::block_on(stream.by_ref().collect::<Vec<_>>());
    let last = received.last().unwrap();
    assert!(
        matches!(last, Err(Error::Failed(why)) if why.contains("broken")),
        "{last:?}"
    );
}

/// The end of the stream waits for what was sent.
#[test]
fn the_end_comes_after_the_memory_is_ready() {
    if role().is_some() {
        let publisher = Publisher::over(crate::two::socket()).unwrap();
        let device = deferred();
        publisher
            .send(&device.upload(&numbers(5)).unwrap())
            .unwrap();
        let ends = std::thread::spawn(|| publisher.finish().unwrap());
        device.synchronize().unwrap();
        ends.join().unwrap();
        return;
    }
    let test = "order::the_end_comes_after_the_memory_is_ready";
    let (other, socket) = Other::connected(test, "publisher").unwrap();
    let sim = Device::new(SimDevice::new(SimConfig::default()).unwrap()).unwrap();
    // SAFETY: the publisher is this program.
    let options = unsafe { SubscriberOptions::trusting() }.with_device(sim);
    let mut subscriber = Subscriber::over_with(socket, options).unwrap();
    let batch = subscriber.next().unwrap().unwrap();
    assert_eq!(batch.to_host().unwrap(), numbers(5));
    assert!(subscriber.next().is_none());
    other.passed();
}
