//! CUDA, for the suites that every vendor's devices go through.

use std::ffi::c_void;
use std::ptr::{self, null_mut};

pub(crate) use arrow_device::abi::ArrowDeviceType as Memory;
use arrow_device::device::DeviceId;
use arrow_device::{Device, Devices, Queue, Result};
use cudarc::driver::sys;

pub(crate) const DEVICE: Memory = Memory::CUDA;
pub(crate) const HOST: Memory = Memory::CUDA_HOST;
pub(crate) const MANAGED: Memory = Memory::CUDA_MANAGED;
/// Which memories its devices have.
pub(crate) const MEMORIES: [Memory; 3] = [DEVICE, HOST, MANAGED];

/// Opens a device that no other test has.
pub(crate) fn open_device(memory: Memory, ordinal: usize) -> Result<Device> {
    let devices = Devices::new();
    arrow_device::cuda::register(&devices);
    devices.get(DeviceId::new(memory, ordinal as i64))
}

/// cudarc leaves its own context current.
pub(crate) fn unset_context() {
    // SAFETY: null is a valid argument: it makes no context current.
    let code = unsafe { sys::cuCtxSetCurrent(null_mut()) };
    assert_eq!(code as i32, 0);
}

/// How many bytes of a device are free, and how many it has.
pub(crate) fn memory_info(device: &Device) -> (usize, usize) {
    let context = device.cuda_context().unwrap();
    let info = context.mem_get_info().unwrap();
    drop(context);
    unset_context();
    info
}

/// Queues a host function.
pub(crate) fn launch_host(queue: &Queue, f: unsafe extern "C" fn(*mut c_void), data: *mut c_void) {
    // Not `Queue::cuda_stream`, after which the queue asks at each call whether its stream is captured.
    let stream = ptr::with_exposed_provenance_mut(queue.raw().stream_handle().unwrap());
    let ordinal = queue.device().id().id as i32;
    let (mut device, mut context, mut popped) = (0, null_mut(), null_mut());
    // SAFETY: context and stream are live, and callers pass a function that may be called with
    // `data` once.
    unsafe {
        assert_eq!(sys::cuDeviceGet(&raw mut device, ordinal) as i32, 0);
        let retained = sys::cuDevicePrimaryCtxRetain(&raw mut context, device);
        assert_eq!(retained as i32, 0);
        assert_eq!(sys::cuCtxPushCurrent_v2(context) as i32, 0);
        let launched = sys::cuLaunchHostFunc(stream, Some(f), data);
        assert_eq!(sys::cuCtxPopCurrent_v2(&raw mut popped) as i32, 0);
        assert_eq!(sys::cuDevicePrimaryCtxRelease_v2(device) as i32, 0);
        assert_eq!(launched as i32, 0);
    }
}
