//! ROCm, for the suites that every vendor's devices go through.

use std::ffi::{c_int, c_void};
use std::ptr::{null_mut, with_exposed_provenance_mut};

pub(crate) use arrow_device::abi::ArrowDeviceType as Memory;
use arrow_device::device::DeviceId;
use arrow_device::{Device, Devices, Queue, Result};

use crate::fake::Group;
use crate::hip::{self, Ptr, current_device, made};

pub(crate) const DEVICE: Memory = Memory::ROCM;
pub(crate) const HOST: Memory = Memory::ROCM_HOST;
/// Which memories its devices have.
pub(crate) const MEMORIES: [Memory; 2] = [DEVICE, HOST];
/// Opens a device that no other test has.
pub(crate) fn open_device(memory: Memory, ordinal: usize) -> Result<Device> {
    load();
    let devices = Devices::new();
    arrow_device::rocm::register(&devices);
    devices.get(DeviceId::new(memory, ordinal as i64))
}

/// Of all cases of every type each of so many is tested: `cuda_fake` tests more of them on the same engine.
pub(crate) const SHARE: usize = 23;

/// What the names of all its calls start with.
pub(crate) const CALLS: &str = "hip";

/// What an error says about a code.
pub(crate) fn error_text(code: i32) -> &'static str {
    match code {
        1 => "hipErrorInvalidValue",
        2 => "hipErrorOutOfMemory",
        _ => "hipErrorUnknown",
    }
}

/// Loads its library.
pub(crate) fn load() {
    hip::library();
}

/// Lets go of what its library keeps of a group that is not in use any more: a context of each device.
pub(crate) fn let_go(group: Group) {
    let uses = ["device", "pinned", "managed", "events", "streams", "pools"];
    if uses.iter().any(|what| group.live(what) > 0) {
        return;
    }
    for ordinal in group.first..group.first + group.ordinals {
        // There may be none.
        let _ = hip::hip_on_cuda_release(ordinal);
    }
}

/// There are no contexts, and nobody leaves another device than the first one current, which no test opens.
#[track_caller]
pub(crate) fn unset_context() {
    assert_eq!(current_device(), 0);
}

/// Runs calls of HIP with a device current.
fn with_device(device: &Device, calls: impl FnOnce()) {
    let before = current_device();
    let ordinal = device.id().id as c_int;
    assert_eq!(hip::hipSetDevice(ordinal), 0);
    calls();
    assert_eq!(hip::hipSetDevice(before), 0);
}

fn stream(queue: &Queue) -> Ptr {
    // Not `Queue::hip_stream`, after which the queue asks at each call whether its stream is captured.
    with_exposed_provenance_mut(queue.raw().stream_handle().unwrap())
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

/// Queues a host function.
pub(crate) fn launch_host(queue: &Queue, f: HostFunction, data: *mut c_void) {
    with_device(queue.device(), || {
        assert_eq!(hip::hipLaunchHostFunc(stream(queue), f, data), 0);
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
