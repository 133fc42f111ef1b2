//! What the consumer does with a producer that keeps to the rules, and with schemas and tasks that do not.

use std::ptr;

use arrow_device::async_stream::{AsyncBatch, AsyncDeviceRecordBatchStream};
use arrow_device::{ArrowDeviceType, Error, ImportOptions, Result};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field, Schema};
use libc::{ECANCELED, EINVAL};

use crate::async_stream::kit::*;

/// A producer, and the stream that it opened.
pub(crate) fn opened(depth: usize) -> (FakeProducer, AsyncDeviceRecordBatchStream) {
    let (producer, mut opening) = FakeProducer::open(depth);
    assert!(poll(&mut opening).is_pending());
    assert_eq!(producer.schema(), 0);
    (producer, ready(poll(&mut opening)).unwrap())
}

#[track_caller]
pub(crate) fn invalid<T>(outcome: Result<T>) -> String {
    match outcome {
        Err(e @ Error::InvalidInput { .. }) => e.to_string(),
        Err(e) => panic!("{e:?} is not InvalidInput"),
        Ok(_) => panic!("is not an error"),
    }
}

#[track_caller]
pub(crate) fn good(item: Option<Result<AsyncBatch>>) -> i64 {
    number_of(&item.expect("ended").unwrap().batch)
}

/// Good batches up to the one error that must be the last item.
#[track_caller]
pub(crate) fn up_to_error(stream: AsyncDeviceRecordBatchStream) -> (Vec<i64>, Error) {
    let mut items = all(stream);
    let error = items.pop().expect("no item").map(|_| ()).unwrap_err();
    let numbers = items.into_iter().map(|item| good(Some(item)));
    (numbers.collect(), error)
}

#[test]
fn streams_move_between_threads() {
    fn send<T: Send + Unpin>() {}
    send::<AsyncDeviceRecordBatchStream>();
    send::<arrow_device::async_stream::Opening>();
    send::<arrow_device::async_stream::AsyncStreamHandler>();
    send::<arrow_device::async_stream::Batches>();
}

#[test]
fn a_good_stream_comes_as_it_was_sent() {
    let (producer, mut stream) = opened(3);
    assert_eq!(stream.schema(), numbers(0, 1).schema());
    assert_eq!(stream.device_type(), ArrowDeviceType::CPU);
    assert!(stream.metadata().is_empty());
    for i in 0..10 {
        assert!(poll_next(&mut stream).is_pending());
        assert_eq!(producer.task(&batch(i)), 0);
        assert_eq!(good(next(&mut stream)), i);
    }
    assert_eq!(producer.end(), 0);
    producer.release();
    assert!(next(&mut stream).is_none());
    assert!(next(&mut stream).is_none(), "the end stays");
    drop(stream);
    assert_eq!(producer.cancels(), 0);
    producer.assert_balanced();
}

#[test]
fn the_end_wakes_and_may_come_before_the_release() {
    let (producer, mut stream) = opened(1);
    let (wakes, waker) = Wakes::new();
    assert!(poll_next_with(&mut stream, &waker).is_pending());
    assert_eq!(producer.end(), 0);
    assert!(wakes.count() > 0);
    assert!(ready(poll_next(&mut stream)).is_none());
    producer.release();
    producer.assert_balanced();
}

#[test]
fn schema_tasks_and_errors_wake() {
    let (producer, mut opening) = FakeProducer::open(2);
    let (wakes, waker) = Wakes::new();
    assert!(poll_with(&mut opening, &waker).is_pending());
    producer.schema();
    assert!(wakes.count() > 0);
    let mut stream = ready(poll(&mut opening)).unwrap();
    for what in 0..2 {
        let (wakes, waker) = Wakes::new();
        assert!(poll_next_with(&mut stream, &waker).is_pending());
        match what {
            0 => assert_eq!(producer.task(&batch(0)), 0),
            _ => producer.error(5, None, None),
        }
        assert!(wakes.count() > 0, "{what}");
        assert!(poll_next(&mut stream).is_ready());
    }
}

/// A stream that moves between tasks wakes the last one that asked.
#[test]
fn the_last_waker_is_woken() {
    let (producer, mut stream) = opened(1);
    let ((_, first), (second, waker)) = (Wakes::new(), Wakes::new());
    assert!(poll_next_with(&mut stream, &first).is_pending());
    assert!(poll_next_with(&mut stream, &waker).is_pending());
    assert_eq!(producer.task(&batch(0)), 0);
    assert!(second.count() > 0);
}

#[test]
fn memory_of_into_raw_is_given_back_after_release() {
    let options = ImportOptions::default();
    // SAFETY: the handler goes to `FakeProducer`, which keeps to the interface.
    let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(2, options) };
    let producer = FakeProducer::with_pointer(handler.into_raw(), false, ArrowDeviceType::CPU);
    producer.schema();
    let mut stream = block_on(opening).unwrap();
    producer.task(&batch(4));
    producer.end();
    producer.release();
    assert_eq!(good(next(&mut stream)), 4);
    assert!(next(&mut stream).is_none());
    producer.assert_balanced();
}

#[test]
fn a_handler_that_is_never_given_away_ends_the_opening() {
    for how in 0..2 {
        // SAFETY: no producer gets the handler, so nothing calls it.
        let (handler, opening) =
            unsafe { AsyncDeviceRecordBatchStream::handler(2, ImportOptions::default()) };
        match how {
            0 => drop(handler),
            _ => drop(handler.into_ffi()),
        }
        let e = block_on(opening).map(|_| ()).unwrap_err();
        assert_ne!(e.errno(), 0, "{e}");
    }
}

#[test]
fn metadata_of_the_stream_and_of_batches_is_copied() {
    let (producer, opening) = FakeProducer::open(4);
    producer.set_metadata(encode(&[(b"rows", b"7"), (b"", b"")]));
    assert_eq!(producer.schema(), 0);
    let mut stream = block_on(opening).unwrap();
    assert_eq!(*stream.metadata(), map(&[("rows", "7"), ("", "")]));
    let mut metadata = encode(&[(b"part", "äöü".as_bytes())]);
    assert_eq!(producer.task_with(&batch(1), Some(&metadata)), 0);
    metadata.fill(0xff);
    assert_eq!(producer.task_with(&batch(2), Some(&encode(&[]))), 0);
    assert_eq!(producer.task(&batch(3)), 0);
    let items = [(); 3].map(|()| next(&mut stream).unwrap().unwrap());
    let found = items.map(|item| (number_of(&item.batch), item.metadata));
    let expected = [(1, map(&[("part", "äöü")])), (2, map(&[])), (3, map(&[]))];
    assert_eq!(found, expected);
}

// ---- on_schema

#[test]
fn a_schema_without_a_producer_is_refused() {
    let (producer, opening) = FakeProducer::open(1);
    let schema = FFI_ArrowSchema::try_from(numbers(0, 1).schema().as_ref()).unwrap();
    assert_eq!(producer.give(CountedSchema::of(schema)), EINVAL);
    producer.release();
    invalid(block_on(opening));
    producer.assert_balanced();
}

#[test]
fn a_producer_without_request_or_cancel_is_refused() {
    for missing in [1, 2] {
        let (producer, opening) = FakeProducer::open(1);
        producer.without_callback(missing);
        assert_eq!(producer.schema(), EINVAL);
        invalid(block_on(opening));
        producer.release();
        assert_eq!((producer.requests().len(), producer.cancels()), (0, 0));
        producer.assert_balanced();
    }
}

#[test]
fn a_null_schema_is_refused() {
    let (producer, opening) = FakeProducer::open(1);
    producer.connect();
    // SAFETY: null is refused before it is followed, which is what is tested; all other pointers
    // are to live structs.
    assert_eq!(unsafe { producer.raw_schema(ptr::null_mut()) }, EINVAL);
    invalid(block_on(opening));
    producer.release();
    assert_eq!(producer.requested(), 0);
    producer.assert_balanced();
}

#[test]
fn a_released_schema_is_refused() {
    let (producer, opening) = FakeProducer::open(1);
    producer.connect();
    let mut schema = FFI_ArrowSchema::empty();
    // SAFETY: `schema` is an initialized struct that nothing else uses.
    assert_eq!(unsafe { producer.raw_schema(&raw mut schema) }, EINVAL);
    assert!(block_on(opening).is_err());
    producer.release();
}

#[test]
fn a_second_schema_is_refused_after_the_batches_before_it() {
    let (producer, stream) = opened(4);
    producer.task(&batch(1));
    producer.task(&batch(2));
    assert_eq!(producer.schema(), EINVAL);
    assert_eq!(producer.task(&batch(3)), EINVAL);
    producer.release();
    let (before, e) = up_to_error(stream);
    assert_eq!(before, [1, 2]);
    invalid::<()>(Err(e));
    assert_eq!(producer.tasks(), (3, 2, 1));
    producer.assert_balanced();
}

#[test]
fn a_schema_after_an_error_is_refused() {
    let (producer, opening) = FakeProducer::open(1);
    producer.error(5, Some(c"early"), None);
    assert_eq!(producer.schema(), EINVAL);
    producer.release();
    let e = block_on(opening).map(|_| ()).unwrap_err();
    assert!(matches!(e, Error::AsyncProducer { errno: 5, .. }), "{e:?}");
    producer.assert_balanced();
}

#[test]
fn a_schema_after_the_end_is_refused() {
    for seen in [false, true] {
        let (producer, mut stream) = opened(1);
        producer.end();
        if seen {
            assert!(next(&mut stream).is_none());
        }
        let code = producer.schema();
        assert!(code == EINVAL || seen && code == ECANCELED, "{code}");
        producer.release();
        assert!(next(&mut stream).is_none());
        producer.assert_balanced();
    }
}

#[test]
fn a_schema_that_cannot_be_imported_is_refused() {
    let int = Field::new("i", DataType::Int32, true);
    let bad = [
        FFI_ArrowSchema::try_new("no such format", vec![], None).unwrap(),
        FFI_ArrowSchema::try_from(&int).unwrap(),
    ];
    for schema in bad {
        let (producer, opening) = FakeProducer::open(1);
        producer.connect();
        assert_eq!(producer.give(CountedSchema::of(schema)), EINVAL);
        let e = block_on(opening).map(|_| ()).unwrap_err();
        assert_eq!(e.errno(), EINVAL, "{e}");
        producer.release();
        assert_eq!(producer.requested(), 0);
        producer.assert_balanced();
    }
}

#[test]
fn a_schema_for_a_dropped_opening_is_cancelled() {
    let (producer, opening) = FakeProducer::open(1);
    drop(opening);
    assert_eq!(producer.schema(), ECANCELED);
    producer.release();
    assert_eq!(producer.requested(), 0);
    producer.assert_balanced();
}

#[test]
fn a_dropped_opening_cancels_after_the_schema() {
    let (producer, opening) = FakeProducer::open(4);
    assert_eq!(producer.schema(), 0);
    assert_eq!(producer.task(&batch(1)), 0);
    drop(opening);
    assert_eq!(producer.cancels(), 1);
    assert_eq!(producer.task(&batch(2)), 0);
    producer.release();
    assert_eq!(producer.tasks(), (2, 0, 2));
    producer.assert_balanced();
}

#[test]
fn a_schema_of_no_columns_is_good() {
    let (producer, opening) = FakeProducer::open(1);
    assert_eq!(producer.schema_of(&Schema::empty()), 0);
    assert_eq!(block_on(opening).unwrap().schema().fields().len(), 0);
    producer.release();
}

#[test]
fn null_self_is_refused() {
    // SAFETY: no producer gets the handler, so nothing calls it.
    let (handler, _opening) =
        unsafe { AsyncDeviceRecordBatchStream::handler(1, ImportOptions::default()) };
    let handler = handler.into_ffi();
    let schema = FFI_ArrowSchema::try_from(numbers(0, 1).schema().as_ref()).unwrap();
    let mut schema = CountedSchema::of(schema);
    let null = ptr::null_mut();
    let (producer, _other) = FakeProducer::open(1);
    let mut task = producer.make_task(|_| 0);
    // SAFETY: null is refused before it is followed, which is what is tested; all other pointers
    // are to live structs.
    unsafe {
        let code = handler.on_next_task().unwrap()(null, &raw mut task, ptr::null());
        assert_eq!((code, producer.tasks()), (EINVAL, (1, 0, 1)));
        assert_eq!(
            handler.on_schema().unwrap()(null, &raw mut schema.c),
            EINVAL
        );
        let code = handler.on_next_task().unwrap()(null, ptr::null_mut(), ptr::null());
        assert_eq!(code, EINVAL);
        handler.on_error().unwrap()(null, 5, ptr::null(), ptr::null());
        handler.release().unwrap()(null);
    }
}
