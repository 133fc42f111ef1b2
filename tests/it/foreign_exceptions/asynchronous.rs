//! Async device streams whose other side throws.

use std::ffi::{c_char, c_int, c_void};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::{mem, ptr};

use arrow_array::record_batch;
use arrow_device::abi::{
    FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask, ForeignSchema,
};
use arrow_device::async_stream::{
    AsyncDeviceRecordBatchStream, DeviceRecordBatchStreamAdapter, Outcome, ProduceOptions, produce,
};
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, Devices, Error, FFI_ArrowDeviceArray, ImportOptions, Result,
};
use arrow_schema::ffi::FFI_ArrowSchema;
use futures::executor::block_on;
use futures::{StreamExt, stream};

use crate::foreign_exceptions::thrown::Thrown;
use crate::foreign_exceptions::{EVENT, assert_thrown};

fn batch() -> DeviceRecordBatch {
    let batch = record_batch!(("id", Int64, [1, 2, 3])).unwrap();
    Devices::cpu().upload(&batch).unwrap()
}

/// One side of a stream: the callback of this name throws.
struct Side {
    throws: &'static str,
    thrown: Thrown,
    calls: Mutex<Vec<&'static str>>,
    extracted: AtomicUsize,
}

impl Side {
    fn new(throws: &'static str) -> Arc<Self> {
        Arc::new(Self {
            throws,
            thrown: Thrown::default(),
            calls: Mutex::default(),
            extracted: AtomicUsize::new(0),
        })
    }

    fn called(&self, name: &'static str) {
        self.calls.lock().unwrap().push(name);
        if self.throws == name {
            self.thrown.throw();
        }
    }

    fn private(self: &Arc<Self>) -> *mut c_void {
        Arc::as_ptr(self).cast_mut().cast()
    }
}

/// # Safety
/// `private` is that of a side that lives.
unsafe fn side<'a>(private: *mut c_void) -> &'a Side {
    // SAFETY: the caller guarantees that `private` is the address of a side that lives (see `# Safety`).
    unsafe { &*private.cast::<Side>() }
}

type Handler = FFI_ArrowAsyncDeviceStreamHandler;

unsafe extern "C-unwind" fn on_schema(this: *mut Handler, schema: *mut FFI_ArrowSchema) -> c_int {
    // SAFETY: the producer passes the live handler of `consumer`, whose side lives, and a schema that it hands over.
    unsafe {
        drop(ForeignSchema::from_raw(schema));
        side((*this).private_data()).called("on_schema");
        let producer = (*this).producer();
        (*producer).request().unwrap()(producer, 9);
    }
    0
}

unsafe extern "C-unwind" fn on_next_task(
    this: *mut Handler,
    task: *mut FFI_ArrowAsyncTask,
    _: *const c_char,
) -> c_int {
    // SAFETY: the producer passes the live handler of `consumer`, whose side lives, and a task, which is extracted once.
    unsafe {
        if !task.is_null() {
            (*task).extract_data().unwrap()(task, ptr::null_mut());
        }
        side((*this).private_data()).called("on_next_task");
    }
    0
}

unsafe extern "C-unwind" fn on_error(
    this: *mut Handler,
    _: c_int,
    _: *const c_char,
    _: *const c_char,
) {
    // SAFETY: the producer passes the live handler of `consumer`, whose side lives.
    unsafe { side((*this).private_data()).called("on_error") };
}

unsafe extern "C-unwind" fn release(this: *mut Handler) {
    // SAFETY: the producer passes the live handler of `consumer`, whose side lives, and releases it once.
    unsafe {
        let side = side((*this).private_data());
        Handler::mark_released(this);
        side.called("release");
    }
}

#[test]
fn on_schema_throws() {
    consumer("on_schema");
}

#[test]
fn on_next_task_throws() {
    consumer("on_next_task");
}

#[test]
fn on_error_throws() {
    consumer("on_error");
}

#[test]
fn handler_release_throws() {
    consumer("release");
}

fn consumer(throws: &'static str) {
    let consumer = Side::new(throws);
    // SAFETY: the callbacks above keep to the interface; the side outlives the handler.
    let handler = unsafe {
        Handler::from_parts(
            on_schema,
            on_next_task,
            on_error,
            release,
            consumer.private(),
        )
    };
    let mut items = vec![Ok(batch())];
    if throws == "on_error" {
        items.push(Err(Error::Cancelled { operation: "it" }));
    }
    let schema = batch().schema();
    let stream =
        DeviceRecordBatchStreamAdapter::new(schema, ArrowDeviceType::CPU, stream::iter(items));
    let outcome = block_on(produce(stream, handler, ProduceOptions::new(EVENT)));
    let errno = libc::EIO;
    let calls = consumer.calls.lock().unwrap().join(" ");
    match throws {
        "on_schema" => assert_eq!(calls, "on_schema release"),
        "on_next_task" => assert_eq!(calls, "on_schema on_next_task release"),
        "on_error" => assert_eq!(calls, "on_schema on_next_task on_error release"),
        _ => assert_eq!(calls, "on_schema on_next_task on_next_task release"),
    }
    match throws {
        "on_schema" | "on_next_task" => {
            assert_eq!(outcome.unwrap(), Outcome::Refused { errno });
        }
        "on_error" => assert!(matches!(outcome, Err(Error::Cancelled { .. }))),
        _ => assert_eq!(outcome.unwrap(), Outcome::Completed),
    }
    assert_eq!(consumer.thrown.count(), 1, "{throws}");
}

unsafe extern "C-unwind" fn request(this: *mut FFI_ArrowAsyncProducer, _: i64) {
    // SAFETY: the consumer passes the producer of `producer`, which lives, as does its side.
    unsafe { side((*this).private_data()).called("request") };
}

unsafe extern "C-unwind" fn cancel(this: *mut FFI_ArrowAsyncProducer) {
    // SAFETY: the consumer passes the producer of `producer`, which lives, as does its side.
    unsafe { side((*this).private_data()).called("cancel") };
}

unsafe extern "C-unwind" fn extract(
    task: *mut FFI_ArrowAsyncTask,
    out: *mut FFI_ArrowDeviceArray,
) -> c_int {
    // SAFETY: the consumer passes a task of `producer`, whose side lives; `out` is null or an empty struct.
    unsafe {
        let side = side((*task).private_data());
        side.extracted.fetch_add(1, SeqCst);
        if !out.is_null() {
            // What it had written when it threw is the consumer's.
            batch().export_array(&EVENT).unwrap().write_to(out);
        }
        side.called("extract_data");
    }
    0
}

#[test]
fn request_throws() {
    producer("request");
}

#[test]
fn extract_data_throws() {
    producer("extract_data");
}

#[test]
fn cancel_throws() {
    producer("cancel");
}

fn producer(throws: &'static str) {
    let producer = Side::new(throws);
    // SAFETY: the callbacks above keep to the interface, and nobody but this test calls them.
    let (mut ours, (handler, opening)) = unsafe {
        let callbacks = FFI_ArrowAsyncProducer::from_parts(
            ArrowDeviceType::CPU,
            request,
            cancel,
            ptr::null(),
            producer.private(),
        );
        let handler = AsyncDeviceRecordBatchStream::handler(2, ImportOptions::default());
        (callbacks, handler)
    };
    let mut handler = handler.into_ffi();
    let (ours, this) = (&raw mut ours, &raw mut handler);
    let mut schema = FFI_ArrowSchema::try_from(&*batch().schema()).unwrap();
    // SAFETY: the producer lives until the release; calls come in order.
    let opened = unsafe {
        (*this).set_producer(ours);
        let opened = (*this).on_schema().unwrap()(this, &raw mut schema);
        for _ in 0..2 {
            let mut task = FFI_ArrowAsyncTask::from_parts(extract, producer.private());
            (*this).on_next_task().unwrap()(this, &raw mut task, ptr::null());
        }
        opened
    };
    let stream: Result<_> = block_on(opening);
    if throws == "request" {
        assert_eq!(opened, libc::EIO);
        let mut stream = stream.unwrap();
        let items: Vec<_> = block_on(Pin::new(&mut stream).collect());
        assert_thrown(items.into_iter().find_map(Result::err), "request");
    } else {
        assert_eq!(opened, 0);
        let mut stream = stream.unwrap();
        let first = block_on(stream.next()).unwrap();
        if throws == "extract_data" {
            assert_thrown(first.err(), "extract_data");
            assert!(block_on(stream.next()).is_none());
        } else {
            assert_eq!(first.unwrap().batch.num_rows(), 3);
        }
        drop(stream);
        assert!(producer.calls.lock().unwrap().contains(&"cancel"));
    }
    drop(mem::replace(&mut handler, Handler::empty()));
    assert!(producer.thrown.count() >= 1, "{throws}");
    // Each task was extracted once.
    assert_eq!(producer.extracted.load(SeqCst), 2, "{throws}");
}
