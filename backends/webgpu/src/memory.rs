//! Device memory: addresses that stand for `wgpu::Buffer`s.
//!
//! An allocation is a range of reserved addresses ([`Reserved`]) over one buffer, or over several where it is larger than the device's
//! largest buffer: then all but the last have [`chunk`](Memory::chunk) bytes, so that no limit of wgpu shows in an address.

use std::sync::Arc;

use arrow_device::Result;
use arrow_device::device::parts::{Block, Found, Pool, Ranges, Reserved};
use arrow_device::device::{AddressClass, DevicePtr, PointerInfo};
use wgpu::BufferUsages;

use crate::sys::Gpu;

/// The offsets at which buffers of an allocation meet are multiples of this many bytes.
const GRAIN: usize = 256;
/// All queues of a device are one, for which freed memory can be reused at once.
const QUEUE: u64 = 0;

/// The device memory of a device.
pub(crate) struct Memory {
    live: Ranges<Arc<Allocation>>,
    idle: Pool<Arc<Allocation>>,
    usages: BufferUsages,
    /// The most bytes of a buffer.
    chunk: usize,
}

/// Addresses and the buffers behind them.
pub(crate) struct Allocation {
    addresses: Reserved,
    buffers: Vec<wgpu::Buffer>,
    /// The bytes of all buffers but the last.
    chunk: usize,
    /// Whether the buffer is a program's own, which is not reused.
    is_foreign: bool,
}

/// Where an address lies.
#[derive(Clone, Debug)]
pub(crate) struct Located {
    pub(crate) buffer: wgpu::Buffer,
    /// In bytes from the beginning of the buffer.
    pub(crate) offset: u64,
    /// How many bytes from there on lie in this buffer and in the allocation, as it was asked for.
    pub(crate) left: u64,
}

impl Allocation {
    pub(crate) fn base(&self) -> DevicePtr {
        self.addresses.base()
    }

    /// Returns the buffers, in the order of their addresses.
    pub(crate) fn buffers(&self) -> &[wgpu::Buffer] {
        &self.buffers
    }
}

impl Memory {
    pub(crate) fn new(gpu: &Gpu, usages: BufferUsages, idle_bytes: usize) -> Result<Self> {
        let most = usize::try_from(gpu.limits.max_buffer_size).unwrap_or(usize::MAX);
        let chunk = most.min(isize::MAX as usize) / GRAIN * GRAIN;
        if chunk == 0 {
            let reason = format!("its limit max_buffer_size is {most} bytes; request more");
            return Err(gpu.not_supported("adopt", reason));
        }
        Ok(Self {
            live: Ranges::new(),
            idle: Pool::new(idle_bytes),
            usages: usages
                | BufferUsages::STORAGE
                | BufferUsages::COPY_SRC
                | BufferUsages::COPY_DST,
            chunk,
        })
    }

    /// Allocates memory. Its last use may still be running, before all work that is submitted from now on.
    pub(crate) fn allocate(&self, gpu: &Gpu, bytes: usize) -> Result<DevicePtr> {
        let out_of_memory = || gpu.out_of_memory("allocate", bytes);
        let rounded = Pool::<()>::rounded(bytes).ok_or_else(out_of_memory)?;
        let memory = match self.idle.take(QUEUE, rounded, |_| true) {
            Some(block) => block.after,
            None => {
                drop(self.idle.take_done(false, |_| true));
                let made = self.create(gpu, rounded, bytes).or_else(|e| {
                    self.trim();
                    // Runs the callbacks of what has ended, after which wgpu frees buffers that were dropped.
                    gpu.poll()?;
                    self.create(gpu, rounded, bytes).map_err(|_| e)
                });
                Arc::new(made?)
            }
        };
        let base = memory.base();
        self.live.insert(base, bytes, memory);
        Ok(base)
    }

    fn create(&self, gpu: &Gpu, rounded: usize, asked: usize) -> Result<Allocation> {
        // The cheaper of both, and the one that refuses what no machine has.
        let addresses =
            Reserved::new(gpu.id, rounded).map_err(|_| gpu.out_of_memory("allocate", asked))?;
        let starts = (0..rounded).step_by(self.chunk);
        let buffers = starts.map(|from| {
            let bytes = self.chunk.min(rounded - from);
            gpu.create_buffer("allocate", bytes, self.usages, false)
        });
        Ok(Allocation {
            addresses,
            buffers: buffers.collect::<Result<_>>()?,
            chunk: self.chunk,
            is_foreign: false,
        })
    }

    /// Adds a buffer of the program, without a copy. Returns the address of its first byte. [`remove`](Self::remove) takes it out
    /// again: it is never reused.
    ///
    /// The caller checks that the buffer is of this device, has at least 1 byte and whole words (4 bytes), and the usage `COPY_SRC`.
    pub(crate) fn insert(&self, gpu: &Gpu, buffer: wgpu::Buffer) -> Result<DevicePtr> {
        let out_of_memory = |_| gpu.out_of_memory("wrap", usize::MAX);
        let bytes = usize::try_from(buffer.size()).map_err(out_of_memory)?;
        let memory = Allocation {
            addresses: Reserved::new(gpu.id, bytes)?,
            buffers: vec![buffer],
            chunk: bytes,
            is_foreign: true,
        };
        let base = memory.base();
        self.live.insert(base, bytes, Arc::new(memory));
        Ok(base)
    }

    /// Takes an allocation out of the table, without reusing it: neither its addresses nor its buffers are known any more.
    /// Returns `None` if none begins at this address.
    pub(crate) fn remove(&self, base: DevicePtr) -> Option<Arc<Allocation>> {
        self.live.remove(base).map(|(_, memory)| memory)
    }

    /// Gives memory back for later work. Returns `false` if no allocation begins at the address.
    pub(crate) fn free(&self, base: DevicePtr) -> bool {
        let Some(memory) = self.remove(base) else {
            return false;
        };
        if !memory.is_foreign {
            let bytes = memory.addresses.bytes();
            let (queue, after) = (QUEUE, memory);
            self.idle.give(Block {
                base,
                bytes,
                queue,
                after,
            });
            if self.idle.is_over(1) {
                drop(self.idle.take_done(false, |_| true));
            }
        }
        true
    }

    /// Drops all memory that nothing uses any more. wgpu frees it once the work that was submitted has ended.
    pub(crate) fn trim(&self) {
        drop(self.idle.take_all());
    }

    /// Returns the buffer in which an address lies, if it lies in a live allocation.
    pub(crate) fn find(&self, address: DevicePtr) -> Option<Located> {
        let Found {
            value,
            bytes,
            offset,
            ..
        } = self.live.find(address)?;
        let (number, within) = (offset / value.chunk, offset % value.chunk);
        let buffer = value.buffers.get(number)?.clone();
        let left = (value.chunk - within).min(bytes - offset);
        Some(Located {
            buffer,
            offset: within as u64,
            left: left as u64,
        })
    }

    /// Returns the live allocation in which an address lies, with the length that was asked for and the offset of the address, in bytes.
    pub(crate) fn allocation(&self, address: DevicePtr) -> Option<Found<Arc<Allocation>>> {
        self.live.find(address)
    }

    pub(crate) fn classify(&self, address: DevicePtr, bytes: usize) -> Option<PointerInfo> {
        self.live.classify(address, bytes, AddressClass::Device)
    }

    /// Returns how many allocations are in use.
    pub(crate) fn used(&self) -> usize {
        self.live.len()
    }
}
