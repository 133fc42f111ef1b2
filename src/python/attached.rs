//! Running code attached to the Python interpreter, and detached from it.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
#[cfg(unix)]
use std::sync::OnceLock;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::mpsc::{Sender, channel};

use pyo3::{Python, ffi};

/// Whether there is an interpreter already, and still.
pub(super) fn has_interpreter() -> bool {
    // SAFETY: this function may be called at any time, on any thread.
    unsafe { ffi::Py_IsInitialized() != 0 }
}

/// Whether this thread is attached to the interpreter, or `None` if that cannot be found out. Asks the interpreter itself:
/// pyo3 knows only of attachments made through pyo3, and `PyGILState_Check` always answers 1 once there has been a
/// sub-interpreter.
fn is_attached() -> Option<bool> {
    if !has_interpreter() {
        return Some(false);
    }
    let current = current_thread_state()?;
    // SAFETY: both only need an interpreter, which there is (checked above). In old versions `current` returns the state of
    // whichever thread is attached, in new ones that of this thread.
    let (current, own) = unsafe { (current(), ffi::PyGILState_GetThisThreadState()) };
    Some(!current.is_null() && current == own)
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

/// Runs `f`, which may take long. If this thread is attached to the interpreter, it is detached meanwhile.
pub(super) fn detached<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    let _ensured = match is_attached() {
        Some(false) => return f(),
        Some(true) => None,
        None => Some(Ensured::new()),
    };
    // SAFETY: this thread is attached, as `is_attached` found or `_ensured` sees to. The token does not leave this line.
    unsafe { Python::assume_attached() }.detach(f)
}

/// Attaches this thread, whatever its state was. pyo3's own way relies on pyo3's count, which others do not keep.
struct Ensured(ffi::PyGILState_STATE);

impl Ensured {
    fn new() -> Self {
        // SAFETY: this needs an interpreter; the callers have found one.
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
    if !has_interpreter() {
        return None;
    }
    let _ensured = Ensured::new();
    // SAFETY: `_ensured` keeps this thread attached, and the token's lifetime keeps it within `f`.
    Some(f(unsafe { Python::assume_attached() }))
}

/// Keeps a value whose drop may need the interpreter. It is dropped by a thread that is attached to it: by the current one
/// if it is, else by one that waits for it. Leaks the value if there is no longer an interpreter.
pub(super) struct DropAttached<T: Send + 'static>(ManuallyDrop<T>);

impl<T: Send + 'static> DropAttached<T> {
    pub(super) const fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }
}

impl<T: Send + 'static> Deref for DropAttached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send + 'static> DerefMut for DropAttached<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: Send + 'static> Drop for DropAttached<T> {
    #[allow(deprecated)] // since Python 3.12, whose replacements 3.11 does not have
    fn drop(&mut self) {
        if !has_interpreter() {
            return;
        }
        // SAFETY: the value is taken only here, and not used afterwards.
        let value = unsafe { ManuallyDrop::take(&mut self.0) };
        if is_attached() != Some(true) {
            // A refused value must not be dropped on this thread.
            let sent = releaser().send(Box::new(value));
            return sent.unwrap_or_else(std::mem::forget);
        }
        // Python code must not run while an exception is being raised: it is set aside meanwhile.
        let [mut kind, mut raised, mut traceback] = [std::ptr::null_mut(); 3];
        // SAFETY: this thread is attached. The pointers are valid for writes, and the references are given back once. The values
        // that this module drops catch panics.
        unsafe {
            ffi::PyErr_Fetch(&mut kind, &mut raised, &mut traceback);
            drop(value);
            ffi::PyErr_Restore(kind, raised, traceback);
        }
    }
}

type Releaser = Sender<Box<dyn Send>>;

/// The thread that drops values attached to the interpreter. Each process has one, a forked one too, whose parent may have held any lock.
/// It never ends; if it cannot be started, it receives nothing.
fn releaser() -> &'static Releaser {
    static RELEASER: AtomicPtr<(u32, Releaser)> = AtomicPtr::new(std::ptr::null_mut());
    let process = std::process::id();
    loop {
        let known = RELEASER.load(Acquire);
        // SAFETY: what was stored is never freed.
        match unsafe { known.as_ref() } {
            Some((of, sender)) if *of == process => return sender,
            _ => {}
        }
        let (sender, values) = channel::<Box<dyn Send>>();
        let thread = std::thread::Builder::new().name("arrow-device-python".into());
        let run = move || values.into_iter().for_each(drop_when_attached);
        let is_started = thread.spawn(run).is_ok();
        let made = Box::into_raw(Box::new((process, sender)));
        if !is_started
            || RELEASER
                .compare_exchange(known, made, AcqRel, Acquire)
                .is_ok()
        {
            // SAFETY: just made, and never freed.
            return unsafe { &(*made).1 };
        }
        // SAFETY: just made, and not stored. The thread ends, since another one has come first.
        drop(unsafe { Box::from_raw(made) });
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
