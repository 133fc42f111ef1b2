//! The HIP runtime's library, loaded at run time.
//!
//! Types and constants are hip-runtime-sys's, but for two: it makes enums of the error and the memory
//! type, and a code that is newer than the bindings would be no value of theirs, which is undefined
//! behaviour; and HIP 6 has numbered its memory types anew. Here both are integers.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::sync::OnceLock;

use hip_runtime_sys::{
    self as bindings, hipDeviceAttribute_t, hipDeviceptr_t, hipError_t, hipEvent_t, hipHostFn_t,
    hipMemPool_t, hipMemPoolAttr, hipMemPoolProps, hipMemcpyKind, hipPointerAttribute_t,
    hipStream_t, hipStreamCaptureMode, hipStreamCaptureStatus,
};
use libloading::Library;

use crate::device::gpu::{Code, CopyAttributes, CopyList, Meaning, either, functions, load};

/// Codes that something depends on.
pub(super) mod code {
    use super::{Code, Meaning};

    pub(in crate::device::rocm) const INVALID_VALUE: Code = 1;
    pub(in crate::device::rocm) const OUT_OF_MEMORY: Code = 2;
    const DEINITIALIZED: Code = 4;
    pub(in crate::device::rocm) const NOT_READY: Code = 600;
    pub(in crate::device::rocm) const NOT_SUPPORTED: Code = 801;

    /// What follows from a code.
    pub(in crate::device::rocm) fn meaning(code: Code) -> Meaning {
        match code {
            OUT_OF_MEMORY => Meaning::OutOfMemory,
            DEINITIALIZED => Meaning::ShutDown,
            // Invalid context; uncorrectable ECC; illegal address; launch timeout; context is destroyed;
            // assert; launch failure; HSA's own errors. Some also stand for another device's loss.
            201 | 214 | 700 | 702 | 709 | 710 | 719 | 1052 | 1053 => Meaning::Lost,
            // Calls that cannot be made during a stream capture.
            900..=908 => Meaning::Passing,
            _ => Meaning::Other,
        }
    }
}

/// What a call of this name answered.
macro_rules! answer {
    ($name:literal, $code:expr) => {
        $crate::device::gpu::Failed::or_done(
            $name,
            concat!($name, " (hipErrorOutOfMemory, code 2)"),
            $code,
        )
    };
}
pub(super) use answer;

/// `hipPointerAttribute_t`, its memory type as an integer.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct PointerAttributes {
    pub(super) memory_type: c_uint,
    pub(super) device: c_int,
    pub(super) device_pointer: *mut c_void,
    pub(super) host_pointer: *mut c_void,
    pub(super) is_managed: c_int,
    pub(super) allocation_flags: c_uint,
}

impl PointerAttributes {
    pub(super) const NONE: Self = Self {
        memory_type: c_uint::MAX,
        device: -1,
        device_pointer: std::ptr::null_mut(),
        host_pointer: std::ptr::null_mut(),
        is_managed: 0,
        allocation_flags: 0,
    };
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<PointerAttributes>() == size_of::<hipPointerAttribute_t>());
    assert!(align_of::<PointerAttributes>() == align_of::<hipPointerAttribute_t>());
    macro_rules! same {
        ($($ours:ident $theirs:ident)*) => {
            $(assert!(offset_of!(PointerAttributes, $ours) == offset_of!(hipPointerAttribute_t, $theirs));)*
        };
    }
    same!(memory_type memoryType device device device_pointer devicePointer host_pointer hostPointer);
    same!(is_managed isManaged allocation_flags allocationFlags);
    assert!(size_of::<bindings::hipMemoryType>() == size_of::<c_uint>());
    assert!(size_of::<hipError_t>() == size_of::<Code>());
    assert!(size_of::<hipStreamCaptureStatus>() == size_of::<c_int>());
    assert!(size_of::<hipStreamCaptureMode>() == size_of::<c_int>());
};

functions! {
    /// The runtime's functions, those of HIP 5.2.
    pub(super) struct Functions: "C", Code as hipError_t;
    required {
        hipRuntimeGetVersion(version: *mut c_int);
        hipGetDeviceCount(count: *mut c_int);
        hipGetDevice(ordinal: *mut c_int);
        hipSetDevice(ordinal: c_int);
        hipDeviceGetAttribute(value: *mut c_int, attribute: hipDeviceAttribute_t, ordinal: c_int);
        hipDeviceSynchronize();
        hipStreamCreateWithFlags(stream: *mut hipStream_t, flags: c_uint);
        hipStreamDestroy(stream: hipStream_t);
        hipStreamSynchronize(stream: hipStream_t);
        hipStreamQuery(stream: hipStream_t);
        hipStreamWaitEvent(stream: hipStream_t, event: hipEvent_t, flags: c_uint);
        hipStreamIsCapturing(stream: hipStream_t, status: *mut c_int as *mut hipStreamCaptureStatus);
        hipThreadExchangeStreamCaptureMode(mode: *mut c_int as *mut hipStreamCaptureMode);
        hipEventCreateWithFlags(event: *mut hipEvent_t, flags: c_uint);
        hipEventDestroy(event: hipEvent_t);
        hipEventRecord(event: hipEvent_t, stream: hipStream_t);
        hipEventQuery(event: hipEvent_t);
        hipEventSynchronize(event: hipEvent_t);
        hipMemPoolCreate(pool: *mut hipMemPool_t, props: *const hipMemPoolProps);
        hipMemPoolDestroy(pool: hipMemPool_t);
        hipMemPoolSetAttribute(pool: hipMemPool_t, attribute: hipMemPoolAttr, value: *mut c_void);
        hipMemPoolTrimTo(pool: hipMemPool_t, bytes_to_keep: usize);
        hipMallocFromPoolAsync(ptr: *mut *mut c_void, bytes: usize, pool: hipMemPool_t, stream: hipStream_t);
        hipFreeAsync(ptr: *mut c_void, stream: hipStream_t);
        hipMalloc(ptr: *mut *mut c_void, bytes: usize);
        hipFree(ptr: *mut c_void);
        hipHostMalloc(ptr: *mut *mut c_void, bytes: usize, flags: c_uint);
        hipHostFree(ptr: *mut c_void);
        hipPointerGetAttributes(
            attributes: *mut PointerAttributes as *mut hipPointerAttribute_t,
            ptr: *const c_void
        );
        hipMemcpyAsync(
            dst: *mut c_void,
            src: *const c_void,
            bytes: usize,
            kind: hipMemcpyKind,
            stream: hipStream_t
        );
        hipMemcpyPeerAsync(
            dst: *mut c_void,
            dst_ordinal: c_int,
            src: *const c_void,
            src_ordinal: c_int,
            bytes: usize,
            stream: hipStream_t
        );
        hipMemsetD8Async(dst: hipDeviceptr_t, byte: c_uchar, count: usize, stream: hipStream_t);
        hipGetErrorName(code: Code as hipError_t) -> *const c_char;
        hipGetErrorString(code: Code as hipError_t) -> *const c_char;
        hipGetLastError();
        hipPeekAtLastError();
    }
    optional {
        // Not in Debian's 5.2.3.
        hipLaunchHostFunc(stream: hipStream_t, function: hipHostFn_t, data: *mut c_void);
    }
}

/// `hipMemcpyBatchAsync` of HIP 7.1, which hip-runtime-sys does not have; compared with the header of 7.14 by eye. AMD's tests of
/// it differ on whether it takes attributes: a runtime that refuses them is given single copies.
#[derive(Clone, Copy)]
pub(super) struct BatchCopy(BatchFunction);

type BatchFunction = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut *mut c_void,
    *mut usize,
    usize,
    *mut CopyAttributes,
    *mut usize,
    usize,
    *mut usize,
    hipStream_t,
) -> Code;

impl BatchCopy {
    /// Gives a stream a list of copies, sources to be read in the stream's order.
    ///
    /// # Safety
    /// All memory lives until the copies are done; the stream is live.
    pub(super) unsafe fn call(self, list: &mut CopyList<*mut c_void>, stream: hipStream_t) -> Code {
        // One set of attributes, from the first copy on.
        let (mut attributes, mut first) = (CopyAttributes::IN_STREAM_ORDER, 0usize);
        let (mut refused, count) = (usize::MAX, list.sizes.len());
        // SAFETY: the caller's; the lists have `count` members, and one set of attributes.
        unsafe {
            (self.0)(
                list.dst.as_mut_ptr(),
                list.src.as_mut_ptr(),
                list.sizes.as_mut_ptr(),
                count,
                &raw mut attributes,
                &raw mut first,
                1,
                &raw mut refused,
                stream,
            )
        }
    }
}

/// The runtime.
pub(super) struct Hip {
    functions: Functions,
    /// Newer runtimes only.
    pub(super) batch: Option<BatchCopy>,
    /// Not of HIP 5.2 and 5.4; there in 6.2.
    stream_device: Option<unsafe extern "C" fn(hipStream_t, *mut c_int) -> Code>,
    /// Stays loaded.
    _library: ManuallyDrop<Library>,
}

impl std::ops::Deref for Hip {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

/// Newest first: the numbers are those of HIP's major versions.
const NAMES: &[&str] = if cfg!(windows) {
    &["amdhip64_7.dll", "amdhip64_6.dll", "amdhip64.dll"]
} else {
    &[
        "libamdhip64.so.7",
        "libamdhip64.so.6",
        "libamdhip64.so.5",
        "libamdhip64.so",
    ]
};

/// The name of the library that the process has loaded already, if it has: another one beside it would not
/// know of its memory, streams and events.
fn loaded() -> Option<&'static str> {
    #[cfg(all(unix, not(target_os = "aix")))]
    for &name in NAMES {
        use libloading::os::unix::{Library, RTLD_LAZY};
        // SAFETY: nothing is loaded, so no initialiser runs.
        if unsafe { Library::open(Some(name), RTLD_LAZY | libc::RTLD_NOLOAD) }.is_ok() {
            return Some(name);
        }
    }
    None
}

impl Hip {
    /// The runtime, loaded at the first call, or what stands against it.
    pub(super) fn get() -> Result<&'static Self, &'static str> {
        static HIP: OnceLock<Result<Hip, String>> = OnceLock::new();
        HIP.get_or_init(Self::load).as_ref().map_err(String::as_str)
    }

    fn load() -> Result<Self, String> {
        let loaded = loaded();
        let names = loaded.as_ref().map_or(NAMES, std::slice::from_ref);
        let advice = "the HIP runtime's library cannot be loaded; install ROCm";
        // SAFETY: loading the runtime runs its initialisers, which is what it is for.
        let open = |name: &str| unsafe { Library::new(name) };
        // It stays loaded, whatever comes: it may have started threads.
        load(names, advice, open, |library| {
            Self::check(ManuallyDrop::new(library))
        })
    }

    /// The runtime, if it is one. It initialises itself: without a device `hipInit` of 5.2 answers "invalid device".
    fn check(library: ManuallyDrop<Library>) -> Result<Self, String> {
        // SAFETY: libraries of these names are the HIP runtime, and it stays loaded.
        let functions = unsafe { Functions::find(&library) }.map_err(|name| {
            format!("the HIP runtime has no {name}: it is older than 5.2, update ROCm")
        })?;
        // SAFETY: as above; the types are those of the headers of the versions named above.
        let (batch, stream_device) = unsafe {
            let batch = library.get::<BatchFunction>(b"hipMemcpyBatchAsync\0");
            let stream_device = library.get(b"hipStreamGetDevice\0");
            (
                batch.ok().map(|f| BatchCopy(*f)),
                stream_device.ok().map(|f| *f),
            )
        };
        Ok(Self {
            functions,
            batch,
            stream_device,
            _library: library,
        })
    }

    /// The runtime's name and text for a code: "hipErrorNoDevice: no ROCm-capable device is detected".
    pub(super) fn text(&self, code: Code) -> String {
        let ask = |function: unsafe extern "C" fn(Code) -> *const c_char| {
            // SAFETY: any number may be asked for.
            let text = unsafe { function(code) };
            // SAFETY: the runtime's texts are static.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
        };
        match (ask(self.hipGetErrorName), ask(self.hipGetErrorString)) {
            // HIP 5 has no texts: it repeats the name.
            (Some(name), Some(text)) if name != text => format!("{name}: {text}"),
            (Some(name), _) => name.into_owned(),
            _ => "a code that this runtime does not name".into(),
        }
    }

    /// Takes back the thread's last error that calls of this crate have left, if there was none `before` them:
    /// what they answer is told otherwise, and the program would take it for its own.
    pub(super) fn forget_error(&self, before: Code) {
        // SAFETY: they have no arguments.
        unsafe {
            if before == 0 && (self.hipPeekAtLastError)() != 0 {
                (self.hipGetLastError)();
            }
        }
    }

    /// Makes calls without a current device, of which no last error stays.
    pub(super) fn quietly<T>(&self, calls: impl FnOnce() -> T) -> T {
        // SAFETY: it has no arguments.
        let before = unsafe { (self.hipPeekAtLastError)() };
        let done = calls();
        self.forget_error(before);
        done
    }

    /// How many devices there are.
    pub(super) fn device_count(&self) -> Result<c_int, Code> {
        let mut count = 0;
        // SAFETY: `count` is written.
        match self.quietly(|| unsafe { (self.hipGetDeviceCount)(&raw mut count) }) {
            0 => Ok(count),
            code => Err(code),
        }
    }

    /// The runtime's version: 50221153 for 5.2.21153. `None` if it does not say.
    pub(super) fn version(&self) -> Option<c_int> {
        let mut version = 0;
        // SAFETY: `version` is written.
        let code = self.quietly(|| unsafe { (self.hipRuntimeGetVersion)(&raw mut version) });
        (code == 0).then_some(version)
    }

    /// The device of a stream, where the runtime tells.
    ///
    /// # Safety
    /// The stream is live.
    pub(super) unsafe fn device_of(&self, stream: hipStream_t) -> Option<Result<c_int, Code>> {
        let function = self.stream_device?;
        let mut ordinal = -1;
        // SAFETY: the caller's; `ordinal` is written.
        Some(match unsafe { function(stream, &raw mut ordinal) } {
            0 => Ok(ordinal),
            code => Err(code),
        })
    }
}
