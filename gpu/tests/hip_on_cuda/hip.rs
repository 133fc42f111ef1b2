//! HIP's runtime library, loaded after the stand-in for the driver, and its calls, answering codes.
#![allow(dead_code)] // tests that include it use what they need

use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;

use crate::fake::Group;

pub(crate) type Ptr = *mut c_void;

pub(crate) type Callback = unsafe extern "C" fn(Ptr, c_int, Ptr);

/// The variable with the path of a library without [`hipLaunchHostFunc`].
pub(crate) const CHANGED: &str = "ARROW_DEVICE_TEST_HIP";

/// The library. It stays loaded. The stand-in is loaded before it, unless `alone`.
pub(crate) fn library(alone: bool) -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        if !alone {
            crate::fake::library();
        }
        let name = "libhip_on_cuda.so";
        // As for the stand-in.
        let beside = std::env::current_exe().unwrap().with_file_name(name);
        let path = if beside.exists() { beside } else { name.into() };
        let path = std::env::var_os(CHANGED).map_or(path, Into::into);
        // SAFETY: the library's initialisers are those of the Rust runtime, which may run on any
        // thread.
        let library = unsafe { Library::new(path) };
        library.expect("cargo has built the library")
    })
}

/// Declares functions of the library.
macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),*) -> $answer:ty;)*) => {$(
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub(crate) fn $name($($arg: $type),*) -> $answer {
            type Function = unsafe extern "C" fn($($type),*) -> $answer;
            // SAFETY: the library's function of this name has this type.
            let function = unsafe {
                library(false).get::<Function>(stringify!($name)).expect(stringify!($name))
            };
            // SAFETY: callers pass pointers that are valid for the call.
            unsafe { function($($arg),*) }
        }
    )*};
}

functions! {
    hip_on_cuda_release(ordinal: c_int) -> c_int;
    hip_on_cuda_version(version: c_int) -> c_int;
    hipInit(flags: u32) -> c_int;
    hipRuntimeGetVersion(version: *mut c_int) -> c_int;
    hipDriverGetVersion(version: *mut c_int) -> c_int;
    hipGetDeviceCount(count: *mut c_int) -> c_int;
    hipGetDevice(ordinal: *mut c_int) -> c_int;
    hipSetDevice(ordinal: c_int) -> c_int;
    hipDeviceGetAttribute(value: *mut c_int, attribute: c_int, ordinal: c_int) -> c_int;
    hipDeviceSynchronize() -> c_int;
    hipStreamCreateWithFlags(stream: *mut Ptr, flags: u32) -> c_int;
    hipStreamDestroy(stream: Ptr) -> c_int;
    hipStreamSynchronize(stream: Ptr) -> c_int;
    hipStreamQuery(stream: Ptr) -> c_int;
    hipStreamWaitEvent(stream: Ptr, event: Ptr, flags: u32) -> c_int;
    hipStreamIsCapturing(stream: Ptr, status: *mut c_int) -> c_int;
    hipStreamBeginCapture(stream: Ptr, mode: c_int) -> c_int;
    hipStreamEndCapture(stream: Ptr, graph: *mut Ptr) -> c_int;
    hipStreamGetDevice(stream: Ptr, ordinal: *mut c_int) -> c_int;
    hipThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int;
    hipLaunchHostFunc(stream: Ptr, function: unsafe extern "C" fn(Ptr), data: Ptr) -> c_int;
    hipStreamAddCallback(stream: Ptr, function: Callback, data: Ptr, flags: u32) -> c_int;
    hipEventCreateWithFlags(event: *mut Ptr, flags: u32) -> c_int;
    hipEventDestroy(event: Ptr) -> c_int;
    hipEventRecord(event: Ptr, stream: Ptr) -> c_int;
    hipEventQuery(event: Ptr) -> c_int;
    hipEventSynchronize(event: Ptr) -> c_int;
    hipMalloc(ptr: *mut Ptr, bytes: usize) -> c_int;
    hipFree(ptr: Ptr) -> c_int;
    hipMallocManaged(ptr: *mut Ptr, bytes: usize, flags: u32) -> c_int;
    hipHostMalloc(ptr: *mut Ptr, bytes: usize, flags: u32) -> c_int;
    hipHostFree(ptr: Ptr) -> c_int;
    hipHostRegister(ptr: Ptr, bytes: usize, flags: u32) -> c_int;
    hipHostUnregister(ptr: Ptr) -> c_int;
    hipHostGetDevicePointer(device: *mut Ptr, host: Ptr, flags: u32) -> c_int;
    hipMemGetInfo(free: *mut usize, total: *mut usize) -> c_int;
    hipMemPoolCreate(pool: *mut Ptr, properties: *const PoolProperties) -> c_int;
    hipMemPoolDestroy(pool: Ptr) -> c_int;
    hipMemPoolSetAttribute(pool: Ptr, attribute: c_int, value: *mut u64) -> c_int;
    hipMemPoolTrimTo(pool: Ptr, bytes: usize) -> c_int;
    hipMallocFromPoolAsync(ptr: *mut Ptr, bytes: usize, pool: Ptr, stream: Ptr) -> c_int;
    hipMallocAsync(ptr: *mut Ptr, bytes: usize, stream: Ptr) -> c_int;
    hipFreeAsync(ptr: Ptr, stream: Ptr) -> c_int;
    hipPointerGetAttributes(attributes: *mut Attributes, ptr: Ptr) -> c_int;
    hipMemcpy(target: Ptr, source: Ptr, bytes: usize, kind: c_int) -> c_int;
    hipMemcpyAsync(target: Ptr, source: Ptr, bytes: usize, kind: c_int, stream: Ptr) -> c_int;
    hipMemcpyPeerAsync(target: Ptr, to: c_int, source: Ptr, from: c_int, bytes: usize,
        stream: Ptr) -> c_int;
    hipMemcpyBatchAsync(targets: *mut Ptr, sources: *mut Ptr, sizes: *mut usize, count: usize,
        attributes: *mut crate::raw::Attributes, starts: *mut usize, attribute_count: usize,
        failed: *mut usize, stream: Ptr) -> c_int;
    hipMemset(target: Ptr, value: c_int, bytes: usize) -> c_int;
    hipMemsetD8Async(target: Ptr, value: u8, bytes: usize, stream: Ptr) -> c_int;
    hipModuleLoadData(module: *mut Ptr, image: *const c_char) -> c_int;
    hipModuleUnload(module: Ptr) -> c_int;
    hipModuleGetFunction(function: *mut Ptr, module: Ptr, name: *const c_char) -> c_int;
    hipModuleLaunchKernel(function: Ptr, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32,
        block_y: u32, block_z: u32, shared_bytes: u32, stream: Ptr, parameters: *mut Ptr,
        extra: *mut Ptr) -> c_int;
    hipGetErrorName(code: c_int) -> *const c_char;
    hipGetErrorString(code: c_int) -> *const c_char;
    hipGetLastError() -> c_int;
    hipPeekAtLastError() -> c_int;
}

/// `hipMemcpyKind`
pub(crate) const HOST_TO_DEVICE: c_int = 1;
pub(crate) const DEVICE_TO_HOST: c_int = 2;
pub(crate) const DEFAULT: c_int = 4;

/// `hipPointerAttribute_t`
#[derive(Debug, PartialEq)]
#[repr(C)]
pub(crate) struct Attributes {
    pub kind: c_int,
    pub device: c_int,
    pub device_pointer: Ptr,
    pub host_pointer: Ptr,
    pub is_managed: c_int,
    pub allocation_flags: u32,
}

/// `hipMemPoolProps`
#[repr(C)]
pub(crate) struct PoolProperties {
    allocation: c_int,
    handle_types: c_int,
    location: c_int,
    ordinal: c_int,
    security: Ptr,
    reserved: [u8; 64],
}

impl PoolProperties {
    /// Pinned to a device.
    pub(crate) fn on(ordinal: c_int) -> Self {
        Self {
            allocation: 1,
            handle_types: 0,
            location: 1,
            ordinal,
            security: null_mut(),
            reserved: [0; 64],
        }
    }
}

/// A group of ordinals; the first is the thread's current device.
#[derive(Clone, Copy)]
pub(crate) struct Rig {
    pub group: Group,
    pub first: c_int,
    ordinals: c_int,
}

impl Rig {
    pub(crate) fn new(ordinals: c_int, flags: u32) -> Self {
        let group = Group::open(ordinals, flags);
        let first = group.first;
        assert_eq!(hipSetDevice(first), 0);
        Self {
            group,
            first,
            ordinals,
        }
    }

    /// Releases the contexts; the report is the caller's to look at.
    pub(crate) fn release(self) {
        assert_eq!(self.group.drain(), 0);
        for ordinal in self.first..self.first + self.ordinals {
            hip_on_cuda_release(ordinal);
        }
    }

    /// Releases the contexts. Nothing may be left.
    #[track_caller]
    pub(crate) fn end(self) {
        self.release();
        self.group.assert_clean();
    }
}

/// The version is the process's: only one test at a time depends on it.
pub(crate) struct Version(#[allow(dead_code)] MutexGuard<'static, ()>);

impl Version {
    pub(crate) fn new(version: c_int) -> Self {
        static ONE: Mutex<()> = Mutex::new(());
        let guard = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        hip_on_cuda_version(version);
        Self(guard)
    }
}

impl Drop for Version {
    fn drop(&mut self) {
        hip_on_cuda_version(0);
    }
}

pub(crate) fn current_device() -> c_int {
    let mut ordinal = -1;
    assert_eq!(hipGetDevice(&mut ordinal), 0);
    ordinal
}

/// A handle or address that a call writes, which must succeed.
#[track_caller]
pub(crate) fn made(make: impl FnOnce(*mut Ptr) -> c_int) -> Ptr {
    let mut made = null_mut();
    assert_eq!(make(&mut made), 0);
    made
}

pub(crate) fn stream() -> Ptr {
    made(|stream| hipStreamCreateWithFlags(stream, 1))
}

pub(crate) fn event() -> Ptr {
    made(|event| hipEventCreateWithFlags(event, 2))
}

pub(crate) fn device(bytes: usize) -> Ptr {
    made(|ptr| hipMalloc(ptr, bytes))
}

pub(crate) fn pinned(bytes: usize) -> Ptr {
    made(|ptr| hipHostMalloc(ptr, bytes, 0))
}
