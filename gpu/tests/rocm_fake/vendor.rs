//! ROCm, for the suites that every vendor's devices go through.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use arrow_device::rocm::RocmQueue;
pub(crate) use arrow_device::rocm::{
    RocmConfig as Config, RocmMemory as Memory, device_count, register,
};
use arrow_device::{Device, Queue, Result};

use crate::fake::Group;
use crate::hip::{self, Ptr, current_device, made};

/// Which memories its devices have.
pub(crate) const MEMORIES: [Memory; 2] = [Memory::Device, Memory::Host];
/// The managed one, if it is among them.
pub(crate) const MANAGED: Option<Memory> = None;
/// What its devices are called in texts.
pub(crate) const NAME: &str = "ROCm";
/// What they are called in names of devices, those with memory of their own first.
pub(crate) const MEMORY_NAMES: [&str; 2] = ["rocm", "rocm-host"];
/// What the names of all its calls start with.
pub(crate) const CALLS: &str = "hip";

/// How many questions of the driver the class of an allocation takes: HIP reports its range in a call
/// of its own, of whose end it is asked.
pub(crate) const LOOKUPS: u64 = 2;

/// Leaves out calls of the driver that the library makes for reasons of its own: the stand-in for
/// HIP enters a context in each of its calls, and checks a device's number when it becomes current.
pub(crate) fn without_their_own(calls: &mut BTreeMap<String, u64>) {
    calls.retain(|name, _| !name.starts_with("cuCtxP") && name != "cuDeviceGetCount");
}

/// Loads its library.
pub(crate) fn load() {
    hip::library(false);
}

/// Lets go of what its library keeps of a group that is not in use any more: a context of each device.
pub(crate) fn let_go(group: Group) {
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
        let _ = hip::hip_on_cuda_release(ordinal);
    }
}

/// What an error names where this call of the stand-in has failed.
pub(crate) fn operation(call: &str) -> &str {
    match call {
        "cuMemAlloc" => "hipMalloc",
        "cuMemAllocFromPoolAsync" => "hipMallocFromPoolAsync",
        // Any call may be the first.
        "cuInit" | "cuDevicePrimaryCtxRetain" => CALLS,
        _ => panic!("no test expects a failure of {call}"),
    }
}

/// What an error says about a code.
pub(crate) fn error_text(code: i32) -> &'static str {
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
pub(crate) fn backend(device: &Device) -> Result<()> {
    device.as_rocm().map(drop)
}

/// Asserts that this thread is as a new one is: the first device is current, which no test opens.
#[track_caller]
pub(crate) fn assert_untouched() {
    assert_eq!(current_device(), 0);
}

/// There are no contexts, and nobody leaves another device current.
#[track_caller]
pub(crate) fn unset_context() {
    assert_untouched();
}

/// Runs calls of HIP with a device current.
fn with_device(device: &Device, calls: impl FnOnce()) {
    let before = current_device();
    let ordinal = device.as_rocm().unwrap().ordinal() as c_int;
    assert_eq!(hip::hipSetDevice(ordinal), 0);
    calls();
    assert_eq!(hip::hipSetDevice(before), 0);
}

fn stream(queue: &Queue) -> Ptr {
    let queue = queue.raw().as_any().downcast_ref::<RocmQueue>();
    queue.unwrap().hip_stream().cast()
}

/// How many bytes of a device are free, and how many it has.
pub(crate) fn memory_info(device: &Device) -> (usize, usize) {
    let (mut free, mut total) = (0, 0);
    with_device(device, || {
        assert_eq!(hip::hipMemGetInfo(&mut free, &mut total), 0);
    });
    (free, total)
}

type HostFunction = unsafe extern "C" fn(*mut c_void);

/// Runs a host function as a callback.
///
/// # Safety
/// `both` is a box with the function and what it may be called with, and is taken once.
unsafe extern "C" fn unpack(_: Ptr, _: c_int, both: Ptr) {
    // SAFETY: the caller guarantees such a box (see `# Safety`).
    unsafe {
        let (f, data) = *Box::from_raw(both.cast::<(HostFunction, *mut c_void)>());
        f(data);
    }
}

/// Queues a host function.
pub(crate) fn launch_host(queue: &Queue, f: HostFunction, data: *mut c_void) {
    with_device(queue.device(), || {
        if std::env::var_os(hip::CHANGED).is_none() {
            assert_eq!(hip::hipLaunchHostFunc(stream(queue), f, data), 0);
            return;
        }
        let both = Box::into_raw(Box::new((f, data)));
        assert_eq!(
            hip::hipStreamAddCallback(stream(queue), unpack, both.cast(), 0),
            0
        );
    });
}

/// Queues a kernel that fails.
pub(crate) fn launch_failing(queue: &Queue) {
    with_device(queue.device(), || {
        let module = made(|module| hip::hipModuleLoadData(module, c".entry fail(".as_ptr()));
        let kernel = made(|kernel| hip::hipModuleGetFunction(kernel, module, c"fail".as_ptr()));
        // A grid of one block of one thread, no shared memory, no parameters.
        let (stream, none) = (stream(queue), null_mut());
        let launched =
            hip::hipModuleLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, none, null_mut());
        assert_eq!(launched, 0);
        // The kernel may have failed by now.
        let _ = hip::hipModuleUnload(module);
    });
}
