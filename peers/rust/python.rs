//! Producers that notice whether the Python interpreter is attached when they are called.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatches, Devices, ExportOptions,
    FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream, SyncPolicy,
};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field, Schema, SchemaRef};

use crate::support::c_stream::CStream;

/// Whether this thread is attached. Not by `PyGILState_Check`, which answers 1 once there was a sub-interpreter.
fn is_attached() -> bool {
    let find = |name: &CStr| {
        // SAFETY: `name` ends with a NUL.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        // SAFETY: CPython's functions of these names have no arguments and return a pointer; null
        // becomes `None`.
        unsafe {
            std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn() -> *mut c_void>>(found)
        }
    };
    let current =
        find(c"PyThreadState_GetUnchecked").or_else(|| find(c"_PyThreadState_UncheckedGet"));
    let own = find(c"PyGILState_GetThisThreadState");
    let (Some(current), Some(own)) = (current, own) else {
        panic!("no interpreter in this process");
    };
    // SAFETY: both functions have no arguments and may be called on any thread.
    let (current, own) = unsafe { (current(), own()) };
    !current.is_null() && current == own
}

static RELEASED_ATTACHED: AtomicU64 = AtomicU64::new(0);
static RELEASED_DETACHED: AtomicU64 = AtomicU64::new(0);
static CALLED_ATTACHED: AtomicU64 = AtomicU64::new(0);
static CALLED_DETACHED: AtomicU64 = AtomicU64::new(0);
static READERS_DROPPED: AtomicU64 = AtomicU64::new(0);

fn count(attached: &AtomicU64, detached: &AtomicU64) {
    if is_attached() { attached } else { detached }.fetch_add(1, SeqCst);
}

/// Five counts: releases with and without the interpreter, calls of `get_next` with and without, streams' readers that
/// were dropped.
///
/// # Safety
/// `out` is valid for writes of five numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peers_python_counts(out: *mut u64) {
    let counts = [
        &RELEASED_ATTACHED,
        &RELEASED_DETACHED,
        &CALLED_ATTACHED,
        &CALLED_DETACHED,
        &READERS_DROPPED,
    ];
    for (i, count) in counts.into_iter().enumerate() {
        // SAFETY: the caller guarantees that `out` has room for five numbers (see `# Safety`).
        unsafe { out.add(i).write(count.load(SeqCst)) };
    }
}

/// Counts how it is dropped.
struct Noticing;

impl Drop for Noticing {
    fn drop(&mut self) {
        count(&RELEASED_ATTACHED, &RELEASED_DETACHED);
    }
}

impl AsRef<[u8]> for Noticing {
    fn as_ref(&self) -> &[u8] {
        static VALUES: [u64; 3] = [1, 2, 3];
        // SAFETY: the static has 24 bytes, and nobody writes to it.
        unsafe { std::slice::from_raw_parts(VALUES.as_ptr().cast(), 24) }
    }
}

fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new("v", DataType::Int64, false)]))
}

fn batch() -> RecordBatch {
    let bytes = bytes::Bytes::from_owner(Noticing);
    let values = arrow_buffer::ScalarBuffer::new(arrow_buffer::Buffer::from(bytes), 0, 3);
    let column: ArrayRef = Arc::new(Int64Array::new(values, None));
    RecordBatch::try_new(schema(), vec![column]).expect("one column")
}

/// A batch of one column `v` with the values 1, 2, 3, whose release is counted.
///
/// # Safety
/// Both are valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peers_python_batch(
    out: *mut FFI_ArrowDeviceArray,
    schema: *mut FFI_ArrowSchema,
) -> c_int {
    let device = Devices::cpu();
    let exported = device
        .upload(&batch())
        .and_then(|batch| batch.export(SyncPolicy::Wait));
    let Ok((array, c_schema)) = exported else {
        return 5;
    };
    // SAFETY: the caller guarantees that both outputs are valid for a write (see `# Safety`).
    unsafe {
        out.write(array);
        schema.write(c_schema);
    }
    0
}

/// Counts when it goes.
struct NoticedReader;

impl Drop for NoticedReader {
    fn drop(&mut self) {
        READERS_DROPPED.fetch_add(1, SeqCst);
    }
}

/// A stream of `batches` of them; each `get_next` takes so many milliseconds and is counted.
///
/// # Safety
/// `out` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peers_python_stream(
    batches: u32,
    milliseconds: u32,
    out: *mut FFI_ArrowDeviceArrayStream,
) -> c_int {
    let device = Devices::cpu();
    let noticed = NoticedReader;
    let next = move |_| -> arrow_device::Result<DeviceRecordBatch> {
        let _ = &noticed;
        count(&CALLED_ATTACHED, &CALLED_DETACHED);
        std::thread::sleep(Duration::from_millis(milliseconds.into()));
        device.upload(&batch())
    };
    let reader = DeviceRecordBatches::new((0..batches).map(next), schema(), ArrowDeviceType::CPU);
    let stream = FFI_ArrowDeviceArrayStream::new(reader, ExportOptions::new(SyncPolicy::Wait));
    let Ok(stream) = stream else { return 5 };
    // SAFETY: the caller guarantees that `out` is valid for a write (see `# Safety`).
    unsafe { out.write(stream) };
    0
}

static HELD: Mutex<Vec<FFI_ArrowDeviceArray>> = Mutex::new(Vec::new());

/// Complains if the producer's release was called.
extern "C" fn release_held() {
    let releases = || RELEASED_ATTACHED.load(SeqCst) + RELEASED_DETACHED.load(SeqCst);
    let before = releases();
    HELD.lock().unwrap_or_else(PoisonError::into_inner).clear();
    if releases() != before {
        eprintln!("released without an interpreter");
    }
}

/// Keeps an array until the process ends, and releases it then, when the interpreter is gone.
///
/// # Safety
/// A valid array.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peers_python_hold(array: *mut FFI_ArrowDeviceArray) {
    // SAFETY: the caller passes an array that it gives away (see `# Safety`).
    let array = unsafe { FFI_ArrowDeviceArray::from_raw(array) };
    HELD.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(array);
    // SAFETY: the function may run at exit, and does not unwind.
    unsafe { libc::atexit(release_held) };
}

static HELD_STREAM: Mutex<Option<FFI_ArrowDeviceArrayStream>> = Mutex::new(None);

extern "C" fn use_held_stream() {
    let held = HELD_STREAM
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take();
    let Some(mut stream) = held else { return };
    let mut out = FFI_ArrowDeviceArray::empty();
    let CStream {
        get_next,
        get_last_error,
        ..
    } = *CStream::of(&stream);
    // SAFETY: a live stream of ours, with all its callbacks; its texts are terminated.
    let (code, text) = unsafe {
        let code = get_next(&mut stream, &mut out);
        let text = get_last_error(&mut stream);
        (code, (!text.is_null()).then(|| CStr::from_ptr(text)))
    };
    println!(
        "get_next after the interpreter: {code} {}",
        text.unwrap_or_default().to_string_lossy()
    );
}

/// Keeps a stream until the process ends, and calls it then, when the interpreter is gone.
///
/// # Safety
/// A valid stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peers_python_hold_stream(stream: *mut FFI_ArrowDeviceArrayStream) {
    // SAFETY: the caller passes a stream that it gives away (see `# Safety`).
    let stream = unsafe { FFI_ArrowDeviceArrayStream::from_raw(stream) };
    *HELD_STREAM.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream);
    // SAFETY: the function may run at exit, and does not unwind.
    unsafe { libc::atexit(use_held_stream) };
}

/// Releases an array on a thread that knows nothing of the interpreter.
///
/// # Safety
/// A valid array.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peers_python_release_elsewhere(array: *mut FFI_ArrowDeviceArray) {
    // SAFETY: the caller passes an array that it gives away (see `# Safety`).
    let array = unsafe { FFI_ArrowDeviceArray::from_raw(array) };
    let _ = std::thread::spawn(move || drop(array)).join();
}
