//! What the consumer requests, and what it does with tasks.

use std::mem::MaybeUninit;
use std::sync::Arc;

use arrow_device::async_stream::AsyncDeviceRecordBatchStream;
use libc::EINVAL;

use crate::async_stream::consumer::{good, invalid, opened, up_to_error};
use crate::async_stream::kit::*;

// ---- request

#[test]
fn the_queue_depth_is_requested_within_on_schema() {
    for depth in [1, 2, 7] {
        let (producer, _opening) = FakeProducer::open(depth);
        assert_eq!(producer.schema(), 0);
        assert_eq!(producer.requests(), [depth as i64]);
        producer.release();
    }
}

#[test]
fn any_depth_is_a_positive_request() {
    for depth in [0, usize::MAX] {
        let (producer, opening) = FakeProducer::open(depth);
        assert_eq!(producer.schema(), 0);
        assert!(
            producer.requested() > 0,
            "{depth}: {:?}",
            producer.requests()
        );
        let mut stream = block_on(opening).unwrap();
        producer.task(&batch(1));
        assert_eq!(good(next(&mut stream)), 1);
        producer.release();
        producer.assert_balanced();
    }
}

#[test]
fn half_of_the_queue_is_requested_once_it_is_extracted() {
    for (depth, half) in [(1, 1), (2, 1), (3, 2), (4, 2), (7, 4)] {
        let (producer, mut stream) = opened(depth);
        let mut requests = vec![depth as i64];
        for i in 0..3 * half {
            assert!(
                producer.requested() > i,
                "{depth}: the producer has nothing to do"
            );
            producer.task(&batch(i));
            assert_eq!(producer.requests(), requests, "nothing was taken");
            good(next(&mut stream));
            if (i + 1) % half == 0 {
                requests.push(half);
            }
            assert_eq!(producer.requests(), requests, "{depth}");
        }
        producer.release();
    }
}

#[test]
fn a_request_comes_after_the_extraction() {
    let (producer, mut stream) = opened(2);
    producer.task(&batch(0));
    producer.task(&batch(1));
    good(next(&mut stream));
    good(next(&mut stream));
    let expected = ["request", "extract", "request", "extract", "request"];
    assert_eq!(producer.log(), expected);
    producer.release();
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

// ---- on_next_task

#[test]
fn nothing_is_extracted_inside_the_call() {
    let (producer, mut stream) = opened(2);
    producer.task(&batch(0));
    assert_eq!(producer.tasks(), (1, 0, 0));
    good(next(&mut stream));
    assert_eq!(producer.tasks(), (1, 1, 0));
    producer.release();
}

/// The task is refused with `EINVAL`; what came before it is good; one error, then the end.
#[track_caller]
fn refused(producer: FakeProducer, stream: AsyncDeviceRecordBatchStream, good: &[i64]) {
    assert_eq!(producer.task(&batch(99)), EINVAL, "later ones too");
    let (before, e) = up_to_error(stream);
    assert_eq!(before, good);
    invalid::<()>(Err(e));
    producer.release();
    producer.assert_balanced();
}

#[test]
fn a_task_before_the_schema_is_refused() {
    let (producer, opening) = FakeProducer::open(1);
    assert_eq!(producer.task(&batch(0)), EINVAL);
    assert_eq!(producer.tasks(), (1, 0, 1));
    invalid(block_on(opening));
    producer.release();
    producer.assert_balanced();
}

#[test]
fn an_end_before_the_schema_is_an_error() {
    let (producer, opening) = FakeProducer::open(1);
    assert_eq!(producer.end(), EINVAL);
    producer.release();
    invalid(block_on(opening));
}

#[test]
fn a_task_after_the_end_is_refused() {
    let (producer, mut stream) = opened(3);
    producer.task(&batch(0));
    producer.end();
    assert_eq!(producer.task(&batch(1)), EINVAL);
    assert_eq!(producer.tasks(), (2, 0, 1));
    producer.release();
    // The end has come, whatever follows.
    assert_eq!(good(next(&mut stream)), 0);
    assert!(next(&mut stream).is_none());
    producer.assert_balanced();
}

#[test]
fn a_task_without_extract_data_is_refused() {
    let (producer, stream) = opened(3);
    producer.task(&batch(0));
    // SAFETY: zero is a value of every member: an optional function and a pointer.
    let mut task = unsafe { MaybeUninit::zeroed().assume_init() };
    assert_eq!(producer.raw_task(&raw mut task, None), EINVAL);
    refused(producer, stream, &[0]);
}

#[test]
fn a_task_beyond_what_was_requested_is_refused() {
    let (producer, stream) = opened(2);
    producer.task(&batch(0));
    producer.task(&batch(1));
    assert_eq!(producer.task(&batch(2)), EINVAL);
    assert_eq!(producer.tasks(), (3, 0, 1));
    refused(producer, stream, &[0, 1]);
}

#[test]
fn metadata_of_a_task_that_cannot_be_read_is_refused() {
    let bad = [
        (-1i32).to_ne_bytes().to_vec(),
        [1i32, -5].iter().flat_map(|n| n.to_ne_bytes()).collect(),
        encode(&[(b"\xff\xfe", b"x")]),
        encode(&[(b"x", b"\xff")]),
    ];
    for metadata in bad {
        let (producer, stream) = opened(3);
        producer.task(&batch(0));
        assert_eq!(producer.task_with(&batch(1), Some(&metadata)), EINVAL);
        assert_eq!(producer.tasks(), (2, 0, 1), "{metadata:?}");
        refused(producer, stream, &[0]);
    }
}

#[test]
fn a_refusal_wakes() {
    let (producer, mut stream) = opened(1);
    let (wakes, waker) = Wakes::new();
    assert!(poll_next_with(&mut stream, &waker).is_pending());
    assert_eq!(producer.schema(), EINVAL);
    assert!(wakes.count() > 0);
    invalid(ready(poll_next(&mut stream)).unwrap());
}

/// A batch of other columns than the schema's is an error of the import.
#[test]
fn an_array_that_does_not_fit_the_schema_is_an_error() {
    let (producer, stream) = opened(3);
    producer.task(&batch(0));
    let values: arrow_array::ArrayRef = Arc::new(arrow_array::StringArray::from(vec!["x"]));
    let text = arrow_array::RecordBatch::try_from_iter([("t", values)]).unwrap();
    let text = arrow_device::Devices::cpu().upload(&text).unwrap();
    producer.task(&text);
    let (before, e) = up_to_error(stream);
    assert_eq!(before, [0]);
    assert_eq!(e.errno(), EINVAL, "{e}");
    assert_eq!(producer.cancels(), 1);
    producer.release();
    producer.assert_balanced();
}
