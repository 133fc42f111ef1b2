//! With and without the interpreter.

use std::mem::ManuallyDrop;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

use arrow_array::RecordBatchReader;
use arrow_schema::{FieldRef, SchemaRef};
use pyo3::{Python, ffi};

use crate::abi::ArrowDeviceType;
use crate::stream::{DeviceArrayReader, DeviceRecordBatchReader};

/// A reader that lets go of the interpreter for as long as each `next` takes.
///
/// [`stream_from_python`](super::stream_from_python) answers with one; other readers that wait can be wrapped as well,
/// a host reader above it for example.
#[derive(Debug)]
pub struct Detached<R>(R);

impl<R> Detached<R> {
    /// Wraps a reader.
    pub const fn new(reader: R) -> Self {
        Self(reader)
    }

    /// The reader itself.
    pub fn into_inner(self) -> R {
        self.0
    }
}

impl<R: Iterator + Send> Iterator for Detached<R>
where
    R::Item: Send,
{
    type Item = R::Item;

    fn next(&mut self) -> Option<R::Item> {
        detached(|| self.0.next())
    }
}

impl<R: DeviceRecordBatchReader + Send> DeviceRecordBatchReader for Detached<R> {
    fn schema(&self) -> SchemaRef {
        self.0.schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.0.device_type()
    }
}

impl<R: DeviceArrayReader + Send> DeviceArrayReader for Detached<R> {
    fn field(&self) -> FieldRef {
        self.0.field()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.0.device_type()
    }
}

impl<R: RecordBatchReader + Send> RecordBatchReader for Detached<R> {
    fn schema(&self) -> SchemaRef {
        self.0.schema()
    }
}

/// Runs `f`, which may take long, and lets others use the interpreter meanwhile if this thread is attached to it.
pub(super) fn detached<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    if is_surely_detached() {
        return f();
    }
    let mut f = Some(f);
    // On a thread that is attached this only says so.
    let done = Python::try_attach(|py| f.take().map(|f| py.detach(f)));
    match (done.flatten(), f) {
        (Some(done), _) => done,
        // No interpreter: nothing to let go of.
        (None, Some(f)) => f(),
        (None, None) => unreachable!("`f` was taken to be run"),
    }
}

/// Drops what may need the interpreter for it, on a thread that is attached to it. Does not wait for the interpreter;
/// leaks the value if there is none any more.
pub(super) fn drop_attached<T: Send + 'static>(value: T) {
    if !is_surely_detached() {
        return drop_here(value);
    }
    // SAFETY: may be called at any time.
    if unsafe { ffi::Py_IsInitialized() } == 0 {
        std::mem::forget(value);
        return;
    }
    static THREAD: OnceLock<Option<Sender<Box<dyn Send>>>> = OnceLock::new();
    let thread = THREAD.get_or_init(|| {
        let (sender, values) = channel::<Box<dyn Send>>();
        let thread = std::thread::Builder::new().name("arrow-device-python".into());
        let run = move || values.into_iter().for_each(drop_here);
        thread.spawn(run).ok().map(|_| sender)
    });
    match thread {
        Some(thread) => {
            // The thread never ends, so it takes what it is sent; what it did not take would be dropped by the error.
            if let Err(refused) = thread.send(Box::new(value)) {
                std::mem::forget(refused);
            }
        }
        // No thread can be had: better a wait than a leak.
        None => drop_here(value),
    }
}

/// As [`drop_attached`], but waits for the interpreter.
fn drop_here<T>(value: T) {
    // Forgotten unless the closure runs.
    let mut value = ManuallyDrop::new(value);
    Python::try_attach(|_| {
        // SAFETY: the only place that drops it; it is not used afterwards.
        unsafe { ManuallyDrop::drop(&mut value) }
    });
}

/// Whether this thread is known not to be attached. Attached ones, and ones of which that cannot be told, are not.
#[cfg(unix)]
fn is_surely_detached() -> bool {
    // Not in the limited API, which the final module may be built for; CPython has it all the same.
    static CHECK: OnceLock<usize> = OnceLock::new();
    let check = *CHECK.get_or_init(|| {
        // SAFETY: the name is terminated.
        unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"PyGILState_Check".as_ptr()) as usize }
    });
    if check == 0 {
        return false;
    }
    // SAFETY: CPython's `int PyGILState_Check(void)`, which may be called on any thread at any time. It answers 1 where
    // it cannot tell.
    unsafe {
        let check: unsafe extern "C" fn() -> std::ffi::c_int = std::mem::transmute(check);
        check() == 0
    }
}

#[cfg(not(unix))]
fn is_surely_detached() -> bool {
    false
}
