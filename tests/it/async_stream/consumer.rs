//! What the consumer does with a producer that keeps to the rules, and with ones that break them.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use arrow_device::async_stream::{AsyncDeviceRecordBatchStream, DeviceRecordBatchStream};
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, Devices, Error, FFI_ArrowDeviceArray, ImportOptions, Result,
};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field, Schema};
use libc::{ECANCELED, EINVAL, EIO, EPIPE};

use crate::async_stream::kit::*;
use crate::support::producer::{counted, ints};

/// A producer, and the stream that it opened.
pub(crate) fn opened(depth: usize) -> (FakeProducer, AsyncDeviceRecordBatchStream) {
    let (producer, mut opening) = FakeProducer::open(depth);
    assert!(poll(&mut opening).is_pending());
    assert_eq!(producer.schema(), 0);
    (producer, ready(poll(&mut opening)).unwrap())
}

#[track_caller]
pub(crate) fn good(item: Option<Result<DeviceRecordBatch>>) -> i64 {
    number_of(&item.expect("ended").unwrap())
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
    send::<Opening>();
}

#[test]
fn a_good_stream_comes_as_it_was_sent() {
    let (producer, mut stream) = opened(3);
    assert_eq!(stream.schema(), numbers(0, 1).schema());
    assert_eq!(stream.device_type(), ArrowDeviceType::CPU);
    assert!(stream.metadata().unwrap().is_empty());
    for i in 0..10 {
        assert!(poll_next(&mut stream).is_pending());
        assert_eq!(producer.task(&batch(i)), 0);
        assert_eq!(good(next(&mut stream)), i);
    }
    assert_eq!(producer.end(), 0);
    assert!(ready(poll_next(&mut stream)).is_none(), "needs no release");
    producer.release();
    assert!(next(&mut stream).is_none(), "the end stays");
    drop(stream);
    assert_eq!(producer.cancels(), 0);
    producer.assert_balanced();
}

/// A stream that moves between tasks wakes the last one that asked.
#[test]
fn whatever_comes_wakes_the_last_task_that_asked() {
    let acts: [fn(&FakeProducer); 5] = [
        |producer| _ = producer.task(&batch(0)),
        |producer| _ = producer.end(),
        |producer| _ = producer.schema(),
        |producer| producer.error(5, None, None),
        FakeProducer::release,
    ];
    for (i, act) in acts.into_iter().enumerate() {
        let (producer, mut stream) = opened(1);
        let ((_, first), (second, waker)) = (Wakes::new(), Wakes::new());
        assert!(poll_next_with(&mut stream, &first).is_pending());
        assert!(poll_next_with(&mut stream, &waker).is_pending());
        act(&producer);
        assert!(second.count() > 0, "{i}");
        assert!(poll_next(&mut stream).is_ready(), "{i}");
    }
}

#[test]
fn metadata_of_the_stream_and_of_batches_is_copied() {
    let (producer, opening) = FakeProducer::open(4);
    producer.set_metadata(encode(&[(b"rows", b"7"), (b"", b"")]));
    assert_eq!(producer.schema(), 0);
    let mut stream = block_on(opening).unwrap();
    assert_eq!(*stream.metadata().unwrap(), map(&[("rows", "7"), ("", "")]));
    let mut metadata = encode(&[(b"part", "äöü".as_bytes())]);
    assert_eq!(producer.task_with(&batch(1), Some(&metadata)), 0);
    metadata.fill(0xff);
    assert_eq!(producer.task_with(&batch(2), Some(&encode(&[]))), 0);
    assert_eq!(producer.task(&batch(3)), 0);
    let found = [(); 3].map(|()| {
        let batch = next(&mut stream).unwrap().unwrap();
        (number_of(&batch), stream.batch_metadata().unwrap().clone())
    });
    let expected = [(1, map(&[("part", "äöü")])), (2, map(&[])), (3, map(&[]))];
    assert_eq!(found, expected);
}

#[test]
fn a_schema_of_no_columns_is_good() {
    let (producer, opening) = FakeProducer::open(1);
    assert_eq!(producer.schema_of(&Schema::empty()), 0);
    assert_eq!(block_on(opening).unwrap().schema().fields().len(), 0);
    producer.release();
}

fn schema() -> FFI_ArrowSchema {
    FFI_ArrowSchema::try_from(numbers(0, 1).schema().as_ref()).unwrap()
}

/// What a producer does, and what it is told.
pub(crate) fn act(p: &FakeProducer, what: &str) -> c_int {
    let error = |code| p.error(code, Some(c"as it is"), None);
    let connected = |schema| {
        p.connect();
        p.give(CountedSchema::of(schema))
    };
    match what {
        "no producer" => return p.give(CountedSchema::of(schema())),
        "no request" => p.without_callback(1),
        "no cancel" => p.without_callback(2),
        "no format" => {
            return connected(FFI_ArrowSchema::try_new(what, vec![], None).unwrap());
        }
        "no struct" => {
            let int = Field::new("i", DataType::Int32, true);
            return connected(FFI_ArrowSchema::try_from(&int).unwrap());
        }
        "null" => {
            p.connect();
            // SAFETY: null is refused before it is followed, which is what is tested.
            return unsafe { p.raw_schema(ptr::null_mut()) };
        }
        "a released schema" => {
            let mut schema = FFI_ArrowSchema::empty();
            p.connect();
            // SAFETY: the struct is an initialized one that nothing else uses.
            return unsafe { p.raw_schema(&raw mut schema) };
        }
        "a schema" => {}
        "a task" => return p.task(&batch(2)),
        "two tasks" => return (p.task(&batch(2)), p.task(&batch(3))).1,
        "a task without extract_data" => {
            // SAFETY: zero is a value of every member: an optional function and a pointer.
            let mut task = unsafe { MaybeUninit::zeroed().assume_init() };
            return p.raw_task(&raw mut task, None);
        }
        "an array of other columns" => {
            let values: ArrayRef = Arc::new(StringArray::from(vec!["x"]));
            let text = RecordBatch::try_from_iter([("t", values)]).unwrap();
            return p.task(&Devices::cpu().upload(&text).unwrap());
        }
        "the end" => return p.end(),
        "an error" => return (error(7), 0).1,
        "another error" => return (error(8), 0).1,
        "a release" => return (p.release(), 0).1,
        "a negative count" => return p.task_with(&batch(2), Some(&(-1i32).to_ne_bytes())),
        "a negative length" => {
            let metadata = [1i32, -5].map(i32::to_ne_bytes).concat();
            return p.task_with(&batch(2), Some(&metadata));
        }
        "a bad key" => return p.task_with(&batch(2), Some(&encode(&[(b"\xff", b"x")]))),
        "a bad value" => return p.task_with(&batch(2), Some(&encode(&[(b"x", b"\xff")]))),
        _ => unreachable!("{what}"),
    }
    p.schema()
}

/// What comes before there is a stream: the code of the last call, and the opening's error. The producer is not called.
#[test]
fn what_ends_an_opening() {
    let cases: [(&[&str], c_int, c_int); 12] = [
        (&["no producer"], EINVAL, EINVAL),
        (&["no request"], EINVAL, EINVAL),
        (&["no cancel"], EINVAL, EINVAL),
        (&["no format"], EINVAL, EINVAL),
        (&["no struct"], EINVAL, EINVAL),
        (&["null"], EINVAL, EINVAL),
        (&["a released schema"], EINVAL, EINVAL),
        (&["a task"], EINVAL, EINVAL),
        (&["the end"], EINVAL, EINVAL),
        (&["an error"], 0, 7),
        (&["an error", "a schema"], EINVAL, 7),
        (&["a release"], 0, EPIPE),
    ];
    for (acts, answer, errno) in cases {
        let (producer, mut opening) = FakeProducer::open(1);
        let (wakes, waker) = Wakes::new();
        assert!(poll_with(&mut opening, &waker).is_pending());
        let answers: Vec<_> = acts.iter().map(|what| act(&producer, what)).collect();
        assert_eq!(answers.last(), Some(&answer), "{acts:?}");
        assert!(wakes.count() > 0, "{acts:?}");
        let e = ready(poll(&mut opening)).map(|_| ()).unwrap_err();
        assert_eq!(e.errno(), errno, "{acts:?}: {e}");
        producer.release();
        let called = (producer.requested(), producer.cancels());
        assert_eq!(called, (0, 0), "{acts:?}");
        assert_eq!(producer.tasks().1, 0, "{acts:?}");
        producer.assert_balanced();
    }
}

/// What comes after the schema and two batches: the code of the last call, and the error of the reader's last item, or none. What
/// a producer does wrong is refused, as is all that comes later; what came before it is good.
#[test]
fn what_ends_a_stream() {
    let cases: [(&[&str], c_int, c_int); 17] = [
        (&["a schema"], EINVAL, EINVAL),
        (&["two tasks"], EINVAL, EINVAL),
        (&["a task without extract_data"], EINVAL, EINVAL),
        (&["a negative count"], EINVAL, EINVAL),
        (&["a negative length"], EINVAL, EINVAL),
        (&["a bad key"], EINVAL, EINVAL),
        (&["a bad value"], EINVAL, EINVAL),
        (&["an array of other columns"], 0, EINVAL),
        (&["the end"], 0, 0),
        (&["the end", "a task"], EINVAL, 0),
        (&["the end", "a schema"], EINVAL, 0),
        (&["the end", "an error"], 0, 0),
        (&["an error"], 0, 7),
        (&["an error", "another error"], 0, 7),
        (&["an error", "the end"], 0, 7),
        (&["a release"], 0, EPIPE),
        (&["an error", "a release"], 0, 7),
    ];
    for (acts, answer, errno) in cases {
        let (producer, stream) = opened(3);
        (0..2).for_each(|i| assert_eq!(producer.task(&batch(i)), 0));
        let answers: Vec<_> = acts.iter().map(|what| act(&producer, what)).collect();
        // Who goes on after an error is not told again, and sends nothing any more.
        if acts[0] != "an error" {
            assert_eq!(answers.last(), Some(&answer), "{acts:?}");
        }
        if answer == EINVAL {
            assert_eq!(
                producer.task(&batch(99)),
                EINVAL,
                "{acts:?}: later ones too"
            );
        }
        let refused = producer.tasks().2;
        let (mut good, mut errors) = (vec![], vec![]);
        for item in all(stream) {
            match item {
                Ok(item) => good.push(number_of(&item)),
                Err(e) => errors.push(e.errno()),
            }
        }
        let first = if acts[0] == "two tasks" { 3 } else { 2 };
        assert_eq!(good, (0..first).collect::<Vec<_>>(), "{acts:?}");
        let expected = (errno != 0).then_some(errno);
        assert_eq!(errors, expected.into_iter().collect::<Vec<_>>(), "{acts:?}");
        // Who has stopped already is not told to.
        if answer == 0 && acts[0] != "an array of other columns" {
            assert_eq!((producer.cancels(), refused), (0, 0), "{acts:?}");
        }
        producer.release();
        producer.assert_balanced();
    }
}

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

/// Of an opening, of a stream, and of an extraction that has failed before.
#[test]
fn an_error_is_told_with_errno_text_and_metadata() {
    let tell = |producer: &FakeProducer| {
        let before = producer.log();
        let metadata = encode(&[(b"disk", b"3")]);
        producer.error(28, Some(c"the disk is full"), Some(&metadata));
        producer.error(8, Some(c"second"), None);
        producer.release();
        assert_eq!(producer.log(), before, "calls nobody");
    };
    let (producer, opening) = FakeProducer::open(1);
    tell(&producer);
    let of_opening = block_on(opening).map(|_| ()).unwrap_err();
    let (producer, stream) = opened(4);
    tell(&producer);
    let of_stream = up_to_error(stream).1;
    let (producer, stream) = opened(4);
    producer.task_of(|_| 28, None);
    tell(&producer);
    let of_extraction = up_to_error(stream).1;
    for e in [of_opening, of_stream, of_extraction] {
        let (errno, text, metadata) = reported(e);
        assert_eq!((errno, metadata), (28, map(&[("disk", "3")])));
        assert!(text.contains("the disk is full"), "{text}");
    }
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
                assert_eq!(e.errno(), if code == 0 { EIO } else { code });
                assert!(!e.to_string().is_empty());
                reported(e);
                producer.release();
                producer.assert_balanced();
            }
        }
    }
}

/// It is that item's error and the stream's end; what it left behind is released.
#[test]
fn a_failed_extraction() {
    type Body = fn(FFI_ArrowDeviceArray, *mut FFI_ArrowDeviceArray) -> c_int;
    fn leaves(array: FFI_ArrowDeviceArray, out: *mut FFI_ArrowDeviceArray) {
        // SAFETY: the consumer passes memory for one struct.
        unsafe { out.write(array) };
    }
    let looks: Body = |_, out| {
        // SAFETY: the consumer passes a struct that is valid for reads.
        let released = unsafe { (*out).is_released() };
        if released { 5 } else { 6 }
    };
    let cases: [(&str, Body, c_int); 6] = [
        ("fails", |_, _| 28, 28),
        ("is given a released struct", looks, 5),
        ("leaves an array", |a, out| (leaves(a, out), 5).1, 5),
        ("sets nothing", |_, _| 0, EINVAL),
        ("panics", |_, _| panic!("inside extract_data"), EIO),
        ("CUDA", |a, out| (leaves(a, out), 0).1, EINVAL),
    ];
    for (name, body, errno) in cases {
        let device_type = match name {
            "CUDA" => ArrowDeviceType::CUDA,
            _ => ArrowDeviceType::CPU,
        };
        let (producer, opening) = FakeProducer::open_with(4, device_type, Default::default());
        assert_eq!(producer.schema(), 0);
        let stream = block_on(opening).unwrap();
        assert_eq!(stream.device_type(), device_type);
        let first = i64::from(device_type == ArrowDeviceType::CPU);
        (0..first).for_each(|i| assert_eq!(producer.task(&batch(i)), 0));
        let watch = Arc::new(AtomicUsize::new(0));
        let array = counted(&ints(), &watch);
        producer.task_of(move |out| body(array, out), None);
        producer.task(&batch(2));
        let (before, e) = up_to_error(stream);
        assert_eq!(
            (before.len() as i64, e.errno()),
            (first, errno),
            "{name}: {e}"
        );
        assert_eq!(
            e.to_string().contains("inside extract_data"),
            name == "panics",
            "{e}"
        );
        assert_eq!((watch.load(SeqCst), producer.cancels()), (1, 1), "{name}");
        assert_eq!(producer.task(&batch(3)), 0, "one that was on its way");
        producer.error(28, Some(c"as extract_data said"), None);
        producer.release();
        let (tasks, data, null) = producer.tasks();
        assert_eq!(
            (data as i64, null, tasks),
            (first + 1, 2, data + 2),
            "{name}"
        );
        producer.assert_balanced();
    }
}

#[test]
fn null_self_is_refused() {
    // SAFETY: the handler is used by this test alone.
    let (handler, _opening) =
        unsafe { AsyncDeviceRecordBatchStream::handler(1, ImportOptions::default()) };
    let mut schema = CountedSchema::of(schema());
    let null = ptr::null_mut();
    let (producer, _other) = FakeProducer::open(1);
    let mut task = producer.make_task(|_| 0);
    // SAFETY: null is refused before it is followed, which is what is tested; all other pointers
    // are to live structs.
    unsafe {
        let on_next_task = (*handler).on_next_task.unwrap();
        assert_eq!(on_next_task(null, &raw mut task, ptr::null()), EINVAL);
        assert_eq!(producer.tasks(), (1, 0, 1));
        assert_eq!(on_next_task(null, ptr::null_mut(), ptr::null()), EINVAL);
        assert_eq!(
            (*handler).on_schema.unwrap()(null, &raw mut schema.c),
            EINVAL
        );
        (*handler).on_error.unwrap()(null, 5, ptr::null(), ptr::null());
        let release = (*handler).release.unwrap();
        release(null);
        release(handler);
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
