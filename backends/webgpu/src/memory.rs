//! Device memory: addresses that stand for `wgpu::Buffer`s.
//!
//! An allocation is a range of reserved addresses ([`Reserved`]) over one buffer, or over several where it is larger than the device's
//! largest buffer: then all but the last have a chunk's bytes, so that no limit of wgpu shows in an address.

use std::any::Any;
use std::fmt;
use std::sync::Mutex;

use arrow_device::Result;
use arrow_device::device::DevicePtr;
use arrow_device::device::engine::Reserved;
use wgpu::BufferUsages;

use crate::sys::Gpu;

/// The offsets at which buffers of an allocation meet are multiples of this many bytes.
const GRAIN: usize = 256;

/// Addresses and the buffers behind them. wgpu frees a buffer that was dropped once the work that was submitted with it has ended.
pub struct Allocation {
    addresses: Reserved,
    bytes: usize,
    buffers: Vec<wgpu::Buffer>,
    /// The bytes of all buffers but the last.
    chunk: usize,
    /// What the program keeps along with its buffer, which need not be `Sync`. Dropped last.
    _keep: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Bytes of a `wgpu::Buffer`. See [`WgpuDevice::resolve`](crate::WgpuDevice::resolve).
#[derive(Clone, Debug)]
pub struct Place {
    /// The buffer.
    pub buffer: wgpu::Buffer,
    /// Bytes before the first one.
    pub offset: u64,
    /// The number of bytes.
    pub bytes: u64,
}

/// Returns the most bytes of a buffer of an allocation.
pub(crate) fn chunk(gpu: &Gpu) -> Result<usize> {
    let most = usize::try_from(gpu.limits.max_buffer_size).unwrap_or(usize::MAX);
    match most.min(isize::MAX as usize) / GRAIN * GRAIN {
        0 => {
            let reason = format!("its limit max_buffer_size is {most} bytes; request more");
            Err(gpu.not_supported("adopt", reason))
        }
        chunk => Ok(chunk),
    }
}

impl Allocation {
    pub(crate) fn new(gpu: &Gpu, bytes: usize, chunk: usize) -> Result<Self> {
        let usages = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
        // The cheaper of both, and the one that refuses what no machine has.
        let addresses = Reserved::new(gpu.id(), bytes)?;
        let starts = (0..bytes).step_by(chunk);
        let buffers = starts
            .map(|from| gpu.create_buffer("allocate", chunk.min(bytes - from), usages, false));
        Ok(Self {
            addresses,
            bytes,
            buffers: buffers.collect::<Result<_>>()?,
            chunk,
            _keep: Mutex::default(),
        })
    }

    /// Makes one of a buffer of the program, with at least 1 byte, without a copy.
    pub(crate) fn of(gpu: &Gpu, buffer: wgpu::Buffer, keep: Box<dyn Any + Send>) -> Result<Self> {
        let bytes = usize::try_from(buffer.size());
        let bytes = bytes.map_err(|_| gpu.out_of_memory("wrap", usize::MAX))?;
        Ok(Self {
            addresses: Reserved::new(gpu.id(), bytes)?,
            bytes,
            buffers: vec![buffer],
            chunk: bytes,
            _keep: Mutex::new(Some(keep)),
        })
    }

    pub(crate) fn base(&self) -> DevicePtr {
        self.addresses.base()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the buffers, in the order of their addresses.
    pub(crate) fn buffers(&self) -> &[wgpu::Buffer] {
        &self.buffers
    }

    /// Returns the bytes from this offset on that lie in one buffer. The offset is less than the bytes of the allocation.
    pub(crate) fn locate(&self, offset: usize) -> Place {
        let (number, within) = (offset / self.chunk, offset % self.chunk);
        let buffer = self.buffers[number].clone();
        let offset = within as u64;
        Place {
            bytes: buffer.size() - offset,
            buffer,
            offset,
        }
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} over {:?}", self.addresses, self.buffers)
    }
}
