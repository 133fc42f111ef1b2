//! The CPU: ordinary host memory as a device.

use std::alloc::{self, Layout};
use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use crate::abi::ArrowDeviceType;
use crate::device::backend::{
    Allocate, Backend, Capabilities, CopyOp, DevicePtr, RawQueue, not_supported, out_of_memory,
};
use crate::device::{DeviceId, Process, lock};
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

/// Where memory of a program's own comes from, and what frees it, by its address.
struct Program {
    allocate: Allocate,
    live: Mutex<HashMap<usize, Box<dyn Any + Send + Sync>>>,
    process: Process,
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").finish_non_exhaustive()
    }
}

impl HostBackend {
    pub(crate) fn new(id: DeviceId) -> Self {
        let page = match id.device_type {
            ArrowDeviceType::CPU => Some(ALIGNMENT),
            ArrowDeviceType::METAL => Some(METAL_PAGE),
            _ => None,
        };
        let program = None;
        Self(Arc::new(HostQueue { id, page, program }))
    }

    /// The CPU, with memory that a program allocates.
    pub(crate) fn of_program(allocate: Allocate) -> Self {
        let program = Program {
            allocate,
            live: Mutex::default(),
            process: Process::this(),
        };
        Self(Arc::new(HostQueue {
            id: DeviceId::CPU,
            page: None,
            program: Some(program),
        }))
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
        if let Some(program) = self.program.as_ref().filter(|_| bytes > 0) {
            let (base, owner) = (program.allocate)(bytes)?;
            lock(&program.live).insert(base.address(), owner);
            return Ok(base);
        }
        if self.page.is_none() && self.program.is_none() {
            let reason = "page-locked memory needs the device's own backend";
            return Err(not_supported(self.id, "allocate", reason));
        }
        if bytes == 0 {
            return Err(Error::argument("allocation of 0 bytes"));
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
        if let Some(program) = &self.program {
            // In a child of the process the table may be locked for ever.
            if program.process.is_this() {
                let owner = lock(&program.live).remove(&base.address());
                // Without the lock: it is the program's.
                let what = "free of memory that is not allocated";
                drop(owner.ok_or_else(|| Error::argument(what))?);
            }
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
