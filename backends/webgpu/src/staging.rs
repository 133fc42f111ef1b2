//! Staging buffers: the memory of wgpu that the host writes uploads to and reads downloads from, kept for reuse.

use std::sync::{Arc, Mutex};

use arrow_device::Result;
use wgpu::{BufferUsages, MapMode};

use crate::sys::{Gpu, lock};

/// The sizes of staging buffers are powers of two from the first to the second.
const SIZES: (usize, usize) = (64 << 10, 2 << 20);

/// The staging buffers of a device, of each direction.
pub(crate) struct Staging {
    up: Arc<Shelf>,
    down: Arc<Shelf>,
    most: usize,
}

/// Idle buffers: for uploads they are mapped, for downloads they are not.
pub(crate) struct Shelf {
    idle: Mutex<Vec<wgpu::Buffer>>,
    most_bytes: u64,
}

impl Shelf {
    fn new(most_bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            idle: Mutex::default(),
            most_bytes: most_bytes as u64,
        })
    }

    fn take(&self, bytes: usize) -> Option<wgpu::Buffer> {
        let mut idle = lock(&self.idle);
        // The one that was used last is in the processor's cache.
        let at = idle
            .iter()
            .rposition(|buffer| buffer.size() == bytes as u64)?;
        Some(idle.remove(at))
    }

    /// Puts a buffer back, unless there are enough.
    pub(crate) fn give(&self, buffer: wgpu::Buffer) {
        let mut idle = lock(&self.idle);
        let bytes: u64 = idle.iter().map(wgpu::Buffer::size).sum();
        if bytes + buffer.size() <= self.most_bytes {
            idle.push(buffer);
            return;
        }
        drop(idle);
        drop(buffer);
    }

    fn clear(&self) {
        let idle = std::mem::take(&mut *lock(&self.idle));
        drop(idle);
    }
}

impl Staging {
    /// Keeps at most `idle_bytes` bytes of each direction.
    pub(crate) fn new(gpu: &Gpu, idle_bytes: usize) -> Self {
        let most = usize::try_from(gpu.limits.max_buffer_size).unwrap_or(usize::MAX);
        Self {
            up: Shelf::new(idle_bytes),
            down: Shelf::new(idle_bytes),
            // A power of two, or all that there may be.
            most: most.min(SIZES.1) / 8 * 8,
        }
    }

    /// Returns the size of the buffer for `left` bytes, which may be fewer.
    fn size(&self, left: usize) -> usize {
        let size = left.checked_next_power_of_two().unwrap_or(SIZES.1);
        size.clamp(SIZES.0, SIZES.1).min(self.most)
    }

    /// Returns a mapped buffer for an upload of `left` bytes, or of a part of them.
    pub(crate) fn up(&self, gpu: &Gpu, left: usize) -> Result<wgpu::Buffer> {
        let size = self.size(left);
        let usage = BufferUsages::MAP_WRITE | BufferUsages::COPY_SRC;
        let idle = self.up.take(size);
        idle.map_or_else(|| gpu.create_buffer("stage", size, usage, true), Ok)
    }

    /// Maps a buffer of [`up`](Self::up) again once the work that was submitted has read it. Within [`Gpu::call`].
    pub(crate) fn reuse(&self, buffer: wgpu::Buffer) {
        let (home, again) = (self.up.clone(), buffer.clone());
        buffer.map_async(MapMode::Write, .., move |mapped| {
            if mapped.is_ok() {
                home.give(again);
            }
        });
    }

    /// Returns a buffer for a download of `left` bytes, or of a part of them, and where it is to be given back. `make_room` is called
    /// before a new one is made.
    pub(crate) fn down(
        &self,
        gpu: &Gpu,
        left: usize,
        make_room: impl FnOnce() -> Result<()>,
    ) -> Result<(wgpu::Buffer, Arc<Shelf>)> {
        let size = self.size(left);
        let usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST;
        let mut idle = self.down.take(size);
        if idle.is_none() {
            make_room()?;
            idle = self.down.take(size);
        }
        let buffer = idle.map_or_else(|| gpu.create_buffer("stage", size, usage, false), Ok)?;
        Ok((buffer, self.down.clone()))
    }

    /// Drops all buffers that are not in use.
    pub(crate) fn trim(&self) {
        self.up.clear();
        self.down.clear();
    }
}
