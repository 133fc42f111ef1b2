//! The driver's calls, as a GPU's backend wants them.

use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{
    CUcontext, CUdeviceptr, CUevent, CUpointer_attribute as Attribute, CUstream,
    CUstreamCaptureMode, CUstreamCaptureStatus,
};

use super::context::Cuda;
use super::driver::{answer, code};
use super::{CudaDevice, CudaQueue};
use crate::device::backend::{CopyOp, DevicePtr};
use crate::device::gpu::{
    Answer, Before, Code, CopyList, HostFunction, Meaning, Memory, Names, Peer, PointerKind,
    RawEvent, RawStream, Runtime, to_ptr,
};

static NAMES: Names = Names {
    vendor: "CUDA",
    advice: super::ADVICE,
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
        ordinal == self.ordinal && context.is_none_or(|of| of == self.raw().addr())
    }

    fn ordinal_of(&self, other: &dyn Any) -> Option<c_int> {
        let other = other.downcast_ref::<CudaDevice>();
        other.map(|other| other.shared().context.ordinal())
    }

    fn queue(&self, raw: RawStream) -> Box<dyn Any + Send + Sync> {
        Box::new(CudaQueue::new(stream(raw)))
    }

    fn enter(&self) -> Answer<Before> {
        // SAFETY: the context lives as long as `self`.
        answer!("cuCtxPushCurrent", unsafe {
            (self.driver.cuCtxPushCurrent_v2)(self.raw())
        })?;
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        // SAFETY: the thread's mode, an int, which `leave` writes back.
        unsafe { (self.driver.cuThreadExchangeStreamCaptureMode)((&raw mut mode).cast()) };
        Ok(Before {
            ordinal: 0,
            capture_mode: mode,
            last_error: 0,
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

    unsafe fn is_idle(&self, raw: RawStream) -> Answer<bool> {
        // SAFETY: the caller's.
        match unsafe { (self.driver.cuStreamQuery)(stream(raw)) } {
            code::NOT_READY => Ok(false),
            code => answer!("cuStreamQuery", code).map(|()| true),
        }
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
        Ok(
            (of != self.raw())
                .then(|| format!("the stream is of another context{}", super::ADVICE)),
        )
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
            PointerKind::Device(_, Some(of)) => Ok((of != self.raw().addr()).then_some(Peer(of))),
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
                (driver.cuMemcpyPeerAsync)(dst, self.raw(), src, of, bytes, stream(raw))
            }),
        }
    }

    unsafe fn copy_list(&self, copies: &[CopyOp], raw: RawStream) -> Option<Answer> {
        let batch = self.driver.batch?;
        let mut list = CopyList::new(copies, address);
        // SAFETY: the copies are the caller's.
        Some(answer!("cuMemcpyBatchAsync", unsafe {
            batch.call(&mut list, stream(raw))
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
