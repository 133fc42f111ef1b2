//! The device under test, and what tests need of SYCL: C++ that is compiled once and loaded.

use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use arrow_device::Device;
use arrow_device::device::{DevicePtr, EventPtr, Queue};
use arrow_device_conformance::{Foreign, Hold, found};
use arrow_device_oneapi::{OneApiConfig, OneApiQueue, device_count};
use libloading::Library;

/// The number of the first device with unified shared memory, or `None`, with a line that says why, where there is none and none is
/// required.
pub(crate) fn number() -> Option<usize> {
    let usable = device_count().and_then(|count| {
        let open = |number: &usize| OneApiConfig::new(*number).open();
        let usable = (0..count).find(|number| open(number).is_ok());
        usable.map_or_else(|| open(&0).map(|_| 0), Ok)
    });
    found(usable, "ARROW_DEVICE_ONEAPI_REQUIRED")
}

/// A configuration of that device.
pub(crate) fn config() -> Option<OneApiConfig> {
    number().map(OneApiConfig::new)
}

pub(crate) fn device() -> Option<Device> {
    config().map(|config| config.open().unwrap())
}

/// Compiles `programs.cpp` unless that has been done.
fn compile() -> PathBuf {
    let root = std::env::var_os("ARROW_DEVICE_SYCL");
    let root = PathBuf::from(root.expect("ARROW_DEVICE_SYCL names the installation of SYCL"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cpp/programs.cpp");
    let output = Path::new(env!("OUT_DIR")).join("libprograms.so");
    let time = |path: &Path| path.metadata().and_then(|of| of.modified()).ok();
    if time(&output).is_some_and(|made| Some(made) > time(&source)) {
        return output;
    }
    let partial = output.with_extension(std::process::id().to_string());
    let (include, lib) = (root.join("include"), root.join("lib"));
    let mut compiler = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    compiler.args(["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-isystem"]);
    compiler.arg(include).arg(&source).arg("-o").arg(&partial);
    compiler.arg("-L").arg(&lib).args(["-lsycl", "-ldl"]);
    compiler.arg(format!("-Wl,-rpath,{}", lib.display()));
    assert!(compiler.status().unwrap().success(), "{compiler:?}");
    std::fs::rename(&partial, &output).unwrap();
    output
}

macro_rules! programs {
    ($($name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        pub(crate) struct Programs { $(pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)* _library: Library }

        /// The functions of `programs.cpp`.
        pub(crate) fn programs() -> &'static Programs {
            static PROGRAMS: OnceLock<Programs> = OnceLock::new();
            // SAFETY: the library of this test; its functions have these types.
            PROGRAMS.get_or_init(|| unsafe {
                let library = Library::new(compile()).unwrap();
                Programs { $($name: *library.get(concat!(stringify!($name), "\0").as_bytes()).unwrap(),)* _library: library }
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
    consume: fn(*mut c_void, *mut c_void, *mut c_void, *mut c_void, usize) -> *mut c_void;
    has_consumed: fn(*mut c_void) -> c_int;
    queue_new: fn(i64, c_int) -> *mut c_void;
    queue_delete: fn(*mut c_void);
    event_held: fn(*mut c_void, *mut *mut c_void) -> *mut c_void;
    event_delete: fn(*mut c_void);
    ask_for_exceptions: fn(*mut c_void) -> c_int;
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
struct Shared(*mut c_void);
// SAFETY: what it points to may be used on any thread.
unsafe impl Send for Shared {}

impl Shared {
    fn get(self) -> *mut c_void {
        self.0
    }
}

/// Work that `start` queues, and that ends when the hold is dropped.
pub(crate) fn hold(start: impl FnOnce(*mut c_void) -> c_int) -> Hold {
    // SAFETY: it has no requirement.
    let gate = Shared(unsafe { (programs().gate_new)() });
    assert_eq!(start(gate.get()), 0);
    // SAFETY: the gate is opened once.
    Hold::new(move || unsafe { (programs().gate_open)(gate.get()) })
}

pub(crate) fn sycl_queue(queue: &Queue) -> *mut c_void {
    OneApiQueue::of(queue).unwrap().sycl_queue()
}

/// Work in SYCL's own hands: what comes after it is not given to OpenCL yet. It throws at its end if `fails`.
pub(crate) fn hold_by_host_task(queue: &Queue, fails: bool) -> Hold {
    // SAFETY: the queue is live.
    hold(|gate| unsafe { (programs().hold_by_host_task)(sycl_queue(queue), gate, fails.into()) })
}

/// Work in OpenCL's hands.
pub(crate) fn hold_by_event(queue: &Queue) -> Hold {
    // SAFETY: the queue is live.
    let held = Shared(unsafe { (programs().hold_by_event)(sycl_queue(queue)) });
    assert!(!held.get().is_null());
    // SAFETY: the event is ended once.
    Hold::new(move || unsafe { (programs().end_event)(held.get(), 0) })
}

/// Work that OpenCL runs.
///
/// # Safety
/// `queue` points to a live `sycl::queue`.
pub(crate) unsafe fn hold_by_kernel(queue: *mut c_void) -> Hold {
    // SAFETY: the caller guarantees a live queue (see `# Safety`).
    hold(|gate| unsafe { (programs().hold_by_kernel)(queue, gate) })
}

/// An event of a program's, in a context.
pub(crate) struct Held {
    queue: *mut c_void,
    event: *mut c_void,
}

impl Held {
    /// Makes one that is pending until the function is called, and then has this status; a negative one says that it has failed.
    pub(crate) fn new(number: usize, how: c_int) -> (Self, impl FnOnce(c_int) + Send) {
        let mut held = std::ptr::null_mut();
        // SAFETY: the queue is live until this is dropped; `held` is valid for a write.
        let (queue, event) = unsafe {
            let queue = (programs().queue_new)(number as i64, how);
            (queue, (programs().event_held)(queue, &raw mut held))
        };
        assert!(!held.is_null());
        let held = Shared(held);
        // SAFETY: the event is ended once.
        let end = move |status| unsafe { (programs().end_event)(held.get(), status) };
        (Self { queue, event }, end)
    }

    pub(crate) fn event(&self) -> EventPtr {
        EventPtr::new(self.event).unwrap()
    }
}

/// An event of another library.
pub(crate) fn foreign(how: c_int) -> Foreign {
    let (held, end) = Held::new(number().unwrap(), how);
    let (event, status) = (held.event(), |works| if works { 0 } else { -5 });
    // SAFETY: `held` has the event.
    unsafe { Foreign::new(event, held, move |works| end(status(works))) }
}

/// A queue of another library copies what is at an address, after an event.
pub(crate) fn consumer(
    device: &Device,
    event: EventPtr,
    from: DevicePtr,
    bytes: usize,
) -> Box<dyn FnMut() -> Option<Vec<u8>>> {
    let queue = sycl_queue(&device.default_queue());
    // Not freed before the copy has ended.
    let mut read = ManuallyDrop::new(vec![0u8; bytes]);
    let (to, from) = (read.as_mut_ptr().cast(), from.as_ptr());
    // SAFETY: queue and event are live; memory and `read` live until the copy has ended.
    let behind = unsafe { (programs().consume)(queue, event.as_ptr(), to, from, bytes) };
    assert!(!behind.is_null());
    // SAFETY: nobody asks again once it has.
    let has_consumed = move || unsafe { (programs().has_consumed)(behind) } == 1;
    Box::new(move || has_consumed().then(|| std::mem::take(&mut *read)))
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: nothing uses them any more.
        unsafe {
            (programs().event_delete)(self.event);
            (programs().queue_delete)(self.queue);
        }
    }
}
