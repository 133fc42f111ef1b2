//! Callbacks that unwind. A Rust panic becomes an error with its text, and costs nothing else. A foreign exception ends the
//! process in a defined abort: `children` runs each of these tests again in a process of its own, in which exceptions are thrown
//! in place of panics.
//!
//! No C++ compiler is needed: exceptions of a made-up language are raised through the unwinder, and a C++ one through the C++
//! runtime, if the machine has it (`thrown`).

mod asynchronous;
mod children;
mod thrown;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::c_stream::CStream;
use crate::support::producer::Producer;
use crate::support_c::export::{field, ints};
use crate::support_c::sim::{Place, places, simulated};
use crate::support_c::{CArray, c};
use arrow_array::{Array, RecordBatch};
use arrow_buffer::Buffer;
use arrow_device::abi::ForeignSchema;
use arrow_device::device::DevicePtr;
use arrow_device::device::sim::SimMode;
use arrow_device::dlpack::{DLManagedTensorVersioned, DlpackOptions, DlpackStream};
use arrow_device::{
    Device, DeviceArray, DeviceBuffer, DeviceRecordBatch, DeviceRecordBatchStreamReader,
    DeviceRecordBatches, Error, ExportOptions, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream,
    SyncPolicy, Validity,
};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field, Schema};
use thrown::{TEXT, Thrown, is_chosen};

const EVENT: ExportOptions = ExportOptions::new(SyncPolicy::Event);

/// What a release does last.
type Throw = Box<dyn FnOnce() + Send + Sync>;

struct Rigged {
    array: FFI_ArrowDeviceArray,
    released: Arc<AtomicUsize>,
    throw: Throw,
}

/// The same array with a release that counts itself, releases what it should, and then throws.
fn rigged(array: FFI_ArrowDeviceArray, throw: Throw) -> (FFI_ArrowDeviceArray, Arc<AtomicUsize>) {
    unsafe extern "C-unwind" fn release(array: *mut CArray) {
        // SAFETY: the consumer calls this once, on a struct that `rigged` made.
        let rigged = unsafe {
            (*array).release = None;
            Box::from_raw((*array).private_data.cast::<Rigged>())
        };
        rigged.released.fetch_add(1, SeqCst);
        drop(rigged.array);
        (rigged.throw)();
    }
    let released = Arc::<AtomicUsize>::default();
    let mut rigged = Box::new(Rigged {
        array,
        released: released.clone(),
        throw,
    });
    let mut outer = *c(&mut rigged.array);
    outer.array.private_data = Box::into_raw(rigged).cast();
    // SAFETY: function pointers that differ only in whether they may unwind; this one is called by the crate alone,
    // which allows it.
    outer.array.release = Some(unsafe {
        std::mem::transmute::<
            unsafe extern "C-unwind" fn(*mut CArray),
            unsafe extern "C" fn(*mut CArray),
        >(release)
    });
    // SAFETY: `outer` has the layout of `struct ArrowDeviceArray`, is an export with the release
    // above, and has no other owner.
    let outer = unsafe { FFI_ArrowDeviceArray::from_raw((&raw mut outer).cast()) };
    (outer, released)
}

fn import(array: FFI_ArrowDeviceArray, place: &Place) -> DeviceArray {
    // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type
    // is the exported one.
    unsafe { DeviceArray::import_as(array, field(&DataType::Int32), &place.options) }.unwrap()
}

fn exported(place: &Place) -> FFI_ArrowDeviceArray {
    let up = place.device.upload_array(&ints(10)).unwrap();
    up.export_array(&EVENT).unwrap()
}

#[track_caller]
fn assert_thrown(error: Option<Error>, operation: &str) {
    let error = error.expect("an error");
    assert_eq!(error.errno(), libc::EIO);
    assert!(matches!(error, Error::Panic { .. }), "{error:?}");
    assert_eq!(error.to_string(), format!("{operation} panicked: {TEXT}"));
}

/// The error that the device keeps, once there is one.
fn dropped_error(device: &Device) -> Option<Error> {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let error = device.take_drop_error();
        if error.is_some() || Instant::now() > until {
            return error;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn release() {
    for place in places() {
        let thrown = Thrown::default();
        let (array, released) = rigged(exported(&place), thrown.throwing());
        let imported = import(array, &place);
        let device = imported.device().clone();
        imported.wait().unwrap();
        assert_eq!(imported.to_host().unwrap().len(), 10);
        let before = device.stats().drop_errors;
        drop(imported);
        assert_eq!((released.load(SeqCst), thrown.count()), (1, 1));
        // The CPU is every test's.
        if place.sim.is_some() {
            let error = device.take_drop_error();
            assert_thrown(error, "ArrowArray.release");
            assert_eq!(device.stats().drop_errors, before + 1);
        }
        // Never imported: nobody to tell.
        let (array, released) = rigged(exported(&place), thrown.throwing());
        drop(array);
        assert_eq!((released.load(SeqCst), thrown.count()), (1, 2));
        place.assert_clean();
    }
}

/// An owner whose drop throws.
struct Owner(Throw, #[allow(dead_code)] Buffer);

impl Drop for Owner {
    fn drop(&mut self) {
        std::mem::replace(&mut self.0, Box::new(|| ()))()
    }
}

/// Memory of such an owner.
fn owned(place: &Place, throw: Throw) -> DeviceBuffer {
    let values = Buffer::from_vec(vec![1i32, 2, 3]);
    let address = DevicePtr::new(values.as_ptr().cast_mut().cast());
    let owner = Box::new(Owner(throw, values));
    // SAFETY: the owner holds the memory, which nothing here reads.
    unsafe { DeviceBuffer::from_raw(&place.device, address, 12, owner, None) }
}

/// Releases on the release thread, after our own use: of a foreign array, and of an owner of the program's.
#[test]
fn on_the_release_thread() {
    let place = simulated(SimMode::Async).unwrap();
    for foreign in [true, false] {
        let thrown = Thrown::default();
        let throw = thrown.clone();
        let here = thread::current().id();
        let throw = Box::new(move || {
            assert_ne!(thread::current().id(), here);
            throw.throw()
        });
        let (array, operation) = if foreign {
            let (array, _) = rigged(exported(&place), throw);
            (import(array, &place), "ArrowArray.release")
        } else {
            let buffer = owned(&place, throw);
            let array = DeviceArray::from_values(DataType::Int32, 3, buffer, None).unwrap();
            (array, "release")
        };
        let queue = place.device.new_queue().unwrap();
        let values = array.values_on::<i32>(&queue).unwrap();
        let (go, gate) = mpsc::channel::<()>();
        let sim = queue.as_sim().unwrap();
        // SAFETY: the kernel writes nothing.
        unsafe { sim.launch(move |_| gate.recv().map_err(|e| e.to_string())) }.unwrap();
        drop(values);
        drop(array);
        assert_eq!(thrown.count(), 0);
        go.send(()).unwrap();
        assert_thrown(dropped_error(&place.device), operation);
        assert_eq!(thrown.count(), 1);
    }
    assert_eq!(place.device.stats().drop_errors, 2);
    place.assert_clean();
}

/// Owners' drops that throw in a release that a consumer calls: the consumer sees nothing, and each is dropped.
#[test]
fn owners_of_an_export() {
    let place = simulated(SimMode::Async).unwrap();
    let thrown = Thrown::default();
    let buffer = || owned(&place, thrown.throwing());
    let array = {
        let validity = Some(Validity::new(buffer(), 0, 3).unwrap());
        DeviceArray::from_values(DataType::Int32, 3, buffer(), validity).unwrap()
    };
    // Not asked for its nulls: nothing reads the mask.
    let allowed = ExportOptions {
        counts_nulls: false,
        ..EVENT
    };
    let exported = array.export_array(&allowed).unwrap();
    drop(array);
    assert_eq!(thrown.count(), 0);
    drop(exported);
    assert_eq!(thrown.count(), 2);
    assert_thrown(place.device.take_drop_error(), "release");
    assert_eq!(place.device.stats().drop_errors, 2);
}

fn stream(producer: Producer, place: &Place) -> (FFI_ArrowDeviceArrayStream, Arc<AtomicUsize>) {
    producer.stream(place.device.id().device_type)
}

fn open(
    stream: FFI_ArrowDeviceArrayStream,
    place: &Place,
) -> Result<DeviceRecordBatchStreamReader, Error> {
    // SAFETY: the tests' streams keep to the interface, except for what they throw.
    unsafe { DeviceRecordBatchStreamReader::new(stream, place.options.clone()) }
}

fn schema() -> Schema {
    Schema::new(vec![Field::new("a", DataType::Int32, true)])
}

#[test]
fn get_schema() {
    let place = simulated(SimMode::Async).unwrap();
    let thrown = Thrown::default();
    let throw = thrown.clone();
    let mut producer = Producer::new(&schema(), |_| unreachable!());
    producer.schema = Box::new(move |_| throw.throw());
    let (stream, released) = stream(producer, &place);
    assert_thrown(open(stream, &place).err(), "get_schema");
    assert_eq!((released.load(SeqCst), thrown.count()), (1, 1));
}

#[test]
fn get_next() {
    let place = simulated(SimMode::Async).unwrap();
    let thrown = Thrown::default();
    // Writes an array, then one more and throws.
    let (mut n, throw, device) = (0, thrown.clone(), place.device.clone());
    let producer = Producer::new(&schema(), move |out| {
        let batch = RecordBatch::try_new(Arc::new(schema()), vec![ints(10)]).unwrap();
        let array = device.upload(&batch).unwrap().export_array(&EVENT).unwrap();
        n += 1;
        // SAFETY: the consumer passes memory for one struct.
        unsafe { out.write(array) };
        if n == 2 {
            throw.throw();
        }
        0
    });
    let (stream, released) = stream(producer, &place);
    let mut reader = open(stream, &place).unwrap();
    assert_eq!(reader.next().unwrap().unwrap().num_rows(), 10);
    assert_thrown(reader.next().unwrap().err(), "get_next");
    assert!(reader.next().is_none());
    assert_eq!((released.load(SeqCst), thrown.count()), (0, 1));
    drop(reader);
    assert_eq!(released.load(SeqCst), 1);
    place.assert_clean();
}

/// What is in the hands of `failing`'s callbacks.
struct Failing {
    /// Which callback throws.
    throws: &'static str,
    thrown: Thrown,
}

impl Failing {
    fn called(&self, callback: &str) {
        if self.throws == callback {
            self.thrown.throw()
        }
    }
}

/// A stream whose `get_schema` fails, and of which another callback throws.
fn failing(throws: &'static str) -> (Error, usize) {
    /// # Safety
    /// `stream` is one of `failing`'s.
    unsafe fn of<'a>(stream: *mut FFI_ArrowDeviceArrayStream) -> &'a Failing {
        // SAFETY: the stream's private data is a `Failing`, which outlives it.
        unsafe { &*(*stream.cast::<CStream>()).private_data.cast::<Failing>() }
    }
    unsafe extern "C-unwind" fn get_schema(
        _: *mut FFI_ArrowDeviceArrayStream,
        _: *mut FFI_ArrowSchema,
    ) -> c_int {
        libc::ENODATA
    }
    unsafe extern "C-unwind" fn get_next(
        _: *mut FFI_ArrowDeviceArrayStream,
        _: *mut FFI_ArrowDeviceArray,
    ) -> c_int {
        libc::ENODATA
    }
    unsafe extern "C-unwind" fn get_last_error(
        stream: *mut FFI_ArrowDeviceArrayStream,
    ) -> *const c_char {
        // SAFETY: the reader calls it with the stream that it was given.
        unsafe { of(stream) }.called("get_last_error");
        ptr::null()
    }
    unsafe extern "C-unwind" fn release(stream: *mut FFI_ArrowDeviceArrayStream) {
        // The stream is not marked released, as if the panic had cut the callback short.
        // SAFETY: the reader calls it with the stream that it was given.
        unsafe { of(stream) }.called("release");
    }
    let place = simulated(SimMode::Async).unwrap();
    let private = Failing {
        throws,
        thrown: Thrown::default(),
    };
    // The callbacks above keep to the interface, except for what they throw; `private` outlives the stream.
    let stream = CStream {
        device_type: place.device.id().device_type,
        get_schema,
        get_next,
        get_last_error,
        release: Some(release),
        private_data: ptr::from_ref(&private).cast_mut().cast(),
    };
    let error = open(stream.into_ffi(), &place).err().unwrap();
    (error, private.thrown.count())
}

#[test]
fn of_a_stream_that_fails() {
    for throws in ["get_last_error", "release"] {
        if !is_chosen(throws) {
            continue;
        }
        let (error, thrown) = failing(throws);
        assert_eq!(thrown, 1, "{throws}");
        match throws {
            "release" => assert_eq!(error.errno(), libc::ENODATA),
            _ => assert_thrown(Some(error), throws),
        }
    }
}

#[test]
fn schema_release() {
    let thrown = Thrown::default();
    let mut schema = c_schema(&thrown);
    // SAFETY: a struct whose release keeps to the interface, except for what it throws; this is its only owner.
    let schema = unsafe { ForeignSchema::from_raw(&raw mut schema) };
    drop(schema);
    assert_eq!(thrown.count(), 1);
}

/// A schema whose release throws.
fn c_schema(thrown: &Thrown) -> FFI_ArrowSchema {
    unsafe extern "C-unwind" fn release(schema: *mut CSchema) {
        // SAFETY: called once, on a struct of `c_schema`, whose private data is a `Thrown`.
        let thrown = unsafe { Box::from_raw((*schema).private_data.cast::<Thrown>()) };
        thrown.throw()
    }
    let schema = CSchema {
        members: [ptr::null_mut(); 3],
        flags: 0,
        n_children: 0,
        pointers: [ptr::null_mut(); 2],
        release: Some(release),
        private_data: Box::into_raw(Box::new(thrown.clone())).cast(),
    };
    // SAFETY: both are `struct ArrowSchema`; the callback is called through this crate's own type, which lets it unwind.
    unsafe { std::mem::transmute::<CSchema, FFI_ArrowSchema>(schema) }
}

/// `struct ArrowSchema`.
#[repr(C)]
struct CSchema {
    /// Format, name and metadata.
    members: [*mut c_void; 3],
    flags: i64,
    n_children: i64,
    /// Children and dictionary.
    pointers: [*mut c_void; 2],
    release: Option<unsafe extern "C-unwind" fn(*mut CSchema)>,
    private_data: *mut c_void,
}

#[test]
fn dlpack_deleter() {
    unsafe extern "C-unwind" fn deleter(tensor: *mut DLManagedTensorVersioned) {
        // SAFETY: called once, on the tensor below, whose context is a `Thrown`.
        let thrown = unsafe { Box::from_raw((*tensor).manager_ctx.cast::<Thrown>()) };
        thrown.throw()
    }
    let place = simulated(SimMode::Async).unwrap();
    let thrown = Thrown::default();
    let up = place.device.upload_array(&ints(10)).unwrap();
    let tensor = up.export_dlpack(&DlpackOptions {
        nulls_ignored: true,
        ..DlpackOptions::new(DlpackStream::NONE)
    });
    let tensor = tensor.unwrap().into_versioned();
    // SAFETY: the tensor is live, and nothing else uses it.
    let own = unsafe {
        let own = ((*tensor).manager_ctx, (*tensor).deleter);
        (*tensor).manager_ctx = Box::into_raw(Box::new(thrown.clone())).cast();
        (*tensor).deleter = Some(deleter);
        own
    };
    let queue = place.device.default_queue();
    // SAFETY: this crate exported the tensor, which is imported once.
    drop(unsafe { DeviceArray::import_dlpack(tensor, &queue) }.unwrap());
    assert_thrown(dropped_error(&place.device), "deleter");
    assert_eq!(thrown.count(), 1);
    // SAFETY: `deleter` left the tensor as it was, and its importer does not use it any more; with its own context and
    // deleter again, it is deleted once.
    unsafe {
        (*tensor).manager_ctx = own.0;
        (*tensor).deleter = own.1;
        own.1.unwrap()(tensor);
    }
}

/// A reader of ours that throws, behind an exported stream: the consumer gets an errno and a text.
#[test]
fn exported_streams() {
    let place = simulated(SimMode::Async).unwrap();
    let thrown = Thrown::default();
    let throw = thrown.clone();
    let batches = (0..1).map(move |_| -> Result<DeviceRecordBatch, Error> { throw.throw() });
    let device_type = place.device.id().device_type;
    let batches = DeviceRecordBatches::new(batches, Arc::new(schema()), device_type);
    let mut stream = FFI_ArrowDeviceArrayStream::new(batches, EVENT).unwrap();
    let CStream {
        get_next: next,
        get_last_error: text,
        ..
    } = *CStream::of(&stream);
    let mut out = FFI_ArrowDeviceArray::empty();
    for _ in 0..2 {
        // SAFETY: the callbacks are those of a live stream of this crate, and `out` is memory for
        // one struct.
        let (code, text) = unsafe {
            let code = next(&raw mut stream, &raw mut out);
            (code, CStr::from_ptr(text(&raw mut stream)))
        };
        let text = text.to_str().unwrap();
        assert_eq!(
            (code, text),
            (libc::EIO, &*format!("get_next panicked: {TEXT}"))
        );
        assert!(out.is_released());
        // It is not asked again.
        assert_eq!(thrown.count(), 1);
    }
}

/// A release that drops what it holds, whose release throws too, and so on; each panic stops at its own guard.
#[test]
fn nested() {
    let place = simulated(SimMode::Async).unwrap();
    let thrown = Thrown::default();
    let mut array = exported(&place);
    let mut counts = vec![];
    for _ in 0..10 {
        let (throw, inner) = (thrown.clone(), import(array, &place));
        let release = move || {
            drop(inner);
            throw.throw();
        };
        let (outer, released) = rigged(exported(&place), Box::new(release));
        counts.push(released);
        array = outer;
    }
    drop(array);
    assert!(counts.iter().all(|n| n.load(SeqCst) == 1));
    assert_eq!(thrown.count(), 10);
    // The outermost was in nobody's hands.
    assert_eq!(place.device.stats().drop_errors, 9);
    let _ = place.device.take_drop_error();
    place.assert_clean();
}

/// A release that throws while a panic of ours goes by: both arrive where they should.
#[test]
fn during_a_panic() {
    let place = simulated(SimMode::Async).unwrap();
    let thrown = Thrown::default();
    let array = import(rigged(exported(&place), thrown.throwing()).0, &place);
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _array = array;
        panic!("ours");
    }));
    assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"ours"));
    assert_thrown(place.device.take_drop_error(), "ArrowArray.release");
    assert_eq!(thrown.count(), 1);
    place.assert_clean();
}
