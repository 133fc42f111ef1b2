//! [`Landing`]: a download, from its staging buffer to the host.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use arrow_device::{Error, Result};
use wgpu::{MapMode, SubmissionIndex};

use crate::callback::Tell;
use crate::staging::Shelf;
use crate::sys::Gpu;

/// A download whose copy to a staging buffer was submitted.
pub(crate) struct Landing {
    buffer: wgpu::Buffer,
    home: Arc<Shelf>,
    parts: Vec<Part>,
    state: Arc<AtomicU8>,
    pub(crate) submission: SubmissionIndex,
    /// The number of the next event when it was submitted: the first one that includes it.
    pub(crate) number: u64,
}

/// The states of a [`Landing`].
const RUNNING: u8 = 0;
const ARRIVED: u8 = 1;
const FAILED: u8 = 2;

/// Where wgpu says whether a staging buffer is mapped. It has failed if it does not, as when a callback of the program panics before ours in
/// the same poll: then ours is dropped without a call.
struct Answer(Arc<AtomicU8>, Option<Tell>);

impl Drop for Answer {
    fn drop(&mut self) {
        let (from, to) = (RUNNING, FAILED);
        let _ = self
            .0
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
        if let Some(tell) = self.1.take() {
            tell();
        }
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
    pub(crate) fn new(
        buffer: wgpu::Buffer,
        home: Arc<Shelf>,
        parts: Vec<Part>,
        submission: SubmissionIndex,
        told: Option<Tell>,
    ) -> Self {
        let state = Arc::new(AtomicU8::new(RUNNING));
        let answer = Answer(state.clone(), told);
        buffer.map_async(MapMode::Read, .., move |mapped| {
            if mapped.is_ok() {
                answer.0.store(ARRIVED, Ordering::Release);
            }
        });
        let number = 0;
        Self {
            buffer,
            home,
            parts,
            state,
            submission,
            number,
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.state.load(Ordering::Acquire) == RUNNING
    }

    /// Returns the host memory to which it will write.
    pub(crate) fn writes(&self) -> Vec<Range<usize>> {
        let writes = self
            .parts
            .iter()
            .map(|part| part.to.addr()..part.to.addr() + part.bytes);
        writes.collect()
    }

    /// Returns what tells this download from others.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.state).addr()
    }

    /// Copies what has arrived to the host. An error is the end of the device.
    pub(crate) fn land(self, gpu: &Gpu) -> Result<()> {
        let failed = |e: Error| gpu.failed(e);
        if self.state.load(Ordering::Acquire) != ARRIVED {
            gpu.check_alive()?;
            return Err(failed(
                gpu.error("map_async", "a staging buffer could not be mapped"),
            ));
        }
        let Self {
            buffer,
            home,
            parts,
            ..
        } = self;
        let copied = gpu.call("get_mapped_range", |_, _| {
            let view = buffer.get_mapped_range(..).map_err(|e| e.to_string())?;
            for Part { from, to, bytes } in parts {
                let from = &view[from..from + bytes];
                // SAFETY: the contract of `RawQueue::copy` keeps the destination until an event that includes this copy has
                // completed, or the device was settled, which waits for this thread.
                unsafe { from.as_ptr().copy_to_nonoverlapping(to, bytes) };
            }
            drop(view);
            buffer.unmap();
            Ok::<_, String>(())
        });
        let copied = copied.and_then(|copied| copied.map_err(|e| gpu.error("get_mapped_range", e)));
        copied.map_err(failed)?;
        home.give(buffer);
        Ok(())
    }
}

/// Returns whether some of the ranges overlap some of the others.
pub(crate) fn overlap(some: &[Range<usize>], others: &[Range<usize>]) -> bool {
    let meet = |one: &Range<usize>| {
        others
            .iter()
            .any(|other| one.start < other.end && other.start < one.end)
    };
    some.iter().any(meet)
}
