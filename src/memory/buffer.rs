//! [`DeviceBuffer`] and [`DeviceBufferMut`].

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use arrow_buffer::Buffer;
use bytes::Bytes;

use crate::device::{Device, DevicePtr, Devices, Queue, SyncEvent};
use crate::error::{Error, Result};
use crate::memory::{Kept, Memory, Owner, Ready};

/// Shared, immutable memory of a device. Clones and slices share the owner that keeps it alive.
///
/// Safe code cannot read it on the host: there is no `Deref` and no slice of bytes, and `Debug` prints the address only.
/// [`into_host`](Self::into_host) turns memory that the host can read into an arrow [`Buffer`].
///
/// ```
/// use arrow_buffer::Buffer;
/// use arrow_device::DeviceBuffer;
///
/// let buffer = DeviceBuffer::from(Buffer::from_vec(vec![1i32, 2, 3])); // on the CPU, not copied
/// let last = buffer.slice(8, 4)?;
/// assert_eq!(last.into_host()?.typed_data::<i32>(), [3]);
/// # Ok::<(), arrow_device::Error>(())
/// ```
///
/// Device memory can neither be indexed nor borrowed as a slice:
///
/// ```compile_fail,E0608
/// # fn first_byte(buffer: arrow_device::DeviceBuffer) -> u8 {
/// buffer[0] // does not compile
/// # }
/// ```
///
/// ```compile_fail,E0308
/// # fn bytes(buffer: &arrow_device::DeviceBuffer) -> &[u8] {
/// buffer // does not compile
/// # }
/// ```
#[derive(Clone)]
pub struct DeviceBuffer {
    owner: Arc<Owner>,
    base: DevicePtr,
    /// Bytes from `base`.
    offset: usize,
    /// Bytes.
    len: usize,
}

impl DeviceBuffer {
    pub(crate) fn from_parts(
        owner: Arc<Owner>,
        base: DevicePtr,
        offset: usize,
        len: usize,
    ) -> Self {
        Self {
            owner,
            base,
            offset,
            len,
        }
    }

    /// Wraps `len` bytes of device memory that `owner` keeps alive. `owner` is dropped once no buffer and no recorded device work
    /// uses the memory. The memory may be read once `ready` has completed, or at once if that is `None`.
    ///
    /// # Safety
    /// `base` is valid on `device` for `len` bytes, and the memory does not change between `ready` and the drop of `owner`.
    pub unsafe fn from_raw(
        device: &Device,
        base: DevicePtr,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
        ready: Option<SyncEvent>,
    ) -> Self {
        let ready = ready.map_or(Ready::Now, Ready::Event);
        let owner = Owner::new(device.clone(), Memory::Kept(Kept(owner)), ready);
        Self::from_parts(Arc::new(owner), base, 0, len)
    }

    /// Returns the device whose memory this is.
    pub fn device(&self) -> &Device {
        self.owner.device()
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first byte, for comparisons and for `unsafe` code. Work that uses it is not ordered after the
    /// work that made the memory: for that, use [`on`](Self::on).
    pub fn address(&self) -> DevicePtr {
        self.base.offset(self.offset)
    }

    /// Returns `len` bytes that start `offset` bytes into this buffer, without a copy.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if they do not lie inside the buffer.
    pub fn slice(&self, offset: usize, len: usize) -> Result<Self> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::argument(format!(
                "slice of {len} bytes at {offset} of a buffer of {} bytes",
                self.len
            )));
        }
        Ok(Self {
            offset: self.offset + offset,
            len,
            ..self.clone()
        })
    }

    /// Lends the buffer to work on `queue`. The queue waits until the memory is ready; this thread does not. Dropping the loan
    /// records the use, so that the memory is freed after the work that was queued before the drop.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a queue of another device, or the device's own error.
    pub fn on(&self, queue: &Queue) -> Result<Loan<'_>> {
        check_queue(queue, self.device())?;
        self.owner.wait_on(queue)?;
        Ok(Loan {
            owner: &self.owner,
            queue: queue.clone(),
            address: self.address(),
        })
    }

    /// Returns the memory as an arrow buffer, without a copy. Waits until it is ready.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the host cannot read the memory.
    pub fn into_host(self) -> Result<Buffer> {
        if !self.device().is_host_readable() {
            return Err(Error::NotSupported {
                device: self.device().id(),
                operation: "reading memory on the host",
                reason: "the host cannot read this device's memory; download it".into(),
            });
        }
        self.owner.wait_host()?;
        // SAFETY: the device is host-readable and the memory is ready, as was just checked; the owner keeps `len` bytes at
        // the address alive.
        Ok(unsafe { host_buffer(&self.owner, self.address(), self.len) })
    }

    pub(crate) fn owner(&self) -> &Arc<Owner> {
        &self.owner
    }

    pub(crate) fn base(&self) -> DevicePtr {
        self.base
    }

    /// Returns the offset from the base in bytes.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }
}

/// Returns a [`Buffer`] over memory that `owner` keeps alive.
///
/// # Safety
/// The host may read `len` bytes at `address`, which do not change as long as `owner` lives.
pub(crate) unsafe fn host_buffer(owner: &Arc<Owner>, address: DevicePtr, len: usize) -> Buffer {
    match std::ptr::NonNull::new(address.as_ptr().cast::<u8>()) {
        Some(ptr) if len > 0 => {
            // SAFETY: the caller guarantees that the memory is readable and unchanged as long as the owner lives (see
            // `# Safety`), and the buffer holds the owner.
            unsafe { Buffer::from_custom_allocation(ptr, len, owner.clone()) }
        }
        _ => Buffer::default(),
    }
}

pub(crate) fn check_queue(queue: &Queue, device: &Device) -> Result<()> {
    if queue.device() == device {
        return Ok(());
    }
    Err(Error::argument(format!(
        "a queue of {} for memory of {device}",
        queue.device()
    )))
}

impl From<Buffer> for DeviceBuffer {
    /// Wraps host memory as a buffer of the CPU, without a copy.
    fn from(buffer: Buffer) -> Self {
        let (base, len) = (
            DevicePtr::new(buffer.as_ptr().cast_mut().cast()),
            buffer.len(),
        );
        // SAFETY: the buffer keeps `len` bytes alive, wherever it is moved, and nobody writes to them.
        unsafe { Self::from_raw(&Devices::cpu(), base, len, Box::new(buffer), None) }
    }
}

impl From<Bytes> for DeviceBuffer {
    /// Wraps host memory as a buffer of the CPU, without a copy.
    fn from(bytes: Bytes) -> Self {
        let (base, len) = (
            DevicePtr::new(bytes.as_ptr().cast_mut().cast()),
            bytes.len(),
        );
        // SAFETY: `bytes` keeps `len` bytes alive, wherever it is moved, and nobody writes to them.
        unsafe { Self::from_raw(&Devices::cpu(), base, len, Box::new(bytes), None) }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("device", &self.device().id())
            .field("address", &self.address())
            .field("len", &self.len)
            .finish()
    }
}

/// A buffer lent to the work of one queue (see [`DeviceBuffer::on`]). Dropping it records the use.
#[derive(Debug)]
#[must_use = "dropping the loan means that all work that uses the buffer was queued"]
pub struct Loan<'a> {
    owner: &'a Arc<Owner>,
    queue: Queue,
    address: DevicePtr,
}

impl Loan<'_> {
    /// Returns the address of the first byte.
    pub fn address(&self) -> DevicePtr {
        self.address
    }
}

#[cfg(feature = "cuda")]
impl Loan<'_> {
    pub(crate) fn address_ref(&self) -> &DevicePtr {
        &self.address
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        self.owner.record_use(&self.queue);
    }
}

/// Fresh device memory with arbitrary content, which its only holder fills by work on a queue and then
/// [freezes](Self::freeze) into a [`DeviceBuffer`].
///
/// ```
/// use arrow_device::{DeviceBufferMut, Devices};
///
/// let queue = Devices::cpu().default_queue();
/// let mut memory = DeviceBufferMut::allocate(&queue, 16)?;
/// memory.fill(0)?;
/// assert_eq!(memory.freeze()?.len(), 16);
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Debug)]
pub struct DeviceBufferMut {
    queue: Queue,
    base: DevicePtr,
    len: usize,
}

impl DeviceBufferMut {
    /// Allocates `len` bytes, aligned to 64 bytes and padded to a multiple of 64, in the order of `queue`.
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`], or the device's own error.
    pub fn allocate(queue: &Queue, len: usize) -> Result<Self> {
        let base = match padded(len) {
            Some(0) => DevicePtr::NULL,
            Some(bytes) => queue.allocate(bytes)?,
            None => {
                return Err(Error::OutOfMemory {
                    device: queue.device().id(),
                    operation: "allocate",
                    bytes: len,
                });
            }
        };
        Ok(Self {
            queue: queue.clone(),
            base,
            len,
        })
    }

    /// Returns the queue in whose order the memory was allocated. Work on another queue must first wait for an event of this
    /// one.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Returns the length in bytes, without the padding.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first byte, for work that writes to it.
    pub fn address(&self) -> DevicePtr {
        self.base
    }

    /// Sets all bytes, padding included, by work on the queue.
    ///
    /// # Errors
    /// Returns the device's own error.
    pub fn fill(&mut self, byte: u8) -> Result<()> {
        // SAFETY: `allocate` allocated the padded length, and the memory is freed in the queue's order, after the fill.
        unsafe {
            self.queue
                .fill(self.base, byte, padded(self.len).unwrap_or(0))
        }
    }

    /// Ends the writing. The buffer is ready once all work that the queue was given so far has completed; this does not wait.
    ///
    /// # Errors
    /// Returns the device's own error if no event can be recorded. The memory is freed then.
    pub fn freeze(self) -> Result<DeviceBuffer> {
        let ready = match self.queue.record()? {
            Some(event) => Ready::Event(event),
            None => Ready::Now,
        };
        let (base, len) = (self.base, self.len);
        let device = self.queue.device().clone();
        let owner = Owner::new(device, self.into_memory(), ready);
        Ok(DeviceBuffer::from_parts(Arc::new(owner), base, 0, len))
    }

    /// Returns the memory for an owner.
    pub(crate) fn into_memory(self) -> Memory {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is neither dropped nor used as a whole again, so the queue is moved out once.
        let queue = unsafe { std::ptr::read(&this.queue) };
        match padded(this.len) {
            Some(bytes @ 1..) => Memory::Device {
                queue,
                base: this.base,
                bytes,
            },
            _ => Memory::Kept(Kept(Box::new(queue))),
        }
    }
}

#[cfg(feature = "cuda")]
impl DeviceBufferMut {
    pub(crate) fn address_ref(&self) -> &DevicePtr {
        &self.base
    }
}

#[cfg(feature = "cuda")]
impl DeviceBuffer {
    /// Transfers the memory, all of it, to the caller's work on `queue`, which waits for what the free would wait for. After
    /// an error the buffer is unchanged.
    pub(crate) fn surrender(&mut self, queue: &Queue) -> Result<DevicePtr> {
        let (base, len) = (self.address(), self.len);
        let owner = Arc::get_mut(&mut self.owner)
            .ok_or_else(|| Error::argument("the memory is shared with other buffers"))?;
        owner.surrender(queue, base, len)?;
        Ok(base)
    }
}

/// Returns `len` bytes rounded up to a multiple of 64.
fn padded(len: usize) -> Option<usize> {
    len.checked_next_multiple_of(crate::device::ALIGNMENT)
}

impl Drop for DeviceBufferMut {
    fn drop(&mut self) {
        if let Some(bytes @ 1..) = padded(self.len) {
            // SAFETY: `allocate` allocated this many bytes on this queue, and they were not frozen. `queue` asks callers to
            // order work on other queues themselves.
            unsafe { self.queue.free(self.base, bytes) }
        }
    }
}
