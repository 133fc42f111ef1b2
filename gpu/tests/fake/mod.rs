//! The stand-in for the CUDA driver, loaded before anything looks for the real one, and what tests
//! steer it with. `fakes/cuda/src/lib.rs` says what each function does.
#![allow(dead_code)] // tests that include it use what they need

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use libloading::Library;

pub(crate) mod block;
pub(crate) mod child;
pub(crate) mod failing;
pub(crate) mod given;
pub(crate) mod places;
pub(crate) mod rig;

pub(crate) const LAZY: u32 = 1;
pub(crate) const PAGEABLE_EAGER: u32 = 2;
pub(crate) const NO_POOLS: u32 = 4;
pub(crate) const NO_CONCURRENT_MANAGED: u32 = 8;
pub(crate) const NO_BATCH: u32 = 16;
pub(crate) const NO_VIRTUAL_MEMORY: u32 = 32;
pub(crate) const NO_DESCRIPTORS: u32 = 64;
pub(crate) const FREE_BLOCKS: u32 = 512;

/// The ways in which the driver runs work.
pub(crate) const MODES: [u32; 2] = [0, LAZY];

/// Whether the whole program runs in one of these modes: `FAKE_CUDA_FLAGS` adds them to the flags of
/// every group. Tests that are about other modes ask.
pub(crate) fn in_mode(flags: u32) -> bool {
    let set = std::env::var("FAKE_CUDA_FLAGS").ok();
    set.and_then(|set| set.parse().ok())
        .is_some_and(|set: u32| set & flags != 0)
}

/// The library. It stays loaded.
pub(crate) fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| load("libcuda_fake.so"))
}

/// Loads a library that cargo has built for the tests.
pub(crate) fn load(name: &str) -> Library {
    // Beside the tests first: what an earlier `cargo build` left comes before it on the path.
    let beside = std::env::current_exe().unwrap().with_file_name(name);
    let path = if beside.exists() { beside } else { name.into() };
    // SAFETY: the library's initialisers are those of the Rust runtime, which may run on any
    // thread.
    let library = unsafe { Library::new(path) };
    library.expect("cargo has built the library")
}

/// Calls a function of a library.
macro_rules! call {
    ($library:expr, $name:ident($($arg:expr => $type:ty),*) -> $answer:ty) => {{
        type Function = unsafe extern "C" fn($($type),*) -> $answer;
        // SAFETY: the library's function of this name has this type.
        let function = unsafe { $library.get::<Function>(stringify!($name)) };
        let function = function.expect(stringify!($name));
        // SAFETY: callers pass pointers that are valid for the call.
        unsafe { function($($arg),*) }
    }};
}
pub(crate) use call;

/// Calls a function of the stand-in.
macro_rules! fake {
    ($($call:tt)*) => {
        $crate::fake::call!($crate::fake::library(), $($call)*)
    };
}
pub(crate) use fake;

/// A group of ordinals with one engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub(crate) first: i32,
    pub(crate) ordinals: i32,
}

impl Group {
    /// `ordinals` fresh ordinals.
    pub(crate) fn open(ordinals: i32, flags: u32) -> Self {
        Self::with_capacity(ordinals, flags, 0)
    }

    pub(crate) fn with_capacity(ordinals: i32, flags: u32, bytes: u64) -> Self {
        let first = fake!(fake_cuda_open(ordinals => i32, flags => u32, bytes => u64) -> i32);
        assert!(first >= 0, "no ordinals left");
        Self { first, ordinals }
    }

    /// Gives the ordinals back, if no context is left. There are 900.
    pub(crate) fn close(self) -> bool {
        fake!(fake_cuda_close(self.first => i32) -> i32) == 0
    }

    /// The first ordinal, as cudarc takes it.
    pub(crate) fn ordinal(self) -> usize {
        self.first as usize
    }

    /// Makes the `nth` call of `name` from now fail; 1 is the next.
    pub(crate) fn fail(self, name: &str, nth: u32, code: i32) {
        let name = text(name);
        fake!(fake_cuda_fail(self.first => i32, name.as_ptr() => *const c_char,
            nth => u32, code => i32) -> i32);
    }

    /// Takes the orders of `fail` back; how many calls failed.
    pub(crate) fn clear(self) -> u32 {
        fake!(fake_cuda_clear(self.first => i32) -> u32)
    }

    pub(crate) fn calls(self, name: &str) -> u64 {
        let name = text(name);
        fake!(fake_cuda_calls(self.first => i32, name.as_ptr() => *const c_char) -> u64)
    }

    /// The calls that this thread has made, of any group or none, by their names.
    pub(crate) fn thread_calls() -> BTreeMap<String, u64> {
        let mut bytes = vec![0u8; 1 << 14];
        let length = fake!(fake_cuda_thread_calls(bytes.as_mut_ptr() => *mut u8,
            bytes.len() => usize) -> usize);
        bytes.truncate(length);
        let text = String::from_utf8(bytes).unwrap();
        let calls = text.lines().map(|line| {
            let (name, n) = line.split_once(' ').unwrap();
            (name.into(), n.parse().unwrap())
        });
        calls.collect()
    }

    /// Makes the stand-in report another length for the block at an address.
    pub(crate) fn misreport(address: usize, bytes: usize) {
        let code = fake!(fake_cuda_misreport(address as u64 => u64, bytes => usize) -> i32);
        assert_eq!(code, 0, "no block at {address:#x}");
    }

    /// Makes the engine fail for good.
    pub(crate) fn break_with(self, code: i32) {
        fake!(fake_cuda_break(self.first => i32, code => i32) -> i32);
    }

    /// From now on every call answers this code; 0 ends that.
    pub(crate) fn shut_down(self, code: i32) {
        fake!(fake_cuda_shutdown(self.first => i32, code => i32) -> i32);
    }

    /// Runs everything that is queued.
    pub(crate) fn drain(self) -> i32 {
        fake!(fake_cuda_drain(self.first => i32) -> i32)
    }

    pub(crate) fn live(self, what: &str) -> u64 {
        let what = text(what);
        fake!(fake_cuda_live(self.first => i32, what.as_ptr() => *const c_char) -> u64)
    }

    /// What is not clean, one item a line.
    pub(crate) fn report(self) -> String {
        let mut bytes = vec![0u8; 1 << 16];
        let length = fake!(fake_cuda_report(self.first => i32, bytes.as_mut_ptr() => *mut u8,
            bytes.len() => usize) -> usize);
        bytes.truncate(length);
        String::from_utf8(bytes).unwrap()
    }

    #[track_caller]
    pub(crate) fn assert_clean(self) {
        assert_eq!(self.report(), "", "{self:?} is not clean");
    }
}

fn text(text: &str) -> CString {
    CString::new(text).unwrap()
}
