//! The HIP runtime's library, loaded at run time.
//!
//! Types and constants are hip-runtime-sys's, with two exceptions: it makes enums of the error and
//! of the memory type. A code that is newer than the bindings would be no value of the enum, which
//! is undefined behaviour, and HIP 6 has given its memory types other numbers. Here both are
//! integers.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};
use std::mem::{ManuallyDrop, offset_of};
use std::sync::OnceLock;

use hip_runtime_sys::{
    self as bindings, hipDeviceAttribute_t, hipDeviceptr_t, hipError_t, hipEvent_t,
    hipMemAllocationType, hipMemLocationType, hipMemPool_t, hipMemPoolAttr, hipMemPoolProps,
    hipMemcpyKind, hipPointerAttribute_t, hipStream_t, hipStreamCallback_t, hipStreamCaptureMode,
    hipStreamCaptureStatus,
};

use crate::device::Process;
use crate::device::gpu::{
    self, Answer, Api, Call, Calls, Code, CopyList, HostFunction, LaunchHost, Library, PoolProps,
    RawEvent, RawPool, RawStream, StreamCallback, called, check_alike, either, find_call,
    functions, load, newer_hip,
};

/// Whether nothing that was queued before runs any more, and every later call fails. Some codes
/// also stand for the loss of another device.
fn is_lost(code: Code) -> bool {
    // Invalid context; uncorrectable ECC; illegal address; launch timeout; context is destroyed;
    // assert; launch failure; HSA's own errors.
    matches!(code, 201 | 214 | 700 | 702 | 709 | 710 | 719 | 1052 | 1053)
}

const _: () = check_alike(
    [
        hipStreamCaptureMode::hipStreamCaptureModeRelaxed as c_int,
        hipStreamCaptureStatus::hipStreamCaptureStatusNone as c_int,
        hipMemPoolAttr::hipMemPoolAttrReleaseThreshold as c_int,
        hipMemAllocationType::hipMemAllocationTypePinned as c_int,
        hipMemLocationType::hipMemLocationTypeDevice as c_int,
    ],
    [
        size_of::<hipMemPoolProps>(),
        align_of::<hipMemPoolProps>(),
        offset_of!(hipMemPoolProps, location),
    ],
);

/// `hipPointerAttribute_t`, with its memory type as an integer.
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
    /// The functions that only HIP has, or that differ from CUDA's. All required ones are in HIP
    /// 5.2.
    pub(super) struct Functions: "C", Code as hipError_t, "hipErrorOutOfMemory";
    shared {
        device_count = hipGetDeviceCount(count: *mut c_int);
        version = hipRuntimeGetVersion(version: *mut c_int);
        exchange_capture_mode = hipThreadExchangeStreamCaptureMode(mode: *mut c_int as *mut hipStreamCaptureMode);
        synchronize = hipDeviceSynchronize();
        create_stream = hipStreamCreateWithFlags(stream: *mut RawStream as *mut hipStream_t, flags: c_uint);
        destroy_stream = hipStreamDestroy(stream: RawStream as hipStream_t);
        synchronize_stream = hipStreamSynchronize(stream: RawStream as hipStream_t);
        query_stream = hipStreamQuery(stream: RawStream as hipStream_t);
        is_capturing = hipStreamIsCapturing(stream: RawStream as hipStream_t, status: *mut c_int as *mut hipStreamCaptureStatus);
        wait = hipStreamWaitEvent(stream: RawStream as hipStream_t, event: RawEvent as hipEvent_t, flags: c_uint);
        create_event = hipEventCreateWithFlags(event: *mut RawEvent as *mut hipEvent_t, flags: c_uint);
        destroy_event = hipEventDestroy(event: RawEvent as hipEvent_t);
        record = hipEventRecord(event: RawEvent as hipEvent_t, stream: RawStream as hipStream_t);
        query = hipEventQuery(event: RawEvent as hipEvent_t);
        wait_event = hipEventSynchronize(event: RawEvent as hipEvent_t);
        create_pool = hipMemPoolCreate(pool: *mut RawPool as *mut hipMemPool_t, props: *const PoolProps as *const hipMemPoolProps);
        destroy_pool = hipMemPoolDestroy(pool: RawPool as hipMemPool_t);
        set_pool = hipMemPoolSetAttribute(pool: RawPool as hipMemPool_t, attribute: c_int as hipMemPoolAttr, value: *mut c_void);
        trim = hipMemPoolTrimTo(pool: RawPool as hipMemPool_t, bytes_to_keep: usize);
        allocate_in_order = hipMallocFromPoolAsync(
            address: *mut usize as *mut *mut c_void,
            bytes: usize,
            pool: RawPool as hipMemPool_t,
            stream: RawStream as hipStream_t
        );
        free_in_order = hipFreeAsync(ptr: *mut c_void, stream: RawStream as hipStream_t);
        allocate_device = hipMalloc(address: *mut usize as *mut *mut c_void, bytes: usize);
        free_device = hipFree(ptr: *mut c_void);
        allocate_host = hipHostMalloc(address: *mut usize as *mut *mut c_void, bytes: usize, flags: c_uint);
        free_host = hipHostFree(ptr: *mut c_void);
        fill = hipMemsetD8Async(
            dst: *mut c_void as hipDeviceptr_t,
            byte: c_uchar,
            count: usize,
            stream: RawStream as hipStream_t
        );
    }
    required {
        hipGetDevice(ordinal: *mut c_int);
        hipSetDevice(ordinal: c_int);
        hipDeviceGetAttribute(value: *mut c_int, attribute: hipDeviceAttribute_t, ordinal: c_int);
        hipPointerGetAttributes(
            attributes: *mut PointerAttributes as *mut hipPointerAttribute_t,
            ptr: *const c_void
        );
        hipMemcpyAsync(
            dst: *mut c_void,
            src: *const c_void,
            bytes: usize,
            kind: hipMemcpyKind,
            stream: RawStream as hipStream_t
        );
        hipMemcpyPeerAsync(
            dst: *mut c_void,
            dst_ordinal: c_int,
            src: *const c_void,
            src_ordinal: c_int,
            bytes: usize,
            stream: RawStream as hipStream_t
        );
        hipGetErrorName(code: Code as hipError_t) -> *const c_char;
        hipGetErrorString(code: Code as hipError_t) -> *const c_char;
        hipGetLastError();
        hipPeekAtLastError();
    }
    optional {
        // Not in Debian's 5.2.3.
        hipLaunchHostFunc(stream: RawStream as hipStream_t, function: Option<HostFunction>, data: *mut c_void);
        // In all versions. The code is passed as an integer, and the stream as a handle.
        hipStreamAddCallback(
            stream: RawStream as hipStream_t,
            callback: Option<StreamCallback> as hipStreamCallback_t,
            data: *mut c_void,
            flags: c_uint
        );
        hipMemGetAddressRange(
            start: *mut *mut c_void as *mut hipDeviceptr_t,
            bytes: *mut usize,
            ptr: *mut c_void as hipDeviceptr_t
        );
    }
}

/// The runtime.
pub(super) struct Hip {
    functions: Functions,
    api: Api,
    /// Returns the device of a stream. Not in HIP 5.2 and 5.4; in 6.2.
    pub(super) stream_device: Option<Call<newer_hip::StreamDevice<RawStream, Code>>>,
    /// Stays loaded.
    _library: ManuallyDrop<libloading::Library>,
}

impl std::ops::Deref for Hip {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

/// Newest first. The numbers are those of HIP's major versions.
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

impl Library for Hip {
    fn get() -> Result<&'static Self, &'static str> {
        static HIP: OnceLock<Result<Hip, String>> = OnceLock::new();
        HIP.get_or_init(Hip::load).as_ref().map_err(String::as_str)
    }

    fn api(&self) -> &Api {
        &self.api
    }

    fn text(&self, code: Code) -> String {
        // SAFETY: the functions accept any code, and return null or a static text.
        unsafe { gpu::text((self.hipGetErrorName)(code), (self.hipGetErrorString)(code)) }
    }

    fn device_count(&self) -> Answer<c_int> {
        self.quietly(|| self.api.device_count())
    }
}

impl Hip {
    fn load() -> Result<Self, String> {
        let advice = "the HIP runtime's library cannot be loaded; install ROCm";
        load(NAMES, advice, Self::check)
    }

    /// Returns the runtime, or why it cannot be used. It initialises itself: without a device,
    /// `hipInit` of 5.2 returns "invalid device".
    fn check(library: ManuallyDrop<libloading::Library>) -> Result<Self, String> {
        // SAFETY: libraries of these names are the HIP runtime, and this one stays loaded.
        let (functions, calls) = unsafe { Functions::find(&library) }.map_err(|name| {
            format!("the HIP runtime has no {name}: it is older than 5.2, update ROCm")
        })?;
        // SAFETY: the library is the HIP runtime, and stays loaded; the type is that of the header
        // of 7.14.
        let stream_device =
            unsafe { find_call!(library, "hipErrorOutOfMemory", hipStreamGetDevice) };
        Ok(Self {
            api: api(&functions, calls, &library),
            functions,
            stream_device: stream_device.ok(),
            _library: library,
        })
    }

    /// Clears the thread's last error if calls of this crate have left it, that is, if there was
    /// none `before` them. Their errors are returned otherwise, and the program would take the last
    /// error for its own.
    pub(super) fn forget_error(&self, before: Code) {
        // SAFETY: the functions have no arguments.
        unsafe {
            if before == 0 && (self.hipPeekAtLastError)() != 0 {
                (self.hipGetLastError)();
            }
        }
    }

    /// Makes calls without a current device, which leave no last error.
    pub(super) fn quietly<T>(&self, calls: impl FnOnce() -> T) -> T {
        // SAFETY: the function has no arguments.
        let before = unsafe { (self.hipPeekAtLastError)() };
        let done = calls();
        self.forget_error(before);
        done
    }
}

/// Returns the runtime's version; 0 if it does not say.
fn version(calls: &Calls) -> c_int {
    let mut version = 0;
    // SAFETY: `version` is valid for the write of an int.
    unsafe { (calls.version)(&raw mut version) };
    version
}

/// The functions for the engine that CUDA and HIP share.
fn api(hip: &Functions, calls: Calls, library: &libloading::Library) -> Api {
    // The function's parameters are expected to change (as CUDA's did in 13), under the same name:
    // only versions are trusted whose bindings have these.
    let known = (70_100_000..80_000_000).contains(&version(&calls));
    // SAFETY: the library is the HIP runtime; the type is that of the versions above.
    let copy_list: Option<Call<newer_hip::CopyList<RawStream, Code>>> =
        unsafe { find_call!(library, "hipErrorOutOfMemory", hipMemcpyBatchAsync) }.ok();
    let copy_list = copy_list.filter(|_| known);
    let function = hip
        .hipLaunchHostFunc
        .map(|call| call.map(LaunchHost::Function));
    let callback = || {
        let call = hip.hipStreamAddCallback;
        call.map(|call| call.map(LaunchHost::Callback))
    };
    Api {
        vendor: "ROCm",
        process: Process::this(),
        advice: "",
        is_lost,
        stream_of: "hipStreamGetDevice",
        pointer: hip.hipPointerGetAttributes.name,
        copy: hip.hipMemcpyAsync.name,
        // Host memory that is not coherent is visible to the host after an event only if the event
        // says so.
        event_flags: bindings::hipEventDisableTiming | bindings::hipEventReleaseToSystem,
        // Visible to the host without an event.
        host_flags: bindings::hipHostMallocPortable | bindings::hipHostMallocCoherent,
        allocate_managed: None,
        copy_list: copy_list.map(|call| call.map(CopyList::WithoutAttributes)),
        launch_host: function.or_else(callback),
        calls,
    }
}
