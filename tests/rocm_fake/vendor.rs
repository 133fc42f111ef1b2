//! ROCm, for the suites that every vendor's devices go through.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use arrow_device::rocm::RocmQueue;
use arrow_device::rocm::hip_runtime_sys::{hipFunction_t, hipModule_t, hipStream_t};
pub use arrow_device::rocm::{RocmConfig as Config, RocmMemory as Memory, device_count, register};
use arrow_device::{Device, Queue, Result};
use libloading::Library;

use crate::fake::{self, Group};

/// Which memories its devices have.
pub const MEMORIES: [Memory; 2] = [Memory::Device, Memory::Host];
/// The managed one, if it is among them.
pub const MANAGED: Option<Memory> = None;
/// What its devices are called in texts.
pub const NAME: &str = "ROCm";
/// What they are called in names of devices, those with memory of their own first.
pub const MEMORY_NAMES: [&str; 2] = ["rocm", "rocm-host"];
/// What the names of all its calls start with.
pub const CALLS: &str = "hip";

/// The library with HIP's functions. It stays loaded.
fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // The driver that it finds.
        fake::library();
        fake::load("libhip_on_cuda.so")
    })
}

/// Calls a function of it.
macro_rules! hip {
    ($($call:tt)*) => {
        fake::call!(library(), $($call)*)
    };
}

/// Loads its library.
pub fn load() {
    library();
}

/// Lets go of what its library keeps of a group that is not in use any more: a context of each device.
pub fn let_go(group: Group) {
    let uses = [
        "device",
        "pinned",
        "managed",
        "registered",
        "events",
        "streams",
        "pools",
    ];
    if uses.iter().any(|what| group.live(what) > 0) {
        return;
    }
    for ordinal in group.first..group.first + group.ordinals {
        // There may be none.
        let _ = hip!(hip_on_cuda_release(ordinal => c_int) -> c_int);
    }
}

/// What an error names where this call of the stand-in has failed.
pub fn operation(call: &str) -> &str {
    match call {
        "cuMemAlloc" => "hipMalloc",
        "cuMemAllocFromPoolAsync" => "hipMallocFromPoolAsync",
        // Any call may be the first.
        "cuInit" | "cuDevicePrimaryCtxRetain" => CALLS,
        _ => panic!("no test expects a failure of {call}"),
    }
}

/// What an error says about a code.
pub fn error_text(code: i32) -> &'static str {
    match code {
        1 => "hipErrorInvalidValue",
        2 => "hipErrorOutOfMemory",
        100 => "hipErrorNoDevice",
        400 => "hipErrorInvalidHandle",
        700 => "hipErrorIllegalAddress",
        719 => "hipErrorLaunchFailure",
        12345 => "hipErrorUnknown",
        _ => panic!("no test expects code {code}"),
    }
}

/// Its part of a device.
pub fn backend(device: &Device) -> Result<()> {
    device.as_rocm().map(drop)
}

/// The device that is current on this thread.
fn current_device() -> c_int {
    let mut ordinal = -1;
    assert_eq!(
        hip!(hipGetDevice(&raw mut ordinal => *mut c_int) -> c_int),
        0
    );
    ordinal
}

/// Asserts that this thread is as a new one is: the first device is current, which no test opens.
#[track_caller]
pub fn assert_untouched() {
    assert_eq!(current_device(), 0);
}

/// There are no contexts, and nobody leaves another device current.
#[track_caller]
pub fn unset_context() {
    assert_untouched();
}

/// Runs calls of HIP with a device current.
fn with_device(device: &Device, calls: impl FnOnce()) {
    let before = current_device();
    let ordinal = device.as_rocm().unwrap().ordinal() as c_int;
    assert_eq!(hip!(hipSetDevice(ordinal => c_int) -> c_int), 0);
    calls();
    assert_eq!(hip!(hipSetDevice(before => c_int) -> c_int), 0);
}

fn stream(queue: &Queue) -> hipStream_t {
    let queue = queue.raw().as_any().downcast_ref::<RocmQueue>();
    queue.unwrap().hip_stream()
}

/// How many bytes of a device are free, and how many it has.
pub fn memory_info(device: &Device) -> (usize, usize) {
    let (mut free, mut total) = (0, 0);
    with_device(device, || {
        let code = hip!(hipMemGetInfo(&raw mut free => *mut usize,
            &raw mut total => *mut usize) -> c_int);
        assert_eq!(code, 0);
    });
    (free, total)
}

/// Queues a host function.
pub fn launch_host(queue: &Queue, f: unsafe extern "C" fn(*mut c_void), data: *mut c_void) {
    type HostFunction = unsafe extern "C" fn(*mut c_void);
    let stream = stream(queue);
    with_device(queue.device(), || {
        let launched = hip!(hipLaunchHostFunc(stream => hipStream_t, f => HostFunction,
            data => *mut c_void) -> c_int);
        assert_eq!(launched, 0);
    });
}

/// Queues a kernel that fails.
pub fn launch_failing(queue: &Queue) {
    let (mut module, mut kernel): (hipModule_t, hipFunction_t) = (null_mut(), null_mut());
    let (image, name) = (c".entry fail(", c"fail");
    with_device(queue.device(), || {
        let loaded = hip!(hipModuleLoadData(&raw mut module => *mut hipModule_t,
            image.as_ptr().cast() => *const c_void) -> c_int);
        assert_eq!(loaded, 0);
        let found = hip!(hipModuleGetFunction(&raw mut kernel => *mut hipFunction_t,
            module => hipModule_t, name.as_ptr() => *const c_char) -> c_int);
        assert_eq!(found, 0);
        // A grid of one block of one thread, no shared memory, no parameters.
        let launched = hip!(hipModuleLaunchKernel(kernel => hipFunction_t,
            1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint,
            0 => c_uint, stream(queue) => hipStream_t,
            null_mut() => *mut *mut c_void, null_mut() => *mut *mut c_void) -> c_int);
        assert_eq!(launched, 0);
        // The kernel may have failed by now.
        let _ = hip!(hipModuleUnload(module => hipModule_t) -> c_int);
    });
}
