//! [`Landing`]: a download, from its staging buffer to the host.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use arrow_device::Result;
use wgpu::{MapMode, SubmissionIndex};

use crate::staging::Shelf;
use crate::sys::Gpu;

/// A download whose copy to a staging buffer was submitted.
pub(crate) struct Landing {
    down: Down,
    state: Arc<AtomicU8>,
    pub(crate) submission: SubmissionIndex,
    /// The number of the next event when it was submitted: the first one that includes it.
    pub(crate) number: u64,
}

/// A staging buffer that downloads are copied to.
pub(crate) struct Down {
    pub(crate) buffer: wgpu::Buffer,
    pub(crate) home: Arc<Shelf>,
    /// In bytes.
    pub(crate) used: usize,
    pub(crate) parts: Vec<Part>,
}

/// The states of a [`Landing`].
const RUNNING: u8 = 0;
const ARRIVED: u8 = 1;
const FAILED: u8 = 2;

/// Where wgpu says whether a staging buffer is mapped. It has failed if it does not, as when a callback of the program panics before ours in
/// the same poll: then ours is dropped without a call.
struct Answer(Arc<AtomicU8>);

impl Drop for Answer {
    fn drop(&mut self) {
        let (from, to) = (RUNNING, FAILED);
        let _ = self
            .0
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// Bytes of a staging buffer, and where they go.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) from: usize,
    pub(crate) to: *mut u8,
    pub(crate) bytes: usize,
}

// SAFETY: the type only holds an address. `land` writes there, where the contract of `RawQueue::copy` allows it.
unsafe impl Send for Part {}

impl Landing {
    /// Has the staging buffer mapped once the submission has ended. Within [`Gpu::call`].
    pub(crate) fn new(down: Down, submission: SubmissionIndex) -> Self {
        let state = Arc::new(AtomicU8::new(RUNNING));
        let answer = Answer(state.clone());
        down.buffer.map_async(MapMode::Read, .., move |mapped| {
            if mapped.is_ok() {
                answer.0.store(ARRIVED, Ordering::Release);
            }
        });
        Self {
            down,
            state,
            submission,
            number: 0,
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.state.load(Ordering::Acquire) == RUNNING
    }

    pub(crate) fn bytes(&self) -> usize {
        self.down.used
    }

    /// Copies what has arrived to the host. An error is the end of the device.
    pub(crate) fn land(self, gpu: &Gpu) -> Result<()> {
        let Down {
            buffer,
            home,
            parts,
            ..
        } = self.down;
        let is_there = self.state.load(Ordering::Acquire) == ARRIVED;
        let copied = gpu.call("map_async", |_, _| {
            let view = is_there
                .then(|| buffer.get_mapped_range(..).ok())
                .flatten()?;
            for Part { from, to, bytes } in parts {
                let from = &view[from..from + bytes];
                // SAFETY: the contract of `RawQueue::copy` keeps the destination until an event that includes this copy has
                // completed, or the device is over, for which `Order::synchronize` waits for this thread.
                unsafe { from.as_ptr().copy_to_nonoverlapping(to, bytes) };
            }
            drop(view);
            buffer.unmap();
            Some(())
        });
        let refused = || gpu.refused("map_async", "a staging buffer could not be mapped");
        let copied = copied.and_then(|copied| copied.ok_or_else(refused));
        copied.map_err(|e| gpu.health.fail(e))?;
        home.give(buffer);
        Ok(())
    }
}
