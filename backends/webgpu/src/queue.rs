//! [`WgpuQueue`]: all queues of a device are its one `wgpu::Queue`.

use std::fmt;
use std::sync::Arc;

use arrow_device::device::parts::exit;
use arrow_device::device::{CopyOp, DevicePtr, EventPtr, RawQueue};
use arrow_device::{Error, Result};

use crate::shared::Handle;

/// A queue: its work runs in one order with that of all others of the device.
pub(crate) struct WgpuQueue(Handle);

impl WgpuQueue {
    pub(crate) fn new(shared: &Handle) -> Arc<Self> {
        Arc::new(Self(shared.clone()))
    }
}

// SAFETY:
// - memory of `allocate` starts at a page of reserved addresses; what was freed is reused in the order of the one queue;
// - work is submitted to that queue when it is given, and runs in its order;
// - an event completes when wgpu has called back for all submissions before it, and their downloads have landed.
unsafe impl RawQueue for WgpuQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        self.0.gpu.check()?;
        if bytes == 0 {
            return Err(Error::InvalidArgument("allocation of 0 bytes".into()));
        }
        self.0.memory.allocate(&self.0.gpu, bytes)
    }

    unsafe fn free(&self, base: DevicePtr, _bytes: usize) -> Result<()> {
        if self.0.gpu.is_forked() {
            return Ok(());
        }
        // Buffers may be dropped.
        let Some(_inside) = exit::enter() else {
            return Ok(());
        };
        if self.0.memory.free(base) {
            return Ok(());
        }
        let reason = format!("{base:?} is not the beginning of an allocation of this device");
        Err(self.0.gpu.not_supported("free", reason))
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        // SAFETY: the caller guarantees the memory until the copies have completed (contract of `RawQueue::copy`).
        unsafe { self.0.copy(copies) }
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        self.0.fill(dst, byte, bytes)
    }

    fn record(&self) -> Result<EventPtr> {
        self.0.timeline.record()
    }

    /// Work that is queued later comes after the event as it is.
    unsafe fn wait(&self, event: EventPtr) -> Result<()> {
        self.0.gpu.check()?;
        self.0.timeline.check(event)
    }
}

impl fmt::Debug for WgpuQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Queue({} {:p})", self.0.gpu.id, self)
    }
}
