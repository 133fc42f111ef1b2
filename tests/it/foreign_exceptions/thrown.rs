//! What the tests' callbacks throw: panics, or foreign exceptions in a child process.

use std::ffi::{CStr, c_int, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// The text of the panics.
pub(crate) const TEXT: &str = "thrown by a callback";

/// The variable that says what a child process throws: [`MADE_UP`] or [`CPP`].
pub(crate) const EXCEPTION: &str = "ARROW_DEVICE_TEST_EXCEPTION";
/// An exception of a language that no runtime knows.
pub(crate) const MADE_UP: &str = "made up";
/// A C++ exception.
pub(crate) const CPP: &str = "C++";
/// What a child process prints when it throws.
pub(crate) const THROWS: &str = "a foreign exception leaves a callback";

/// The variable that says which case of a table a child process runs.
pub(crate) const CASE: &str = "ARROW_DEVICE_TEST_CASE";

/// Whether this process runs a case.
pub(crate) fn is_chosen(case: &str) -> bool {
    std::env::var(CASE).map_or(true, |chosen| chosen == case)
}

/// Throws and counts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Thrown(Arc<AtomicUsize>);

impl Thrown {
    /// Returns how often something was thrown.
    pub(crate) fn count(&self) -> usize {
        self.0.load(SeqCst)
    }

    /// What throws.
    pub(crate) fn throwing(&self) -> Box<dyn FnOnce() + Send + Sync> {
        let this = self.clone();
        Box::new(move || this.throw())
    }

    pub(crate) fn throw(&self) -> ! {
        self.0.fetch_add(1, SeqCst);
        let Ok(exception) = std::env::var(EXCEPTION) else {
            panic!("{TEXT}");
        };
        eprintln!("{THROWS}");
        match &*exception {
            CPP => raise_cpp(),
            _ => raise_made_up(),
        }
    }
}

/// `struct _Unwind_Exception`.
#[repr(C, align(16))]
struct Exception {
    class: u64,
    cleanup: unsafe extern "C" fn(c_int, *mut Exception),
    private: [*mut c_void; 2],
}

// The unwinder, which the standard library links.
unsafe extern "C-unwind" {
    fn _Unwind_RaiseException(exception: *mut Exception) -> c_int;
}

fn raise_made_up() -> ! {
    unsafe extern "C" fn cleanup(_: c_int, exception: *mut Exception) {
        // SAFETY: called once, by whoever catches what was boxed below.
        drop(unsafe { Box::from_raw(exception) });
    }
    let exception = Box::into_raw(Box::new(Exception {
        class: u64::from_be_bytes(*b"MADEUP\0\0"),
        cleanup,
        private: [ptr::null_mut(); 2],
    }));
    // SAFETY: the exception is complete, and lives until its cleanup.
    let code = unsafe { _Unwind_RaiseException(exception) };
    panic!("nobody catches the exception: code {code}");
}

type Allocate = unsafe extern "C" fn(usize) -> *mut c_void;
type Throw = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, *mut c_void) -> !;

/// Throws an `int`.
fn raise_cpp() -> ! {
    let library = cpp_runtime();
    let find = |name: &CStr| {
        // SAFETY: `library` is the handle of an open library, and `name` ends with a NUL.
        let found = unsafe { libc::dlsym(library, name.as_ptr()) };
        assert!(!found.is_null(), "{name:?}");
        found
    };
    let (allocate, throw) = (find(c"__cxa_allocate_exception"), find(c"__cxa_throw"));
    // SAFETY: the types are those of the C++ ABI, in which an `int` has no destructor.
    unsafe {
        let allocate = transmute::<*mut c_void, Allocate>(allocate);
        let throw = transmute::<*mut c_void, Throw>(throw);
        let value = allocate(size_of::<c_int>());
        value.cast::<c_int>().write(7);
        throw(value, find(c"_ZTIi"), ptr::null_mut())
    }
}

/// Returns libstdc++, or null if the machine has none.
pub(crate) fn cpp_runtime() -> *mut c_void {
    // SAFETY: the library's initialisers may run on any thread.
    unsafe { libc::dlopen(c"libstdc++.so.6".as_ptr(), libc::RTLD_NOW) }
}
