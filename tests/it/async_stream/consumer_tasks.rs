//! What the consumer requests, what it extracts, and what it does when it is dropped.

use std::sync::Mutex;

use arrow_device::async_stream::AsyncDeviceRecordBatchStream;
use arrow_device::device::sim::SimMode;
use arrow_device::{ArrowDeviceType, Error};
use libc::ECANCELED;

use crate::async_stream::consumer::{good, opened};
use crate::async_stream::kit::*;
use crate::simkit::Sim;

#[test]
fn any_depth_is_a_positive_request() {
    for depth in [0, usize::MAX] {
        let (producer, mut stream) = opened(depth);
        assert!(producer.requested() > 0, "{:?}", producer.requests());
        producer.task(&batch(1));
        assert_eq!(good(next(&mut stream)), 1);
        producer.release();
        producer.assert_balanced();
    }
}

/// The whole of it within `on_schema`; nothing is extracted within the call that brings it.
#[test]
fn half_of_the_queue_is_requested_once_it_is_extracted() {
    for (depth, half) in [(1, 1), (2, 1), (3, 2), (4, 2), (7, 4)] {
        let (producer, mut stream) = opened(depth);
        let (mut requests, mut log) = (vec![depth as i64], vec!["request"]);
        for i in 0..3 * half {
            assert!(
                producer.requested() > i,
                "{depth}: the producer has nothing to do"
            );
            producer.task(&batch(i));
            assert_eq!(producer.log(), log, "nothing was taken");
            good(next(&mut stream));
            log.push("extract");
            if (i + 1) % half == 0 {
                requests.push(half);
                log.push("request");
            }
            assert_eq!(producer.requests(), requests, "{depth}");
            assert_eq!(
                producer.log(),
                log,
                "the request comes after the extraction"
            );
        }
        producer.release();
    }
}

#[test]
fn nothing_is_requested_after_the_end_an_error_or_the_release() {
    for how in 0..3 {
        let (producer, mut stream) = opened(3);
        (0..3).for_each(|i| assert_eq!(producer.task(&batch(i)), 0));
        match how {
            0 => assert_eq!(producer.end(), 0),
            1 => producer.error(5, None, None),
            _ => producer.release(),
        }
        (0..3).for_each(|i| assert_eq!(good(next(&mut stream)), i));
        assert_eq!(producer.requests(), [3], "{how}");
        producer.release();
        drop(stream);
        assert_eq!(producer.cancels(), 0);
        producer.assert_balanced();
    }
}

/// In every state: a producer that goes on is cancelled once, and tasks that were not taken are extracted with null.
#[test]
fn whatever_is_dropped_cancels_and_extracts_with_null() {
    fn read(producer: &FakeProducer, opening: Opening) -> AsyncDeviceRecordBatchStream {
        assert_eq!(producer.schema(), 0);
        (0..3).for_each(|i| assert_eq!(producer.task(&batch(i)), 0));
        let mut stream = block_on(opening).unwrap();
        good(next(&mut stream));
        stream
    }
    for state in ["opening", "stream", "ended", "failed", "released"] {
        let (producer, opening) = FakeProducer::open(8);
        if state == "opening" {
            assert_eq!((producer.schema(), producer.task(&batch(0))), (0, 0));
            drop(opening);
        } else {
            let stream = read(&producer, opening);
            match state {
                "ended" => assert_eq!(producer.end(), 0),
                "failed" => producer.error(7, None, None),
                "released" => producer.release(),
                _ => {}
            }
            drop(stream);
        }
        let cancels = usize::from(matches!(state, "opening" | "stream"));
        let extracted = usize::from(state != "opening");
        let found = || (producer.cancels(), producer.tasks().1);
        assert_eq!(found(), (cancels, extracted), "{state}");
        if cancels > 0 {
            assert_eq!(producer.task(&batch(3)), 0, "{state}: a late one");
            assert_eq!(producer.end(), 0);
            producer.error(7, None, None);
        }
        producer.release();
        assert_eq!(found(), (cancels, extracted), "{state}");
        producer.assert_balanced();
    }
}

/// Dropped while the producer is in the consumer's own `request` of `on_schema`, and released there: nothing holds what the handler
/// needs any more but the call that is under way.
#[test]
fn an_opening_dropped_within_on_schema_cancels() {
    for releases in [false, true] {
        let (producer, opening) = FakeProducer::open(2);
        let opening = Mutex::new(Some(opening));
        producer.on_request(move |producer, _| {
            drop(opening.lock().unwrap().take());
            if releases {
                producer.release();
            }
        });
        let code = producer.schema();
        assert!(code == ECANCELED || code == 0 && !releases, "{code}");
        if code == 0 {
            assert_eq!(producer.cancels(), 1);
            assert_eq!(producer.task(&batch(0)), 0);
        }
        producer.release();
        producer.assert_balanced();
    }
}

#[test]
fn batches_outlive_their_stream_and_their_producer() {
    let (producer, mut stream) = opened(4);
    producer.task(&batch(3));
    producer.task(&batch(4));
    producer.end();
    producer.release();
    producer.assert_balanced_but_tasks();
    drop(producer);
    let kept = next(&mut stream).unwrap().unwrap();
    assert_eq!(good(next(&mut stream)), 4);
    assert!(next(&mut stream).is_none());
    drop(stream);
    assert_eq!(number_of(&kept), 3);
}

/// An event of the producer goes on with the batch: nothing waits for it. A batch of a device that nobody knows is an error.
#[test]
fn batches_of_a_device() {
    if cfg!(miri) {
        return;
    }
    let (sim, other) = (Sim::new(SimMode::Deferred), Sim::new(SimMode::Async));
    let options = options_of(&sim);
    let (producer, opening) = FakeProducer::open_with(2, ArrowDeviceType::EXT_DEV, options);
    producer.schema();
    let mut stream = block_on(opening).unwrap();
    let before = sim.stats();
    producer.task(&sim.upload(&numbers(700, 5)).unwrap());
    producer.task(&other.upload(&numbers(0, 3)).unwrap());
    let first = ready(poll_next(&mut stream)).unwrap().unwrap();
    assert!(!first.is_ready().unwrap());
    assert_eq!(sim.stats().since(&before).host_waits, 0);
    assert_eq!(number_of(&first), 7);
    let e = next(&mut stream).unwrap().map(|_| ()).unwrap_err();
    assert!(matches!(e, Error::DeviceNotAvailable { .. }), "{e:?}");
    assert!(next(&mut stream).is_none());
    producer.release();
    producer.assert_balanced();
    drop((first, stream));
    sim.assert_done();
    other.assert_done();
}
