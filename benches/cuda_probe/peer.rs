//! The same transfers by cudarc's safe interface.

use std::sync::Arc;
use std::time::Instant;

use arrow_device::cuda::cudarc::driver::{CudaContext, CudaSlice, CudaStream, PinnedHostSlice};

use crate::data::pack;
use crate::stats::{Res, Seconds, since};

/// A stream of cudarc's own, in the primary context.
pub(crate) struct Peer(Arc<CudaStream>);

impl Peer {
    pub(crate) fn new(ordinal: usize) -> Res<Self> {
        let context = CudaContext::new(ordinal)?;
        // Its events for slices that several streams use: one stream needs none, and is faster without.
        // SAFETY: every slice of this peer is used on its one stream alone.
        unsafe { context.disable_event_tracking() };
        Ok(Self(context.new_stream()?))
    }

    /// A block of zeros on the device.
    pub(crate) fn block(&self, bytes: usize) -> Res<CudaSlice<u8>> {
        let block = self.0.alloc_zeros(bytes)?;
        self.0.synchronize()?;
        Ok(block)
    }

    /// Page-locked memory, not write-combined.
    pub(crate) fn locked(&self, bytes: usize) -> Res<PinnedHostSlice<u8>> {
        // SAFETY: bytes may have any content, and the kernel has zeroed these.
        Ok(unsafe { self.0.context().alloc_pinned_with_flags(bytes, 0) }?)
    }

    /// Times `work`; what it makes is freed untimed.
    fn timed<T>(&self, work: impl FnOnce(&Arc<CudaStream>) -> Res<T>) -> Res<Seconds> {
        let start = Instant::now();
        let made = work(&self.0)?;
        let submitted = since(start);
        self.0.synchronize()?;
        let seconds = [submitted, since(start)];
        drop(made);
        self.0.synchronize()?;
        Ok(seconds)
    }

    /// One copy into a block.
    pub(crate) fn up(&self, from: &[u8], to: &mut CudaSlice<u8>) -> Res<Seconds> {
        self.timed(|stream| Ok(stream.memcpy_htod(from, to)?))
    }

    /// One copy out of a block.
    pub(crate) fn down(&self, from: &CudaSlice<u8>, to: &mut PinnedHostSlice<u8>) -> Res<Seconds> {
        self.timed(|stream| Ok(stream.memcpy_dtoh(from, to)?))
    }

    /// A new block and a copy for each buffer.
    pub(crate) fn up_each<'a>(&self, buffers: impl Iterator<Item = &'a [u8]>) -> Res<Seconds> {
        self.timed(|stream| {
            let blocks = buffers.map(|from| stream.clone_htod(from));
            Ok(blocks.collect::<Result<Vec<_>, _>>()?)
        })
    }

    /// Buffers packed into page-locked memory that is there, which is copied into a new block.
    pub(crate) fn up_packed<'a>(
        &self,
        buffers: impl Iterator<Item = &'a [u8]>,
        locked: &mut PinnedHostSlice<u8>,
    ) -> Res<Seconds> {
        self.timed(|stream| {
            pack(locked.as_mut_slice()?, buffers);
            Ok(stream.clone_htod(&*locked)?)
        })
    }

    /// A copy of each block into fresh memory, and what `make` makes of it.
    pub(crate) fn down_each<T>(
        &self,
        blocks: &[CudaSlice<u8>],
        make: impl FnOnce(Vec<Vec<u8>>) -> Res<T>,
    ) -> Res<Seconds> {
        self.timed(|stream| {
            let here = blocks.iter().map(|from| stream.clone_dtoh(from));
            make(here.collect::<Result<_, _>>()?)
        })
    }

    /// A block copied into page-locked memory that is there, from there `each` bytes at a time into fresh memory, and what `make` makes of it.
    pub(crate) fn down_packed<T>(
        &self,
        block: &CudaSlice<u8>,
        locked: &mut PinnedHostSlice<u8>,
        each: usize,
        make: impl FnOnce(Vec<Vec<u8>>) -> Res<T>,
    ) -> Res<Seconds> {
        self.timed(|stream| {
            stream.memcpy_dtoh(block, locked)?;
            make(
                locked
                    .as_slice()?
                    .chunks(each)
                    .map(<[u8]>::to_vec)
                    .collect(),
            )
        })
    }
}
