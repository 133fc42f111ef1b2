//! The C interface of streams, with no device but the CPU: errors, ends, and producers and consumers that misbehave.

use std::ffi::{CStr, CString, c_int};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::SeqCst};

use crate::support::c_stream::CStream;
use crate::support::producer::{Producer, counted, ints, relabel};
use arrow_array::{RecordBatch, RecordBatchIterator, StringArray};
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatchReader, DeviceRecordBatchStreamReader, DeviceRecordBatches,
    Devices, Error, ExportOptions, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream, ImportOptions,
    SyncPolicy, export_reader,
};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{ArrowError, DataType, Schema};

const EVENT: ExportOptions = ExportOptions::new(SyncPolicy::Event);

fn open(
    stream: FFI_ArrowDeviceArrayStream,
    options: &ImportOptions,
) -> DeviceRecordBatchStreamReader {
    // SAFETY: the tests' streams keep to the interface.
    unsafe { DeviceRecordBatchStreamReader::new(stream, options.clone()) }.unwrap()
}

#[test]
fn foreign_errors_arrive_and_end_the_reader() {
    let batch = ints();
    let arrays = Arc::new(AtomicUsize::new(0));
    let (array, calls) = (counted(&batch, &arrays), Arc::new(AtomicUsize::new(0)));
    let mut first = Some(array);
    let counter = calls.clone();
    let mut producer = Producer::new(&batch.schema(), move |out| {
        counter.fetch_add(1, SeqCst);
        match first.take() {
            Some(array) => {
                // SAFETY: the consumer passes memory for one struct.
                unsafe { out.write(array) };
                0
            }
            None => 71,
        }
    });
    producer.text = Some(CString::new("the disk is gone").unwrap());
    let (stream, released) = producer.stream(ArrowDeviceType::CPU);
    let mut reader = open(stream, &ImportOptions::default());
    let good = reader.next().unwrap().unwrap();
    let e = reader.next().unwrap().unwrap_err();
    assert!(
        matches!(&e, Error::Foreign { errno: 71, message, .. } if message == "the disk is gone")
    );
    assert_eq!(e.errno(), 71);
    assert!(reader.next().is_none());
    assert_eq!(calls.load(SeqCst), 2, "a reader that failed asks no more");
    drop(reader);
    assert_eq!(released.load(SeqCst), 1);
    assert_eq!(good.to_host().unwrap().num_rows(), 3, "outlives the stream");
    drop(good);
    assert_eq!(arrays.load(SeqCst), 1);
}

#[test]
fn out_that_is_filled_before_a_failure_is_released() {
    let batch = ints();
    let arrays = Arc::new(AtomicUsize::new(0));
    let mut array = Some(counted(&batch, &arrays));
    let producer = Producer::new(&batch.schema(), move |out| {
        // SAFETY: the consumer passes memory for one struct.
        unsafe { out.write(array.take().unwrap()) };
        5
    });
    let (stream, released) = producer.stream(ArrowDeviceType::CPU);
    let mut reader = open(stream, &ImportOptions::default());
    let e = reader.next().unwrap().unwrap_err();
    assert!(e.to_string().contains("no text"), "{e}");
    assert_eq!(arrays.load(SeqCst), 1);
    drop(reader);
    assert_eq!(released.load(SeqCst), 1);
}

#[test]
fn another_device_type_is_refused_and_released() {
    // Arrow C++ loses such a batch (defect 3.3.6) or accepts it (3.3.7).
    for (declared, got) in [
        (ArrowDeviceType::VULKAN, ArrowDeviceType::EXT_DEV),
        (ArrowDeviceType::VULKAN, ArrowDeviceType::VULKAN),
        (ArrowDeviceType::CPU, ArrowDeviceType::CUDA_HOST),
        (ArrowDeviceType::new(99), ArrowDeviceType::new(99)),
    ] {
        let batch = ints();
        let arrays = Arc::new(AtomicUsize::new(0));
        let count = arrays.clone();
        let producer = Producer::new(&batch.schema(), move |out| {
            let array = relabel(counted(&ints(), &count), got, 0);
            // SAFETY: the consumer passes memory for one struct.
            unsafe { out.write(array) };
            0
        });
        let (stream, released) = producer.stream(declared);
        let mut reader = open(stream, &ImportOptions::default());
        let e = reader.next().unwrap().unwrap_err();
        match declared == got {
            // No backend: the reason says what would serve.
            true => assert!(matches!(e, Error::DeviceNotAvailable { .. }), "{e}"),
            false => assert!(e.to_string().contains("device_type"), "{e}"),
        }
        assert!(reader.next().is_none());
        drop(reader);
        assert_eq!((arrays.load(SeqCst), released.load(SeqCst)), (1, 1));
    }
}

#[test]
fn device_ids_may_vary_in_a_foreign_stream() {
    // Without a backend: ordinary memory serves as page-locked.
    let options = ImportOptions {
        devices: Some(Devices::new()),
        ..Default::default()
    };
    let batch = ints();
    let mut id = 0;
    let producer = Producer::new(&batch.schema(), move |out| {
        id += 1;
        if id < 4 {
            let array = counted(&ints(), &Arc::default());
            let array = relabel(array, ArrowDeviceType::CUDA_HOST, id);
            // SAFETY: the consumer passes memory for one struct.
            unsafe { out.write(array) };
        }
        0
    });
    let (stream, _) = producer.stream(ArrowDeviceType::CUDA_HOST);
    let batches: Vec<_> = open(stream, &options).map(|b| b.unwrap()).collect();
    let ids: Vec<_> = batches.iter().map(|b| b.device().id().id).collect();
    assert_eq!(ids, [1, 2, 3]);
    // In ours as well.
    let (schema, host) = (batch.schema(), ArrowDeviceType::CUDA_HOST);
    let batches = DeviceRecordBatches::new(batches.into_iter().map(Ok), schema, host);
    let stream = FFI_ArrowDeviceArrayStream::new(batches, EVENT).unwrap();
    let ids: Vec<_> = open(stream, &options)
        .map(|b| b.unwrap().device().id().id)
        .collect();
    assert_eq!(ids, [1, 2, 3]);
}

#[test]
fn producers_that_give_no_schema() {
    let text = |out: *mut FFI_ArrowSchema| {
        let schema = FFI_ArrowSchema::try_from(&DataType::Utf8).unwrap();
        // SAFETY: the consumer passes memory for one struct.
        unsafe { out.write(schema) };
    };
    type GetSchema = Box<dyn FnMut(*mut FFI_ArrowSchema) -> c_int + Send>;
    let producers: [(GetSchema, c_int, &str); 4] = [
        (Box::new(|_| 22), 22, "no idea"),
        (Box::new(|_| 0), libc::EINVAL, "schema"),
        (
            Box::new(move |out| {
                text(out);
                12
            }),
            12,
            "no idea",
        ),
        // A stream of arrays that are no batches.
        (
            Box::new(move |out| {
                text(out);
                0
            }),
            libc::EINVAL,
            "a batch needs a struct, not Utf8; import arrays of other types one by one, with DeviceArray::import",
        ),
    ];
    for (get_schema, errno, expected) in producers {
        let mut producer = Producer::new(&Schema::empty(), |_| 0);
        producer.schema = get_schema;
        producer.text = Some(CString::new("no idea").unwrap());
        let (stream, released) = producer.stream(ArrowDeviceType::CPU);
        // SAFETY: the producer keeps to the interface, except in what the import checks.
        let e = unsafe { DeviceRecordBatchStreamReader::new(stream, ImportOptions::default()) };
        let e = e.unwrap_err();
        assert_eq!(e.errno(), errno, "{e}");
        assert!(e.to_string().contains(expected), "{e}");
        assert_eq!(released.load(SeqCst), 1, "{expected}");
    }
}

#[test]
fn released_and_incomplete_streams_are_refused() {
    let mut stream = FFI_ArrowDeviceArrayStream::empty();
    // SAFETY: an empty stream is a valid struct, which is released.
    let e = unsafe { DeviceRecordBatchStreamReader::from_raw(&mut stream) }.unwrap_err();
    assert!(matches!(e, Error::Released(_)));
    // SAFETY: null is refused before it is followed.
    let e = unsafe { DeviceRecordBatchStreamReader::from_raw(std::ptr::null_mut()) };
    assert!(e.is_err());
    // Each callback missing in turn: the members lie behind `device_type`, 8 bytes each.
    for (i, name) in ["get_schema", "get_next", "get_last_error"]
        .iter()
        .enumerate()
    {
        let (mut stream, released) =
            Producer::new(&Schema::empty(), |_| 0).stream(ArrowDeviceType::CPU);
        // SAFETY: the member lies inside the struct; null is a valid callback that is missing.
        unsafe {
            let member = (&raw mut stream).cast::<u8>().add(8 * (i + 1));
            member.cast::<Option<fn()>>().write(None);
        }
        // SAFETY: the producer keeps to the interface, except in what the import checks.
        let e = unsafe { DeviceRecordBatchStreamReader::from_raw(&mut stream) }.unwrap_err();
        assert!(e.to_string().contains(&format!("stream.{name}")), "{e}");
        assert_eq!(released.load(SeqCst), 1, "{name}");
        assert!(stream.is_released());
    }
}

#[test]
fn bad_arrays_end_the_stream() {
    let other = RecordBatch::try_from_iter([("s", Arc::new(StringArray::from(vec!["x"])) as _)]);
    let other = other.unwrap();
    let mut sent = 0;
    let producer = Producer::new(&ints().schema(), move |out| {
        sent += 1;
        assert_eq!(sent, 1);
        let batch = Devices::cpu().upload(&other).unwrap();
        // SAFETY: the consumer passes memory for one struct.
        unsafe { out.write(batch.export_array(&EVENT).unwrap()) };
        0
    });
    let (stream, released) = producer.stream(ArrowDeviceType::CPU);
    let mut host = open(stream, &ImportOptions::default()).into_host_reader();
    let e = Error::from(host.next().unwrap().unwrap_err());
    assert!(e.to_string().contains("array.children[0].n_buffers"), "{e}");
    assert!(host.next().is_none());
    drop(host);
    assert_eq!(released.load(SeqCst), 1);
}

/// Calls the stream as a consumer in C does.
struct CConsumer(FFI_ArrowDeviceArrayStream);

impl CConsumer {
    fn next(&mut self) -> (c_int, FFI_ArrowDeviceArray) {
        // What was in `out` before must not matter.
        let mut out = std::mem::MaybeUninit::<FFI_ArrowDeviceArray>::uninit();
        // SAFETY: `out` has room, and is filled or emptied by every call.
        unsafe {
            out.as_mut_ptr()
                .cast::<u8>()
                .write_bytes(0xAB, size_of::<FFI_ArrowDeviceArray>());
            let code = (CStream::of(&self.0).get_next)(&mut self.0, out.as_mut_ptr());
            (code, out.assume_init())
        }
    }

    fn text(&mut self) -> String {
        // SAFETY: the last call failed; the text is valid until the next.
        unsafe {
            let text = (CStream::of(&self.0).get_last_error)(&mut self.0);
            assert!(!text.is_null());
            CStr::from_ptr(text).to_str().unwrap().to_owned()
        }
    }
}

#[test]
fn our_errors_repeat_with_errno_and_text() {
    let cases: Vec<(ArrowError, c_int)> = vec![
        (ArrowError::MemoryError("full".into()), libc::ENOMEM),
        (ArrowError::InvalidArgumentError("bad".into()), libc::EINVAL),
        (ArrowError::NotYetImplemented("later".into()), libc::ENOTSUP),
        (
            ArrowError::IoError("gone".into(), std::io::Error::other("x")),
            libc::EIO,
        ),
        (
            Error::Foreign {
                operation: "get_next",
                errno: 99,
                message: "theirs".into(),
            }
            .into(),
            99,
        ),
    ];
    for (error, errno) in cases {
        let text = error.to_string();
        let schema = ints().schema();
        let items = vec![Ok(ints()), Err(error), Ok(ints())];
        let reader = RecordBatchIterator::new(items, schema);
        let mut consumer = CConsumer(export_reader(reader, &Devices::cpu()).unwrap());
        let (code, array) = consumer.next();
        assert_eq!((code, array.is_released()), (0, false));
        for _ in 0..3 {
            let (code, array) = consumer.next();
            assert_eq!(code, errno);
            assert!(array.is_released());
            let got = consumer.text();
            assert!(
                text.ends_with(&got) || got.ends_with(&text),
                "{got} / {text}"
            );
        }
    }
}

#[test]
fn our_streams_end_again_and_again() {
    let mut consumer = CConsumer(
        export_reader(
            RecordBatchIterator::new([Ok(ints())], ints().schema()),
            &Devices::cpu(),
        )
        .unwrap(),
    );
    assert!(!consumer.next().1.is_released());
    for _ in 0..3 {
        let (code, array) = consumer.next();
        assert_eq!((code, array.is_released()), (0, true));
    }
    // Early close: nothing was asked for, and the reader goes with the stream.
    let held = Arc::new(());
    let guard = held.clone();
    let batches = std::iter::from_fn(move || {
        let _ = &guard;
        Some(Ok(ints()))
    });
    let endless = RecordBatchIterator::new(batches, ints().schema());
    let stream = export_reader(endless, &Devices::cpu()).unwrap();
    assert_eq!(Arc::strong_count(&held), 2);
    drop(stream);
    assert_eq!(Arc::strong_count(&held), 1);
    // A null `out` is an error, not a crash.
    let null = std::ptr::null_mut();
    // SAFETY: null is refused before it is followed.
    let code = unsafe { (CStream::of(&consumer.0).get_next)(&mut consumer.0, null) };
    assert_eq!(code, libc::EINVAL);
    // SAFETY: null is refused before it is followed.
    let code =
        unsafe { (CStream::of(&consumer.0).get_schema)(&mut consumer.0, std::ptr::null_mut()) };
    assert_eq!(code, libc::EINVAL);
}

#[test]
fn a_reader_that_panics_is_an_error_with_its_text() {
    let schema = ints().schema();
    let mut n = 0;
    let batches = std::iter::from_fn(move || {
        n += 1;
        assert!(n < 2, "asked for batch {n}");
        Some(Ok(ints()))
    });
    let reader = RecordBatchIterator::new(batches, schema);
    let mut consumer = CConsumer(export_reader(reader, &Devices::cpu()).unwrap());
    assert_eq!(consumer.next().0, 0);
    for _ in 0..2 {
        let (code, array) = consumer.next();
        assert_eq!((code, array.is_released()), (libc::EIO, true));
        assert!(consumer.text().contains("asked for batch 2"));
    }
}

/// A reader that calls the stream which it is behind: the call is refused, and a release leaves the reader to the call that it is in.
#[test]
fn calls_during_a_call() {
    let stream = Arc::new(AtomicPtr::<FFI_ArrowDeviceArrayStream>::default());
    let (at, held) = (stream.clone(), Arc::new(()));
    let kept = held.clone();
    let batches = std::iter::from_fn(move || {
        let (this, mut out) = (at.load(SeqCst), FFI_ArrowDeviceArray::empty());
        // SAFETY: the stream lives until the end of the test. A consumer must not do this; that it is harmless is what is tested.
        unsafe {
            let c = this.cast::<CStream>();
            assert_eq!(((*c).get_next)(this, &raw mut out), libc::EBUSY);
            let text = CStr::from_ptr(((*c).get_last_error)(this));
            assert_eq!(text, c"another call on this stream is under way");
            ((*c).release.unwrap())(this);
            assert!((*c).release.is_none());
        }
        assert!(out.is_released() && Arc::strong_count(&kept) == 2);
        Some(Ok(ints()))
    });
    let reader = RecordBatchIterator::new(batches, ints().schema());
    let exported = export_reader(reader, &Devices::cpu()).unwrap();
    let exported = Box::into_raw(Box::new(exported));
    stream.store(exported, SeqCst);
    let mut out = FFI_ArrowDeviceArray::empty();
    // SAFETY: the stream was just made, and `out` is memory for one struct.
    let code = unsafe { ((*exported.cast::<CStream>()).get_next)(exported, &raw mut out) };
    assert_eq!((code, out.is_released()), (0, false));
    assert_eq!(Arc::strong_count(&held), 1);
    // SAFETY: it comes from a box.
    assert!(unsafe { Box::from_raw(exported) }.is_released());
}

#[test]
fn batches_of_another_schema_are_refused() {
    let other = RecordBatch::try_from_iter([("s", Arc::new(StringArray::from(vec!["x"])) as _)]);
    let other = Devices::cpu().upload(&other.unwrap()).unwrap();
    let batches = DeviceRecordBatches::new(vec![Ok(other)], ints().schema(), ArrowDeviceType::CPU);
    let stream = FFI_ArrowDeviceArrayStream::new(batches, EVENT).unwrap();
    let e = open(stream, &ImportOptions::default()).next().unwrap();
    assert!(e.unwrap_err().to_string().contains("is called 's'"));
    // An array on another device than the stream declares.
    let batch = Devices::cpu().upload(&ints()).unwrap();
    let batches = DeviceRecordBatches::new(vec![Ok(batch)], ints().schema(), ArrowDeviceType::CUDA);
    let stream = FFI_ArrowDeviceArrayStream::new(batches, EVENT).unwrap();
    let e = open(stream, &ImportOptions::default()).next().unwrap();
    assert!(e.unwrap_err().to_string().contains("cpu"));
}
