//! CUDA, for the suites that its stand-in goes through.

use arrow_device::Queue;
use cudarc::driver::{LaunchConfig, sys};
use cudarc::nvrtc::Ptx;

use crate::fake::{self, Group};

#[path = "../cuda_suite/vendor.rs"]
mod suite;
pub(crate) use suite::*;

/// What its kinds of memory are called in names of devices.
pub(crate) const MEMORY_NAMES: [&str; 3] = ["cuda", "cuda-host", "cuda-managed"];
/// Of all cases of every type each of so many is tested: the simulated device's own tests go through all
/// of them. Prime: other cases for each type.
pub(crate) const SHARE: usize = 11;

/// What the names of all its calls start with.
pub(crate) const CALLS: &str = "cu";

/// Loads its library.
pub(crate) fn load() {
    fake::library();
}

/// Lets go of what its library keeps of a group that is not in use any more.
pub(crate) fn let_go(_: Group) {}

/// What an error says about a code.
pub(crate) fn error_text(code: i32) -> &'static str {
    match code {
        1 => "CUDA_ERROR_INVALID_VALUE",
        2 => "CUDA_ERROR_OUT_OF_MEMORY",
        100 => "CUDA_ERROR_NO_DEVICE",
        400 => "CUDA_ERROR_INVALID_HANDLE",
        700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
        719 => "CUDA_ERROR_LAUNCH_FAILED",
        12345 => "does not name",
        _ => panic!("no test expects code {code}"),
    }
}

/// Asserts that this thread is as a new one is: no context is current.
#[track_caller]
pub(crate) fn assert_untouched() {
    let mut raw = std::ptr::null_mut();
    // SAFETY: `raw` is valid for the write of a handle.
    let code = unsafe { sys::cuCtxGetCurrent(&raw mut raw) };
    assert_eq!((code as i32, raw), (0, std::ptr::null_mut()));
}

/// Queues a kernel that fails.
pub(crate) fn launch_failing(queue: &Queue) {
    let context = queue.device().cuda_context().unwrap();
    let module = context.load_module(Ptx::from_src(".entry fail(")).unwrap();
    let kernel = module.load_function("fail").unwrap();
    let stream = queue.cuda_stream().unwrap();
    // SAFETY: the kernel has no parameters and uses no memory.
    let launched = unsafe {
        stream
            .launch_builder(&kernel)
            .launch(LaunchConfig::for_num_elems(1))
    };
    launched.unwrap();
    drop((stream, kernel, module, context));
    unset_context();
}
