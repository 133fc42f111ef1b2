//! A backend whose memory the host reads, and which leaves in it what the allocator left there: a mistake.

use std::alloc::{Layout, alloc, dealloc};
use std::sync::Arc;

use arrow_device::device::{Backend, Capabilities, CopyOp, DevicePtr, RawQueue};
use arrow_device::{ArrowDeviceType, DeviceId, Devices, Queue, Result};

/// The CPU, except for its memory.
#[derive(Debug)]
pub(crate) struct Unwritten;

#[derive(Debug)]
struct UnwrittenQueue(Queue);

// SAFETY: the CPU has no events; the queue's memory is the global allocator's. That it is not written is what is tested.
unsafe impl Backend for Unwritten {
    fn capabilities(&self) -> Capabilities {
        let mut this = Capabilities::new(DeviceId::new(ArrowDeviceType::CUDA_HOST, 77));
        this.host_readable = true;
        this.synchronous = true;
        this
    }
    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(Arc::new(UnwrittenQueue(Devices::cpu().default_queue())))
    }
    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        self.default_queue()
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 64).unwrap()
}

// SAFETY: memory comes from the global allocator with the requested size, aligned to 64 bytes; the rest is the CPU's.
unsafe impl RawQueue for UnwrittenQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        // SAFETY: the tested rule allocates no 0 bytes.
        Ok(DevicePtr::new(unsafe { alloc(layout(bytes)) }.cast()))
    }
    unsafe fn free(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        // SAFETY: the caller guarantees memory of `allocate` with this size, freed once (see `RawQueue::free`).
        unsafe { dealloc(base.as_ptr().cast(), layout(bytes)) };
        Ok(())
    }
    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.0.raw().copy(copies) }
    }
    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.0.raw().fill(dst, byte, bytes) }
    }
}
