//! The driver's calls for one context of one device.

use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUmemAllocationType,
    CUmemLocationType, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool,
    CUpointer_attribute as Attribute, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
};

use super::driver::{Driver, code};
use super::{CudaDevice, CudaQueue};
use crate::device::DeviceId;
use crate::device::backend::{CopyOp, DevicePtr, device_error};
use crate::device::gpu::{
    Answer, Before, Code, Failed, HostFunction, Meaning, Memory, Names, Peer, PointerKind,
    RawEvent, RawStream, Runtime, Shared, absent, ordinal_of, to_ptr,
};
use crate::error::{Error, Result};

/// What a call of this name answered.
macro_rules! answer {
    ($name:literal, $code:expr) => {{
        let code: Code = $code;
        match code {
            0 => Ok(()),
            code => Err(Failed {
                call: $name,
                out_of_memory: concat!($name, " (CUDA_ERROR_OUT_OF_MEMORY, code 2)"),
                code,
            }),
        }
    }};
}

static NAMES: Names = Names {
    vendor: "CUDA",
    synchronize: "cuCtxSynchronize",
    create_stream: "cuStreamCreate",
    stream_of: "cuStreamGetCtx",
    wait: "cuStreamWaitEvent",
    record: "cuEventRecord",
    query: "cuEventQuery",
    wait_event: "cuEventSynchronize",
    allocate_in_order: "cuMemAllocFromPoolAsync",
    free_in_order: "cuMemFreeAsync",
    trim: "cuMemPoolTrimTo",
    allocate_device: "cuMemAlloc",
    allocate_host: "cuMemHostAlloc",
    allocate_managed: "cuMemAllocManaged",
    pointer: "cuPointerGetAttributes",
    copy: "cuMemcpyAsync",
    fill: "cuMemsetD8Async",
};

/// A context.
pub(super) struct Cuda {
    pub(super) driver: &'static Driver,
    /// The device's number in the driver.
    pub(super) ordinal: c_int,
    device: CUdevice,
    raw: CUcontext,
    /// The context's owner; `None`: the primary one, retained here.
    given: Option<Arc<CudaContext>>,
    /// Where the device has such.
    pool: Option<CUmemoryPool>,
    reads_managed: bool,
    /// Primary contexts of other devices, by ordinal, retained.
    others: Mutex<Vec<(c_int, CUdevice, CUcontext)>>,
}

// SAFETY: the handles may be used on any thread; each call makes the context current there.
unsafe impl Send for Cuda {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// The primary context of a device, or the one that is given.
    pub(super) fn new(id: DeviceId, given: Option<Arc<CudaContext>>) -> Result<Self> {
        let driver = Driver::get().map_err(|why| absent(id, why))?;
        let failed = |call: &str, code| {
            let text = driver.text(code);
            absent(id, format!("{call} failed: {text} (code {code})"))
        };
        let count = driver
            .device_count()
            .map_err(|code| failed("cuDeviceGetCount", code))?;
        let ordinal = ordinal_of("CUDA", id, count)?;
        let mut device: CUdevice = 0;
        // SAFETY: `device` is written.
        match unsafe { (driver.cuDeviceGet)(&raw mut device, ordinal) } {
            0 => {}
            code => return Err(failed("cuDeviceGet", code)),
        }
        // Perhaps for now only: not the device that is missing.
        let refused = |Failed { call, code, .. }| device_error(id, call, code, driver.text(code));
        let raw = match &given {
            Some(context) if context.ordinal() as i64 != id.id => {
                let ordinal = context.ordinal();
                return Err(Error::argument(format!(
                    "a context of CUDA device {ordinal} for {id}"
                )));
            }
            Some(context) => context.cu_ctx(),
            // Released in `drop`.
            None => retain(driver, device).map_err(refused)?,
        };
        // From here on `drop` gives everything back.
        let mut cuda = Self {
            driver,
            ordinal,
            device,
            raw,
            given,
            pool: None,
            reads_managed: false,
            others: Mutex::new(Vec::new()),
        };
        if cuda.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING) == 0 {
            return Err(absent(id, "the device has no unified addressing"));
        }
        let both = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS;
        cuda.reads_managed = cuda.attribute(both) != 0;
        cuda.pool = cuda.new_pool().map_err(refused)?;
        Ok(cuda)
    }

    /// A device attribute; 0 if the driver does not know it.
    pub(super) fn attribute(&self, attribute: CUdevice_attribute) -> c_int {
        let mut value = 0;
        // SAFETY: `value` is written.
        let code =
            unsafe { (self.driver.cuDeviceGetAttribute)(&raw mut value, attribute, self.device) };
        if code == 0 { value } else { 0 }
    }

    /// A pool of our own that keeps freed memory until it is trimmed: the default one gives it back
    /// at every synchronisation, and is everybody's. Pools are the device's, not a context's.
    fn new_pool(&self) -> Answer<Option<CUmemoryPool>> {
        let supported = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        if self.attribute(supported) == 0 {
            return Ok(None);
        }
        let before = self.enter()?;
        let pool = self.new_pool_here();
        self.leave(before);
        pool.map(Some)
    }

    /// As above; the context is current.
    fn new_pool_here(&self) -> Answer<CUmemoryPool> {
        // SAFETY: all members are integers or pointers, for which zero is a value.
        let mut props: CUmemPoolProps = unsafe { std::mem::zeroed() };
        props.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        props.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        // The second member: its name depends on the version of the bindings.
        // SAFETY: `CUmemLocation` is a C struct of the type and an int, the device.
        unsafe {
            (&raw mut props.location)
                .cast::<c_int>()
                .add(1)
                .write(self.device);
        }
        let mut pool = std::ptr::null_mut();
        // SAFETY: `pool` is written.
        answer!("cuMemPoolCreate", unsafe {
            (self.driver.cuMemPoolCreate)(&raw mut pool, &raw const props)
        })?;
        let mut keep = u64::MAX;
        // SAFETY: the attribute is a 64-bit number of bytes.
        let set = answer!("cuMemPoolSetAttribute", unsafe {
            (self.driver.cuMemPoolSetAttribute)(
                pool,
                CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                (&raw mut keep).cast::<c_void>(),
            )
        });
        set.map(|()| pool).inspect_err(|_| {
            // SAFETY: just made, and empty.
            unsafe { (self.driver.cuMemPoolDestroy)(pool) };
        })
    }

    pub(super) fn raw(&self) -> CUcontext {
        self.raw
    }

    pub(super) fn given(&self) -> Option<&Arc<CudaContext>> {
        self.given.as_ref()
    }

    /// The pool; there is one where this is asked.
    fn pool(&self) -> CUmemoryPool {
        self.pool.unwrap_or(std::ptr::null_mut())
    }

    /// The primary context of another device, for copies out of its memory. Kept as long as this one.
    fn primary_of(&self, ordinal: c_int) -> Answer<CUcontext> {
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, _, raw)) = others.iter().find(|(of, ..)| *of == ordinal) {
            return Ok(*raw);
        }
        let mut device: CUdevice = 0;
        // SAFETY: `device` is written.
        answer!("cuDeviceGet", unsafe {
            (self.driver.cuDeviceGet)(&raw mut device, ordinal)
        })?;
        let raw = retain(self.driver, device)?;
        others.push((ordinal, device, raw));
        Ok(raw)
    }
}

/// A device's primary context.
fn retain(driver: &Driver, device: CUdevice) -> Answer<CUcontext> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: `raw` is written; who asks releases it.
    answer!("cuDevicePrimaryCtxRetain", unsafe {
        (driver.cuDevicePrimaryCtxRetain)(&raw mut raw, device)
    })?;
    Ok(raw)
}

fn stream(stream: RawStream) -> CUstream {
    stream.0.cast()
}

fn event(event: RawEvent) -> CUevent {
    event.0.cast()
}

fn address(ptr: DevicePtr) -> CUdeviceptr {
    ptr.address() as CUdeviceptr
}

// SAFETY: each method is the call of the driver that its name and its documentation ask for, with
// arguments of that call's; the driver aligns memory to 256 bytes and more.
unsafe impl Runtime for Cuda {
    fn names(&self) -> &'static Names {
        &NAMES
    }

    fn ordinal(&self) -> c_int {
        self.ordinal
    }

    fn text(&self, code: Code) -> String {
        self.driver.text(code)
    }

    fn meaning(&self, code: Code) -> Meaning {
        code::meaning(code)
    }

    fn reads_managed(&self) -> bool {
        self.reads_managed
    }

    fn has_pool(&self) -> bool {
        self.pool.is_some()
    }

    fn owns(&self, kind: PointerKind) -> bool {
        let PointerKind::Device(ordinal, context) = kind else {
            return false;
        };
        ordinal == self.ordinal && context.is_none_or(|of| of == self.raw.addr())
    }

    fn shared_of<'a>(&self, other: &'a dyn Any) -> Option<&'a Shared> {
        let other = other.downcast_ref::<CudaDevice>();
        other.map(CudaDevice::shared)
    }

    fn queue(&self, raw: RawStream) -> Box<dyn Any + Send + Sync> {
        Box::new(CudaQueue::new(stream(raw)))
    }

    fn enter(&self) -> Answer<Before> {
        // SAFETY: the context lives as long as `self`.
        answer!("cuCtxPushCurrent", unsafe {
            (self.driver.cuCtxPushCurrent_v2)(self.raw)
        })?;
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        // SAFETY: the thread's mode, an int, which `leave` writes back.
        unsafe { (self.driver.cuThreadExchangeStreamCaptureMode)((&raw mut mode).cast()) };
        Ok(Before {
            ordinal: 0,
            capture_mode: mode,
        })
    }

    fn leave(&self, mut before: Before) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: pushed on this thread by `enter`. cudarc may have set another context in its
        // place; that one goes.
        unsafe { (self.driver.cuCtxPopCurrent_v2)(&raw mut popped) };
        let mode = &raw mut before.capture_mode;
        // SAFETY: the thread's own mode, as it was.
        unsafe { (self.driver.cuThreadExchangeStreamCaptureMode)(mode.cast()) };
    }

    fn synchronize(&self) -> Answer {
        // SAFETY: the context is current.
        answer!("cuCtxSynchronize", unsafe {
            (self.driver.cuCtxSynchronize)()
        })
    }

    fn ask(&self) -> Answer {
        // SAFETY: the legacy default stream is always there; a query gives it no work.
        answer!("cuStreamQuery", unsafe {
            (self.driver.cuStreamQuery)(std::ptr::null_mut())
        })
    }

    fn create_stream(&self) -> Answer<RawStream> {
        const NON_BLOCKING: c_uint = 1;
        let mut raw: CUstream = std::ptr::null_mut();
        // SAFETY: `raw` is written.
        answer!("cuStreamCreate", unsafe {
            (self.driver.cuStreamCreate)(&raw mut raw, NON_BLOCKING)
        })?;
        Ok(RawStream(raw.cast()))
    }

    unsafe fn destroy_stream(&self, raw: RawStream) {
        // SAFETY: the caller's.
        unsafe { (self.driver.cuStreamDestroy_v2)(stream(raw)) };
    }

    unsafe fn synchronize_stream(&self, raw: RawStream) -> Answer {
        // SAFETY: the caller's.
        answer!("cuStreamSynchronize", unsafe {
            (self.driver.cuStreamSynchronize)(stream(raw))
        })
    }

    unsafe fn is_captured(&self, raw: RawStream) -> Answer<bool> {
        let mut status: c_int = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_int;
        // SAFETY: the caller's; the status is an int.
        answer!("cuStreamIsCapturing", unsafe {
            (self.driver.cuStreamIsCapturing)(stream(raw), (&raw mut status).cast())
        })?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_int)
    }

    unsafe fn foreign(&self, raw: RawStream) -> Answer<Option<String>> {
        let mut of = std::ptr::null_mut();
        // SAFETY: the caller's: the stream is live; `of` is written.
        answer!("cuStreamGetCtx", unsafe {
            (self.driver.cuStreamGetCtx)(stream(raw), &raw mut of)
        })?;
        Ok((of != self.raw).then(|| super::OTHER_CONTEXT.into()))
    }

    unsafe fn wait(&self, raw: RawStream, of: RawEvent) -> Answer {
        // SAFETY: the caller's.
        answer!("cuStreamWaitEvent", unsafe {
            (self.driver.cuStreamWaitEvent)(stream(raw), event(of), 0)
        })
    }

    fn create_event(&self) -> Answer<RawEvent> {
        const DISABLE_TIMING: c_uint = 2;
        let mut raw: CUevent = std::ptr::null_mut();
        // SAFETY: `raw` is written.
        answer!("cuEventCreate", unsafe {
            (self.driver.cuEventCreate)(&raw mut raw, DISABLE_TIMING)
        })?;
        Ok(RawEvent(raw.cast()))
    }

    unsafe fn destroy_event(&self, raw: RawEvent) {
        // SAFETY: the caller's.
        unsafe { (self.driver.cuEventDestroy_v2)(event(raw)) };
    }

    unsafe fn record(&self, of: RawEvent, raw: RawStream) -> Answer {
        // SAFETY: the caller's.
        answer!("cuEventRecord", unsafe {
            (self.driver.cuEventRecord)(event(of), stream(raw))
        })
    }

    unsafe fn query(&self, raw: RawEvent) -> Answer<bool> {
        // SAFETY: the caller's.
        match unsafe { (self.driver.cuEventQuery)(event(raw)) } {
            code::NOT_READY => Ok(false),
            code => answer!("cuEventQuery", code).map(|()| true),
        }
    }

    unsafe fn wait_event(&self, raw: RawEvent) -> Answer {
        // SAFETY: the caller's.
        answer!("cuEventSynchronize", unsafe {
            (self.driver.cuEventSynchronize)(event(raw))
        })
    }

    unsafe fn allocate_in_order(&self, bytes: usize, raw: RawStream) -> Answer<DevicePtr> {
        let mut ptr: CUdeviceptr = 0;
        // SAFETY: `ptr` is written; the pool lives as long as `self`, the stream is the caller's.
        answer!("cuMemAllocFromPoolAsync", unsafe {
            let function = self.driver.cuMemAllocFromPoolAsync;
            function(&raw mut ptr, bytes, self.pool(), stream(raw))
        })?;
        Ok(to_ptr(ptr as usize))
    }

    unsafe fn free_in_order(&self, ptr: DevicePtr, raw: RawStream) -> Answer {
        // SAFETY: the caller's.
        answer!("cuMemFreeAsync", unsafe {
            (self.driver.cuMemFreeAsync)(address(ptr), stream(raw))
        })
    }

    fn trim(&self) -> Answer {
        // SAFETY: the pool is ours.
        answer!("cuMemPoolTrimTo", unsafe {
            (self.driver.cuMemPoolTrimTo)(self.pool(), 0)
        })
    }

    fn allocate(&self, memory: Memory, bytes: usize) -> Answer<DevicePtr> {
        // For all contexts; not write-combined, since the host reads it.
        const PORTABLE: c_uint = 1;
        const ATTACH_GLOBAL: c_uint = 1;
        let mut ptr: CUdeviceptr = 0;
        let mut host = std::ptr::null_mut();
        // SAFETY: `ptr` or `host` is written.
        unsafe {
            match memory {
                Memory::Device => {
                    answer!(
                        "cuMemAlloc",
                        (self.driver.cuMemAlloc_v2)(&raw mut ptr, bytes)
                    )
                }
                Memory::Host => answer!(
                    "cuMemHostAlloc",
                    (self.driver.cuMemHostAlloc)(&raw mut host, bytes, PORTABLE)
                ),
                Memory::Managed => answer!(
                    "cuMemAllocManaged",
                    (self.driver.cuMemAllocManaged)(&raw mut ptr, bytes, ATTACH_GLOBAL)
                ),
            }
        }?;
        Ok(match memory {
            Memory::Host => DevicePtr::new(host),
            Memory::Device | Memory::Managed => to_ptr(ptr as usize),
        })
    }

    unsafe fn free(&self, memory: Memory, ptr: DevicePtr) -> Answer {
        // SAFETY: the caller's.
        unsafe {
            match memory {
                Memory::Host => answer!("cuMemFreeHost", (self.driver.cuMemFreeHost)(ptr.as_ptr())),
                Memory::Device | Memory::Managed => {
                    answer!("cuMemFree", (self.driver.cuMemFree_v2)(address(ptr)))
                }
            }
        }
    }

    fn kind_of_byte(&self, address: usize) -> Answer<PointerKind> {
        let mut memory_type: c_uint = 0;
        let mut managed: c_uint = 0;
        let mut ordinal: c_int = -1;
        let mut device_pointer: CUdeviceptr = 0;
        let mut of: CUcontext = std::ptr::null_mut();
        let mut attributes = [
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
            Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
            Attribute::CU_POINTER_ATTRIBUTE_CONTEXT,
        ];
        let mut values: [*mut c_void; 5] = [
            (&raw mut memory_type).cast(),
            (&raw mut managed).cast(),
            (&raw mut ordinal).cast(),
            (&raw mut device_pointer).cast(),
            (&raw mut of).cast(),
        ];
        // SAFETY: each value has its attribute's type. The driver looks the address up, it does not
        // follow it.
        answer!("cuPointerGetAttributes", unsafe {
            (self.driver.cuPointerGetAttributes)(
                attributes.len() as c_uint,
                attributes.as_mut_ptr(),
                values.as_mut_ptr(),
                address as CUdeviceptr,
            )
        })?;
        const HOST: c_uint = 1;
        const DEVICE: c_uint = 2;
        Ok(match memory_type {
            _ if managed != 0 => PointerKind::Managed,
            HOST => PointerKind::Host {
                mapped: device_pointer == address as CUdeviceptr,
            },
            DEVICE => PointerKind::Device(ordinal, (!of.is_null()).then(|| of.expose_provenance())),
            _ => PointerKind::Unknown,
        })
    }

    fn peer_of(&self, kind: PointerKind) -> Answer<Option<Peer>> {
        match kind {
            PointerKind::Device(_, Some(of)) => Ok((of != self.raw.addr()).then_some(Peer(of))),
            PointerKind::Device(ordinal, None) if ordinal != self.ordinal => {
                let of = self.primary_of(ordinal)?;
                Ok(Some(Peer(of.expose_provenance())))
            }
            _ => Ok(None),
        }
    }

    unsafe fn copy(&self, copy: &CopyOp, from: Option<Peer>, raw: RawStream) -> Answer {
        let (dst, src, bytes) = (address(copy.dst), address(copy.src), copy.bytes);
        let driver = self.driver;
        match from {
            // SAFETY: the caller's. All memory is in one address space: the driver finds the direction.
            None => answer!("cuMemcpyAsync", unsafe {
                (driver.cuMemcpyAsync)(dst, src, bytes, stream(raw))
            }),
            // SAFETY: as above. A context's handle is the driver's address of it.
            Some(Peer(of)) => answer!("cuMemcpyPeerAsync", unsafe {
                let of = std::ptr::with_exposed_provenance_mut(of);
                (driver.cuMemcpyPeerAsync)(dst, self.raw, src, of, bytes, stream(raw))
            }),
        }
    }

    unsafe fn copy_list(&self, copies: &[CopyOp], raw: RawStream) -> Option<Answer> {
        let batch = self.driver.batch?;
        let list = |of: fn(&CopyOp) -> DevicePtr| -> Vec<CUdeviceptr> {
            copies.iter().map(|copy| address(of(copy))).collect()
        };
        let (mut dst, mut src) = (list(|copy| copy.dst), list(|copy| copy.src));
        let mut sizes: Vec<usize> = copies.iter().map(|copy| copy.bytes).collect();
        // SAFETY: the lists have as many members; the copies are the caller's.
        Some(answer!("cuMemcpyBatchAsync", unsafe {
            batch.call(&mut dst, &mut src, &mut sizes, stream(raw))
        }))
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize, raw: RawStream) -> Answer {
        // SAFETY: the caller's.
        answer!("cuMemsetD8Async", unsafe {
            (self.driver.cuMemsetD8Async)(address(dst), byte, bytes, stream(raw))
        })
    }

    unsafe fn launch_host(
        &self,
        raw: RawStream,
        function: HostFunction,
        data: *mut c_void,
    ) -> Answer {
        // SAFETY: the caller's.
        answer!("cuLaunchHostFunc", unsafe {
            (self.driver.cuLaunchHostFunc)(stream(raw), Some(function), data)
        })
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if let Some(pool) = self.pool {
            if let Ok(before) = self.enter() {
                // SAFETY: made in `new`; memory that is still being freed in stream order stays until then.
                unsafe { (self.driver.cuMemPoolDestroy)(pool) };
                self.leave(before);
            }
        }
        let others = self.others.get_mut();
        for (_, device, _) in others.unwrap_or_else(PoisonError::into_inner).drain(..) {
            // SAFETY: retained in `primary_of`.
            unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(device) };
        }
        match self.given.take() {
            Some(context) => self.driver.let_go(context, || ()),
            // SAFETY: retained in `new`.
            None => unsafe {
                (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device);
            },
        }
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.raw)
    }
}
