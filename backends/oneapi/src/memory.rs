//! The memory of a device: SYCL's unified shared memory.

use std::sync::Arc;

use arrow_device::Result;
use arrow_device::device::DevicePtr;

use crate::sys::{OneApiMemory, Owned, raw};

/// An allocation, which is freed when this is dropped. `sycl::free` waits until the device does not use the memory any more, and so may wait
/// for other work too.
#[derive(Debug)]
pub struct Block {
    device: Arc<Owned<raw::Device>>,
    base: DevicePtr,
}

impl Block {
    /// Allocates memory; `None` if there is not enough. What the host can read is initialised.
    pub(crate) fn new(
        device: &Arc<Owned<raw::Device>>,
        memory: OneApiMemory,
        bytes: usize,
    ) -> Result<Option<Arc<Self>>> {
        let Some(base) = device.allocate(memory, bytes)? else {
            return Ok(None);
        };
        if memory != OneApiMemory::Device {
            // SAFETY: the memory is new, of this many bytes, and the host may write to shared and host memory that no work uses.
            unsafe { base.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        }
        let device = device.clone();
        Ok(Some(Arc::new(Self { device, base })))
    }

    pub(crate) fn base(&self) -> DevicePtr {
        self.base
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // An error has no place to go: the memory is lost.
        // SAFETY: the memory was allocated by this device, and is freed once. The engine drops it when no work uses it.
        let _ = unsafe { self.device.free(self.base) };
    }
}
