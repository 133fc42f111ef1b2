//! The C++ of the tests, compiled once and loaded.

use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use libloading::Library;

/// The folder of the SYCL installation that the tests use.
fn root() -> PathBuf {
    let root = std::env::var_os("ARROW_DEVICE_SYCL")
        .expect("ARROW_DEVICE_SYCL names the installation of SYCL");
    root.into()
}

/// Compiles a file of `tests/cpp` unless that has been done.
pub(crate) fn compile(source: &str, output: &str, flags: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/cpp")
        .join(source);
    let output = Path::new(env!("OUT_DIR")).join(output);
    let time = |path: &Path| path.metadata().and_then(|of| of.modified()).ok();
    if time(&output).is_some_and(|made| Some(made) > time(&source)) {
        return output;
    }
    let partial = output.with_extension(format!("{}", std::process::id()));
    let mut compiler = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    compiler
        .args(["-std=c++17", "-O1", "-w"])
        .args(flags)
        .arg("-isystem")
        .arg(root().join("include"));
    compiler
        .arg(&source)
        .arg("-o")
        .arg(&partial)
        .arg("-L")
        .arg(root().join("lib"))
        .args(["-lsycl", "-ldl", "-lpthread"]);
    compiler.arg(format!("-Wl,-rpath,{}", root().join("lib").display()));
    let status = compiler.status().unwrap();
    assert!(status.success(), "{compiler:?}");
    std::fs::rename(&partial, &output).unwrap();
    output
}

macro_rules! programs {
    ($($name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        pub(crate) struct Programs { $(pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)* _library: Library }

        /// The functions of `programs.cpp`.
        pub(crate) fn programs() -> &'static Programs {
            static PROGRAMS: OnceLock<Programs> = OnceLock::new();
            PROGRAMS.get_or_init(|| {
                let path = compile("programs.cpp", "libprograms.so", &["-shared", "-fPIC"]);
                // SAFETY: the library of this test; its functions have these types.
                unsafe {
                    let library = Library::new(path).unwrap();
                    Programs { $($name: *library.get(concat!(stringify!($name), "\0").as_bytes()).unwrap(),)* _library: library }
                }
            })
        }
    };
}

programs! {
    gate_new: fn() -> *mut c_void;
    gate_open: fn(*mut c_void);
    hold_by_host_task: fn(*mut c_void, *mut c_void, c_int) -> c_int;
    hold_by_event: fn(*mut c_void) -> *mut c_void;
    hold_by_kernel: fn(*mut c_void, *mut c_void) -> c_int;
    end_event: fn(*mut c_void, c_int);
    producer_live: fn() -> c_int;
    produce: fn(*mut c_void, i64, i64, c_int, *mut c_void) -> c_int;
    consume: fn(*const c_void, *const c_void, i64) -> *mut c_void;
    consumed_is_complete: fn(*mut c_void) -> c_int;
    consumed_is: fn(*mut c_void, i64) -> c_int;
    queue_new: fn(i64, c_int) -> *mut c_void;
    queue_delete: fn(*mut c_void);
    queue_malloc: fn(*mut c_void, usize) -> *mut c_void;
    queue_free: fn(*mut c_void, *mut c_void);
    event_held: fn(*mut c_void, *mut *mut c_void) -> *mut c_void;
    ask_for_exceptions: fn(*mut c_void) -> c_int;
    queue_fill: fn(*mut c_void, *mut c_void, usize) -> *mut c_void;
    event_is_complete: fn(*mut c_void) -> c_int;
    event_delete: fn(*mut c_void);
    scale_by_host_task: fn(*mut c_void, *mut i64, i64, i64) -> c_int;
}

/// How a producer makes its array, or a queue is made.
pub(crate) const OWN_CONTEXT: c_int = 1;
pub(crate) const OUT_OF_ORDER: c_int = 2;
pub(crate) const FAILS: c_int = 4;
pub(crate) const SHARED: c_int = 8;
pub(crate) const EVENT_OF_HOST: c_int = 16;
pub(crate) const NO_HANDLER: c_int = 32;

/// An address that is used on other threads.
#[derive(Clone, Copy)]
pub(crate) struct Shared(pub(crate) *mut c_void);
// SAFETY: what it points to may be used on any thread.
unsafe impl Send for Shared {}
// SAFETY: what it points to may be used on several threads at once.
unsafe impl Sync for Shared {}

impl Shared {
    pub(crate) fn get(self) -> *mut c_void {
        self.0
    }
}
