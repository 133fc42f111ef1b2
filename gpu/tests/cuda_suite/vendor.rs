//! CUDA, for the suites that every vendor's devices go through.

use std::ffi::c_void;
use std::ptr::null_mut;

use arrow_device::cuda::CudaQueue;
pub(crate) use arrow_device::cuda::{CudaConfig as Config, CudaMemory as Memory};
use arrow_device::{Device, Queue};
use cudarc::driver::sys;

/// Which memories its devices have.
pub(crate) const MEMORIES: [Memory; 3] = [Memory::Device, Memory::Host, Memory::Managed];

/// cudarc leaves its own context current.
pub(crate) fn unset_context() {
    // SAFETY: null is a valid argument: it makes no context current.
    let code = unsafe { sys::cuCtxSetCurrent(null_mut()) };
    assert_eq!(code as i32, 0);
}

/// How many bytes of a device are free, and how many it has.
pub(crate) fn memory_info(device: &Device) -> (usize, usize) {
    let context = device.as_cuda().unwrap().cuda_context().unwrap();
    let info = context.mem_get_info().unwrap();
    drop(context);
    unset_context();
    info
}

/// Queues a host function.
pub(crate) fn launch_host(queue: &Queue, f: unsafe extern "C" fn(*mut c_void), data: *mut c_void) {
    let stream = queue.raw().as_any().downcast_ref::<CudaQueue>().unwrap();
    let context = queue.device().as_cuda().unwrap().cu_context();
    let mut popped = null_mut();
    // SAFETY: context and stream are live, and callers pass a function that may be called with
    // `data` once.
    unsafe {
        assert_eq!(sys::cuCtxPushCurrent_v2(context) as i32, 0);
        let launched = sys::cuLaunchHostFunc(stream.cu_stream(), Some(f), data);
        assert_eq!(sys::cuCtxPopCurrent_v2(&raw mut popped) as i32, 0);
        assert_eq!(launched as i32, 0);
    }
}
