//! The driver library, loaded at run time.
//!
//! Handles and constants are cudarc's, its calls are not: they panic where the library or a function
//! is missing, and take an error code that is newer than the bindings for an enum's value, which is
//! undefined behaviour. Here codes are integers, and what is missing is an error.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{
    self as bindings, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUhostFn,
    CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUpointer_attribute, CUresult, CUstream,
    CUstreamCaptureMode, CUstreamCaptureStatus,
};
use libloading::Library;

use crate::device::gpu::{Code, CopyAttributes, CopyList, Meaning, either, functions, load};

/// Codes that something depends on.
pub(super) mod code {
    use super::{Code, Meaning};

    const OUT_OF_MEMORY: Code = 2;
    const DEINITIALIZED: Code = 4;
    pub(in crate::device::cuda) const NOT_READY: Code = 600;

    /// What follows from a code.
    pub(in crate::device::cuda) fn meaning(code: Code) -> Meaning {
        match code {
            OUT_OF_MEMORY => Meaning::OutOfMemory,
            DEINITIALIZED => Meaning::ShutDown,
            // Device unavailable; invalid context; uncorrectable ECC, NVLink and contained errors; MPS
            // client terminated; illegal address to launch failure, with context is destroyed in
            // between; tensor memory leak; external device. Nothing that was queued before runs any
            // more, and every later call fails; some also stand for another context's loss.
            46 | 201 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 808 | 911 => {
                Meaning::Lost
            }
            // Calls that cannot be made during a stream capture, or in a host function.
            800 | 900..=908 => Meaning::Passing,
            _ => Meaning::Other,
        }
    }
}

/// What a call of this name answered.
macro_rules! answer {
    ($name:literal, $code:expr) => {
        $crate::device::gpu::Failed::or_done(
            $name,
            concat!($name, " (CUDA_ERROR_OUT_OF_MEMORY, code 2)"),
            $code,
        )
    };
}
pub(super) use answer;

/// The driver.
pub(super) struct Driver {
    functions: Functions,
    /// Newer drivers only.
    pub(super) batch: Option<BatchCopy>,
    /// Stays loaded.
    _library: ManuallyDrop<Library>,
}

impl std::ops::Deref for Driver {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

functions! {
    /// The driver's functions.
    pub(super) struct Functions: "Rust", Code as CUresult;
    required {
        cuInit(flags: c_uint);
        cuDriverGetVersion(version: *mut c_int);
        cuDeviceGetCount(count: *mut c_int);
        cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
        cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
        cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
        cuDevicePrimaryCtxRelease_v2(device: CUdevice);
        cuCtxPushCurrent_v2(context: CUcontext);
        cuCtxPopCurrent_v2(context: *mut CUcontext);
        cuCtxSynchronize();
        cuStreamCreate(stream: *mut CUstream, flags: c_uint);
        cuStreamDestroy_v2(stream: CUstream);
        cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
        cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
        cuStreamQuery(stream: CUstream);
        cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
        cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
        cuStreamSynchronize(stream: CUstream);
        cuEventCreate(event: *mut CUevent, flags: c_uint);
        cuEventDestroy_v2(event: CUevent);
        cuEventRecord(event: CUevent, stream: CUstream);
        cuEventQuery(event: CUevent);
        cuEventSynchronize(event: CUevent);
        cuMemPoolCreate(pool: *mut CUmemoryPool, props: *const CUmemPoolProps);
        cuMemPoolDestroy(pool: CUmemoryPool);
        cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void);
        cuMemPoolTrimTo(pool: CUmemoryPool, bytes_to_keep: usize);
        cuMemAllocFromPoolAsync(ptr: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream);
        cuMemFreeAsync(ptr: CUdeviceptr, stream: CUstream);
        cuMemAlloc_v2(ptr: *mut CUdeviceptr, bytes: usize);
        cuMemFree_v2(ptr: CUdeviceptr);
        cuMemHostAlloc(ptr: *mut *mut c_void, bytes: usize, flags: c_uint);
        cuMemFreeHost(ptr: *mut c_void);
        cuMemAllocManaged(ptr: *mut CUdeviceptr, bytes: usize, flags: c_uint);
        cuPointerGetAttributes(
            count: c_uint,
            attributes: *mut CUpointer_attribute,
            data: *mut *mut c_void,
            ptr: CUdeviceptr
        );
        cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream);
        cuMemcpyPeerAsync(
            dst: CUdeviceptr,
            dst_context: CUcontext,
            src: CUdeviceptr,
            src_context: CUcontext,
            bytes: usize,
            stream: CUstream
        );
        cuMemsetD8Async(dst: CUdeviceptr, byte: c_uchar, count: usize, stream: CUstream);
        cuLaunchHostFunc(stream: CUstream, function: CUhostFn, data: *mut c_void);
        cuGetErrorName(code: Code as CUresult, text: *mut *const c_char);
        cuGetErrorString(code: Code as CUresult, text: *mut *const c_char);
    }
    optional {}
}

type ErrorText = unsafe extern "C" fn(Code, *mut *const c_char) -> Code;

/// The call that runs a list of copies; its name and parameters depend on the driver, and the
/// bindings have only one of them, or none.
#[derive(Clone, Copy)]
pub(super) enum BatchCopy {
    /// `cuMemcpyBatchAsync_v2`, CUDA 13.
    Plain(
        unsafe extern "C" fn(
            *mut CUdeviceptr,
            *mut CUdeviceptr,
            *mut usize,
            usize,
            *mut CopyAttributes,
            *mut usize,
            usize,
            CUstream,
        ) -> Code,
    ),
    /// `cuMemcpyBatchAsync`, CUDA 12.8: it also says which copy it refused.
    WithIndex(
        unsafe extern "C" fn(
            *mut CUdeviceptr,
            *mut CUdeviceptr,
            *mut usize,
            usize,
            *mut CopyAttributes,
            *mut usize,
            usize,
            *mut usize,
            CUstream,
        ) -> Code,
    ),
}

impl BatchCopy {
    /// Gives a stream a list of copies, sources to be read in the stream's order.
    ///
    /// # Safety
    /// All memory lives until the copies are done; the stream is live.
    pub(super) unsafe fn call(self, list: &mut CopyList<CUdeviceptr>, stream: CUstream) -> Code {
        // One set of attributes, from the first copy on.
        let (mut attributes, mut first) = (CopyAttributes::IN_STREAM_ORDER, 0usize);
        let (attributes, first, count) = (&raw mut attributes, &raw mut first, list.sizes.len());
        let (dst, src) = (list.dst.as_mut_ptr(), list.src.as_mut_ptr());
        let sizes = list.sizes.as_mut_ptr();
        let mut refused = usize::MAX;
        // SAFETY: the caller's; the lists have `count` members.
        unsafe {
            match self {
                Self::Plain(function) => {
                    function(dst, src, sizes, count, attributes, first, 1, stream)
                }
                Self::WithIndex(function) => {
                    let refused = &raw mut refused;
                    function(
                        dst, src, sizes, count, attributes, first, 1, refused, stream,
                    )
                }
            }
        }
    }

    /// # Safety
    /// `library` is a CUDA driver library.
    unsafe fn load(library: &Library) -> Option<Self> {
        // SAFETY: the caller's; the types are those of CUDA's header of the versions named above.
        unsafe {
            match library.get(b"cuMemcpyBatchAsync_v2\0") {
                Ok(function) => Some(Self::Plain(*function)),
                Err(_) => match library.get(b"cuMemcpyBatchAsync\0") {
                    Ok(function) => Some(Self::WithIndex(*function)),
                    Err(_) => None,
                },
            }
        }
    }
}

impl Driver {
    /// The driver, loaded and initialised at the first call, or what stands against it.
    pub(super) fn get() -> Result<&'static Self, &'static str> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        DRIVER
            .get_or_init(Self::load)
            .as_ref()
            .map_err(String::as_str)
    }

    fn load() -> Result<Self, String> {
        // The order in which cudarc looks, so that both find the same library.
        let names: &[&str] = if cfg!(windows) {
            &["nvcuda.dll"]
        } else {
            &["libcuda.so", "libcuda.so.1"]
        };
        let advice = "the NVIDIA driver's library cannot be loaded; install the driver";
        // SAFETY: loading a driver library runs its initialisers, which is what it is for.
        let open = |name: &str| unsafe { Library::new(name) };
        // It stays loaded, whatever comes: it may have started threads.
        load(names, advice, open, |library| {
            Self::check(ManuallyDrop::new(library))
        })
    }

    /// The driver, initialised. An error says what stands against it.
    fn check(library: ManuallyDrop<Library>) -> Result<Self, String> {
        // SAFETY: libraries of these names are CUDA drivers, and it stays loaded.
        let (functions, batch) = unsafe { (Functions::find(&library), BatchCopy::load(&library)) };
        let driver = Self {
            functions: functions
                .map_err(|name| format!("the driver has no {name}: it is too old, update it"))?,
            batch,
            _library: library,
        };
        // SAFETY: called before all others, with the only flags that there are.
        match unsafe { (driver.cuInit)(0) } {
            0 => Ok(driver),
            code => {
                let text = driver.text(code);
                Err(format!("cuInit failed: {text} (code {code})"))
            }
        }
    }

    /// Runs `last`, which drops something of cudarc's that lives in `context`, without leaving that
    /// context current: cudarc makes it current for every call.
    pub(super) fn let_go(&self, context: Arc<CudaContext>, last: impl FnOnce()) {
        // SAFETY: `context` keeps it alive.
        let pushed = unsafe { (self.cuCtxPushCurrent_v2)(context.cu_ctx()) == 0 };
        last();
        // Destroying a context takes it off the stack by itself; releasing a primary one does not.
        match Arc::into_inner(context) {
            Some(context) if !context.is_primary() => return drop(context),
            context => drop(context),
        }
        if pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: takes off what was pushed, or what cudarc put in its place.
            unsafe { (self.cuCtxPopCurrent_v2)(&raw mut popped) };
        }
    }

    /// The driver's name and text for a code: "CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected".
    pub(super) fn text(&self, code: Code) -> String {
        let ask = |function: ErrorText| {
            let mut text = std::ptr::null();
            // SAFETY: `text` is written, or left null for an unknown code.
            let known = unsafe { function(code, &raw mut text) } == 0 && !text.is_null();
            // SAFETY: the driver's texts are static.
            known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
        };
        match (ask(self.cuGetErrorName), ask(self.cuGetErrorString)) {
            (Some(name), Some(text)) => format!("{name}: {text}"),
            (Some(name), None) => name.into_owned(),
            _ => "a code that this driver does not name".into(),
        }
    }

    /// How many devices there are.
    pub(super) fn device_count(&self) -> Result<c_int, Code> {
        let mut count = 0;
        // SAFETY: `count` is written.
        match unsafe { (self.cuDeviceGetCount)(&raw mut count) } {
            0 => Ok(count),
            code => Err(code),
        }
    }

    /// The version of CUDA that the driver speaks: 13000 for 13.0.
    pub(super) fn version(&self) -> Option<c_int> {
        let mut version = 0;
        // SAFETY: `version` is written.
        let code = unsafe { (self.cuDriverGetVersion)(&raw mut version) };
        (code == 0).then_some(version)
    }
}
