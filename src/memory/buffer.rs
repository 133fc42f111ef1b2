//! [`DeviceBuffer`] and [`DeviceBufferMut`].

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use arrow_buffer::Buffer;
use bytes::Bytes;

use crate::device::{Device, DevicePtr, Devices, Queue, SyncEvent};
use crate::error::{Error, Result};
use crate::memory::{Kept, Memory, Owner, Ready};

/// Shared, immutable memory of a device: a base, an offset and a length in bytes, and the owner
/// that keeps it alive. Clones and slices share the owner.
///
/// The host cannot look inside: there is no `Deref` and no slice of bytes, and `Debug` prints the
/// address only. Memory that the host can read becomes an arrow [`Buffer`] by
/// [`into_host`](Self::into_host).
///
/// ```compile_fail,E0608
/// # fn first_byte(buffer: arrow_device::DeviceBuffer) -> u8 {
/// buffer[0] // does not compile: device memory cannot be indexed
/// # }
/// ```
///
/// ```compile_fail,E0308
/// # fn bytes(buffer: &arrow_device::DeviceBuffer) -> &[u8] {
/// buffer // does not compile: nor does it become a slice
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

    /// Adopts `len` bytes of device memory that `owner` keeps alive; it is dropped once no buffer
    /// and no device work needs it. `ready`: the event after which the memory may be read.
    ///
    /// # Safety
    /// `base` is valid on `device` for `len` bytes and unchanged until `owner` is dropped.
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

    /// The device whose memory it is.
    pub fn device(&self) -> &Device {
        self.owner.device()
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte, for comparing and for `unsafe` code of the device. Nothing
    /// orders what is done with it: see [`on`](Self::on).
    pub fn address(&self) -> DevicePtr {
        self.base.offset(self.offset)
    }

    /// `len` bytes from `offset` (bytes) of this buffer, without a copy.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they do not lie inside.
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

    /// The buffer for work on `queue`: the queue waits until the memory is ready, and when the loan
    /// is dropped the use is recorded, so that the memory outlives the work.
    pub fn on(&self, queue: &Queue) -> Result<Loan<'_>> {
        check_queue(queue, self.device())?;
        self.owner.wait_on(queue)?;
        Ok(Loan {
            owner: &self.owner,
            queue: queue.clone(),
            address: self.address(),
        })
    }

    /// As an arrow buffer without a copy, if the host can read the memory: waits until it is ready.
    ///
    /// # Errors
    /// [`Error::NotSupported`] for other memory: download it.
    pub fn into_host(self) -> Result<Buffer> {
        if !self.device().is_host_readable() {
            return Err(Error::NotSupported {
                device: self.device().id(),
                operation: "reading memory on the host",
                reason: "the host cannot read this device's memory; download it".into(),
            });
        }
        self.owner.wait_host()?;
        // SAFETY: the host can read the device's memory, and it is ready.
        Ok(unsafe { host_buffer(&self.owner, self.address(), self.len) })
    }

    pub(crate) fn owner(&self) -> &Arc<Owner> {
        &self.owner
    }

    pub(crate) fn base(&self) -> DevicePtr {
        self.base
    }

    /// Bytes from the base.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }
}

/// A [`Buffer`] over ready, host-readable memory that `owner` keeps alive.
///
/// # Safety
/// The host may read `len` bytes at `address` as long as `owner` lives.
pub(crate) unsafe fn host_buffer(owner: &Arc<Owner>, address: DevicePtr, len: usize) -> Buffer {
    match std::ptr::NonNull::new(address.as_ptr().cast::<u8>()) {
        Some(ptr) if len > 0 => {
            // SAFETY: the caller's; the buffer holds the owner.
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
    /// Host memory as a buffer of the CPU, without a copy.
    fn from(buffer: Buffer) -> Self {
        let (ptr, len) = (buffer.as_ptr().cast_mut().cast(), buffer.len());
        let memory = Memory::Kept(Kept(Box::new(buffer)));
        let owner = Owner::new(Devices::cpu(), memory, Ready::Now);
        Self::from_parts(Arc::new(owner), DevicePtr::new(ptr), 0, len)
    }
}

impl From<Bytes> for DeviceBuffer {
    /// Host memory as a buffer of the CPU, without a copy.
    fn from(bytes: Bytes) -> Self {
        let (ptr, len) = (bytes.as_ptr().cast_mut().cast(), bytes.len());
        let memory = Memory::Kept(Kept(Box::new(bytes)));
        let owner = Owner::new(Devices::cpu(), memory, Ready::Now);
        Self::from_parts(Arc::new(owner), DevicePtr::new(ptr), 0, len)
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

/// A buffer lent to the work of one queue. Dropping it records the use.
#[derive(Debug)]
#[must_use = "dropping the loan says that the work that uses the buffer was queued"]
pub struct Loan<'a> {
    owner: &'a Arc<Owner>,
    queue: Queue,
    address: DevicePtr,
}

impl Loan<'_> {
    /// The address of the first byte.
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

/// Fresh, uninitialised device memory that one holder fills with work on one queue, before it is
/// frozen into a [`DeviceBuffer`].
#[derive(Debug)]
pub struct DeviceBufferMut {
    queue: Queue,
    base: DevicePtr,
    len: usize,
}

impl DeviceBufferMut {
    /// Allocates `len` bytes (64-byte aligned, padded to 64 bytes) in `queue`'s order.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or the device's own error.
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

    /// The queue in whose order the memory was allocated. Work on another one must wait for an
    /// event of this one first.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte, for work that writes it.
    pub fn address(&self) -> DevicePtr {
        self.base
    }

    /// Sets all bytes, the padding included, on the queue.
    pub fn fill(&mut self, byte: u8) -> Result<()> {
        // SAFETY: the memory is ours for its padded length.
        unsafe {
            self.queue
                .fill(self.base, byte, padded(self.len).unwrap_or(0))
        }
    }

    /// Ends the writing: the buffer is ready after all work of the queue so far.
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

    /// Gives the memory to an owner.
    pub(crate) fn into_memory(self) -> Memory {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped, so the queue is moved out once.
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
    /// Gives the memory, all of it, to work on `queue`, which waits for what its free would wait for.
    /// After an error the buffer is as it was.
    pub(crate) fn surrender(&mut self, queue: &Queue) -> Result<DevicePtr> {
        let (base, len) = (self.address(), self.len);
        let owner = Arc::get_mut(&mut self.owner)
            .ok_or_else(|| Error::argument("the memory is shared with other buffers"))?;
        owner.surrender(queue, base, len)?;
        Ok(base)
    }
}

/// `len` bytes rounded up to 64.
fn padded(len: usize) -> Option<usize> {
    len.checked_next_multiple_of(crate::device::ALIGNMENT)
}

impl Drop for DeviceBufferMut {
    fn drop(&mut self) {
        if let Some(bytes @ 1..) = padded(self.len) {
            // SAFETY: allocated here with this size, never frozen; work on other queues was the
            // caller's to order.
            unsafe { self.queue.free(self.base, bytes) }
        }
    }
}
