//! Driver calls without wrappers, answering codes.
#![allow(dead_code)] // as in `fake`

use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;

use crate::fake::{Group, fake};

pub(crate) type Ptr = *mut c_void;

/// Declares driver functions that answer a code.
macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {$(
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub(crate) fn $name($($arg: $type),*) -> i32 {
            fake!($name($($arg => $type),*) -> i32)
        }
    )*};
}

functions! {
    cuInit(flags: u32);
    cuDevicePrimaryCtxRetain(ctx: *mut Ptr, dev: c_int);
    cuDevicePrimaryCtxRelease_v2(dev: c_int);
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, dev: c_int);
    cuCtxCreate_v2(ctx: *mut Ptr, flags: u32, dev: c_int);
    cuCtxDestroy_v2(ctx: Ptr);
    cuCtxPushCurrent_v2(ctx: Ptr);
    cuCtxPopCurrent_v2(ctx: *mut Ptr);
    cuCtxSetCurrent(ctx: Ptr);
    cuCtxGetCurrent(ctx: *mut Ptr);
    cuCtxGetDevice(dev: *mut c_int);
    cuCtxSynchronize();
    cuCtxEnablePeerAccess(peer: Ptr, flags: u32);
    cuCtxDisablePeerAccess(peer: Ptr);
    cuDeviceCanAccessPeer(can: *mut c_int, dev: c_int, peer: c_int);
    cuStreamCreate(stream: *mut Ptr, flags: u32);
    cuStreamDestroy_v2(stream: Ptr);
    cuStreamGetCtx(stream: Ptr, ctx: *mut Ptr);
    cuStreamQuery(stream: Ptr);
    cuStreamSynchronize(stream: Ptr);
    cuStreamWaitEvent(stream: Ptr, event: Ptr, flags: u32);
    cuEventCreate(event: *mut Ptr, flags: u32);
    cuEventDestroy_v2(event: Ptr);
    cuEventRecord(event: Ptr, stream: Ptr);
    cuEventQuery(event: Ptr);
    cuEventSynchronize(event: Ptr);
    cuMemAlloc_v2(ptr: *mut u64, bytes: usize);
    cuMemFree_v2(ptr: u64);
    cuMemAllocAsync(ptr: *mut u64, bytes: usize, stream: Ptr);
    cuMemFreeAsync(ptr: u64, stream: Ptr);
    cuMemHostAlloc(ptr: *mut Ptr, bytes: usize, flags: u32);
    cuMemFreeHost(ptr: Ptr);
    cuMemAllocManaged(ptr: *mut u64, bytes: usize, flags: u32);
    cuMemHostRegister_v2(ptr: Ptr, bytes: usize, flags: u32);
    cuMemHostUnregister(ptr: Ptr);
    cuMemHostGetDevicePointer_v2(device: *mut u64, ptr: Ptr, flags: u32);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemPoolCreate(pool: *mut Ptr, props: *const c_int);
    cuMemPoolDestroy(pool: Ptr);
    cuMemPoolSetAttribute(pool: Ptr, attribute: c_int, value: *const u64);
    cuMemPoolGetAttribute(pool: Ptr, attribute: c_int, value: *mut u64);
    cuDeviceGetDefaultMemPool(pool: *mut Ptr, dev: c_int);
    cuMemAllocFromPoolAsync(ptr: *mut u64, bytes: usize, pool: Ptr, stream: Ptr);
    cuPointerGetAttribute(data: Ptr, attribute: c_int, ptr: u64);
    cuPointerGetAttributes(n: u32, attributes: *const c_int, data: *const Ptr, ptr: u64);
    cuMemcpyAsync(dst: u64, src: u64, bytes: usize, stream: Ptr);
    cuMemcpyHtoDAsync_v2(dst: u64, src: *const u8, bytes: usize, stream: Ptr);
    cuMemcpyDtoHAsync_v2(dst: *mut u8, src: u64, bytes: usize, stream: Ptr);
    cuMemcpyDtoDAsync_v2(dst: u64, src: u64, bytes: usize, stream: Ptr);
    cuMemcpyHtoD_v2(dst: u64, src: *const u8, bytes: usize);
    cuMemcpyDtoH_v2(dst: *mut u8, src: u64, bytes: usize);
    cuMemcpyBatchAsync(dsts: *const u64, srcs: *const u64, sizes: *const usize, count: usize,
        attrs: *const Attributes, starts: *const usize, n: usize, fail: *mut usize, stream: Ptr);
    cuMemcpyBatchAsync_v2(dsts: *const u64, srcs: *const u64, sizes: *const usize, count: usize,
        attrs: *const Attributes, starts: *const usize, n: usize, stream: Ptr);
    cuMemsetD8Async(dst: u64, byte: u8, bytes: usize, stream: Ptr);
    cuLaunchHostFunc(stream: Ptr, function: extern "C" fn(Ptr), data: Ptr);
    cuModuleLoadData(module: *mut Ptr, image: *const c_char);
    cuModuleUnload(module: Ptr);
    cuModuleGetFunction(function: *mut Ptr, module: Ptr, name: *const c_char);
    cuGetErrorName(code: i32, text: *mut *const c_char);
}

/// `CUmemcpyAttributes`
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Attributes {
    pub(crate) order: c_int,
    pub(crate) hints: [c_int; 4],
    pub(crate) flags: u32,
}

impl Attributes {
    pub(crate) fn new(order: c_int) -> Self {
        Self {
            order,
            hints: [0; 4],
            flags: 0,
        }
    }
}

/// A group with the primary context of its first ordinal retained and current until dropped.
pub(crate) struct Bound {
    pub(crate) group: Group,
    pub(crate) ctx: Ptr,
}

impl Bound {
    pub(crate) fn new(flags: u32) -> Self {
        Self::with_group(Group::open(1, flags))
    }

    pub(crate) fn with_group(group: Group) -> Self {
        assert_eq!(cuInit(0), 0);
        let ctx = retain(group.first);
        assert_eq!(cuCtxPushCurrent_v2(ctx), 0);
        Self { group, ctx }
    }

    /// Releases the context. Nothing may be left.
    pub(crate) fn end(self) {
        assert_eq!(self.group.drain(), 0);
        assert_eq!(cuDevicePrimaryCtxRelease_v2(self.group.first), 0);
        self.group.assert_clean();
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        cuCtxPopCurrent_v2(null_mut());
    }
}

pub(crate) fn retain(ordinal: i32) -> Ptr {
    let mut ctx = null_mut();
    assert_eq!(cuDevicePrimaryCtxRetain(&mut ctx, ordinal), 0);
    ctx
}

pub(crate) fn stream() -> Ptr {
    let mut stream = null_mut();
    assert_eq!(cuStreamCreate(&mut stream, 1), 0);
    stream
}

pub(crate) fn event() -> Ptr {
    let mut event = null_mut();
    assert_eq!(cuEventCreate(&mut event, 2), 0);
    event
}

/// An event recorded on a stream.
pub(crate) fn recorded(stream: Ptr) -> Ptr {
    let event = event();
    assert_eq!(cuEventRecord(event, stream), 0);
    event
}

pub(crate) fn device(bytes: usize) -> u64 {
    let mut ptr = 0;
    assert_eq!(cuMemAlloc_v2(&mut ptr, bytes), 0);
    ptr
}

pub(crate) fn pooled(bytes: usize, stream: Ptr) -> u64 {
    let mut ptr = 0;
    assert_eq!(cuMemAllocAsync(&mut ptr, bytes, stream), 0);
    ptr
}

pub(crate) fn pinned(bytes: usize) -> *mut u8 {
    let mut ptr = null_mut();
    assert_eq!(cuMemHostAlloc(&mut ptr, bytes, 0), 0);
    ptr.cast()
}

pub(crate) fn managed(bytes: usize) -> u64 {
    let mut ptr = 0;
    assert_eq!(cuMemAllocManaged(&mut ptr, bytes, 1), 0);
    ptr
}

/// Host memory that was written.
pub(crate) fn host<const N: usize>(ptr: *const u8) -> [u8; N] {
    // SAFETY: callers pass live memory of at least this length, after a wait.
    unsafe { ptr.cast::<[u8; N]>().read() }
}

/// Launches a kernel on the legacy default stream.
pub(crate) fn launch_kernel(function: Ptr, grid: u32, params: &[Ptr]) -> i32 {
    let (one, null) = (1u32, null_mut::<Ptr>());
    fake!(cuLaunchKernel(function => Ptr, grid => u32, one => u32, one => u32, one => u32,
        one => u32, one => u32, 0 => u32, null_mut() => Ptr, params.as_ptr() => *const Ptr,
        null => *mut Ptr) -> i32)
}
