//! Modules, functions, launches. The code is CUDA's.

use std::ffi::{c_char, c_uint, c_void};

use crate::call::forward;
use crate::ffi::*;

forward! {
    hipModuleLoadData(module: *mut Handle, image: *const c_void) => cuModuleLoadData(module, image);
    hipModuleUnload(module: Handle) => cuModuleUnload(module);
    hipModuleGetFunction(function: *mut Handle, module: Handle, kname: *const c_char) =>
        cuModuleGetFunction(function, module, kname);
    hipModuleLaunchKernel(
        f: Handle,
        gridDimX: c_uint, gridDimY: c_uint, gridDimZ: c_uint,
        blockDimX: c_uint, blockDimY: c_uint, blockDimZ: c_uint,
        sharedMemBytes: c_uint,
        stream: Handle,
        kernelParams: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) => cuLaunchKernel(
        f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, stream,
        kernelParams, extra,
    );
}
