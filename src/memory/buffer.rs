//! [`DeviceBuffer`]: shared memory of a device, its views on the host, loans of it to a queue, and copies of it to the host.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use arrow_buffer::Buffer;

use crate::device::engine::{Engine, Runtime};
use crate::device::{CopyOp, Device, DevicePtr, Devices, Queue, SyncEvent};
use crate::error::{Error, Result, bail};
use crate::memory::{HostBuffer, Loan, Memory, Owner, Ready, check_queue};

/// Shared, immutable memory of a device. Clones and slices share the owner that keeps it alive.
///
/// Safe code cannot read it on the host: there is no `Deref` and no slice of bytes, and `Debug` prints the address only.
/// [`to_host`](Self::to_host) turns memory that the host can read into an arrow [`Buffer`] without a copy.
///
/// ```
/// use arrow_buffer::Buffer;
/// use arrow_device::DeviceBuffer;
///
/// let buffer = DeviceBuffer::from(Buffer::from_vec(vec![1i32, 2, 3])); // on the CPU, not copied
/// let last = buffer.slice(8, 4)?;
/// assert_eq!(last.to_host()?.typed_data::<i32>(), [3]);
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
    pub(crate) owner: Arc<Owner>,
    pub(crate) base: DevicePtr,
    /// Bytes from `base`.
    pub(crate) offset: usize,
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
        let owner = Owner::new(device.clone(), Memory::Kept(owner), ready);
        Self::from_parts(Arc::new(owner), base, 0, len)
    }

    /// Makes a buffer of `bytes` bytes of a program's memory, as a value of the device's runtime. The device knows it as long as the buffer
    /// or a slice of it lives, and then drops it. Copies nothing and waits for nothing.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) for memory without an address, for 0 bytes, and for memory of
    /// which the device knows some already; [`Error::NotSupported`](crate::Error::NotSupported) if it is not a device of this runtime. The
    /// value is dropped then.
    ///
    /// # Safety
    /// The memory has at least `bytes` bytes. The work that uses it so far is finished, or ordered before the work that uses the buffer, and
    /// the value keeps the memory until it is finished. Nobody writes to it until the value is dropped.
    pub unsafe fn wrap<R: Runtime>(
        device: &Device,
        memory: R::Memory,
        bytes: usize,
    ) -> Result<Self> {
        let engine = Engine::<R>::of(device)?;
        let base = engine.insert(memory, bytes)?;
        let owner = Box::new(engine.forget_later(base));
        // SAFETY: the addresses are those of the memory, which `owner` keeps; the caller guarantees that it does not change (see
        // `# Safety`).
        Ok(unsafe { Self::from_raw(device, base, bytes, owner, None) })
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
        let bytes = self.len;
        if offset.checked_add(len).is_none_or(|end| end > bytes) {
            bail!("slice of {len} bytes at {offset} of a buffer of {bytes} bytes");
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
        let lender = (self.device(), Some(&self.owner));
        Loan::new(lender, queue, self.address(), self.len)
    }
}

impl From<Buffer> for DeviceBuffer {
    /// Wraps host memory as a buffer of the CPU, without a copy.
    fn from(buffer: Buffer) -> Self {
        let len = buffer.len();
        // An empty buffer need not have memory at its address.
        let base = match len {
            0 => DevicePtr::NULL,
            _ => DevicePtr::new(buffer.as_ptr().cast_mut().cast()),
        };
        // SAFETY: the buffer keeps `len` bytes alive, wherever it is moved, and nobody writes to them.
        unsafe { Self::from_raw(&Devices::cpu(), base, len, Box::new(buffer), None) }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, at, device) = (self.len, self.address(), self.device());
        write!(f, "DeviceBuffer({bytes} bytes at {at:?} on {device})")
    }
}

impl DeviceBuffer {
    /// Takes the memory out of the buffer, without copying, for work on `queue`, such as that of a runtime whose own type is to own
    /// the memory. Returns the address, and the bytes that were allocated, padding included. The queue waits until the memory is
    /// ready and its recorded uses are done. This thread waits only for a use on a device whose events the queue cannot wait for,
    /// and if a use could not be recorded.
    ///
    /// The memory leaks unless its new owner calls [`RawQueue::free`](crate::device::RawQueue::free) with both, once.
    ///
    /// ```
    /// use arrow_device::{DeviceBufferMut, Devices};
    ///
    /// let queue = Devices::cpu().default_queue();
    /// let buffer = DeviceBufferMut::allocate(&queue, 100)?.freeze()?;
    /// let (base, bytes) = buffer.into_raw(&queue).map_err(|(_, e)| e)?;
    /// assert_eq!(bytes, 128);
    /// // SAFETY: these are the address and the bytes of an allocation that nothing else owns.
    /// unsafe { queue.raw().free(base, bytes) }?;
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the buffer, unchanged, with the reason: [`Error::InvalidArgument`] if it is not the only holder of its memory,
    /// is not all of an allocation that this crate made on the device, or if the queue belongs to another device; otherwise the
    /// device's own error.
    pub fn into_raw(
        mut self,
        queue: &Queue,
    ) -> std::result::Result<(DevicePtr, usize), (Self, Error)> {
        let (base, len) = (self.address(), self.len);
        let taken = check_queue(queue, self.device()).and_then(|()| {
            let owner = Arc::get_mut(&mut self.owner)
                .ok_or_else(|| Error::argument("the memory is shared with other buffers"))?;
            owner.surrender(queue, base, len)
        });
        taken.map(|bytes| (base, bytes)).map_err(|e| (self, e))
    }
}

/// A list of copies into a host buffer, or out of it, that was given to a queue. The host buffer and the sources live until the copies have
/// completed, even if the reading is dropped.
#[must_use]
#[derive(Debug)]
pub(crate) struct Reading {
    /// The event after which the host buffer may be read; `None` if it may be read now.
    event: Option<SyncEvent>,
    /// `None` once it was returned.
    kept: Option<(HostBuffer, Vec<Arc<Owner>>)>,
}

impl Reading {
    /// Gives the copies to `queue`, after the events of `owners`.
    ///
    /// # Safety
    /// One side of each copy lies in `host`, the other in memory of `owners`.
    pub(crate) unsafe fn start(
        queue: &Queue,
        owners: Vec<Arc<Owner>>,
        copies: &[CopyOp],
        host: HostBuffer,
    ) -> Result<Self> {
        let mut event = Ok(None);
        if !copies.is_empty() {
            owners.iter().try_for_each(|owner| owner.wait_on(queue))?;
            // SAFETY: the caller guarantees that both sides of each copy lie in `host` and in memory of `owners` (see `# Safety`),
            // which `kept` holds until the event, or until the queue's work has completed: a list may be copied in part even after an error.
            event = unsafe { queue.copy(copies) }.and_then(|()| queue.record());
        }
        let mut kept = Some((host, owners));
        if event.is_err() {
            queue.keep_until(&event, kept.take());
        }
        let event = event?;
        Ok(Self { event, kept })
    }

    /// Returns the event that completes with the copies; `None` if there is nothing to wait for.
    pub(crate) fn event(&self) -> Option<&SyncEvent> {
        self.event.as_ref()
    }

    /// Makes this thread wait for the copies, unless the event is known to have completed: one host wait. Returns the host buffer.
    pub(crate) fn finish(mut self) -> Result<HostBuffer> {
        let event = self.event.as_ref();
        if let Some(event) = event.filter(|event| !event.as_ref().is_known_complete()) {
            // After an error the copies may still run: dropping the reading keeps the memory that they use.
            event.wait()?;
        }
        // Only this and the drop take it.
        let kept = self.kept.take().map(|(host, _)| host);
        kept.ok_or_else(|| Error::argument("the reading has finished already"))
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if let (Some(event), Some(kept)) = (&self.event, self.kept.take()) {
            event.keep(kept);
        }
    }
}
