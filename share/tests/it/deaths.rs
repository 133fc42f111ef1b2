//! `kill -9` of either side at each step of the protocol: the other one learns of it, keeps what it has, and nothing is left.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_device::device::sim::{SimConfig, SimDevice, SimMode};
use arrow_device::{Device, DeviceRecordBatch};
use arrow_device_share::{
    DeadPeers, Error, Publisher, PublisherOptions, Subscriber, SubscriberOptions, shared_cpu,
    shared_sim,
};

use crate::round_trips::batch_of;
use crate::support::Rng;
use crate::two::{Held, Other, alone, role, say, socket, stay};

pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn numbers(from: i64) -> RecordBatch {
    let column: ArrayRef = Arc::new(Int64Array::from_iter_values(from..from + 1000));
    batch_of(column)
}

pub(crate) fn shared(from: i64) -> DeviceRecordBatch {
    shared_cpu().upload(&numbers(from)).unwrap()
}

/// Waits until it is so: the publisher's thread learns of deaths by itself.
#[track_caller]
pub(crate) fn until(what: &str, is_so: impl Fn() -> bool) {
    let end = std::time::Instant::now() + LONG;
    while !is_so() {
        assert!(std::time::Instant::now() < end, "it never happened: {what}");
        std::thread::yield_now();
    }
}

/// What a subscriber has done when it dies.
const SUBSCRIBER_STEPS: [&str; 7] = [
    "connected",
    "subscribed",
    "knows the schema",
    "has a batch",
    "has returned a batch",
    "has batches to read",
    "has read the end",
];

fn subscribe_until(step: &str) -> ! {
    if step == "connected" {
        let _socket = socket();
        say(step);
        stay();
    }
    let mut subscriber = Subscriber::over(socket()).unwrap();
    let mut kept = Vec::new();
    match step {
        "subscribed" | "has batches to read" => {}
        "knows the schema" => _ = subscriber.schema().unwrap(),
        "has a batch" => kept.push(subscriber.next().unwrap().unwrap()),
        "has returned a batch" => drop(subscriber.next().unwrap().unwrap()),
        _ => kept.extend(subscriber.by_ref().map(Result::unwrap)),
    }
    say(step);
    stay()
}

#[test]
fn a_subscriber_dies() {
    let test = "deaths::a_subscriber_dies";
    match role() {
        Some(step) if step != "alone" => subscribe_until(&step),
        _ if !alone(test) => return,
        _ => {}
    }
    // What is made once is there.
    drop(shared(0));
    let before = Held::now();
    for step in SUBSCRIBER_STEPS {
        let (mut other, socket) = Other::connected(test, step).unwrap();
        let options = PublisherOptions {
            dead_peers: DeadPeers::Report,
            leases: 4,
            ..Default::default()
        };
        let publisher = Publisher::over_with(socket, options).unwrap();
        let is_silent = step == "connected";
        let mut publisher = Some(publisher);
        if !is_silent {
            let publisher = publisher.as_ref().unwrap();
            publisher.send(&shared(0)).unwrap();
            publisher.send(&shared(1)).unwrap();
        }
        if step == "has read the end" {
            publisher.take().unwrap().finish().unwrap();
        }
        other.expect(step);
        other.kill();
        if let Some(publisher) = &publisher {
            until(step, || publisher.stats().died == 1);
            let stats = publisher.stats();
            assert_eq!(
                (stats.leases, stats.subscribers, stats.left),
                (0, 0, 0),
                "{step}"
            );
            let sent = publisher.send(&shared(2));
            assert!(
                matches!(sent, Err(Error::SubscriberDied)),
                "{step}: {sent:?}"
            );
            // Once.
            assert_eq!(publisher.send(&shared(3)).unwrap(), 0, "{step}");
        }
        drop(publisher);
        before.assert_again(step);
    }
}

/// What a publisher has done when it dies.
const PUBLISHER_STEPS: [&str; 5] = [
    "listens",
    "has a subscriber",
    "has sent",
    "has sent what is not ready",
    "has a batch back",
];

fn publish_until(role: &str) -> ! {
    let (step, path) = role.split_once('|').unwrap();
    if step == "listens" {
        // Whoever connects is never answered.
        let publisher = Publisher::bind(path).unwrap();
        std::mem::forget(publisher);
        say(step);
        stay();
    }
    let publisher = Publisher::bind(path).unwrap();
    say("listens");
    publisher.wait_for_subscribers(1, LONG).unwrap();
    if step == "has sent what is not ready" {
        let config = SimConfig {
            mode: SimMode::Deferred,
            ..SimConfig::default()
        };
        let sim = Device::new(SimDevice::new(shared_sim(config)).unwrap()).unwrap();
        publisher.send(&sim.upload(&numbers(0)).unwrap()).unwrap();
    } else if step != "has a subscriber" {
        publisher.send(&shared(0)).unwrap();
    }
    if step == "has a batch back" {
        until(step, || publisher.stats().leases == 0);
    }
    say(step);
    stay()
}

#[test]
fn a_publisher_dies() {
    let test = "deaths::a_publisher_dies";
    match role() {
        Some(role) if role != "alone" => publish_until(&role),
        _ if !alone(test) => return,
        _ => {}
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let (sim, device) = crate::round_trips::sim();
    let before = Held::now();
    for step in PUBLISHER_STEPS {
        let role = format!("{step}|{}", path.display());
        let mut other = Other::start(test, &role, Stdio::null());
        other.expect("listens");
        // SAFETY: the publisher is this program.
        let options = unsafe { SubscriberOptions::trusting() }.with_device(device.clone());
        let mut subscriber = Subscriber::connect_with(&path, options).unwrap();
        let mut batch = None;
        if let "has sent" | "has a batch back" = step {
            batch = Some(subscriber.next().unwrap().unwrap());
        }
        if step == "has a batch back" {
            batch = None;
        }
        if step != "listens" {
            other.expect(step);
        }
        other.kill();
        let end = subscriber.next().unwrap();
        assert!(matches!(end, Err(Error::PublisherDied)), "{step}: {end:?}");
        assert!(subscriber.next().is_none(), "{step}");
        drop(subscriber);
        // The memory is this process's own by now.
        if let Some(batch) = batch {
            assert_eq!(batch.to_host().unwrap(), numbers(0));
        }
        before.assert_again(step);
    }
    sim.assert_clean();
    // The next publisher takes the dead one's place.
    assert!(path.exists());
    drop(Publisher::bind(&path).unwrap());
    assert!(!path.exists());
    // But not that of another file.
    std::fs::write(&path, "mine").unwrap();
    assert!(Publisher::bind(&path).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    before.assert_again("in the end");
}

/// Subscribers come, read for a while, and die at any moment. The publisher goes on.
#[test]
fn a_soak_with_deaths() {
    let test = "deaths::a_soak_with_deaths";
    match role() {
        Some(path) if path != "alone" => {
            let mut subscriber = Subscriber::connect(path).unwrap();
            say("here");
            let mut kept = std::collections::VecDeque::new();
            for (i, batch) in subscriber.by_ref().enumerate() {
                let batch = batch.unwrap();
                assert_eq!(batch.num_rows(), 1000);
                kept.push_back(batch);
                if i % 3 == 0 {
                    kept.clear();
                }
                if kept.len() > 8 {
                    kept.pop_front();
                }
            }
            return;
        }
        _ if !alone(test) => return,
        _ => {}
    }
    let batches = std::env::var("ARROW_DEVICE_SHARE_SOAK");
    let batches = batches.map_or(4_000, |n| n.parse().unwrap());
    let mut rng = Rng::new(37);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    drop(shared(0));
    let before = Held::now();
    let publisher = Publisher::bind(&path).unwrap();
    let (mut others, mut killed) = (Vec::new(), 0);
    for i in 0..batches {
        while others.len() < 3 {
            let mut other = Other::start(test, path.to_str().unwrap(), Stdio::null());
            other.expect("here");
            others.push(other);
        }
        publisher.send(&shared(i)).unwrap();
        // Not after the last one: all three are waited for.
        if rng.one_in(250) && i + 1 < batches {
            others.remove(rng.below(3)).kill();
            killed += 1;
        }
    }
    publisher.wait_for_subscribers(3, LONG).unwrap();
    until("all have read", || publisher.stats().leases < 3 * 9);
    publisher.finish().unwrap();
    others.into_iter().for_each(Other::passed);
    assert!(killed > 0);
    before.assert_again("in the end");
}
