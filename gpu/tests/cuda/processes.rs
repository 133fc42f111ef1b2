//! A batch in the GPU's memory that another process gets: this program starts itself as the other one.

use arrow_array::RecordBatch;
use arrow_device::Device;
use arrow_device_share::{Error, Publisher, Subscriber, SubscriberOptions, shared_cuda};

use crate::gpu_suite::hold::hold;
use crate::gpu_suite::{everywhere, soon};
use crate::support::{assert_same_batch, wide_batch};
use crate::two::{Other, role, say, socket, stay};
use crate::vendor::{DEVICE, open_device};

fn values() -> RecordBatch {
    wide_batch(8, 10_000)
}

/// The other process's part: whether the device waits for its batch when it comes, what it is, and what comes next.
fn subscribe(device: &Device, role: &str) {
    // SAFETY: the publisher is this program.
    let options = unsafe { SubscriberOptions::trusting() }.with_device(device.clone());
    let mut subscriber = Subscriber::over_with(socket(), options).unwrap();
    let batch = subscriber.next().unwrap().unwrap();
    let ready = batch.as_struct().ready_event(None).unwrap();
    assert!(ready.is_some_and(|event| !event.is_complete().unwrap()));
    say("has it");
    if role == "is killed" {
        stay();
    }
    assert_same_batch(&values(), &batch.to_host().unwrap(), "crossed");
    drop(batch);
    let copied = subscriber.next().unwrap().unwrap();
    assert_same_batch(&values(), &copied.to_host().unwrap(), "copied");
    drop(copied);
    assert!(subscriber.next().is_none());
}

/// The subscriber has the batch before the publisher's device has written it. What does not lie in memory that can be shared is copied once,
/// on the device. A subscriber that is killed gives back what it had.
#[test]
fn a_subscriber_on_the_same_gpu() {
    if let Some(role) = role() {
        return subscribe(&open_device(DEVICE, 0).unwrap(), &role);
    }
    everywhere(|place| {
        let plain = place.open(DEVICE);
        let shared = shared_cuda(&plain).unwrap();
        for role in ["reads", "is killed"] {
            let test = "processes::a_subscriber_on_the_same_gpu";
            let (mut other, socket) = Other::connected(test, role).unwrap();
            let publisher = Publisher::over(socket).unwrap();
            let held = hold(&shared.default_queue());
            let batch = shared.upload(&values()).unwrap();
            publisher.send(&batch).unwrap();
            assert_eq!(publisher.stats().copied_batches, 0);
            other.expect("has it");
            drop((held, batch));
            if role == "is killed" {
                other.kill();
                assert!(soon(|| publisher.stats().died == 1));
                assert_eq!(publisher.stats().leases, 0);
                continue;
            }
            let before = plain.stats();
            publisher.send(&plain.upload(&values()).unwrap()).unwrap();
            assert_eq!(publisher.stats().copied_batches, 1);
            assert_eq!(plain.stats().since(&before).bytes_to_host, 0);
            publisher.finish().unwrap();
            other.passed();
        }
        shared.trim();
    });
}

/// The memory outlives the process that has made it.
#[test]
fn a_publisher_that_is_killed() {
    if role().is_some() {
        let shared = shared_cuda(&open_device(DEVICE, 0).unwrap()).unwrap();
        let publisher = Publisher::over(socket()).unwrap();
        let batch = shared.upload(&values()).unwrap();
        shared.synchronize().unwrap();
        publisher.send(&batch).unwrap();
        stay();
    }
    everywhere(|place| {
        let plain = place.open(DEVICE);
        let test = "processes::a_publisher_that_is_killed";
        let (other, socket) = Other::connected(test, "publishes").unwrap();
        // SAFETY: the publisher is this program.
        let options = unsafe { SubscriberOptions::trusting() }.with_device(plain.device.clone());
        let mut subscriber = Subscriber::over_with(socket, options).unwrap();
        let batch = subscriber.next().unwrap().unwrap();
        other.kill();
        let end = subscriber.next().unwrap();
        assert!(matches!(end, Err(Error::PublisherDied)), "{end:?}");
        assert_same_batch(&values(), &batch.to_host().unwrap(), "outlives");
    });
}
