//! Host functions on a queue's stream.

use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex};

use arrow_device::Queue;
use arrow_device::conformance::Hold;
use arrow_device::cuda::CudaQueue;
use cudarc::driver::sys;

/// Something that a stream's work waits at until it is opened.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

/// Keeps a queue's stream busy with a host function.
pub fn hold(queue: &Queue) -> Hold {
    unsafe extern "C" fn pass(gate: *mut c_void) {
        // SAFETY: the reference that `hold` gave away.
        let gate = unsafe { Arc::from_raw(gate.cast_const().cast::<Gate>()) };
        let open = gate.open.lock().unwrap();
        drop(gate.opened.wait_while(open, |open| !*open).unwrap());
    }
    let gate = Arc::new(Gate::default());
    let data = Arc::into_raw(gate.clone()).cast_mut().cast();
    launch_host(queue, pass, data);
    Hold::new(move || {
        *gate.open.lock().unwrap() = true;
        gate.opened.notify_all();
    })
}

/// Queues a host function.
pub fn launch_host(queue: &Queue, f: unsafe extern "C" fn(*mut c_void), data: *mut c_void) {
    let stream = queue.raw().as_any().downcast_ref::<CudaQueue>().unwrap();
    let context = queue.device().as_cuda().unwrap().cu_context();
    let mut popped = std::ptr::null_mut();
    // SAFETY: context and stream live; the callers' functions take their data once.
    unsafe {
        assert_eq!(sys::cuCtxPushCurrent_v2(context) as i32, 0);
        let launched = sys::cuLaunchHostFunc(stream.cu_stream(), Some(f), data);
        assert_eq!(sys::cuCtxPopCurrent_v2(&raw mut popped) as i32, 0);
        assert_eq!(launched as i32, 0);
    }
}
