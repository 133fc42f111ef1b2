//! C++ exceptions, thrown by the C++ runtime itself, which is loaded if the machine has one.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::Write as _;
use std::mem::{size_of, transmute_copy};
use std::thread;

use crate::{assert_thrown, exported, import, made::Thrown, rigged};
use arrow_device::device::sim::SimMode;

use crate::support_c::sim::simulated;

type Destructor = unsafe extern "C" fn(*mut c_void);

/// What is used of libstdc++.
#[derive(Clone, Copy)]
struct Runtime {
    allocate: unsafe extern "C" fn(usize) -> *mut c_void,
    throw: unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, Option<Destructor>) -> !,
    uncaught: unsafe extern "C" fn() -> c_int,
    int: *mut c_void,
    runtime_error: *mut c_void,
    construct: unsafe extern "C" fn(*mut c_void, *const c_char),
    destroy: Destructor,
}

// SAFETY: addresses in a library that stays loaded, which any thread may use.
unsafe impl Send for Runtime {}
// SAFETY: addresses in a library that stays loaded, which any thread may use.
unsafe impl Sync for Runtime {}

thread_local! {
    /// Thrown integers that this thread has destroyed.
    static DESTROYED: Cell<usize> = const { Cell::new(0) };
}

/// Bytes of a `std::runtime_error`: a vtable and a string of shared text.
const RUNTIME_ERROR: usize = size_of::<[usize; 2]>();

/// # Safety
/// `T` is a pointer or function pointer of the type that the symbol has.
unsafe fn find<T: Copy>(library: *mut c_void, name: &CStr) -> T {
    assert_eq!(size_of::<T>(), size_of::<*mut c_void>());
    // SAFETY: an open library; the size is a pointer's, the type the caller's.
    unsafe {
        let found = libc::dlsym(library, name.as_ptr());
        assert!(!found.is_null(), "{name:?}");
        transmute_copy(&found)
    }
}

impl Runtime {
    fn load(flags: c_int) -> Option<Self> {
        // SAFETY: no constructor of the library does harm; symbols are what the C++ ABI says.
        unsafe {
            let library = libc::dlopen(c"libstdc++.so.6".as_ptr(), libc::RTLD_NOW | flags);
            if library.is_null() {
                assert!(
                    std::env::var_os("CI").is_none(),
                    "CI needs a C++ runtime: no libstdc++.so.6"
                );
                // Not `eprintln!`, which the test harness hides.
                let line = b"C++ exceptions not tested: no libstdc++.so.6\n";
                std::io::stderr().write_all(line).unwrap();
                return None;
            }
            Some(Self {
                allocate: find(library, c"__cxa_allocate_exception"),
                throw: find(library, c"__cxa_throw"),
                uncaught: find(library, c"_ZSt19uncaught_exceptionsv"),
                int: find(library, c"_ZTIi"),
                runtime_error: find(library, c"_ZTISt13runtime_error"),
                construct: find(library, c"_ZNSt13runtime_errorC1EPKc"),
                destroy: find(library, c"_ZNSt13runtime_errorD1Ev"),
            })
        }
    }

    fn throw_int(self) {
        unsafe extern "C" fn destroy(_: *mut c_void) {
            DESTROYED.set(DESTROYED.get() + 1);
        }
        // SAFETY: room for an `int`, whose destructor only counts.
        unsafe {
            let value = (self.allocate)(size_of::<c_int>()).cast::<c_int>();
            value.write(7);
            (self.throw)(value.cast(), self.int, Some(destroy))
        }
    }

    fn throw_runtime_error(self) {
        // SAFETY: room for the object, aligned for any, and its own constructor and destructor.
        unsafe {
            let value = (self.allocate)(RUNTIME_ERROR);
            (self.construct)(value, c"a text long enough to be on the heap".as_ptr());
            (self.throw)(value, self.runtime_error, Some(self.destroy))
        }
    }

    /// `std::uncaught_exceptions()` of this thread.
    fn uncaught(self) -> c_int {
        // SAFETY: no arguments.
        unsafe { (self.uncaught)() }
    }
}

#[test]
fn by_type() {
    let Some(runtime) = Runtime::load(libc::RTLD_LOCAL) else {
        return;
    };
    let test = move || {
        let place = simulated(SimMode::Async).unwrap();
        let throws = [
            (Runtime::throw_int as fn(_), "a C++ exception (int)"),
            (
                Runtime::throw_runtime_error,
                "a C++ exception (std::runtime_error)",
            ),
        ];
        for i in 0..100 {
            for (throw, text) in throws {
                let release = move || {
                    assert_eq!(runtime.uncaught(), 0);
                    throw(runtime);
                };
                drop(import(
                    rigged(exported(&place), Box::new(release)).0,
                    &place,
                ));
                assert_thrown(place.device.take_drop_error(), "ArrowArray.release", text);
                assert_eq!(runtime.uncaught(), 0);
            }
            assert_eq!(DESTROYED.get(), i + 1);
        }
        place.assert_clean();
    };
    let threads: Vec<_> = (0..4).map(|_| thread::spawn(test)).collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
}

/// An exception that says that it is C++'s, of a runtime that shows nothing: the unwinder ends it.
#[test]
fn hidden_runtime() {
    // Another runtime, which the whole program sees, is not asked.
    let _ = Runtime::load(libc::RTLD_GLOBAL);
    let place = simulated(SimMode::Async).unwrap();
    let thrown = Thrown::default();
    let throw = thrown.clone();
    let release = move || throw.throw_cpp();
    drop(import(
        rigged(exported(&place), Box::new(release)).0,
        &place,
    ));
    assert_thrown(
        place.device.take_drop_error(),
        "ArrowArray.release",
        "a C++ exception",
    );
    assert_eq!(thrown.counts(), (1, 1));
    place.assert_clean();
}
