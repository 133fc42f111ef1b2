//! OpenCL's functions, loaded at run time.
//!
//! Types and constants are opencl-sys's, which links nothing. The functions come from OpenCL's loader (`libOpenCL`), and
//! those of extensions from the platform, since the loader does not export them.

use std::ffi::{CStr, c_void};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;

use arrow_device::device::parts::Process;
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
pub(crate) type Answer<T> = Result<T, Failed>;

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
            unsafe fn find(find: impl Fn(&'static CStr) -> *mut c_void) -> Result<Self, &'static str> {
                Ok(Self {
                    $($function: {
                        const NAME: &CStr = name(concat!(stringify!($function), "\0"));
                        // SAFETY: the caller guarantees a null pointer, which is `None`, or the function of this name,
                        // whose type opencl-sys takes from OpenCL's headers (see `# Safety`).
                        let found = unsafe { std::mem::transmute::<*mut c_void, $type>(find(NAME)) };
                        found.ok_or(stringify!($function))?
                    },)*
                })
            }
        }
    };
}

/// Returns a function's name as a C string.
const fn name(with_nul: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(with_nul.as_bytes()) {
        Ok(name) => name,
        Err(_) => c"",
    }
}

functions! {
    /// The functions of OpenCL 1.2, which every runtime has.
    Functions {
        clGetPlatformIDs: clGetPlatformIDs_t,
        clGetPlatformInfo: clGetPlatformInfo_t,
        clGetDeviceIDs: clGetDeviceIDs_t,
        clGetDeviceInfo: clGetDeviceInfo_t,
        clCreateContext: clCreateContext_t,
        clRetainContext: clRetainContext_t,
        clReleaseContext: clReleaseContext_t,
        clGetContextInfo: clGetContextInfo_t,
        clCreateCommandQueue: clCreateCommandQueue_t,
        clRetainCommandQueue: clRetainCommandQueue_t,
        clReleaseCommandQueue: clReleaseCommandQueue_t,
        clGetCommandQueueInfo: clGetCommandQueueInfo_t,
        clFlush: clFlush_t,
        clFinish: clFinish_t,
        clCreateBuffer: clCreateBuffer_t,
        clRetainMemObject: clRetainMemObject_t,
        clReleaseMemObject: clReleaseMemObject_t,
        clGetMemObjectInfo: clGetMemObjectInfo_t,
        clEnqueueReadBuffer: clEnqueueReadBuffer_t,
        clEnqueueWriteBuffer: clEnqueueWriteBuffer_t,
        clEnqueueCopyBuffer: clEnqueueCopyBuffer_t,
        clEnqueueFillBuffer: clEnqueueFillBuffer_t,
        clEnqueueMarkerWithWaitList: clEnqueueMarkerWithWaitList_t,
        clEnqueueBarrierWithWaitList: clEnqueueBarrierWithWaitList_t,
        clWaitForEvents: clWaitForEvents_t,
        clGetEventInfo: clGetEventInfo_t,
        clRetainEvent: clRetainEvent_t,
        clReleaseEvent: clReleaseEvent_t,
        clSetEventCallback: clSetEventCallback_t,
        clCreateUserEvent: clCreateUserEvent_t,
        clSetUserEventStatus: clSetUserEventStatus_t,
        clSetKernelArg: clSetKernelArg_t,
        clGetExtensionFunctionAddressForPlatform: clGetExtensionFunctionAddressForPlatform_t,
    }
}

functions! {
    /// The functions for shared virtual memory, of OpenCL 2.0.
    Svm {
        clSVMAlloc: clSVMAlloc_t,
        clSVMFree: clSVMFree_t,
        clEnqueueSVMMemcpy: clEnqueueSVMMemcpy_t,
        clEnqueueSVMMemFill: clEnqueueSVMMemFill_t,
        clSetKernelArgSVMPointer: clSetKernelArgSVMPointer_t,
    }
}

functions! {
    /// The functions of the extension cl_intel_unified_shared_memory.
    Usm {
        clHostMemAllocINTEL: clHostMemAllocINTEL_t,
        clDeviceMemAllocINTEL: clDeviceMemAllocINTEL_t,
        clMemFreeINTEL: clMemFreeINTEL_t,
        clGetMemAllocInfoINTEL: clGetMemAllocInfoINTEL_t,
        clEnqueueMemcpyINTEL: clEnqueueMemcpyINTEL_t,
        clEnqueueMemFillINTEL: clEnqueueMemFillINTEL_t,
        clSetKernelArgMemPointerINTEL: clSetKernelArgMemPointerINTEL_t,
    }
}

impl Usm {
    /// Returns the platform's functions, or the name of one that it lacks.
    ///
    /// # Safety
    /// `platform` is one that the loader listed.
    pub(crate) unsafe fn of(cl: &Cl, platform: cl_platform_id) -> Result<Self, &'static str> {
        // SAFETY: the caller guarantees the platform (see `# Safety`), and the name is a C string.
        let find = |name: &CStr| unsafe {
            (cl.clGetExtensionFunctionAddressForPlatform)(platform, name.as_ptr())
        };
        // SAFETY: the platform returns null or the extension's function of the name, which stays as long as the runtime
        // does.
        unsafe { Self::find(find) }
    }

    /// Returns whether an address is in unified shared memory of a context.
    ///
    /// # Safety
    /// The context is live.
    pub(crate) unsafe fn knows(&self, context: cl_context, address: *mut c_void) -> bool {
        let what = CL_MEM_ALLOC_TYPE_INTEL;
        // SAFETY: the caller guarantees the context; the call accepts any address and does not follow it.
        let kind = unsafe {
            info!(
                self,
                clGetMemAllocInfoINTEL(context, address, what) as cl_uint
            )
        };
        kind.is_ok_and(|kind| kind != CL_MEM_TYPE_UNKNOWN_INTEL)
    }
}

/// Makes a call that returns a code. To be used in an `unsafe` block.
macro_rules! call {
    ($table:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $crate::sys::answered(stringify!($function), ($table.$function)($($argument),*))
    };
}
pub(crate) use call;

/// Makes a call that returns a pointer, and a code through its last parameter. To be used in an `unsafe` block.
macro_rules! create {
    ($table:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        let mut code = opencl_sys::CL_SUCCESS;
        let made = ($table.$function)($($argument,)* &raw mut code);
        $crate::sys::made(stringify!($function), made, code)
    }};
}
pub(crate) use create;

pub(crate) fn answered(call: &'static str, code: cl_int) -> Answer<()> {
    match code {
        CL_SUCCESS => Ok(()),
        code => Err(Failed { call, code }),
    }
}

pub(crate) fn made(call: &'static str, made: *mut c_void, code: cl_int) -> Answer<NonNull<c_void>> {
    answered(call, code)?;
    NonNull::new(made).ok_or(Failed { call, code })
}

/// OpenCL's loader, which stays loaded.
pub(crate) struct Cl {
    functions: Functions,
    /// `None` if the loader is older than OpenCL 2.0.
    pub(crate) svm: Option<Svm>,
    /// Where it was loaded: a child of that process must not call it.
    pub(crate) process: Process,
    _library: ManuallyDrop<Library>,
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
                Ok(library) => return Self::check(ManuallyDrop::new(library)),
                Err(e) => reasons.push(e.to_string()),
            }
        }
        Err(format!(
            "OpenCL's loader cannot be loaded; install it (Debian and Ubuntu: ocl-icd-libopencl1) and a driver ({})",
            reasons.join("; ")
        ))
    }

    fn check(library: ManuallyDrop<Library>) -> Result<Self, String> {
        let find = |name: &'static CStr| {
            // SAFETY: the symbol is taken for an address, which every symbol has.
            let found = unsafe { library.get::<*mut c_void>(name.to_bytes_with_nul()) };
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
            process: Process::this(),
            _library: library,
        })
    }
}

/// Asks one of the runtime's `clGet*Info` functions, which take a size, a place and a place for the size, for a value of a
/// fixed size. To be used in an `unsafe` block; any bits are a `$type`.
macro_rules! info {
    ($table:expr, $function:ident($($argument:expr),*) as $type:ty) => {{
        let mut value = std::mem::MaybeUninit::<$type>::zeroed();
        $crate::sys::call!(
            $table,
            $function($($argument,)* size_of::<$type>(), value.as_mut_ptr().cast(), std::ptr::null_mut())
        )
        .map(|()| value.assume_init())
    }};
}
pub(crate) use info;

/// As [`info`], for a list of values of unknown length.
macro_rules! info_list {
    ($table:expr, $function:ident($($argument:expr),*) as [$type:ty]) => {{
        let mut bytes = 0;
        $crate::sys::call!($table, $function($($argument,)* 0, std::ptr::null_mut(), &raw mut bytes)).and_then(|()| {
            let mut list = vec![<$type>::default(); bytes / size_of::<$type>()];
            let room = size_of_val(&*list);
            let place = list.as_mut_ptr().cast();
            $crate::sys::call!($table, $function($($argument,)* room, place, std::ptr::null_mut())).map(|()| list)
        })
    }};
}
pub(crate) use info_list;

/// Returns a text of the runtime, without the NUL at its end.
pub(crate) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())])
        .trim()
        .to_owned()
}
