//! The same transfers by cudarc's safe interface.

use std::sync::Arc;
use std::time::Instant;

use arrow_buffer::Buffer;
use arrow_device::cuda::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, HostSlice, PinnedHostSlice,
};

use crate::Probe;
use crate::stats::{Res, since};

/// A stream of cudarc's own, in the primary context.
pub(crate) struct Peer {
    stream: Arc<CudaStream>,
}

impl Peer {
    pub(crate) fn new(probe: &Probe) -> Res<Self> {
        let context = CudaContext::new(probe.ordinal)?;
        // Its events for slices that several streams use: one stream needs none, and is faster without.
        // SAFETY: every slice of this peer is used on its one stream alone.
        unsafe { context.disable_event_tracking() };
        Ok(Self {
            stream: context.new_stream()?,
        })
    }

    /// A block of zeros on the device.
    pub(crate) fn block(&self, bytes: usize) -> Res<CudaSlice<u8>> {
        let block = self.stream.alloc_zeros(bytes)?;
        self.stream.synchronize()?;
        Ok(block)
    }

    /// Page-locked memory, not write-combined.
    pub(crate) fn locked(&self, bytes: usize) -> Res<PinnedHostSlice<u8>> {
        // SAFETY: bytes may have any content, and the kernel has zeroed these.
        Ok(unsafe { self.stream.context().alloc_pinned_with_flags(bytes, 0) }?)
    }

    fn finish(&self, start: Instant) -> Res<[f64; 2]> {
        let submitted = since(start);
        self.stream.synchronize()?;
        Ok([submitted, since(start)])
    }

    /// One copy into a block.
    pub(crate) fn up(&self, from: &[u8], to: &mut CudaSlice<u8>) -> Res<[f64; 2]> {
        let start = Instant::now();
        self.stream.memcpy_htod(from, to)?;
        self.finish(start)
    }

    /// One copy out of a block.
    pub(crate) fn down(&self, from: &CudaSlice<u8>, to: &mut impl HostSlice<u8>) -> Res<[f64; 2]> {
        let start = Instant::now();
        self.stream.memcpy_dtoh(from, to)?;
        self.finish(start)
    }

    /// A new block and a copy for each buffer. Frees are not timed.
    pub(crate) fn up_each(&self, buffers: &[Buffer]) -> Res<[f64; 2]> {
        let start = Instant::now();
        let mut blocks = Vec::with_capacity(buffers.len());
        for buffer in buffers {
            blocks.push(self.stream.clone_htod(buffer.as_slice())?);
        }
        let seconds = self.finish(start)?;
        drop(blocks);
        self.stream.synchronize()?;
        Ok(seconds)
    }

    /// A copy of each block into fresh memory.
    pub(crate) fn down_each(&self, blocks: &[CudaSlice<u8>]) -> Res<[f64; 2]> {
        let start = Instant::now();
        let mut here = Vec::with_capacity(blocks.len());
        for block in blocks {
            here.push(self.stream.clone_dtoh(block)?);
        }
        let seconds = self.finish(start)?;
        drop(here);
        Ok(seconds)
    }
}
