//! The loader's functions.

use std::ffi::{c_char, c_void};
use std::ptr::null_mut;

use opencl_sys::cl_function_types::*;
use opencl_sys::*;

use crate::control::{Fate, fate, gained, lost};
use crate::real::real;

type ContextNotify = Option<unsafe extern "C" fn(*const c_char, *const c_void, usize, *mut c_void)>;

/// Functions of each sort:
/// - `code`: returns a code;
/// - `list`: as above; its last parameter is the place for a count, which may be null;
/// - `made`: returns an object, and a code through a last parameter;
/// - `enqueue`: returns a code; its last parameter is the place for an event, which may be null;
/// - `retain`, `release`: of one object.
macro_rules! functions {
    () => {};
    (code $name:ident: $type:ident($($arg:ident: $arg_type:ty),*); $($rest:tt)*) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $arg_type),*) -> cl_int {
            match fate(stringify!($name), false) {
                // SAFETY: the caller keeps to the function's contract.
                Fate::Pass => unsafe { real!($name: $type)($($arg),*) },
                Fate::Fail(code) => code,
            }
        }
        functions! { $($rest)* }
    };
    (list $name:ident: $type:ident($($arg:ident: $arg_type:ty),*; $count:ident: $count_type:ty); $($rest:tt)*) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $arg_type,)* $count: *mut $count_type) -> cl_int {
            match fate(stringify!($name), true) {
                // SAFETY: the caller keeps to the function's contract.
                Fate::Pass => unsafe { real!($name: $type)($($arg,)* $count) },
                Fate::Fail(code) => {
                    if !$count.is_null() && code == CL_SUCCESS {
                        // SAFETY: the caller passes a place for the count, or null.
                        unsafe { $count.write(0) };
                    }
                    code
                }
            }
        }
        functions! { $($rest)* }
    };
    (made $name:ident: $type:ident($($arg:ident: $arg_type:ty),*); $($rest:tt)*) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $arg_type,)* code: *mut cl_int) -> *mut c_void {
            match fate(stringify!($name), true) {
                Fate::Pass => {
                    // SAFETY: the caller keeps to the function's contract.
                    let object = unsafe { real!($name: $type)($($arg,)* code) };
                    gained(object);
                    object
                }
                Fate::Fail(failure) => {
                    if !code.is_null() {
                        // SAFETY: the caller passes a place for the code, or null.
                        unsafe { code.write(failure) };
                    }
                    null_mut()
                }
            }
        }
        functions! { $($rest)* }
    };
    (enqueue $name:ident: $type:ident($($arg:ident: $arg_type:ty),*); $($rest:tt)*) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $arg_type,)* event: *mut cl_event) -> cl_int {
            match fate(stringify!($name), !event.is_null()) {
                Fate::Pass => {
                    // SAFETY: the caller keeps to the function's contract.
                    let code = unsafe { real!($name: $type)($($arg,)* event) };
                    if code == CL_SUCCESS && !event.is_null() {
                        // SAFETY: the function has written the event.
                        gained(unsafe { *event });
                    }
                    code
                }
                Fate::Fail(code) => {
                    if code == CL_SUCCESS && !event.is_null() {
                        // SAFETY: the caller passes a place for an event, or null.
                        unsafe { event.write(null_mut()) };
                    }
                    code
                }
            }
        }
        functions! { $($rest)* }
    };
    (retain $name:ident: $type:ident; $($rest:tt)*) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(object: *mut c_void) -> cl_int {
            match fate(stringify!($name), false) {
                Fate::Pass => {
                    // SAFETY: the caller keeps to the function's contract.
                    let code = unsafe { real!($name: $type)(object) };
                    if code == CL_SUCCESS {
                        gained(object);
                    }
                    code
                }
                Fate::Fail(code) => code,
            }
        }
        functions! { $($rest)* }
    };
    (release $name:ident: $type:ident; $($rest:tt)*) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(object: *mut c_void) -> cl_int {
            lost(object);
            // SAFETY: the caller keeps to the function's contract.
            unsafe { real!($name: $type)(object) }
        }
        functions! { $($rest)* }
    };
}

functions! {
    list clGetPlatformIDs: clGetPlatformIDs_t(entries: cl_uint, platforms: *mut cl_platform_id; count: cl_uint);
    code clGetPlatformInfo: clGetPlatformInfo_t(
        platform: cl_platform_id, what: cl_platform_info, size: usize, value: *mut c_void, bytes: *mut usize
    );
    list clGetDeviceIDs: clGetDeviceIDs_t(
        platform: cl_platform_id, kind: cl_device_type, entries: cl_uint, devices: *mut cl_device_id; count: cl_uint
    );
    code clGetDeviceInfo: clGetDeviceInfo_t(
        device: cl_device_id, what: cl_device_info, size: usize, value: *mut c_void, bytes: *mut usize
    );
    made clCreateContext: clCreateContext_t(
        properties: *const cl_context_properties, count: cl_uint, devices: *const cl_device_id, notify: ContextNotify,
        data: *mut c_void
    );
    retain clRetainContext: clRetainContext_t;
    release clReleaseContext: clReleaseContext_t;
    code clGetContextInfo: clGetContextInfo_t(
        context: cl_context, what: cl_context_info, size: usize, value: *mut c_void, bytes: *mut usize
    );
    made clCreateCommandQueue: clCreateCommandQueue_t(
        context: cl_context, device: cl_device_id, properties: cl_command_queue_properties
    );
    retain clRetainCommandQueue: clRetainCommandQueue_t;
    release clReleaseCommandQueue: clReleaseCommandQueue_t;
    code clGetCommandQueueInfo: clGetCommandQueueInfo_t(
        queue: cl_command_queue, what: cl_command_queue_info, size: usize, value: *mut c_void, bytes: *mut usize
    );
    code clFlush: clFlush_t(queue: cl_command_queue);
    code clFinish: clFinish_t(queue: cl_command_queue);
    made clCreateBuffer: clCreateBuffer_t(context: cl_context, flags: cl_mem_flags, size: usize, host: *mut c_void);
    retain clRetainMemObject: clRetainMemObject_t;
    release clReleaseMemObject: clReleaseMemObject_t;
    code clGetMemObjectInfo: clGetMemObjectInfo_t(
        mem: cl_mem, what: cl_mem_info, size: usize, value: *mut c_void, bytes: *mut usize
    );
    enqueue clEnqueueReadBuffer: clEnqueueReadBuffer_t(
        queue: cl_command_queue, mem: cl_mem, blocking: cl_bool, offset: usize, size: usize, to: *mut c_void,
        waits: cl_uint, wait: *const cl_event
    );
    enqueue clEnqueueWriteBuffer: clEnqueueWriteBuffer_t(
        queue: cl_command_queue, mem: cl_mem, blocking: cl_bool, offset: usize, size: usize, from: *const c_void,
        waits: cl_uint, wait: *const cl_event
    );
    enqueue clEnqueueCopyBuffer: clEnqueueCopyBuffer_t(
        queue: cl_command_queue, from: cl_mem, to: cl_mem, from_offset: usize, to_offset: usize, size: usize,
        waits: cl_uint, wait: *const cl_event
    );
    enqueue clEnqueueFillBuffer: clEnqueueFillBuffer_t(
        queue: cl_command_queue, mem: cl_mem, pattern: *const c_void, pattern_size: usize, offset: usize, size: usize,
        waits: cl_uint, wait: *const cl_event
    );
    enqueue clEnqueueMarkerWithWaitList: clEnqueueMarkerWithWaitList_t(
        queue: cl_command_queue, waits: cl_uint, wait: *const cl_event
    );
    enqueue clEnqueueBarrierWithWaitList: clEnqueueBarrierWithWaitList_t(
        queue: cl_command_queue, waits: cl_uint, wait: *const cl_event
    );
    code clWaitForEvents: clWaitForEvents_t(count: cl_uint, events: *const cl_event);
    code clGetEventInfo: clGetEventInfo_t(
        event: cl_event, what: cl_event_info, size: usize, value: *mut c_void, bytes: *mut usize
    );
    retain clRetainEvent: clRetainEvent_t;
    release clReleaseEvent: clReleaseEvent_t;
    made clCreateUserEvent: clCreateUserEvent_t(context: cl_context);
    code clSetUserEventStatus: clSetUserEventStatus_t(event: cl_event, status: cl_int);
    code clSetKernelArg: clSetKernelArg_t(kernel: cl_kernel, index: cl_uint, size: usize, value: *const c_void);
    enqueue clEnqueueSVMMemcpy: clEnqueueSVMMemcpy_t(
        queue: cl_command_queue, blocking: cl_bool, to: *mut c_void, from: *const c_void, size: usize,
        waits: cl_uint, wait: *const cl_event
    );
    enqueue clEnqueueSVMMemFill: clEnqueueSVMMemFill_t(
        queue: cl_command_queue, at: *mut c_void, pattern: *const c_void, pattern_size: usize, size: usize,
        waits: cl_uint, wait: *const cl_event
    );
    code clSetKernelArgSVMPointer: clSetKernelArgSVMPointer_t(kernel: cl_kernel, index: cl_uint, value: *const c_void);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn clSVMAlloc(
    context: cl_context,
    flags: cl_svm_mem_flags,
    size: usize,
    alignment: cl_uint,
) -> *mut c_void {
    match fate("clSVMAlloc", true) {
        Fate::Pass => {
            // SAFETY: the caller keeps to the function's contract.
            let memory =
                unsafe { real!(clSVMAlloc: clSVMAlloc_t)(context, flags, size, alignment) };
            gained(memory);
            memory
        }
        Fate::Fail(_) => null_mut(),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn clSVMFree(context: cl_context, memory: *mut c_void) {
    lost(memory);
    // SAFETY: the caller keeps to the function's contract.
    unsafe { real!(clSVMFree: clSVMFree_t)(context, memory) };
}
