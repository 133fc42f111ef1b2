//! The driver library, loaded at run time.
//!
//! Handles and constants are cudarc's. Its functions are not used: they panic if the library or a
//! function is missing, and read a return code that is newer than the bindings as a value of an
//! enum, which is undefined behaviour. Here codes are integers, and what is missing is an error.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};
use std::mem::{ManuallyDrop, offset_of};
use std::sync::{Arc, OnceLock};

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{
    self as bindings, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent,
    CUmemAllocationType, CUmemLocationType, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool,
    CUpointer_attribute, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
};

use crate::device::Process;
use crate::device::gpu::{
    self, Api, Call, Calls, Code, CopyList, HostFunction, LaunchHost, Library, PoolProps, RawEvent,
    RawPool, RawStream, called, check_alike, either, find_call, functions, load,
};

/// What the stub library returns from every function that is called. It has no texts.
const STUB_LIBRARY: Code = 34;

/// Whether nothing that was queued before runs any more, and every later call fails. Some codes
/// also stand for the loss of another context.
fn is_lost(code: Code) -> bool {
    // Device unavailable; invalid context; uncorrectable ECC, NVLink and contained errors; illegal
    // address to launch failure, with "context is destroyed" in between; tensor memory leak; MPS
    // client terminated; external device.
    matches!(
        code,
        46 | 201 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810 | 911
    )
}

const _: () = check_alike(
    [
        CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int,
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_int,
        CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as c_int,
        CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as c_int,
        CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as c_int,
    ],
    [
        size_of::<CUmemPoolProps>(),
        align_of::<CUmemPoolProps>(),
        offset_of!(CUmemPoolProps, location),
    ],
);

functions! {
    /// The functions that only CUDA has, or that differ from HIP's.
    pub(super) struct Functions: "Rust", Code as CUresult, "CUDA_ERROR_OUT_OF_MEMORY";
    shared {
        device_count = cuDeviceGetCount(count: *mut c_int);
        version = cuDriverGetVersion(version: *mut c_int);
        exchange_capture_mode = cuThreadExchangeStreamCaptureMode(mode: *mut c_int as *mut CUstreamCaptureMode);
        synchronize = cuCtxSynchronize();
        create_stream = cuStreamCreate(stream: *mut RawStream as *mut CUstream, flags: c_uint);
        destroy_stream = cuStreamDestroy_v2(stream: RawStream as CUstream);
        synchronize_stream = cuStreamSynchronize(stream: RawStream as CUstream);
        query_stream = cuStreamQuery(stream: RawStream as CUstream);
        is_capturing = cuStreamIsCapturing(stream: RawStream as CUstream, status: *mut c_int as *mut CUstreamCaptureStatus);
        wait = cuStreamWaitEvent(stream: RawStream as CUstream, event: RawEvent as CUevent, flags: c_uint);
        create_event = cuEventCreate(event: *mut RawEvent as *mut CUevent, flags: c_uint);
        destroy_event = cuEventDestroy_v2(event: RawEvent as CUevent);
        record = cuEventRecord(event: RawEvent as CUevent, stream: RawStream as CUstream);
        query = cuEventQuery(event: RawEvent as CUevent);
        wait_event = cuEventSynchronize(event: RawEvent as CUevent);
        create_pool = cuMemPoolCreate(pool: *mut RawPool as *mut CUmemoryPool, props: *const PoolProps as *const CUmemPoolProps);
        destroy_pool = cuMemPoolDestroy(pool: RawPool as CUmemoryPool);
        set_pool = cuMemPoolSetAttribute(pool: RawPool as CUmemoryPool, attribute: c_int as CUmemPool_attribute, value: *mut c_void);
        trim = cuMemPoolTrimTo(pool: RawPool as CUmemoryPool, bytes_to_keep: usize);
        allocate_in_order = cuMemAllocFromPoolAsync(
            address: *mut usize as *mut CUdeviceptr,
            bytes: usize,
            pool: RawPool as CUmemoryPool,
            stream: RawStream as CUstream
        );
        free_in_order = cuMemFreeAsync(ptr: *mut c_void as CUdeviceptr, stream: RawStream as CUstream);
        allocate_device = cuMemAlloc_v2 "cuMemAlloc" (address: *mut usize as *mut CUdeviceptr, bytes: usize);
        free_device = cuMemFree_v2(ptr: *mut c_void as CUdeviceptr);
        allocate_host = cuMemHostAlloc(address: *mut usize as *mut *mut c_void, bytes: usize, flags: c_uint);
        free_host = cuMemFreeHost(ptr: *mut c_void);
        fill = cuMemsetD8Async(dst: *mut c_void as CUdeviceptr, byte: c_uchar, count: usize, stream: RawStream as CUstream);
    }
    required {
        cuInit(flags: c_uint);
        cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
        cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
        cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
        cuDevicePrimaryCtxRelease_v2(device: CUdevice);
        cuCtxPushCurrent_v2 "cuCtxPushCurrent" (context: CUcontext);
        cuCtxPopCurrent_v2(context: *mut CUcontext);
        cuStreamGetCtx(stream: RawStream as CUstream, context: *mut CUcontext);
        cuMemAllocManaged(address: *mut usize as *mut CUdeviceptr, bytes: usize, flags: c_uint);
        cuPointerGetAttributes(
            count: c_uint,
            attributes: *mut CUpointer_attribute,
            data: *mut *mut c_void,
            ptr: CUdeviceptr
        );
        cuMemcpyAsync(
            dst: *mut c_void as CUdeviceptr,
            src: *mut c_void as CUdeviceptr,
            bytes: usize,
            stream: RawStream as CUstream
        );
        cuMemcpyPeerAsync(
            dst: *mut c_void as CUdeviceptr,
            dst_context: CUcontext,
            src: *mut c_void as CUdeviceptr,
            src_context: CUcontext,
            bytes: usize,
            stream: RawStream as CUstream
        );
        cuLaunchHostFunc(stream: RawStream as CUstream, function: Option<HostFunction>, data: *mut c_void);
        cuGetErrorName(code: Code as CUresult, text: *mut *const c_char);
        cuGetErrorString(code: Code as CUresult, text: *mut *const c_char);
    }
    optional {}
}

// `CUdeviceptr` is an integer of the size of a pointer, which is passed as one.
const _: () = assert!(size_of::<CUdeviceptr>() == size_of::<*mut c_void>());

type StreamContexts = unsafe extern "C" fn(RawStream, *mut CUcontext, *mut *mut c_void) -> Code;

/// The driver.
pub(super) struct Driver {
    functions: Functions,
    api: Api,
    /// Records an event after all work of a context. Since CUDA 12.5, which not all bindings are
    /// of.
    pub(super) record_context: Option<Call<unsafe extern "C" fn(CUcontext, RawEvent) -> Code>>,
    /// Returns a stream's context and its green context, null if it is of none. As above.
    pub(super) stream_contexts: Option<Call<StreamContexts>>,
    /// Stays loaded.
    _library: ManuallyDrop<libloading::Library>,
}

impl std::ops::Deref for Driver {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

impl Library for Driver {
    fn get() -> Result<&'static Self, &'static str> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        let driver = DRIVER.get_or_init(Driver::load);
        driver.as_ref().map_err(String::as_str)
    }

    fn api(&self) -> &Api {
        &self.api
    }

    fn text(&self, code: Code) -> String {
        let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
        // SAFETY: each function writes a static text, or leaves the pointer null or makes it so for
        // an unknown code.
        unsafe {
            (self.cuGetErrorName)(code, &raw mut name);
            (self.cuGetErrorString)(code, &raw mut text);
            gpu::text(name, text)
        }
    }
}

impl Driver {
    fn load() -> Result<Self, String> {
        // The driver installs the name with the number; the plain one may be the toolkit's stub,
        // which only serves to link programs.
        let names: &[&str] = if cfg!(windows) {
            &["nvcuda.dll"]
        } else {
            &["libcuda.so.1", "libcuda.so"]
        };
        let advice = "the NVIDIA driver's library cannot be loaded; install the driver";
        load(names, advice, Self::check)
    }

    /// Returns the driver, initialised, or why it cannot be used.
    fn check(library: ManuallyDrop<libloading::Library>) -> Result<Self, String> {
        // SAFETY: libraries of these names are CUDA drivers, and this one stays loaded.
        let functions = unsafe { Functions::find(&library) };
        let (functions, calls) = functions
            .map_err(|name| format!("the driver has no {name}: it is too old, update it"))?;
        // SAFETY: the library is the driver, and stays loaded; the types are those of its header.
        let (record_context, stream_contexts) = unsafe {
            (
                find_call!(library, "CUDA_ERROR_OUT_OF_MEMORY", cuCtxRecordEvent),
                find_call!(library, "CUDA_ERROR_OUT_OF_MEMORY", cuStreamGetCtx_v2),
            )
        };
        let driver = Self {
            api: api(&functions, calls, &library),
            functions,
            record_context: record_context.ok(),
            stream_contexts: stream_contexts.ok(),
            _library: library,
        };
        // SAFETY: called before all other functions, with the only flags that there are.
        match unsafe { (driver.cuInit)(0) } {
            0 => Ok(driver),
            STUB_LIBRARY => Err(
                "cuInit failed: the CUDA toolkit's stub library was loaded instead of the driver \
                 (code 34); remove the toolkit's folder `stubs` from the library path"
                    .into(),
            ),
            code => {
                let text = driver.text(code);
                Err(format!("cuInit failed: {text} (code {code})"))
            }
        }
    }

    /// Runs `last`, which drops something of cudarc's that lives in `context`, without leaving that
    /// context current: cudarc makes it current for every call.
    pub(super) fn let_go(&self, context: Arc<CudaContext>, last: impl FnOnce()) {
        if !self.api.process.is_this() {
            // In a child of the process no call may be made.
            std::mem::forget((context, last));
            return;
        }
        // SAFETY: `context` keeps the raw context alive.
        let pushed = unsafe { (self.cuCtxPushCurrent_v2)(context.cu_ctx()) == 0 };
        last();
        // Destroying a context takes it off the stack by itself; releasing a primary one does not.
        match Arc::into_inner(context) {
            Some(context) if !context.is_primary() => return drop(context),
            context => drop(context),
        }
        if pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: `popped` is valid for the write of a handle. What is popped was pushed above,
            // or put in its place by cudarc.
            unsafe { (self.cuCtxPopCurrent_v2)(&raw mut popped) };
        }
    }
}

/// The functions for the engine that CUDA and HIP share.
fn api(driver: &Functions, calls: Calls, library: &libloading::Library) -> Api {
    const DISABLE_TIMING: c_uint = 2;
    const PORTABLE: c_uint = 1;
    let call = |function| Call {
        name: "cuMemcpyBatchAsync",
        out_of_memory: "cuMemcpyBatchAsync (CUDA_ERROR_OUT_OF_MEMORY, code 2)",
        function,
    };
    // SAFETY: the library is the driver; the types are those of its header, of the versions that
    // `CopyList` names.
    let copy_list = unsafe {
        match library.get(b"cuMemcpyBatchAsync_v2\0") {
            Ok(function) => Some(CopyList::Plain(*function)),
            Err(_) => match library.get(b"cuMemcpyBatchAsync\0") {
                Ok(function) => Some(CopyList::WithIndex(*function)),
                Err(_) => None,
            },
        }
    };
    Api {
        vendor: "CUDA",
        process: Process::this(),
        advice: super::ADVICE,
        is_lost,
        stream_of: driver.cuStreamGetCtx.name,
        pointer: driver.cuPointerGetAttributes.name,
        copy: driver.cuMemcpyAsync.name,
        event_flags: DISABLE_TIMING,
        host_flags: PORTABLE,
        allocate_managed: Some(driver.cuMemAllocManaged),
        copy_list: copy_list.map(call),
        launch_host: Some(driver.cuLaunchHostFunc.map(LaunchHost::Function)),
        calls,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of the codes of the Multi-Process Service (805 to 810) only the last says that the client was
    /// terminated. That it has too many clients (808) leaves a context as it is.
    #[test]
    fn only_a_terminated_client_has_lost_its_context() {
        let lost: Vec<Code> = (800..=820).filter(|code| is_lost(*code)).collect();
        assert_eq!(lost, [810]);
    }
}
