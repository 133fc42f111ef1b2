//! OpenCL's functions, loaded at run time, and references to its objects.
//!
//! Types and constants are opencl-sys's, which links nothing. The functions come from OpenCL's loader (`libOpenCL`), and
//! those of extensions from the platform, since the loader does not export them.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr::{NonNull, null, null_mut};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use arrow_device::ArrowDeviceType;
use arrow_device::device::DeviceId;
use arrow_device::device::engine::Health;
use libloading::Library;
use opencl_sys::cl_function_types::*;
use opencl_sys::*;

/// A call of the runtime that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failed {
    pub(crate) call: &'static str,
    pub(crate) code: cl_int,
}

/// The result of a call of the runtime.
pub(crate) type Answer<T = ()> = Result<T, Failed>;

/// The function pointer in the `Option` that opencl-sys declares for each function.
pub(crate) trait Function {
    type Pointer: Copy;
}

impl<F: Copy> Function for Option<F> {
    type Pointer = F;
}

/// Declares a table of functions, with the types of opencl-sys, and a method for each that makes the call. Their sorts:
/// - `code`: returns a code;
/// - `enqueue`: as above, and ends with a list of events to wait for, which is empty here, and the place for an event, which is not asked for;
/// - `made`: returns an object or memory, and a code through its last parameter;
/// - `info`: returns a code, and ends with the length and the place of the answer, and the place for its length. The method returns a value
///   of fixed length; [`list`] asks for others;
/// - `plain`: anything else, called as it is.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($sort:ident $function:ident: $type:ty = ($($arg:ident: $arg_type:ty),*);)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        #[allow(non_snake_case)]
        pub(crate) struct $table {
            $(pub(crate) $function: <$type as Function>::Pointer,)*
        }

        /// # Safety
        /// Each method has the contract of the function in OpenCL's specification. What an `info` asks for is a `T`, and so are zeros.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl $table {
            /// Returns the table, or the name of the first function that is missing.
            ///
            /// # Safety
            /// `find` returns null, or the function of the name, which ends with NUL, for the rest of the process.
            unsafe fn find(find: impl Fn(&'static str) -> *mut c_void) -> Result<Self, &'static str> {
                Ok(Self {
                    $($function: {
                        let name = concat!(stringify!($function), "\0");
                        // SAFETY: the caller guarantees a null pointer, which is `None`, or the function of this name,
                        // whose type opencl-sys takes from OpenCL's headers (see `# Safety`).
                        let found = unsafe { std::mem::transmute::<*mut c_void, $type>(find(name)) };
                        found.ok_or(stringify!($function))?
                    },)*
                })
            }

            $(method! { $sort $function($($arg: $arg_type),*) })*
        }
    };
}

macro_rules! method {
    (plain $($rest:tt)*) => {};
    (code $function:ident($($arg:ident: $type:ty),*)) => {
        pub(crate) unsafe fn $function(&self, $($arg: $type),*) -> Answer {
            // SAFETY: the caller keeps to the function's contract (see the table's `# Safety`).
            answered(stringify!($function), unsafe { (self.$function)($($arg),*) })
        }
    };
    (enqueue $function:ident($($arg:ident: $type:ty),*)) => {
        pub(crate) unsafe fn $function(&self, $($arg: $type),*) -> Answer {
            // SAFETY: the caller keeps to the function's contract (see the table's `# Safety`); there is no list, and no event.
            answered(stringify!($function), unsafe { (self.$function)($($arg,)* 0, null(), null_mut()) })
        }
    };
    (made $function:ident($($arg:ident: $type:ty),*)) => {
        pub(crate) unsafe fn $function(&self, $($arg: $type),*) -> Answer<NonNull<c_void>> {
            let mut code = CL_SUCCESS;
            // SAFETY: the caller keeps to the function's contract (see the table's `# Safety`); the place for the code is valid.
            let made = unsafe { (self.$function)($($arg,)* &raw mut code) };
            answered(stringify!($function), code)?;
            NonNull::new(made).ok_or(Failed { call: stringify!($function), code })
        }
    };
    (info $function:ident($($arg:ident: $type:ty),*)) => {
        pub(crate) unsafe fn $function<T>(&self, $($arg: $type),*) -> Answer<T> {
            let mut value = MaybeUninit::<T>::zeroed();
            let (bytes, place) = (size_of::<T>(), value.as_mut_ptr().cast());
            // SAFETY: the caller keeps to the function's contract, and what it writes is a `T`, as zeros are (see the table's `# Safety`).
            unsafe {
                answered(stringify!($function), (self.$function)($($arg,)* bytes, place, null_mut()))?;
                Ok(value.assume_init())
            }
        }
    };
}

functions! {
    /// The functions of OpenCL 1.2.
    Functions {
        code clGetPlatformIDs: clGetPlatformIDs_t = (room: cl_uint, to: *mut cl_platform_id, count: *mut cl_uint);
        plain clGetPlatformInfo: clGetPlatformInfo_t = ();
        code clGetDeviceIDs: clGetDeviceIDs_t
            = (platform: cl_platform_id, kinds: cl_device_type, room: cl_uint, to: *mut cl_device_id, count: *mut cl_uint);
        info clGetDeviceInfo: clGetDeviceInfo_t = (device: cl_device_id, what: cl_device_info);
        made clCreateContext: clCreateContext_t
            = (properties: *const cl_context_properties, count: cl_uint, devices: *const cl_device_id, notify: ContextNotify, data: *mut c_void);
        code clRetainContext: clRetainContext_t = (context: cl_context);
        code clReleaseContext: clReleaseContext_t = (context: cl_context);
        plain clGetContextInfo: clGetContextInfo_t = ();
        made clCreateCommandQueue: clCreateCommandQueue_t
            = (context: cl_context, device: cl_device_id, properties: cl_command_queue_properties);
        code clRetainCommandQueue: clRetainCommandQueue_t = (queue: cl_command_queue);
        code clReleaseCommandQueue: clReleaseCommandQueue_t = (queue: cl_command_queue);
        info clGetCommandQueueInfo: clGetCommandQueueInfo_t = (queue: cl_command_queue, what: cl_command_queue_info);
        code clFlush: clFlush_t = (queue: cl_command_queue);
        code clFinish: clFinish_t = (queue: cl_command_queue);
        made clCreateBuffer: clCreateBuffer_t = (context: cl_context, flags: cl_mem_flags, bytes: usize, host: *mut c_void);
        code clRetainMemObject: clRetainMemObject_t = (mem: cl_mem);
        code clReleaseMemObject: clReleaseMemObject_t = (mem: cl_mem);
        info clGetMemObjectInfo: clGetMemObjectInfo_t = (mem: cl_mem, what: cl_mem_info);
        enqueue clEnqueueReadBuffer: clEnqueueReadBuffer_t
            = (queue: cl_command_queue, mem: cl_mem, blocking: cl_bool, at: usize, bytes: usize, to: *mut c_void);
        enqueue clEnqueueWriteBuffer: clEnqueueWriteBuffer_t
            = (queue: cl_command_queue, mem: cl_mem, blocking: cl_bool, at: usize, bytes: usize, from: *const c_void);
        enqueue clEnqueueCopyBuffer: clEnqueueCopyBuffer_t
            = (queue: cl_command_queue, from: cl_mem, to: cl_mem, from_at: usize, to_at: usize, bytes: usize);
        enqueue clEnqueueFillBuffer: clEnqueueFillBuffer_t
            = (queue: cl_command_queue, mem: cl_mem, pattern: *const c_void, length: usize, at: usize, bytes: usize);
        code clEnqueueMarkerWithWaitList: clEnqueueMarkerWithWaitList_t
            = (queue: cl_command_queue, count: cl_uint, events: *const cl_event, event: *mut cl_event);
        code clEnqueueBarrierWithWaitList: clEnqueueBarrierWithWaitList_t
            = (queue: cl_command_queue, count: cl_uint, events: *const cl_event, event: *mut cl_event);
        code clWaitForEvents: clWaitForEvents_t = (count: cl_uint, events: *const cl_event);
        info clGetEventInfo: clGetEventInfo_t = (event: cl_event, what: cl_event_info);
        code clRetainEvent: clRetainEvent_t = (event: cl_event);
        code clReleaseEvent: clReleaseEvent_t = (event: cl_event);
        made clCreateUserEvent: clCreateUserEvent_t = (context: cl_context);
        code clSetUserEventStatus: clSetUserEventStatus_t = (event: cl_event, status: cl_int);
        code clSetKernelArg: clSetKernelArg_t = (kernel: cl_kernel, index: cl_uint, bytes: usize, value: *const c_void);
        plain clGetExtensionFunctionAddressForPlatform: clGetExtensionFunctionAddressForPlatform_t = ();
    }
}

type ContextNotify =
    Option<unsafe extern "C" fn(*const std::ffi::c_char, *const c_void, usize, *mut c_void)>;

functions! {
    /// The functions for shared virtual memory, of OpenCL 2.0.
    Svm {
        plain clSVMAlloc: clSVMAlloc_t = ();
        plain clSVMFree: clSVMFree_t = ();
        enqueue clEnqueueSVMMemcpy: clEnqueueSVMMemcpy_t
            = (queue: cl_command_queue, blocking: cl_bool, to: *mut c_void, from: *const c_void, bytes: usize);
        enqueue clEnqueueSVMMemFill: clEnqueueSVMMemFill_t
            = (queue: cl_command_queue, to: *mut c_void, pattern: *const c_void, length: usize, bytes: usize);
        code clSetKernelArgSVMPointer: clSetKernelArgSVMPointer_t = (kernel: cl_kernel, index: cl_uint, pointer: *const c_void);
    }
}

functions! {
    /// The functions of the extension cl_intel_unified_shared_memory.
    Usm {
        made clHostMemAllocINTEL: clHostMemAllocINTEL_t
            = (context: cl_context, properties: *const cl_mem_properties_intel, bytes: usize, alignment: cl_uint);
        made clDeviceMemAllocINTEL: clDeviceMemAllocINTEL_t
            = (context: cl_context, device: cl_device_id, properties: *const cl_mem_properties_intel, bytes: usize, alignment: cl_uint);
        code clMemFreeINTEL: clMemFreeINTEL_t = (context: cl_context, memory: *mut c_void);
        info clGetMemAllocInfoINTEL: clGetMemAllocInfoINTEL_t = (context: cl_context, address: *const c_void, what: cl_mem_info_intel);
        enqueue clEnqueueMemcpyINTEL: clEnqueueMemcpyINTEL_t
            = (queue: cl_command_queue, blocking: cl_bool, to: *mut c_void, from: *const c_void, bytes: usize);
        enqueue clEnqueueMemFillINTEL: clEnqueueMemFillINTEL_t
            = (queue: cl_command_queue, to: *mut c_void, pattern: *const c_void, length: usize, bytes: usize);
        code clSetKernelArgMemPointerINTEL: clSetKernelArgMemPointerINTEL_t = (kernel: cl_kernel, index: cl_uint, pointer: *const c_void);
    }
}

impl Usm {
    /// Returns the platform's functions, or the name of one that it lacks.
    ///
    /// # Safety
    /// `platform` is one that the loader listed.
    pub(crate) unsafe fn of(cl: &Cl, platform: cl_platform_id) -> Result<Self, &'static str> {
        let find = cl.clGetExtensionFunctionAddressForPlatform;
        // SAFETY: the caller guarantees the platform (see `# Safety`), and the name ends with NUL. The platform returns null or the
        // extension's function of the name, which stays as long as the runtime does.
        unsafe { Self::find(|name| find(platform, name.as_ptr().cast())) }
    }
}

fn answered(call: &'static str, code: cl_int) -> Answer {
    match code {
        CL_SUCCESS => Ok(()),
        code => Err(Failed { call, code }),
    }
}

/// Asks an `info` for a list, whose length and place, and the place for whose length, are passed on.
pub(crate) fn list<T: Clone>(
    call: &'static str,
    zero: T,
    ask: impl Fn(usize, *mut c_void, *mut usize) -> cl_int,
) -> Answer<Vec<T>> {
    let mut bytes = 0;
    answered(call, ask(0, null_mut(), &raw mut bytes))?;
    let mut list = vec![zero; bytes / size_of::<T>()];
    let room = size_of_val(&*list);
    answered(call, ask(room, list.as_mut_ptr().cast(), null_mut()))?;
    Ok(list)
}

/// The functions that keep and release an object of a sort.
type Sort = (Count, Count);
type Count = unsafe fn(&Functions, *mut c_void) -> Answer;

pub(crate) const CONTEXT: Sort = (Functions::clRetainContext, Functions::clReleaseContext);
pub(crate) const QUEUE: Sort = (
    Functions::clRetainCommandQueue,
    Functions::clReleaseCommandQueue,
);
pub(crate) const EVENT: Sort = (Functions::clRetainEvent, Functions::clReleaseEvent);
pub(crate) const BUFFER: Sort = (Functions::clRetainMemObject, Functions::clReleaseMemObject);

/// A reference to an object of the runtime, which is given back when this is dropped.
pub(crate) struct Object {
    cl: &'static Cl,
    sort: Sort,
    raw: NonNull<c_void>,
}

// SAFETY: the runtime's functions may be called on any thread with any object except kernels, of which there are none here.
unsafe impl Send for Object {}
// SAFETY: a shared reference only calls those functions, which may run on several threads at once.
unsafe impl Sync for Object {}

impl Object {
    /// Takes over a reference.
    ///
    /// # Safety
    /// `raw` is a live object of this sort, one of whose references belongs to the result.
    pub(crate) unsafe fn own(cl: &'static Cl, sort: Sort, raw: NonNull<c_void>) -> Self {
        Self { cl, sort, raw }
    }

    /// Takes a reference of its own. Null is refused by the runtime.
    ///
    /// # Safety
    /// `raw` is null or a live object of this sort.
    pub(crate) unsafe fn retain(cl: &'static Cl, sort: Sort, raw: *mut c_void) -> Answer<Self> {
        let (call, code) = ("retaining an object", CL_INVALID_VALUE);
        // SAFETY: the caller guarantees a live object, or null, which is an error.
        unsafe { sort.0(cl, raw) }?;
        let raw = NonNull::new(raw).ok_or(Failed { call, code })?;
        Ok(Self { cl, sort, raw })
    }

    pub(crate) fn raw(&self) -> *mut c_void {
        self.raw.as_ptr()
    }

    /// Returns the address of the handle, as long as this value is not moved.
    pub(crate) fn place(&self) -> *mut c_void {
        std::ptr::from_ref(&self.raw).cast_mut().cast()
    }
}

impl std::fmt::Debug for Object {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.raw.fmt(f)
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        if let Some(_inside) = self.cl.health.enter_to_drop() {
            // An error has no place to go.
            // SAFETY: this value owns a reference, which keeps the object alive until here.
            let _: Answer = unsafe { self.sort.1(self.cl, self.raw()) };
        }
    }
}

/// OpenCL's loader, which stays loaded.
pub(crate) struct Cl {
    functions: Functions,
    /// `None` if the loader is older than OpenCL 2.0.
    pub(crate) svm: Option<Svm>,
    /// A child of the process in which it was loaded must not call it.
    pub(crate) health: Health,
}

impl Deref for Cl {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

const NAMES: &[&str] = if cfg!(windows) {
    &["OpenCL.dll"]
} else if cfg!(target_vendor = "apple") {
    &["/System/Library/Frameworks/OpenCL.framework/OpenCL"]
} else {
    &["libOpenCL.so.1", "libOpenCL.so"]
};

impl Cl {
    /// Returns the loader, loaded at the first call, or why it cannot be used.
    pub(crate) fn get() -> Result<&'static Self, &'static str> {
        static CL: OnceLock<Result<Cl, String>> = OnceLock::new();
        CL.get_or_init(Self::load).as_ref().map_err(String::as_str)
    }

    fn load() -> Result<Self, String> {
        if cfg!(all(windows, target_arch = "x86")) {
            return Err("OpenCL is not supported in 32-bit programs on Windows".into());
        }
        let mut reasons = Vec::new();
        for name in NAMES {
            // SAFETY: libraries of these names are OpenCL's loader, whose initialisation asks nothing of its user.
            match unsafe { Library::new(*name) } {
                Ok(library) => return Self::check(library),
                Err(e) => reasons.push(e.to_string()),
            }
        }
        Err(format!(
            "OpenCL's loader cannot be loaded; install it (Debian and Ubuntu: ocl-icd-libopencl1) and a driver ({})",
            reasons.join("; ")
        ))
    }

    fn check(library: Library) -> Result<Self, String> {
        let library = std::mem::ManuallyDrop::new(library);
        let find = |name: &'static str| {
            // SAFETY: the symbol is taken for an address, which every symbol has.
            let found = unsafe { library.get::<*mut c_void>(name) };
            found.map_or(null_mut(), |found| *found)
        };
        // SAFETY: the library is OpenCL's loader and stays loaded: a symbol of this name is the function.
        let functions = unsafe { Functions::find(find) }.map_err(|missing| {
            format!("OpenCL's loader has no {missing}: it is older than OpenCL 1.2, update it")
        })?;
        Ok(Self {
            functions,
            // SAFETY: the library is OpenCL's loader and stays loaded: a symbol of this name is the function.
            svm: unsafe { Svm::find(find) }.ok(),
            health: Health::new(DeviceId::new(ArrowDeviceType::OPENCL, 0)),
        })
    }
}

/// Locks a mutex. No code of this crate leaves what it protects half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the name of an error code that programs meet, such as `CL_OUT_OF_RESOURCES`.
pub(crate) fn code_name(code: cl_int) -> &'static str {
    match code {
        CL_SUCCESS => "CL_SUCCESS, without a result",
        CL_PLATFORM_NOT_FOUND_KHR => "CL_PLATFORM_NOT_FOUND_KHR",
        CL_DEVICE_NOT_AVAILABLE => "CL_DEVICE_NOT_AVAILABLE",
        CL_MEM_OBJECT_ALLOCATION_FAILURE => "CL_MEM_OBJECT_ALLOCATION_FAILURE",
        CL_OUT_OF_RESOURCES => "CL_OUT_OF_RESOURCES",
        CL_OUT_OF_HOST_MEMORY => "CL_OUT_OF_HOST_MEMORY",
        CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST => {
            "CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST"
        }
        CL_INVALID_VALUE => "CL_INVALID_VALUE",
        CL_INVALID_CONTEXT => "CL_INVALID_CONTEXT",
        CL_INVALID_COMMAND_QUEUE => "CL_INVALID_COMMAND_QUEUE",
        CL_INVALID_MEM_OBJECT => "CL_INVALID_MEM_OBJECT",
        CL_INVALID_KERNEL => "CL_INVALID_KERNEL",
        CL_INVALID_ARG_INDEX => "CL_INVALID_ARG_INDEX",
        CL_INVALID_EVENT => "CL_INVALID_EVENT",
        _ => "see CL/cl.h",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_names() {
        assert_eq!(code_name(CL_OUT_OF_RESOURCES), "CL_OUT_OF_RESOURCES");
        assert_eq!(code_name(-4711), "see CL/cl.h");
    }
}
