//! How kernels are launched. Each has a name and parameters of 8 bytes, the same on all devices; `filter.cu` says what it does.

use std::sync::Arc;

use arrow_device::device::DevicePtr;
use arrow_device::{DeviceBufferMut, Queue, Result};

use super::sim;

/// The kernels of a device.
#[derive(Debug)]
pub(crate) enum Kernels {
    Sim,
    #[cfg(feature = "cuda")]
    Cuda(super::cuda::Cuda),
}

/// A queue, and the kernels of its device.
#[derive(Clone)]
pub(crate) struct Launcher {
    pub(crate) kernels: Arc<Kernels>,
    pub(crate) queue: Queue,
}

impl Launcher {
    /// Queues a kernel for so many rows.
    ///
    /// # Safety
    /// The words must be the kernel's parameters. What it reads with them must be lent to the queue and be valid, and what it writes must
    /// be memory of enough bytes that is not frozen yet.
    pub(crate) unsafe fn launch(
        &self,
        kernel: &'static str,
        rows: u64,
        words: &[u64],
    ) -> Result<()> {
        match &*self.kernels {
            // SAFETY: the caller guarantees parameters and memory (see `# Safety`).
            Kernels::Sim => unsafe { sim::launch(&self.queue, kernel, rows, words) },
            #[cfg(feature = "cuda")]
            // SAFETY: the caller guarantees parameters and memory (see `# Safety`).
            Kernels::Cuda(kernels) => unsafe { kernels.launch(&self.queue, kernel, rows, words) },
        }
    }

    /// Allocates memory of zeros.
    pub(crate) fn zeros(&self, bytes: usize) -> Result<DeviceBufferMut> {
        let mut zeros = DeviceBufferMut::allocate(&self.queue, bytes)?;
        zeros.fill(0)?;
        Ok(zeros)
    }
}

/// An address as a parameter.
pub(crate) fn word(address: DevicePtr) -> u64 {
    address.address() as u64
}

/// The address of memory that a kernel writes, as a parameter.
pub(crate) fn to(buffer: &mut DeviceBufferMut) -> u64 {
    word(buffer.address())
}
