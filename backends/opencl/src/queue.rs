//! [`OpenClQueue`]: an in-order command queue.

use std::fmt;
use std::sync::Arc;

use arrow_device::device::parts::queue_number;
use arrow_device::device::{CopyOp, DevicePtr, EventPtr, RawQueue};
use arrow_device::{Error, Queue, Result};
use opencl_sys::{cl_command_queue, cl_kernel, cl_uint};

use crate::cells;
use crate::event;
use crate::object::CommandQueue;
use crate::queues::{self, Patience};
use crate::shared::Shared;
use crate::sys::create;

/// A queue of an OpenCL device, of which [`Queue::raw`](arrow_device::Queue::raw) is one: an in-order command queue.
pub struct OpenClQueue {
    shared: Arc<Shared>,
    queue: Arc<CommandQueue>,
    number: u64,
}

impl OpenClQueue {
    /// Returns the command queue of a queue, to launch kernels on.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the queue is another device's.
    pub fn of(queue: &Queue) -> Result<&Self> {
        let found = queue.raw().downcast_ref();
        found.ok_or_else(|| {
            let device = queue.device();
            Error::InvalidArgument(format!("a queue of {device} is not an OpenCL queue").into())
        })
    }

    /// Makes a queue of the device.
    pub(crate) fn new(shared: &Arc<Shared>) -> Result<Arc<Self>> {
        let context = &shared.context;
        context.check_usable()?;
        // SAFETY: context and device are live and belong together. Without a property the queue is in order.
        let made = unsafe {
            create!(
                context.cl,
                clCreateCommandQueue(context.raw(), context.device(), 0)
            )
        };
        // SAFETY: the queue was just made, and nobody else has it.
        let queue = unsafe { CommandQueue::own(context.cl, context.check(made)?) };
        Ok(Self::with(shared, queue))
    }

    /// Wraps a queue, which is of the device's context, for the device, and in order.
    pub(crate) fn with(shared: &Arc<Shared>, queue: CommandQueue) -> Arc<Self> {
        let (queue, number) = (Arc::new(queue), queue_number());
        shared.queues.add(number, queue.clone());
        Arc::new(Self {
            shared: shared.clone(),
            queue,
            number,
        })
    }

    /// Returns the command queue. It lives as long as this value; retain it to keep it longer.
    ///
    /// Kernels that are enqueued there run in the order of the queue, after the events that it was told to wait for. A command
    /// that is given a failed event to wait for may end the process (PoCL) or run nevertheless (Intel's runtime).
    pub fn handle(&self) -> cl_command_queue {
        self.queue.raw()
    }

    /// Makes device memory the argument `index` of a kernel, by the call that belongs to the device's memory: for example
    /// `clSetKernelArgSVMPointer`. Returns how many bytes after the beginning of the argument the address lies: 0, except with
    /// [`OpenClMemory::Handles`](crate::OpenClMemory::Handles), where the argument is a whole `cl_mem` and the kernel needs that
    /// number as a further argument. (A sub-buffer could begin at multiples of the device's alignment only, mostly 128 bytes.)
    /// A null address, for a missing validity bitmap, is a null pointer in the kernel.
    ///
    /// # Errors
    /// Returns the runtime's error.
    ///
    /// # Safety
    /// - `kernel` is live and of the device's context, and no other thread uses it meanwhile.
    /// - `address` is null or in memory of this device that is alive, for the runtime, until the kernel has run: keep the loan
    ///   (or the buffer that is written) until the kernel is enqueued.
    pub unsafe fn set_kernel_arg(
        &self,
        kernel: cl_kernel,
        index: u32,
        address: DevicePtr,
    ) -> Result<usize> {
        let Shared {
            kind,
            context,
            live,
            ..
        } = &*self.shared;
        context.check_usable()?;
        // SAFETY: the caller guarantees the kernel (see `# Safety`).
        context
            .check(unsafe { kind.set_kernel_arg(context, live, kernel, index as cl_uint, address) })
    }
}

// SAFETY:
// - memory of `allocate` is aligned (`Kind::allocate`), and comes from the pool only to the queue that used it last or after
//   that use;
// - the queues are in order: `new` makes them so, and `OpenClDevice::adopt_queue` refuses others; a wait is a barrier;
// - events are markers, which complete after all earlier commands of an in-order queue.
unsafe impl RawQueue for OpenClQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        self.shared.context.check_usable()?;
        if bytes == 0 {
            return Err(Error::InvalidArgument("allocation of 0 bytes".into()));
        }
        self.shared.allocate(self.number, bytes)
    }

    unsafe fn free(&self, base: DevicePtr, _bytes: usize) -> Result<()> {
        if self.shared.context.is_forked() {
            return Ok(());
        }
        // SAFETY: the queue is live. Without an event the memory stays with this queue.
        let after = unsafe { self.shared.marker(self.handle()) }.ok();
        self.shared.free(self.number, base, after)
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        let Shared {
            kind,
            context,
            live,
            ..
        } = &*self.shared;
        context.check_usable()?;
        for (queued, op) in copies.iter().enumerate() {
            // SAFETY: the caller guarantees memory for all bytes until the copies have completed (contract of `RawQueue::copy`); the
            // queue is live.
            let copied = unsafe { kind.copy(context, live, self.handle(), op) };
            if let Err(failed) = copied {
                if queued > 0 {
                    // None may be under way after an error.
                    let finished = queues::finish(context.cl, &self.queue, Patience::UntilEnded);
                    if let Err(failed) = finished {
                        context.failure.set(context.error(failed));
                    }
                }
                return Err(context.error(failed));
            }
        }
        Ok(())
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        let Shared {
            kind,
            context,
            live,
            ..
        } = &*self.shared;
        context.check_usable()?;
        // SAFETY: the caller guarantees `bytes` bytes until the fill has completed (contract of `RawQueue::fill`); the queue is live.
        context.check(unsafe { kind.fill(context, live, self.handle(), dst, byte, bytes) })
    }

    fn record(&self) -> Result<EventPtr> {
        let context = &self.shared.context;
        context.check_usable()?;
        // SAFETY: the queue is live.
        let event = context.check(unsafe { self.shared.marker(self.handle()) })?;
        let cell = self.shared.cells.put(event);
        cell.ok_or_else(|| {
            let text = format!("{}: recording made a null event", context.id);
            Error::InvalidArgument(text.into())
        })
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<()> {
        let context = &self.shared.context;
        context.check_usable()?;
        let producer = self.shared.cells.producer(event);
        // SAFETY: the caller guarantees a live event (contract of `RawQueue::wait`); the queue is live and of this context.
        context.check(unsafe {
            let event = cells::read(event);
            event::make_wait(context, self.handle(), context.raw(), event, producer)
        })
    }

    fn stream_handle(&self) -> Option<usize> {
        Some(self.handle().expose_provenance())
    }
}

impl Drop for OpenClQueue {
    fn drop(&mut self) {
        if self.shared.context.is_forked() {
            return;
        }
        // SAFETY: the queue is live.
        let last = unsafe { self.shared.marker(self.handle()) }.ok();
        let Shared {
            context, queues, ..
        } = &*self.shared;
        queues.drop_queue(context, self.number, last);
    }
}

impl fmt::Debug for OpenClQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = self.shared.context.id;
        write!(f, "Queue({id} {:p})", self.handle())
    }
}
