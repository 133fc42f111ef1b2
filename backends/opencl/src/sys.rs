//! OpenCL's functions, loaded at run time, and references to its objects.
//!
//! Types and constants are opencl-sys's, which links nothing. The functions come from OpenCL's loader (`libOpenCL`), and
//! those of extensions from the platform, since the loader does not export them.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr::{NonNull, null_mut};
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

/// Declares a table of functions, with the types of opencl-sys.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($function:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        #[allow(non_snake_case)]
        pub(crate) struct $table {
            $(pub(crate) $function: <$type as Function>::Pointer,)*
        }

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
        }
    };
}

/// Calls a function of a table, whose contract in OpenCL's specification the caller keeps to. Their sorts:
/// - `code`: returns a code;
/// - `enqueue`: as above, and ends with a list of events to wait for, which is empty here, and the place for an event, which is not asked for;
/// - `made`: returns an object or memory, and a code through its last parameter;
/// - `info`: returns a code, and ends with the length and the place of the answer, and the place for its length. The answer has a fixed
///   length, and may be zeros; [`list`] asks for others.
macro_rules! call {
    (code $table:ident.$function:ident($($arg:expr),* $(,)?)) => {
        $crate::sys::answered(stringify!($function), ($table.$function)($($arg),*))
    };
    (enqueue $table:ident.$function:ident($($arg:expr),* $(,)?)) => {
        $crate::sys::answered(stringify!($function), ($table.$function)($($arg,)* 0, std::ptr::null(), std::ptr::null_mut()))
    };
    (made $table:ident.$function:ident($($arg:expr),* $(,)?)) => {{
        let mut code = CL_SUCCESS;
        let made = ($table.$function)($($arg,)* &raw mut code);
        $crate::sys::made(stringify!($function), made, code)
    }};
    (info $table:ident.$function:ident($($arg:expr),* $(,)?)) => {
        $crate::sys::asked(stringify!($function), |bytes, place| ($table.$function)($($arg,)* bytes, place, std::ptr::null_mut()))
    };
}
pub(crate) use call;

functions! {
    /// The functions of OpenCL 1.2.
    Functions {
        clGetPlatformIDs: clGetPlatformIDs_t, clGetPlatformInfo: clGetPlatformInfo_t, clGetDeviceIDs: clGetDeviceIDs_t,
        clGetDeviceInfo: clGetDeviceInfo_t, clCreateContext: clCreateContext_t, clGetContextInfo: clGetContextInfo_t,
        clRetainContext: clRetainContext_t, clReleaseContext: clReleaseContext_t, clCreateCommandQueue: clCreateCommandQueue_t,
        clGetCommandQueueInfo: clGetCommandQueueInfo_t, clRetainCommandQueue: clRetainCommandQueue_t,
        clReleaseCommandQueue: clReleaseCommandQueue_t, clFlush: clFlush_t, clFinish: clFinish_t, clCreateBuffer: clCreateBuffer_t,
        clGetMemObjectInfo: clGetMemObjectInfo_t, clRetainMemObject: clRetainMemObject_t, clReleaseMemObject: clReleaseMemObject_t,
        clEnqueueReadBuffer: clEnqueueReadBuffer_t, clEnqueueWriteBuffer: clEnqueueWriteBuffer_t,
        clEnqueueCopyBuffer: clEnqueueCopyBuffer_t, clEnqueueFillBuffer: clEnqueueFillBuffer_t,
        clEnqueueMarkerWithWaitList: clEnqueueMarkerWithWaitList_t, clEnqueueBarrierWithWaitList: clEnqueueBarrierWithWaitList_t,
        clWaitForEvents: clWaitForEvents_t, clGetEventInfo: clGetEventInfo_t, clRetainEvent: clRetainEvent_t,
        clReleaseEvent: clReleaseEvent_t, clCreateUserEvent: clCreateUserEvent_t, clSetUserEventStatus: clSetUserEventStatus_t,
        clSetKernelArg: clSetKernelArg_t, clGetExtensionFunctionAddressForPlatform: clGetExtensionFunctionAddressForPlatform_t,
    }
}

functions! {
    /// The functions for shared virtual memory, of OpenCL 2.0.
    Svm {
        clSVMAlloc: clSVMAlloc_t, clSVMFree: clSVMFree_t, clSetKernelArgSVMPointer: clSetKernelArgSVMPointer_t,
        clEnqueueSVMMemcpy: clEnqueueSVMMemcpy_t, clEnqueueSVMMemFill: clEnqueueSVMMemFill_t,
    }
}

functions! {
    /// The functions of the extension cl_intel_unified_shared_memory.
    Usm {
        clHostMemAllocINTEL: clHostMemAllocINTEL_t, clDeviceMemAllocINTEL: clDeviceMemAllocINTEL_t, clMemFreeINTEL: clMemFreeINTEL_t,
        clGetMemAllocInfoINTEL: clGetMemAllocInfoINTEL_t, clEnqueueMemcpyINTEL: clEnqueueMemcpyINTEL_t,
        clEnqueueMemFillINTEL: clEnqueueMemFillINTEL_t, clSetKernelArgMemPointerINTEL: clSetKernelArgMemPointerINTEL_t,
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

pub(crate) fn answered(call: &'static str, code: cl_int) -> Answer {
    match code {
        CL_SUCCESS => Ok(()),
        code => Err(Failed { call, code }),
    }
}

pub(crate) fn made(call: &'static str, made: *mut c_void, code: cl_int) -> Answer<NonNull<c_void>> {
    answered(call, code)?;
    NonNull::new(made).ok_or(Failed { call, code })
}

/// Asks an `info` for a value.
///
/// # Safety
/// What `ask` writes is a `T`, as zeros are.
pub(crate) unsafe fn asked<T>(
    call: &'static str,
    ask: impl FnOnce(usize, *mut c_void) -> cl_int,
) -> Answer<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    answered(call, ask(size_of::<T>(), value.as_mut_ptr().cast()))?;
    // SAFETY: the caller guarantees a `T`, or zeros, which are one (see `# Safety`).
    Ok(unsafe { value.assume_init() })
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
type Sort = fn(&Functions) -> (Count, Count);
type Count = unsafe extern "C" fn(*mut c_void) -> cl_int;

pub(crate) const CONTEXT: Sort = |cl| (cl.clRetainContext, cl.clReleaseContext);
pub(crate) const QUEUE: Sort = |cl| (cl.clRetainCommandQueue, cl.clReleaseCommandQueue);
pub(crate) const EVENT: Sort = |cl| (cl.clRetainEvent, cl.clReleaseEvent);
pub(crate) const BUFFER: Sort = |cl| (cl.clRetainMemObject, cl.clReleaseMemObject);

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
        // SAFETY: the caller guarantees a live object, or null, which is an error.
        let code = unsafe { sort(cl).0(raw) };
        let raw = made("retaining an object", raw, code)?;
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
        if let Ok(_inside) = self.cl.health.enter_even_if_failed() {
            // An error has no place to go.
            // SAFETY: this value owns a reference, which keeps the object alive until here.
            let _: cl_int = unsafe { (self.sort)(self.cl).1(self.raw()) };
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

macro_rules! names {
    ($code:ident: $($name:ident)*) => {
        match $code {
            CL_SUCCESS => "CL_SUCCESS, without a result",
            $($name => stringify!($name),)*
            _ => "see CL/cl.h",
        }
    };
}

/// Returns the name of an error code that programs meet, such as `CL_OUT_OF_RESOURCES`.
pub(crate) fn code_name(code: cl_int) -> &'static str {
    names! { code:
        CL_PLATFORM_NOT_FOUND_KHR CL_DEVICE_NOT_AVAILABLE CL_MEM_OBJECT_ALLOCATION_FAILURE CL_OUT_OF_RESOURCES CL_OUT_OF_HOST_MEMORY
        CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST CL_INVALID_VALUE CL_INVALID_CONTEXT CL_INVALID_COMMAND_QUEUE
        CL_INVALID_MEM_OBJECT CL_INVALID_KERNEL CL_INVALID_ARG_INDEX CL_INVALID_EVENT
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
