//! The stand-in for OpenCL's loader (`fakes/opencl`), loaded before anything looks for the real one, and what controls it.

use std::ffi::{CString, c_char, c_int};
use std::sync::OnceLock;

use libloading::Library;

use crate::fork_kit::{alone, is_alone};
use crate::suite::Faults;

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let name = "libopencl_fake.so";
        // Beside the tests first: what an earlier `cargo build` left comes before it on the path.
        let beside = std::env::current_exe().unwrap().with_file_name(name);
        let path = if beside.exists() { beside } else { name.into() };
        // SAFETY: the library's initialisers are those of the Rust runtime, which may run on any thread.
        unsafe { Library::new(path) }.expect("cargo has built the library")
    })
}

macro_rules! call {
    ($name:ident($($arg:expr => $type:ty),*) -> $answer:ty) => {{
        // SAFETY: the stand-in has the function with these parameters.
        unsafe {
            let name = concat!(stringify!($name), "\0").as_bytes();
            let function = library().get::<unsafe extern "C" fn($($type),*) -> $answer>(name).unwrap();
            function($($arg),*)
        }
    }};
}

/// Lets the nth call from now of this function (`*`: of any) fail, once.
pub(crate) fn fail(name: &str, nth: u64, code: c_int) {
    fail_times(name, nth, 1, code);
}

/// Lets so many calls fail, from the nth from now on.
pub(crate) fn fail_times(name: &str, nth: u64, times: u64, code: c_int) {
    let name = CString::new(name).unwrap();
    call!(fake_opencl_fail(
        name.as_ptr() => *const c_char, nth => u64, times => u64, code => c_int
    ) -> ());
}

/// Takes that back; whether a call has failed.
pub(crate) fn clear() -> bool {
    call!(fake_opencl_clear() -> u64) > 0
}

/// How many calls of a function were made.
pub(crate) fn calls(name: &str) -> u64 {
    let name = CString::new(name).unwrap();
    call!(fake_opencl_calls(name.as_ptr() => *const c_char) -> u64)
}

/// How many references and pieces of memory of the runtime this program owns.
pub(crate) fn live() -> u64 {
    call!(fake_opencl_live() -> u64)
}

/// How often something was given back that was not owned.
pub(crate) fn misuses() -> u64 {
    call!(fake_opencl_misuses() -> u64)
}

/// Runs a test in a process of its own, in which the stand-in takes the loader's place. True there.
#[track_caller]
pub(crate) fn is_loaded(test: &str) -> bool {
    alone(test, load);
    is_alone()
}

pub(crate) fn load() {
    library();
}

/// For the suite of streams.
pub(crate) fn faults() -> Faults {
    if is_alone() {
        load();
    }
    Faults {
        interposed: is_loaded,
        fail_nth: |n| fail("*", n, -5),
        clear,
        misused: || (misuses() > 0).then(|| "given back twice".into()),
    }
}
