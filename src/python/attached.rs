//! Running code attached to the Python interpreter, and detached from it.

use std::mem::ManuallyDrop;
#[cfg(unix)]
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

use arrow_array::RecordBatchReader;
use arrow_schema::SchemaRef;
use pyo3::{Python, ffi};

use crate::abi::ArrowDeviceType;
use crate::stream::DeviceRecordBatchReader;

/// A reader that releases the interpreter (the GIL) during each `next`.
///
/// [`stream_from_python`](super::stream_from_python) returns one. Wrap other readers that block, such as a host reader
/// above it, in the same way.
#[derive(Debug)]
pub struct Detached<R>(R);

impl<R> Detached<R> {
    /// Wraps a reader.
    pub const fn new(reader: R) -> Self {
        Self(reader)
    }

    /// Returns the wrapped reader.
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

impl<R: RecordBatchReader + Send> RecordBatchReader for Detached<R> {
    fn schema(&self) -> SchemaRef {
        self.0.schema()
    }
}

/// How this thread stands to the interpreter.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Attached,
    Detached,
    /// There is none yet, or no longer one.
    NoInterpreter,
    /// It cannot be found out.
    Unknown,
}

/// Asks the interpreter itself. pyo3 knows only of attachments made through pyo3, and `PyGILState_Check` always answers 1
/// once there has been a sub-interpreter.
fn state() -> State {
    // SAFETY: this function may be called at any time, on any thread.
    if unsafe { ffi::Py_IsInitialized() } == 0 {
        return State::NoInterpreter;
    }
    let Some(current) = current_thread_state() else {
        return State::Unknown;
    };
    // SAFETY: both only need an interpreter, which there is (checked above). In old versions `current` returns the state of
    // whichever thread is attached, in new ones that of this thread.
    let (current, own) = unsafe { (current(), ffi::PyGILState_GetThisThreadState()) };
    if !current.is_null() && current == own {
        State::Attached
    } else {
        State::Detached
    }
}

type CurrentThreadState = unsafe extern "C" fn() -> *mut ffi::PyThreadState;

/// Looks the function up at run time: it is not in the limited API, which the final module may be built for, but every
/// CPython has one of the two.
#[cfg(unix)]
fn current_thread_state() -> Option<CurrentThreadState> {
    static FOUND: OnceLock<Option<CurrentThreadState>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let names = [
            c"PyThreadState_GetUnchecked",
            c"_PyThreadState_UncheckedGet",
        ];
        // SAFETY: the names are null-terminated.
        let find =
            |name: &std::ffi::CStr| unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        let found = names.into_iter().map(find).find(|f| !f.is_null())?;
        // SAFETY: both functions, of CPython 3.13 and of the versions before it, are declared `PyThreadState *f(void)`.
        Some(unsafe { std::mem::transmute::<*mut std::ffi::c_void, CurrentThreadState>(found) })
    })
}

#[cfg(not(unix))]
fn current_thread_state() -> Option<CurrentThreadState> {
    None
}

pub(super) fn has_interpreter() -> bool {
    state() != State::NoInterpreter
}

/// Runs `f`, which may take long. If this thread is attached to the interpreter, it is detached meanwhile.
pub(super) fn detached<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    match state() {
        State::Detached | State::NoInterpreter => f(),
        // SAFETY: `state` has found this thread attached, and the token does not leave this line.
        State::Attached => unsafe { Python::assume_attached() }.detach(f),
        State::Unknown => {
            let _ensured = Ensured::new();
            // SAFETY: `Ensured` keeps this thread attached, and the token does not leave this line.
            unsafe { Python::assume_attached() }.detach(f)
        }
    }
}

/// Attaches this thread, whatever its state was. pyo3's own way relies on pyo3's count, which others do not keep.
struct Ensured(ffi::PyGILState_STATE);

impl Ensured {
    fn new() -> Self {
        // SAFETY: this needs an interpreter; the callers have found one with `state`.
        Self(unsafe { ffi::PyGILState_Ensure() })
    }
}

impl Drop for Ensured {
    fn drop(&mut self) {
        // SAFETY: this is what `PyGILState_Ensure` returned, released once, and on the same thread, since every `Ensured` is a
        // local variable.
        unsafe { ffi::PyGILState_Release(self.0) }
    }
}

/// Runs `f` attached, after waiting for the interpreter. Returns `None` if there is none.
pub(super) fn attached<T>(f: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    if state() == State::NoInterpreter {
        return None;
    }
    let _ensured = Ensured::new();
    // SAFETY: `_ensured` keeps this thread attached, and the token's lifetime keeps it within `f`.
    Some(f(unsafe { Python::assume_attached() }))
}

/// Drops a value whose drop may need the interpreter, on a thread that is attached to it. Does not wait for the
/// interpreter. Leaks the value if there is no longer one.
pub(super) fn drop_attached<T: Send + 'static>(value: T) {
    match state() {
        State::Attached => {
            let _pending = Pending::set_aside();
            drop(value);
        }
        State::NoInterpreter => std::mem::forget(value),
        State::Detached | State::Unknown => match releaser() {
            Some(releaser) => {
                // The thread never ends, so it receives the value. A refused one must not be dropped on this thread.
                if let Err(refused) = releaser.send(Box::new(value)) {
                    std::mem::forget(refused);
                }
            }
            // The thread cannot be started: a wait is better than a leak.
            None => {
                let _ensured = Ensured::new();
                drop(value);
            }
        },
    }
}

/// An exception that was being raised when a value is dropped. Python code must not run while it is set.
struct Pending([*mut ffi::PyObject; 3]);

impl Pending {
    /// Must be called on a thread that is attached.
    #[allow(deprecated)] // since Python 3.12, whose replacements 3.11 does not have
    fn set_aside() -> Self {
        let [mut kind, mut value, mut traceback] = [std::ptr::null_mut(); 3];
        // SAFETY: the only caller has found this thread attached. The three pointers are valid for writes; this owns the
        // references from here on.
        unsafe { ffi::PyErr_Fetch(&mut kind, &mut value, &mut traceback) };
        Self([kind, value, traceback])
    }
}

impl Drop for Pending {
    #[allow(deprecated)] // since Python 3.12, whose replacements 3.11 does not have
    fn drop(&mut self) {
        let [kind, value, traceback] = self.0;
        // SAFETY: this thread is still attached, since dropping a value does not change that. The references come from
        // `PyErr_Fetch` and are given back once. An exception that was raised meanwhile is dropped.
        unsafe { ffi::PyErr_Restore(kind, value, traceback) };
    }
}

type Releaser = Sender<Box<dyn Send>>;

/// The thread that drops values attached to the interpreter. Each process has one, a forked one too.
fn releaser() -> Option<Releaser> {
    static RELEASER: Mutex<Option<(u32, Releaser)>> = Mutex::new(None);
    let mut releaser = RELEASER.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    match &*releaser {
        Some((of, sender)) if *of == process => Some(sender.clone()),
        _ => {
            let (sender, values) = channel::<Box<dyn Send>>();
            let thread = std::thread::Builder::new().name("arrow-device-python".into());
            let run = move || values.into_iter().for_each(drop_when_attached);
            thread.spawn(run).ok()?;
            // After a fork, the parent's sender may hold a lock that no thread here will release.
            std::mem::forget(releaser.replace((process, sender.clone())));
            Some(sender)
        }
    }
}

/// Must be called on a thread that pyo3 knows to be detached.
fn drop_when_attached<T>(value: T) {
    // Leaked unless the closure runs.
    let mut value = ManuallyDrop::new(value);
    Python::try_attach(|_| {
        // SAFETY: the value is dropped only here, once, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut value) }
    });
}
