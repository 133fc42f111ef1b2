//! The functions of the extension cl_intel_unified_shared_memory, which the platform returns by name.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use opencl_sys::cl_function_types::*;
use opencl_sys::*;

use crate::control::{Fate, fate, gained, lost};
use crate::real::real;

/// The platform's functions by name, from the first time that it is asked. There is one platform that has them.
macro_rules! extension {
    ($($name:ident: $type:ty, $fake:ident;)*) => {
        /// Returns the stand-in for an extension function that the platform has.
        fn stand_in(name: &CStr, found: *mut c_void) -> *mut c_void {
            match name.to_bytes() {
                $(bytes if bytes == stringify!($name).as_bytes() => {
                    // SAFETY: the platform's function of this name has this type.
                    let function = unsafe { std::mem::transmute::<*mut c_void, $type>(found) };
                    let _ = real::$fake.set(function);
                    $fake as *mut c_void
                })*
                _ => found,
            }
        }

        #[allow(non_upper_case_globals)]
        mod real {
            use super::*;
            $(pub(super) static $fake: OnceLock<$type> = OnceLock::new();)*
        }
    };
}

extension! {
    clHostMemAllocINTEL: clHostMemAllocINTEL_t, host_alloc;
    clDeviceMemAllocINTEL: clDeviceMemAllocINTEL_t, device_alloc;
    clMemFreeINTEL: clMemFreeINTEL_t, mem_free;
    clEnqueueMemcpyINTEL: clEnqueueMemcpyINTEL_t, memcpy;
    clEnqueueMemFillINTEL: clEnqueueMemFillINTEL_t, mem_fill;
}

macro_rules! call {
    ($fake:ident($($arg:expr),*)) => {
        match real::$fake.get() {
            // SAFETY: the caller keeps to the function's contract.
            Some(Some(function)) => unsafe { function($($arg),*) },
            // The program got this function when the platform had it.
            _ => std::process::abort(),
        }
    };
}

unsafe fn refuse(code: *mut cl_int, failure: cl_int) -> *mut c_void {
    if !code.is_null() {
        // SAFETY: the caller passes a place for the code, or null.
        unsafe { code.write(failure) };
    }
    null_mut()
}

unsafe extern "C" fn host_alloc(
    context: cl_context,
    properties: *const cl_mem_properties_intel,
    size: usize,
    alignment: cl_uint,
    code: *mut cl_int,
) -> *mut c_void {
    match fate("clHostMemAllocINTEL", true) {
        Fate::Pass => {
            let memory = call!(host_alloc(context, properties, size, alignment, code));
            gained(memory);
            memory
        }
        // SAFETY: the place for the code is the caller's.
        Fate::Fail(failure) => unsafe { refuse(code, failure) },
    }
}

unsafe extern "C" fn device_alloc(
    context: cl_context,
    device: cl_device_id,
    properties: *const cl_mem_properties_intel,
    size: usize,
    alignment: cl_uint,
    code: *mut cl_int,
) -> *mut c_void {
    match fate("clDeviceMemAllocINTEL", true) {
        Fate::Pass => {
            let memory = call!(device_alloc(
                context, device, properties, size, alignment, code
            ));
            gained(memory);
            memory
        }
        // SAFETY: the place for the code is the caller's.
        Fate::Fail(failure) => unsafe { refuse(code, failure) },
    }
}

unsafe extern "C" fn mem_free(context: cl_context, memory: *mut c_void) -> cl_int {
    lost(memory);
    call!(mem_free(context, memory))
}

unsafe extern "C" fn memcpy(
    queue: cl_command_queue,
    blocking: cl_bool,
    to: *mut c_void,
    from: *const c_void,
    size: usize,
    waits: cl_uint,
    wait: *const cl_event,
    event: *mut cl_event,
) -> cl_int {
    match fate("clEnqueueMemcpyINTEL", false) {
        Fate::Pass => call!(memcpy(queue, blocking, to, from, size, waits, wait, event)),
        Fate::Fail(code) => code,
    }
}

unsafe extern "C" fn mem_fill(
    queue: cl_command_queue,
    at: *mut c_void,
    pattern: *const c_void,
    pattern_size: usize,
    size: usize,
    waits: cl_uint,
    wait: *const cl_event,
    event: *mut cl_event,
) -> cl_int {
    match fate("clEnqueueMemFillINTEL", false) {
        Fate::Pass => call!(mem_fill(
            queue,
            at,
            pattern,
            pattern_size,
            size,
            waits,
            wait,
            event
        )),
        Fate::Fail(code) => code,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn clGetExtensionFunctionAddressForPlatform(
    platform: cl_platform_id,
    name: *const c_char,
) -> *mut c_void {
    match fate("clGetExtensionFunctionAddressForPlatform", true) {
        Fate::Pass => {
            type Get = clGetExtensionFunctionAddressForPlatform_t;
            // SAFETY: the caller keeps to the function's contract.
            let found =
                unsafe { real!(clGetExtensionFunctionAddressForPlatform: Get)(platform, name) };
            if found.is_null() {
                return found;
            }
            // SAFETY: as above: the name is a C string.
            stand_in(unsafe { CStr::from_ptr(name) }, found)
        }
        Fate::Fail(_) => null_mut(),
    }
}
