//! Errors, early releases, failing extractions and streams that are dropped: the consumer's side.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use arrow_device::async_stream::AsyncDeviceRecordBatchStream;
use arrow_device::device::sim::SimMode;
use arrow_device::{ArrowDeviceType, Error, FFI_ArrowDeviceArray};
use libc::{EINVAL, EIO, EPIPE};

use crate::async_stream::consumer::{good, invalid, opened, up_to_error};
use crate::async_stream::kit::*;
use crate::simkit::Sim;
use crate::support::producer::ints;

/// Errno, text and metadata of what a producer reported.
#[track_caller]
fn reported(e: Error) -> (i32, String, std::collections::HashMap<String, String>) {
    match e {
        Error::AsyncProducer {
            errno,
            message,
            metadata,
        } => (errno, message.into_owned(), metadata),
        other => panic!("{other:?} is not what the producer reported"),
    }
}

// ---- on_error

#[test]
fn an_error_before_the_schema_is_the_openings() {
    let (producer, opening) = FakeProducer::open(1);
    producer.error(7, Some(c"no table"), Some(&encode(&[(b"k", b"v")])));
    producer.release();
    let (errno, text, metadata) = reported(block_on(opening).map(|_| ()).unwrap_err());
    assert_eq!((errno, metadata), (7, map(&[("k", "v")])));
    assert!(text.contains("no table"), "{text}");
    producer.assert_balanced();
}

#[test]
fn an_error_comes_after_the_batches_before_it() {
    let (producer, stream) = opened(3);
    (0..3).for_each(|i| assert_eq!(producer.task(&batch(i)), 0));
    producer.error(12, Some(c"no memory"), None);
    producer.release();
    let (before, e) = up_to_error(stream);
    assert_eq!(before, [0, 1, 2]);
    let (errno, text, metadata) = reported(e);
    assert_eq!((errno, metadata.len()), (12, 0));
    assert!(text.contains("no memory"), "{text}");
    assert_eq!(producer.cancels(), 0, "it has stopped already");
    producer.assert_balanced();
}

#[test]
fn any_code_text_and_metadata_of_an_error_will_do() {
    for code in [0, -1, -22, 5, 123_456, i32::MIN, i32::MAX] {
        for text in [None, Some(c""), Some(c"\xff not UTF-8")] {
            for metadata in [None, Some(vec![0xff; 8]), Some(encode(&[(b"\xff", b"")]))] {
                let (producer, stream) = opened(1);
                producer.error(code, text, metadata.as_deref());
                let (before, e) = up_to_error(stream);
                assert!(before.is_empty());
                let errno = e.errno();
                assert_eq!(errno, if code == 0 { EIO } else { code });
                assert!(!e.to_string().is_empty());
                reported(e);
                producer.release();
                producer.assert_balanced();
            }
        }
    }
}

#[test]
fn a_second_error_is_ignored() {
    let (producer, stream) = opened(1);
    producer.error(7, Some(c"first"), None);
    producer.error(8, Some(c"second"), None);
    producer.release();
    let (_, e) = up_to_error(stream);
    assert_eq!(e.errno(), 7);
    producer.assert_balanced();
}

#[test]
fn an_error_after_the_end_is_ignored() {
    for seen in [false, true] {
        let (producer, mut stream) = opened(1);
        producer.end();
        if seen {
            assert!(next(&mut stream).is_none());
        }
        producer.error(7, Some(c"too late"), None);
        producer.release();
        assert!(next(&mut stream).is_none());
        producer.assert_balanced();
    }
}

#[test]
fn an_end_after_an_error_changes_nothing() {
    let (producer, stream) = opened(1);
    producer.error(7, None, None);
    producer.end();
    producer.release();
    assert_eq!(up_to_error(stream).1.errno(), 7);
}

#[test]
fn an_error_never_calls_the_producer() {
    let (producer, stream) = opened(4);
    producer.task(&batch(0));
    let before = producer.log();
    producer.error(7, None, None);
    assert_eq!(producer.log(), before);
    producer.release();
    assert_eq!(producer.log(), before);
    drop(stream);
    producer.assert_balanced();
}

// ---- release

#[test]
fn a_release_before_the_end_is_an_error() {
    let (producer, stream) = opened(3);
    producer.task(&batch(0));
    producer.task(&batch(1));
    producer.release();
    let (before, e) = up_to_error(stream);
    assert_eq!(before, [0, 1]);
    assert_eq!(e.errno(), EPIPE, "{e}");
    producer.assert_balanced();
}

#[test]
fn a_release_before_the_schema_is_an_error() {
    let (producer, opening) = FakeProducer::open(1);
    let mut opening = Box::pin(opening);
    let (wakes, waker) = Wakes::new();
    assert!(poll_with(&mut opening, &waker).is_pending());
    producer.release();
    assert!(wakes.count() > 0);
    let e = ready(poll(&mut opening)).map(|_| ()).unwrap_err();
    assert_eq!(e.errno(), EPIPE, "{e}");
    producer.assert_balanced();
}

#[test]
fn tasks_are_good_after_the_release_and_the_producers_end() {
    let (producer, mut stream) = opened(3);
    producer.task(&batch(5));
    producer.end();
    producer.release();
    producer.assert_balanced_but_tasks();
    drop(producer);
    assert_eq!(good(next(&mut stream)), 5);
    assert!(next(&mut stream).is_none());
}

// ---- extract_data

#[test]
fn a_failed_extraction_is_that_items_error_and_the_streams_end() {
    let (producer, stream) = opened(4);
    producer.task(&batch(0));
    producer.task_of(|_| 28, None);
    producer.task(&batch(2));
    let (before, e) = up_to_error(stream);
    assert_eq!(before, [0]);
    assert_eq!(reported(e).0, 28);
    assert_eq!(producer.cancels(), 1);
    assert_eq!(producer.task(&batch(3)), 0, "one that was on its way");
    producer.error(28, Some(c"as extract_data said"), None);
    producer.release();
    assert_eq!(producer.tasks(), (4, 2, 2));
    producer.assert_balanced();
}

#[test]
fn a_failed_extraction_is_told_with_the_producers_own_error() {
    let (producer, stream) = opened(4);
    producer.task_of(|_| 28, None);
    producer.error(
        28,
        Some(c"the disk is full"),
        Some(&encode(&[(b"disk", b"3")])),
    );
    let (_, e) = up_to_error(stream);
    let (errno, text, metadata) = reported(e);
    assert_eq!((errno, metadata), (28, map(&[("disk", "3")])));
    assert!(text.contains("the disk is full"), "{text}");
    producer.release();
    producer.assert_balanced();
}

#[test]
fn an_extraction_that_sets_nothing_is_refused() {
    let (producer, stream) = opened(4);
    producer.task(&batch(0));
    producer.task_of(|_| 0, None);
    let (before, e) = up_to_error(stream);
    assert_eq!(before, [0]);
    invalid::<()>(Err(e));
    producer.release();
    producer.assert_balanced();
}

/// `out` is a released struct, not garbage: producers may look.
#[test]
fn extract_data_gets_a_released_struct_to_write_to() {
    let (producer, mut stream) = opened(4);
    let look = |out: *mut FFI_ArrowDeviceArray| {
        // SAFETY: the consumer passes a struct that is valid for reads.
        if unsafe { (*out).is_released() } {
            5
        } else {
            6
        }
    };
    producer.task_of(look, None);
    assert_eq!(
        next(&mut stream).unwrap().map(|_| ()).unwrap_err().errno(),
        5
    );
    producer.release();
}

#[test]
fn an_array_that_a_failed_extraction_left_is_released() {
    let watch = Arc::new(AtomicUsize::new(0));
    let (producer, stream) = opened(4);
    let array = crate::support::producer::counted(&ints(), &watch);
    let body = move |out: *mut FFI_ArrowDeviceArray| {
        // SAFETY: the consumer passes memory for one struct.
        unsafe { array.write_to(out) };
        5
    };
    producer.task_of(body, None);
    assert_eq!(up_to_error(stream).1.errno(), 5);
    assert_eq!(watch.load(SeqCst), 1);
    producer.release();
}

#[test]
fn an_extraction_that_panics_is_an_error() {
    let (producer, stream) = opened(4);
    producer.task_of(|_| panic!("inside extract_data"), None);
    let (_, e) = up_to_error(stream);
    assert!(e.to_string().contains("inside extract_data"), "{e}");
    assert_eq!(e.errno(), EIO);
    producer.release();
    producer.assert_balanced();
}

#[test]
fn an_array_of_another_device_type_is_released_and_refused() {
    let watch = Arc::new(AtomicUsize::new(0));
    let (producer, opening) = FakeProducer::open_with(2, ArrowDeviceType::CUDA, Default::default());
    producer.schema();
    let stream = block_on(opening).unwrap();
    assert_eq!(stream.device_type(), ArrowDeviceType::CUDA);
    let array = crate::support::producer::counted(&ints(), &watch);
    let body = move |out: *mut FFI_ArrowDeviceArray| {
        // SAFETY: the consumer passes memory for one struct.
        unsafe { array.write_to(out) };
        0
    };
    producer.task_of(body, None);
    let (_, e) = up_to_error(stream);
    invalid::<()>(Err(e));
    assert_eq!(watch.load(SeqCst), 1);
    producer.release();
    producer.assert_balanced();
}

#[test]
fn a_device_that_nobody_knows_is_an_error() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    let known = FakeProducer::open_with(2, ArrowDeviceType::EXT_DEV, options_of(&sim));
    let (producer, opening) = known;
    producer.schema();
    let mut stream = block_on(opening).unwrap();
    let other = Sim::new(SimMode::Async);
    producer.task(&sim.upload(&numbers(700, 5)).unwrap());
    producer.task(&other.upload(&numbers(0, 3)).unwrap());
    let first = next(&mut stream).unwrap().unwrap().batch;
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

// ---- dropping

#[test]
fn a_dropped_stream_cancels_and_extracts_with_null() {
    let (producer, mut stream) = opened(4);
    (0..3).for_each(|i| assert_eq!(producer.task(&batch(i)), 0));
    good(next(&mut stream));
    drop(stream);
    assert_eq!(producer.cancels(), 1);
    assert_eq!(producer.tasks(), (3, 1, 2));
    assert_eq!(producer.task(&batch(3)), 0, "a late one");
    assert_eq!(producer.end(), 0);
    producer.error(7, None, None);
    producer.release();
    assert_eq!(producer.tasks(), (4, 1, 3));
    assert_eq!(producer.cancels(), 1);
    producer.assert_balanced();
}

#[test]
fn a_stream_that_has_ended_is_not_cancelled() {
    for fails in [false, true] {
        let (producer, stream) = opened(4);
        producer.task(&batch(0));
        match fails {
            false => assert_eq!(producer.end(), 0),
            true => producer.error(7, None, None),
        }
        drop(stream);
        assert_eq!(producer.cancels(), 0, "it has stopped already");
        producer.release();
        producer.assert_balanced();
    }
}

#[test]
fn a_dropped_stream_does_not_call_a_producer_that_has_gone() {
    let (producer, stream) = opened(4);
    producer.task(&batch(0));
    producer.release();
    drop(stream);
    assert_eq!(producer.cancels(), 0);
    assert_eq!(producer.tasks(), (1, 0, 1));
    producer.assert_balanced();
}

/// Dropped while the producer is in the consumer's own `request` of `on_schema`.
#[test]
fn an_opening_dropped_within_on_schema_cancels() {
    let (producer, opening) = FakeProducer::open(2);
    let opening = Mutex::new(Some(opening));
    producer.on_request(move |_, _| drop(opening.lock().unwrap().take()));
    let code = producer.schema();
    assert!([0, libc::ECANCELED].contains(&code), "{code}");
    if code == 0 {
        assert_eq!(producer.cancels(), 1);
        assert_eq!(producer.task(&batch(0)), 0);
    }
    producer.release();
    producer.assert_balanced();
}

/// The batches of a stream outlive it and its producer.
#[test]
fn batches_outlive_their_stream() {
    let (producer, mut stream) = opened(4);
    producer.task(&batch(3));
    let kept = next(&mut stream).unwrap().unwrap().batch;
    drop(stream);
    producer.release();
    drop(producer);
    assert_eq!(number_of(&kept), 3);
}

#[test]
fn into_batches_gives_the_same_batches() {
    use arrow_device::async_stream::DeviceRecordBatchStream;
    let (producer, stream) = opened(4);
    let mut batches = AsyncDeviceRecordBatchStream::into_batches(stream);
    assert_eq!(batches.schema(), numbers(0, 1).schema());
    assert_eq!(batches.device_type(), ArrowDeviceType::CPU);
    producer.task_with(&batch(1), Some(&encode(&[(b"k", b"v")])));
    producer.error(EINVAL, Some(c"sorry"), None);
    assert_eq!(number_of(&next(&mut batches).unwrap().unwrap()), 1);
    assert_eq!(next(&mut batches).unwrap().unwrap_err().errno(), EINVAL);
    assert!(next(&mut batches).is_none());
    producer.release();
}

/// An event of the producer goes on with the batch: nothing waits for it here.
#[test]
fn a_batch_that_is_not_ready_is_not_waited_for() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Deferred);
    let (producer, opening) =
        FakeProducer::open_with(2, ArrowDeviceType::EXT_DEV, options_of(&sim));
    producer.schema();
    let mut stream = block_on(opening).unwrap();
    let before = sim.stats();
    let up = sim.upload(&numbers(900, 5)).unwrap();
    producer.task(&up);
    drop(up);
    let back = ready(poll_next(&mut stream)).unwrap().unwrap().batch;
    assert!(!back.is_ready().unwrap());
    assert_eq!(sim.stats().since(&before).host_waits, 0);
    assert_eq!(number_of(&back), 9);
    producer.end();
    producer.release();
    assert!(next(&mut stream).is_none());
    drop((back, stream));
    producer.assert_balanced();
    sim.assert_done();
}
