//! With and without the interpreter.

use std::mem::ManuallyDrop;
#[cfg(unix)]
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

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

/// What this thread has to do with the interpreter.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Attached,
    Detached,
    /// Not there yet, or no more.
    NoInterpreter,
    /// This interpreter does not tell.
    Unknown,
}

/// Asked of the interpreter itself: pyo3 only knows what went through it, and `PyGILState_Check` answers 1 whatever is
/// true once there was a sub-interpreter.
fn state() -> State {
    // SAFETY: may be called at any time.
    if unsafe { ffi::Py_IsInitialized() } == 0 {
        return State::NoInterpreter;
    }
    let Some(current) = current_thread_state() else {
        return State::Unknown;
    };
    // SAFETY: an interpreter is there; both only look. The current state is that of whichever thread is attached in old
    // versions, of this thread in new ones.
    let (current, own) = unsafe { (current(), ffi::PyGILState_GetThisThreadState()) };
    if !current.is_null() && current == own {
        State::Attached
    } else {
        State::Detached
    }
}

type CurrentThreadState = unsafe extern "C" fn() -> *mut ffi::PyThreadState;

/// Not in the limited API, which the final module may be built for; CPython has one of the two all the same.
#[cfg(unix)]
fn current_thread_state() -> Option<CurrentThreadState> {
    static FOUND: OnceLock<Option<CurrentThreadState>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let names = [
            c"PyThreadState_GetUnchecked",
            c"_PyThreadState_UncheckedGet",
        ];
        // SAFETY: the names are terminated.
        let find =
            |name: &std::ffi::CStr| unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        let found = names.into_iter().map(find).find(|f| !f.is_null())?;
        // SAFETY: both are `PyThreadState *f(void)`, of CPython 3.13 and of the versions before it.
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

/// Runs `f`, which may take long, and lets others use the interpreter meanwhile if this thread is attached to it.
pub(super) fn detached<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    match state() {
        State::Detached | State::NoInterpreter => f(),
        // SAFETY: attached, and the token does not leave this line.
        State::Attached => unsafe { Python::assume_attached() }.detach(f),
        State::Unknown => {
            let _ensured = Ensured::new();
            // SAFETY: as above.
            unsafe { Python::assume_attached() }.detach(f)
        }
    }
}

/// Attached, whatever was before; pyo3's own way believes its own count, which others do not keep.
struct Ensured(ffi::PyGILState_STATE);

impl Ensured {
    fn new() -> Self {
        // SAFETY: an interpreter is there.
        Self(unsafe { ffi::PyGILState_Ensure() })
    }
}

impl Drop for Ensured {
    fn drop(&mut self) {
        // SAFETY: what `PyGILState_Ensure` answered on this thread, once.
        unsafe { ffi::PyGILState_Release(self.0) }
    }
}

/// Runs `f` attached; waits for the interpreter. `None` if there is none.
pub(super) fn attached<T>(f: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    if state() == State::NoInterpreter {
        return None;
    }
    let _ensured = Ensured::new();
    // SAFETY: attached, and the token does not leave `f`.
    Some(f(unsafe { Python::assume_attached() }))
}

/// Drops what may need the interpreter for it, on a thread that is attached to it. Does not wait for the interpreter;
/// leaks the value if there is none any more.
pub(super) fn drop_attached<T: Send + 'static>(value: T) {
    match state() {
        State::Attached => {
            let _pending = Pending::set_aside();
            drop(value);
        }
        State::NoInterpreter => std::mem::forget(value),
        State::Detached | State::Unknown => match releaser() {
            Some(releaser) => {
                // The thread never ends, so it takes what it is sent. What it did not take would be dropped here.
                if let Err(refused) = releaser.send(Box::new(value)) {
                    std::mem::forget(refused);
                }
            }
            // No thread can be had: better a wait than a leak.
            None => {
                let _ensured = Ensured::new();
                drop(value);
            }
        },
    }
}

/// The exception that is on its way while something is dropped: Python code must not run with it set.
struct Pending([*mut ffi::PyObject; 3]);

impl Pending {
    /// On a thread that is attached.
    #[allow(deprecated)] // since Python 3.12, whose calls 3.11 does not have
    fn set_aside() -> Self {
        let [mut kind, mut value, mut traceback] = [std::ptr::null_mut(); 3];
        // SAFETY: attached; the three are written, and owned from here on.
        unsafe { ffi::PyErr_Fetch(&mut kind, &mut value, &mut traceback) };
        Self([kind, value, traceback])
    }
}

impl Drop for Pending {
    #[allow(deprecated)] // as above
    fn drop(&mut self) {
        let [kind, value, traceback] = self.0;
        // SAFETY: still attached; what `PyErr_Fetch` gave, given back once. What was raised meanwhile goes.
        unsafe { ffi::PyErr_Restore(kind, value, traceback) };
    }
}

type Releaser = Sender<Box<dyn Send>>;

/// The thread that drops what must be dropped attached: one in each process, forked ones too.
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
            // After a fork: nobody gives the parent's lock back.
            std::mem::forget(releaser.replace((process, sender.clone())));
            Some(sender)
        }
    }
}

/// On a thread that pyo3 knows to be detached.
fn drop_when_attached<T>(value: T) {
    // Forgotten unless the closure runs.
    let mut value = ManuallyDrop::new(value);
    Python::try_attach(|_| {
        // SAFETY: the only place that drops it; it is not used afterwards.
        unsafe { ManuallyDrop::drop(&mut value) }
    });
}
