//! The CPU: ordinary host memory as a device.

use std::alloc::{self, Layout};
use std::sync::Arc;

use crate::abi::ArrowDeviceType;
use crate::device::DeviceId;
use crate::device::backend::{
    Backend, Capabilities, CopyOp, DevicePtr, Program, RawQueue, not_supported, out_of_memory,
};
use crate::error::{Error, Result};

/// The alignment, in bytes, of everything this crate allocates.
pub(crate) const ALIGNMENT: usize = 64;

/// The alignment, in bytes, of memory of type METAL: a page of Apple's processors, of which a Metal
/// buffer consists if it wraps memory without a copy.
const METAL_PAGE: usize = 16 << 10;

/// Host memory: the CPU, and, with their own ids, the page-locked memory of devices without a
/// backend and memory that Metal devices share with the host. Synchronous, without events.
#[derive(Debug)]
pub(crate) struct HostBackend(Arc<HostQueue>);

#[derive(Debug)]
struct HostQueue {
    id: DeviceId,
    /// Allocations start at a multiple of this many bytes and are padded to one. `None` if memory
    /// of this type must come from elsewhere.
    page: Option<usize>,
    program: Option<Program>,
}

impl HostBackend {
    /// Memory of the host's own, or what a program allocates.
    pub(crate) fn new(id: DeviceId, program: Option<Program>) -> Self {
        let page = match id.device_type {
            _ if program.is_some() => None,
            ArrowDeviceType::CPU => Some(ALIGNMENT),
            ArrowDeviceType::METAL => Some(METAL_PAGE),
            _ => None,
        };
        Self(Arc::new(HostQueue { id, page, program }))
    }

    /// The number of bytes of which each buffer fills a multiple, if memory of this type is the host's own.
    pub(crate) fn page(&self) -> Option<usize> {
        self.0.page
    }
}

// SAFETY: all memory of this device is host memory, from the global allocator, from a program that
// vouches for it, or from a producer that declares it as such; work has completed when a call returns, and there are no events;
// `classify` accepts no address.
unsafe impl Backend for HostBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            host_readable: true,
            synchronous: true,
            ..Capabilities::new(self.0.id)
        }
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.0.clone())
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.0.clone())
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}

impl HostQueue {
    /// The layout of an allocation of this many bytes.
    fn layout(&self, bytes: usize) -> Option<Layout> {
        let page = self.page?;
        Layout::from_size_align(bytes.checked_next_multiple_of(page)?, page).ok()
    }
}

// SAFETY: memory comes from the global allocator with at least the requested size, aligned to
// `ALIGNMENT` or to a page, or from a program that vouches for as much; work runs at once, so in order.
unsafe impl RawQueue for HostQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        if bytes == 0 {
            return Err(Error::argument("allocation of 0 bytes"));
        }
        if let Some(program) = self.program {
            return (program.allocate)(self.id, bytes);
        }
        if self.page.is_none() {
            let reason = "page-locked memory needs the device's own backend";
            return Err(not_supported(self.id, "allocate", reason));
        }
        let oom = || out_of_memory(self.id, "allocate", bytes);
        let layout = self.layout(bytes).ok_or_else(oom)?;
        // Zeroed, because safe code may later view the memory as bytes.
        // SAFETY: `bytes` is not 0, as was just checked.
        let ptr = unsafe { alloc::alloc_zeroed(layout) };
        if ptr.is_null() {
            return Err(oom());
        }
        Ok(DevicePtr::new(ptr.cast()))
    }

    unsafe fn free(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        if let Some(program) = self.program {
            (program.free)(base);
            return Ok(());
        }
        let layout = self
            .layout(bytes)
            .ok_or_else(|| Error::argument("free of a size that was never allocated"))?;
        // SAFETY: the caller guarantees that `base` came from `allocate`, with this size, and is
        // freed once (see `# Safety`).
        unsafe { alloc::dealloc(base.as_ptr().cast(), layout) };
        Ok(())
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        for copy in copies {
            let (src, dst) = (copy.src.as_ptr(), copy.dst.as_ptr());
            // SAFETY: the caller guarantees that all ranges are valid and do not overlap (see
            // `RawQueue::copy`); a CPU's memory is the host's.
            unsafe { std::ptr::copy_nonoverlapping::<u8>(src.cast(), dst.cast(), copy.bytes) };
        }
        Ok(())
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller guarantees that `bytes` bytes at `dst` are valid (see `# Safety`).
        unsafe { std::ptr::write_bytes(dst.as_ptr().cast::<u8>(), byte, bytes) };
        Ok(())
    }
}
