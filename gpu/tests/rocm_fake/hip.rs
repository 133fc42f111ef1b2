//! HIP's runtime library, loaded after the stand-in for the driver, and its calls, answering codes.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use libloading::Library;

pub(crate) type Ptr = *mut c_void;

/// The library. It stays loaded, after the stand-in.
pub(crate) fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        crate::fake::library();
        crate::fake::load("libhip_on_cuda.so")
    })
}

/// Declares functions of the library.
macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),*) -> $answer:ty;)*) => {$(
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub(crate) fn $name($($arg: $type),*) -> $answer {
            crate::fake::call!(library(), $name($($arg => $type),*) -> $answer)
        }
    )*};
}

functions! {
    hip_on_cuda_release(ordinal: c_int) -> c_int;
    hipRuntimeGetVersion(version: *mut c_int) -> c_int;
    hipGetDevice(ordinal: *mut c_int) -> c_int;
    hipSetDevice(ordinal: c_int) -> c_int;
    hipStreamCreateWithFlags(stream: *mut Ptr, flags: u32) -> c_int;
    hipStreamDestroy(stream: Ptr) -> c_int;
    hipStreamSynchronize(stream: Ptr) -> c_int;
    hipStreamBeginCapture(stream: Ptr, mode: c_int) -> c_int;
    hipStreamEndCapture(stream: Ptr, graph: *mut Ptr) -> c_int;
    hipThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int;
    hipLaunchHostFunc(stream: Ptr, function: unsafe extern "C" fn(Ptr), data: Ptr) -> c_int;
    hipEventCreateWithFlags(event: *mut Ptr, flags: u32) -> c_int;
    hipEventRecord(event: Ptr, stream: Ptr) -> c_int;
    hipEventQuery(event: Ptr) -> c_int;
    hipMalloc(ptr: *mut Ptr, bytes: usize) -> c_int;
    hipFree(ptr: Ptr) -> c_int;
    hipHostMalloc(ptr: *mut Ptr, bytes: usize, flags: u32) -> c_int;
    hipHostFree(ptr: Ptr) -> c_int;
    hipMemGetInfo(free: *mut usize, total: *mut usize) -> c_int;
    hipMemcpyAsync(target: Ptr, source: Ptr, bytes: usize, kind: c_int, stream: Ptr) -> c_int;
    hipModuleLoadData(module: *mut Ptr, image: *const c_char) -> c_int;
    hipModuleUnload(module: Ptr) -> c_int;
    hipModuleGetFunction(function: *mut Ptr, module: Ptr, name: *const c_char) -> c_int;
    hipModuleLaunchKernel(function: Ptr, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32,
        block_y: u32, block_z: u32, shared_bytes: u32, stream: Ptr, parameters: *mut Ptr,
        extra: *mut Ptr) -> c_int;
    hipGetLastError() -> c_int;
    hipPeekAtLastError() -> c_int;
}

/// `hipMemcpyKind`
pub(crate) const DEVICE_TO_HOST: c_int = 2;
pub(crate) const DEFAULT: c_int = 4;

pub(crate) fn current_device() -> c_int {
    let mut ordinal = -1;
    assert_eq!(hipGetDevice(&mut ordinal), 0);
    ordinal
}

/// A handle or address that a call writes, which must succeed.
#[track_caller]
pub(crate) fn made(make: impl FnOnce(*mut Ptr) -> c_int) -> Ptr {
    let mut made = null_mut();
    assert_eq!(make(&mut made), 0);
    made
}

pub(crate) fn stream() -> Ptr {
    made(|stream| hipStreamCreateWithFlags(stream, 1))
}

pub(crate) fn event() -> Ptr {
    made(|event| hipEventCreateWithFlags(event, 2))
}

pub(crate) fn device(bytes: usize) -> Ptr {
    made(|ptr| hipMalloc(ptr, bytes))
}

pub(crate) fn pinned(bytes: usize) -> Ptr {
    made(|ptr| hipHostMalloc(ptr, bytes, 0))
}
