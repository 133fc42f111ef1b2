//! The runtime's calls, as a GPU's backend wants them.

use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};

use hip_runtime_sys::{
    hipEvent_t, hipEventDisableTiming, hipEventReleaseToSystem, hipHostMallocCoherent,
    hipHostMallocPortable, hipMemcpyKind, hipStream_t, hipStreamCaptureMode,
    hipStreamCaptureStatus, hipStreamNonBlocking,
};

use super::device::Rocm;
use super::library::{PointerAttributes, answer, code};
use super::{RocmDevice, RocmQueue, pointer};
use crate::device::backend::{CopyOp, DevicePtr};
use crate::device::gpu::{
    Answer, Before, Code, CopyList, HostFunction, Meaning, Memory, Names, Peer, PointerKind,
    RawEvent, RawStream, Runtime, to_ptr,
};

static NAMES: Names = Names {
    vendor: "ROCm",
    advice: "",
    synchronize: "hipDeviceSynchronize",
    create_stream: "hipStreamCreateWithFlags",
    stream_of: "hipStreamGetDevice",
    wait: "hipStreamWaitEvent",
    record: "hipEventRecord",
    query: "hipEventQuery",
    wait_event: "hipEventSynchronize",
    allocate_in_order: "hipMallocFromPoolAsync",
    free_in_order: "hipFreeAsync",
    trim: "hipMemPoolTrimTo",
    allocate_device: "hipMalloc",
    allocate_host: "hipHostMalloc",
    allocate_managed: "hipMallocManaged",
    pointer: "hipPointerGetAttributes",
    copy: "hipMemcpyAsync",
    fill: "hipMemsetD8Async",
};

fn stream(stream: RawStream) -> hipStream_t {
    stream.0.cast()
}

fn event(event: RawEvent) -> hipEvent_t {
    event.0.cast()
}

impl Rocm {
    /// Makes the device current; the number of the one before it.
    fn set_current(&self) -> Answer<c_int> {
        let mut before = -1;
        // SAFETY: `before` is written.
        answer!("hipGetDevice", unsafe {
            (self.hip.hipGetDevice)(&raw mut before)
        })?;
        if before != self.ordinal {
            // SAFETY: there is such a device.
            answer!("hipSetDevice", unsafe {
                (self.hip.hipSetDevice)(self.ordinal)
            })?;
        }
        Ok(before)
    }
}

// SAFETY: each method is the call of the runtime that its name and its documentation ask for, with
// arguments of that call's; the runtime aligns memory to 256 bytes and more.
unsafe impl Runtime for Rocm {
    fn names(&self) -> &'static Names {
        &NAMES
    }

    fn ordinal(&self) -> c_int {
        self.ordinal
    }

    fn text(&self, code: Code) -> String {
        self.hip.text(code)
    }

    fn meaning(&self, code: Code) -> Meaning {
        code::meaning(code)
    }

    fn reads_managed(&self) -> bool {
        self.reads_managed
    }

    /// HIP's header says so.
    fn destroying_waits(&self) -> bool {
        true
    }

    fn has_pool(&self) -> bool {
        self.pool.is_some()
    }

    fn owns(&self, kind: PointerKind) -> bool {
        matches!(kind, PointerKind::Device(ordinal, _) if ordinal == self.ordinal)
    }

    fn ordinal_of(&self, other: &dyn Any) -> Option<c_int> {
        let other = other.downcast_ref::<RocmDevice>();
        other.map(|other| other.shared().context.ordinal())
    }

    fn queue(&self, raw: RawStream) -> Box<dyn Any + Send + Sync> {
        Box::new(RocmQueue::new(raw))
    }

    fn enter(&self) -> Answer<Before> {
        // SAFETY: it has no arguments.
        let last_error = unsafe { (self.hip.hipPeekAtLastError)() };
        let before = self.set_current();
        let before = before.inspect_err(|_| self.hip.forget_error(last_error))?;
        let mut mode = hipStreamCaptureMode::hipStreamCaptureModeRelaxed as c_int;
        // SAFETY: the thread's mode, an int, which `leave` writes back.
        unsafe { (self.hip.hipThreadExchangeStreamCaptureMode)(&raw mut mode) };
        Ok(Before {
            ordinal: before,
            capture_mode: mode,
            last_error,
        })
    }

    fn leave(&self, mut before: Before) {
        let mode = &raw mut before.capture_mode;
        // SAFETY: the thread's own mode, as it was.
        unsafe { (self.hip.hipThreadExchangeStreamCaptureMode)(mode) };
        if before.ordinal != self.ordinal {
            // SAFETY: the thread's own device, as it was.
            unsafe { (self.hip.hipSetDevice)(before.ordinal) };
        }
        self.hip.forget_error(before.last_error);
    }

    fn synchronize(&self) -> Answer {
        // SAFETY: the device is current.
        answer!("hipDeviceSynchronize", unsafe {
            (self.hip.hipDeviceSynchronize)()
        })
    }

    fn create_stream(&self) -> Answer<RawStream> {
        let mut raw: hipStream_t = std::ptr::null_mut();
        // SAFETY: `raw` is written.
        answer!("hipStreamCreateWithFlags", unsafe {
            (self.hip.hipStreamCreateWithFlags)(&raw mut raw, hipStreamNonBlocking)
        })?;
        Ok(RawStream(raw.cast()))
    }

    unsafe fn destroy_stream(&self, raw: RawStream) {
        // SAFETY: the caller's.
        unsafe { (self.hip.hipStreamDestroy)(stream(raw)) };
    }

    unsafe fn synchronize_stream(&self, raw: RawStream) -> Answer {
        // SAFETY: the caller's.
        answer!("hipStreamSynchronize", unsafe {
            (self.hip.hipStreamSynchronize)(stream(raw))
        })
    }

    unsafe fn is_idle(&self, raw: RawStream) -> Answer<bool> {
        // SAFETY: the caller's.
        match unsafe { (self.hip.hipStreamQuery)(stream(raw)) } {
            code::NOT_READY => Ok(false),
            code => answer!("hipStreamQuery", code).map(|()| true),
        }
    }

    unsafe fn is_captured(&self, raw: RawStream) -> Answer<bool> {
        const NONE: c_int = hipStreamCaptureStatus::hipStreamCaptureStatusNone as c_int;
        let mut status = NONE;
        // SAFETY: the caller's; the status is an int.
        answer!("hipStreamIsCapturing", unsafe {
            (self.hip.hipStreamIsCapturing)(stream(raw), &raw mut status)
        })?;
        Ok(status != NONE)
    }

    unsafe fn foreign(&self, raw: RawStream) -> Answer<Option<String>> {
        // SAFETY: the caller's.
        let of = match unsafe { self.hip.device_of(stream(raw)) } {
            // An older runtime does not tell: whoever gives the stream vouches for it.
            None => return Ok(None),
            Some(Err(code)) => return answer!("hipStreamGetDevice", code).map(|()| None),
            Some(Ok(of)) => of,
        };
        let other = || format!("the stream is of ROCm device {of}; use that device");
        Ok((of != self.ordinal).then(other))
    }

    unsafe fn wait(&self, raw: RawStream, of: RawEvent) -> Answer {
        // SAFETY: the caller's.
        answer!("hipStreamWaitEvent", unsafe {
            (self.hip.hipStreamWaitEvent)(stream(raw), event(of), 0)
        })
    }

    fn create_event(&self) -> Answer<RawEvent> {
        // Host memory that is not coherent is visible to the host after an event only if it says so.
        const FLAGS: c_uint = hipEventDisableTiming | hipEventReleaseToSystem;
        let mut raw: hipEvent_t = std::ptr::null_mut();
        // SAFETY: `raw` is written.
        answer!("hipEventCreateWithFlags", unsafe {
            (self.hip.hipEventCreateWithFlags)(&raw mut raw, FLAGS)
        })?;
        Ok(RawEvent(raw.cast()))
    }

    unsafe fn destroy_event(&self, raw: RawEvent) {
        // SAFETY: the caller's.
        unsafe { (self.hip.hipEventDestroy)(event(raw)) };
    }

    unsafe fn record(&self, of: RawEvent, raw: RawStream) -> Answer {
        // SAFETY: the caller's.
        answer!("hipEventRecord", unsafe {
            (self.hip.hipEventRecord)(event(of), stream(raw))
        })
    }

    unsafe fn query(&self, raw: RawEvent) -> Answer<bool> {
        // SAFETY: the caller's.
        match unsafe { (self.hip.hipEventQuery)(event(raw)) } {
            code::NOT_READY => Ok(false),
            code => answer!("hipEventQuery", code).map(|()| true),
        }
    }

    unsafe fn wait_event(&self, raw: RawEvent) -> Answer {
        // SAFETY: the caller's.
        answer!("hipEventSynchronize", unsafe {
            (self.hip.hipEventSynchronize)(event(raw))
        })
    }

    unsafe fn allocate_in_order(&self, bytes: usize, raw: RawStream) -> Answer<DevicePtr> {
        let mut ptr = std::ptr::null_mut();
        // SAFETY: `ptr` is written; the pool lives as long as `self`, the stream is the caller's.
        answer!("hipMallocFromPoolAsync", unsafe {
            (self.hip.hipMallocFromPoolAsync)(&raw mut ptr, bytes, self.pool(), stream(raw))
        })?;
        if ptr.is_null() {
            // HIP 5.2 calls it a success.
            return answer!("hipMallocFromPoolAsync", code::OUT_OF_MEMORY)
                .map(|()| DevicePtr::NULL);
        }
        Ok(to_ptr(ptr.expose_provenance()))
    }

    unsafe fn free_in_order(&self, ptr: DevicePtr, raw: RawStream) -> Answer {
        // SAFETY: the caller's.
        answer!("hipFreeAsync", unsafe {
            (self.hip.hipFreeAsync)(ptr.as_ptr(), stream(raw))
        })
    }

    fn trim(&self) -> Answer {
        // SAFETY: the pool is ours.
        answer!("hipMemPoolTrimTo", unsafe {
            (self.hip.hipMemPoolTrimTo)(self.pool(), 0)
        })
    }

    fn allocate(&self, memory: Memory, bytes: usize) -> Answer<DevicePtr> {
        // For all devices, and visible to the host without an event.
        const FLAGS: c_uint = hipHostMallocPortable | hipHostMallocCoherent;
        let mut ptr = std::ptr::null_mut();
        // SAFETY: `ptr` is written.
        unsafe {
            match memory {
                Memory::Device => {
                    answer!("hipMalloc", (self.hip.hipMalloc)(&raw mut ptr, bytes))
                }
                Memory::Host => answer!(
                    "hipHostMalloc",
                    (self.hip.hipHostMalloc)(&raw mut ptr, bytes, FLAGS)
                ),
                // No type of device has it.
                Memory::Managed => answer!("hipMallocManaged", code::NOT_SUPPORTED),
            }
        }?;
        Ok(match memory {
            Memory::Host => DevicePtr::new(ptr),
            Memory::Device | Memory::Managed => to_ptr(ptr.expose_provenance()),
        })
    }

    unsafe fn free(&self, memory: Memory, ptr: DevicePtr) -> Answer {
        // SAFETY: the caller's.
        unsafe {
            match memory {
                Memory::Host => answer!("hipHostFree", (self.hip.hipHostFree)(ptr.as_ptr())),
                Memory::Device | Memory::Managed => {
                    answer!("hipFree", (self.hip.hipFree)(ptr.as_ptr()))
                }
            }
        }
    }

    fn kind_of_byte(&self, address: usize) -> Answer<PointerKind> {
        let mut found = PointerAttributes::NONE;
        let ptr = std::ptr::without_provenance(address);
        // SAFETY: `found` is written. The runtime looks the address up, it does not follow it.
        let code = unsafe { (self.hip.hipPointerGetAttributes)(&raw mut found, ptr) };
        if code == code::INVALID_VALUE {
            // What HIP 5, and some later ones, say of memory that is not theirs.
            return Ok(PointerKind::Unknown);
        }
        answer!("hipPointerGetAttributes", code)?;
        Ok(pointer::kind(self.version, address, &found))
    }

    fn peer_of(&self, kind: PointerKind) -> Answer<Option<Peer>> {
        let PointerKind::Device(of, _) = kind else {
            return Ok(None);
        };
        let of = usize::try_from(of).ok();
        Ok(of.filter(|of| *of != self.ordinal as usize).map(Peer))
    }

    unsafe fn copy(&self, copy: &CopyOp, from: Option<Peer>, raw: RawStream) -> Answer {
        let (dst, src, bytes) = (copy.dst.as_ptr(), copy.src.as_ptr(), copy.bytes);
        match from {
            // SAFETY: the caller's. All memory is in one address space: the runtime finds the direction.
            None => answer!("hipMemcpyAsync", unsafe {
                let kind = hipMemcpyKind::hipMemcpyDefault;
                (self.hip.hipMemcpyAsync)(dst, src, bytes, kind, stream(raw))
            }),
            // SAFETY: as above; `of` is the number of a device.
            Some(Peer(of)) => answer!("hipMemcpyPeerAsync", unsafe {
                let function = self.hip.hipMemcpyPeerAsync;
                function(dst, self.ordinal, src, of as c_int, bytes, stream(raw))
            }),
        }
    }

    unsafe fn copy_list(&self, copies: &[CopyOp], raw: RawStream) -> Option<Answer> {
        let batch = self.hip.batch?;
        let mut list = CopyList::new(copies, DevicePtr::as_ptr);
        // SAFETY: the copies are the caller's.
        Some(answer!("hipMemcpyBatchAsync", unsafe {
            batch.call(&mut list, stream(raw))
        }))
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize, raw: RawStream) -> Answer {
        // SAFETY: the caller's.
        answer!("hipMemsetD8Async", unsafe {
            (self.hip.hipMemsetD8Async)(dst.as_ptr(), byte, bytes, stream(raw))
        })
    }

    unsafe fn launch_host(
        &self,
        raw: RawStream,
        function: HostFunction,
        data: *mut c_void,
    ) -> Answer {
        let code = match self.hip.hipLaunchHostFunc {
            // SAFETY: the caller's.
            Some(launch) => unsafe { launch(stream(raw), Some(function), data) },
            // `Rocm::new` has refused the devices that need it.
            None => code::NOT_SUPPORTED,
        };
        answer!("hipLaunchHostFunc", code)
    }
}
