//! How kernels are launched. Each has a name and parameters of 8 bytes, the same on all devices; `filter.cu` says what it does.

use std::mem::take;
use std::sync::Arc;

use arrow_device::device::DevicePtr;
use arrow_device::{DeviceArray, DeviceBuffer, DeviceBufferMut, Queue, Result};

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

    /// Lends a batch's struct to kernels. The queue waits until all memory of the batch is ready: once if it has one event, and not for each buffer.
    pub(crate) fn lend(&self, batch: &DeviceArray) -> Result<Lent> {
        if let Some(event) = batch.ready_event(&self.queue)? {
            self.queue.wait(&event)?;
        }
        let (queue, arrays) = (self.queue.clone(), vec![batch.clone()]);
        Ok(Lent { queue, arrays })
    }

    /// Allocates memory of zeros.
    pub(crate) fn zeros(&self, bytes: usize) -> Result<DeviceBufferMut> {
        let mut zeros = DeviceBufferMut::allocate(&self.queue, bytes)?;
        zeros.fill(0)?;
        Ok(zeros)
    }
}

/// Batches that are lent to a queue. Their memory is not freed before the kernels are done that were queued until this is dropped.
pub(crate) struct Lent {
    queue: Queue,
    pub(crate) arrays: Vec<DeviceArray>,
}

impl Lent {
    /// Ends the loans of one queue with one event.
    pub(crate) fn end(loans: impl Iterator<Item = Self>) {
        drop(loans.reduce(|mut all, mut one| {
            all.arrays.append(&mut one.arrays);
            all
        }));
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.arrays.is_empty() {
            return;
        }
        let (device, kept) = (self.queue.device(), Box::new(take(&mut self.arrays)));
        // SAFETY: there are no bytes that could be used, or change.
        let all = unsafe { DeviceBuffer::from_raw(device, DevicePtr::NULL, 0, kept, None) };
        // The end of this loan records the event until which the buffer keeps the arrays.
        drop(all.on(&self.queue));
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
