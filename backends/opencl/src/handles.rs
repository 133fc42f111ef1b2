//! [`OpenClDevice`] and [`OpenClQueue`]: OpenCL's handles behind devices and queues, and a program's own command queues and buffers.

use std::sync::{Arc, OnceLock};

use arrow_device::device::DevicePtr;
use arrow_device::device::parts::queue_number;
use arrow_device::{Device, DeviceBuffer, Error, Queue, Result};
use opencl_sys::*;

use crate::memory::Allocation;
use crate::platform::{Kind, OpenClDeviceInfo, OpenClMemory};
use crate::runtime::{self, Shared};
use crate::sys::{BUFFER, Object, QUEUE};

/// An OpenCL device in a context: the backend of an arrow-device device.
///
/// [`OpenClConfig`](crate::OpenClConfig) opens one.
pub struct OpenClDevice {
    pub(crate) shared: Arc<Shared>,
    pub(crate) queue: Arc<OpenClQueue>,
}

impl OpenClDevice {
    /// Returns the OpenCL device behind a device.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if it is not an OpenCL device of this crate.
    pub fn of(device: &Device) -> Result<&Self> {
        let found = device.backend().downcast_ref();
        found.ok_or_else(|| {
            Error::InvalidArgument(format!("{device} is not an OpenCL device").into())
        })
    }

    /// Makes the backend. `queue` becomes the default queue; otherwise one is created.
    pub(crate) fn new(shared: Shared, queue: Option<Object>) -> Result<Self> {
        let shared = Arc::new(shared);
        let queue = match queue {
            Some(queue) => OpenClQueue::with(&shared, queue),
            None => OpenClQueue::new(&shared)?,
        };
        Ok(Self { shared, queue })
    }

    /// Returns what OpenCL reports about the device.
    pub fn info(&self) -> &OpenClDeviceInfo {
        &self.shared.context.info
    }

    /// Returns which memory the device allocates.
    pub fn memory(&self) -> OpenClMemory {
        self.shared.context.kind.name()
    }

    /// Returns the context. It lives as long as this value; retain it to keep it longer.
    pub fn context(&self) -> cl_context {
        self.shared.context.raw()
    }

    /// Returns the device's handle in OpenCL.
    pub fn device_id(&self) -> cl_device_id {
        self.shared.context.device()
    }

    /// Returns the `cl_mem` behind an address, and the offset of the address in it in bytes. The buffer lives as long as the
    /// memory of the address does; retain it to keep it longer.
    ///
    /// A sub-buffer can begin at the offset only if it is a multiple of the device's `CL_DEVICE_MEM_BASE_ADDR_ALIGN` (in bits,
    /// mostly 128 bytes), which columns of a batch, aligned to 64 bytes, need not be. Pass kernels the whole `cl_mem` and the
    /// offset instead.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the device does not allocate [`OpenClMemory::Handles`], and
    /// [`Error::InvalidArgument`] if the address is not in memory of the device.
    pub fn handle(&self, address: DevicePtr) -> Result<(cl_mem, usize)> {
        let context = &self.shared.context;
        if !matches!(context.kind, Kind::Handles) {
            let reason = format!(
                "its memory ({:?}) has addresses and no cl_mem; pass the address to the kernel",
                self.memory()
            );
            return Err(context.not_supported("handle", reason));
        }
        let _inside = context.enter_usable()?;
        let found = self.shared.memory.handle(address);
        let (_memory, mem, offset) = found.map_err(|_| {
            Error::InvalidArgument(format!("{address:?} is not in memory of {}", context.id).into())
        })?;
        Ok((mem, offset))
    }

    /// Makes a queue of the program's command queue, of which it takes a reference of its own. It gives that back when the queue
    /// was dropped and its work is done: at the latest when the device is waited for or dropped.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the command queue is of another context or device, or runs its commands out of order:
    /// create it without `CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE`.
    ///
    /// # Safety
    /// `queue` is a live command queue.
    pub unsafe fn adopt_queue(device: &Device, queue: cl_command_queue) -> Result<Queue> {
        let this = Self::of(device)?;
        // SAFETY: the caller guarantees the command queue (see `# Safety`).
        let queue = unsafe { check_queue(&this.shared, queue) }?;
        // SAFETY: the queue was made of this device.
        Ok(unsafe { device.wrap_queue(OpenClQueue::with(&this.shared, queue)) })
    }

    /// Wraps a `cl_mem` of the program, of which it takes a reference of its own, as a buffer of a device with
    /// [`OpenClMemory::Handles`]. Copies nothing and waits for nothing. The buffer covers the whole `cl_mem`.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the device has other memory, or the `cl_mem` is of another context or not a buffer.
    ///
    /// # Safety
    /// `mem` is a live `cl_mem`. Work on it that was enqueued before is finished, or ordered before the work that uses the buffer
    /// (on the same queue, or by an event). Nobody writes to it until the buffer and what is made of it were dropped and their
    /// uses have ended.
    pub unsafe fn wrap_mem(device: &Device, mem: cl_mem) -> Result<DeviceBuffer> {
        let this = Self::of(device)?;
        let (context, cl) = (&this.shared.context, this.shared.context.cl);
        let refused = |reason: &str| Err(context.not_supported("wrap_mem", reason.into()));
        if !matches!(context.kind, Kind::Handles) {
            return refused(
                "its memory has no handles; open the device with OpenClMemory::Handles",
            );
        }
        let _inside = context.enter_usable()?;
        // SAFETY: the caller guarantees the buffer (see `# Safety`); each value is asked for as what the specification says it is.
        let asked = unsafe {
            Object::retain(cl, BUFFER, mem).and_then(|mem| {
                let of: cl_context = cl.clGetMemObjectInfo(mem.raw(), CL_MEM_CONTEXT)?;
                let kind: cl_mem_object_type = cl.clGetMemObjectInfo(mem.raw(), CL_MEM_TYPE)?;
                let bytes: usize = cl.clGetMemObjectInfo(mem.raw(), CL_MEM_SIZE)?;
                Ok((mem, of, kind, bytes))
            })
        };
        let (mem, of, kind, bytes) = context.check(asked)?;
        if of != context.raw() {
            return refused("the cl_mem is of another context; adopt that context");
        }
        if kind != CL_MEM_OBJECT_BUFFER {
            return refused("the cl_mem is an image or a pipe, and not a buffer");
        }
        let memory = Arc::new(Allocation::of_handle(context, mem, bytes)?);
        let base = memory.base;
        this.shared.memory.live.insert(base, bytes, memory);
        let owner = Wrapped(this.shared.clone(), base);
        // SAFETY: the address stands for the whole buffer, which `owner` keeps; the caller guarantees that it does not change.
        Ok(unsafe { DeviceBuffer::from_raw(device, base, bytes, Box::new(owner), None) })
    }

    /// Returns how many allocations, exported or recorded events, and pieces of host memory are in use, for tests of leaks.
    #[doc(hidden)]
    pub fn in_use(&self) -> (usize, usize, usize) {
        let shared = &self.shared;
        // Each event has the failure of its device, and the device one more.
        let events = Arc::strong_count(&shared.context.failure) - 1;
        (shared.memory.live.len(), events, shared.host.len())
    }
}

/// Keeps a program's buffer at its address.
struct Wrapped(Arc<Shared>, DevicePtr);

impl Drop for Wrapped {
    fn drop(&mut self) {
        if let Some(_inside) = self.0.context.cl.enter() {
            drop(self.0.memory.live.remove(self.1));
        }
    }
}

/// Takes a reference of a command queue, if it can be a queue of the device.
///
/// # Safety
/// The command queue is live.
pub(crate) unsafe fn check_queue(shared: &Shared, queue: cl_command_queue) -> Result<Object> {
    let (context, cl) = (&shared.context, shared.context.cl);
    let _inside = context.enter_usable()?;
    // SAFETY: the caller guarantees the command queue; each value is asked for as what the specification says it is.
    let asked = unsafe {
        Object::retain(cl, QUEUE, queue).and_then(|kept| {
            let of: cl_context = cl.clGetCommandQueueInfo(queue, CL_QUEUE_CONTEXT)?;
            let device: cl_device_id = cl.clGetCommandQueueInfo(queue, CL_QUEUE_DEVICE)?;
            let properties: cl_bitfield = cl.clGetCommandQueueInfo(queue, CL_QUEUE_PROPERTIES)?;
            Ok((kept, of, device, properties))
        })
    };
    let (kept, of, device, properties) = context.check(asked)?;
    let reason = if of != context.raw() || device != context.device() {
        "the command queue is of another context or device; create it for the device's own"
    } else if properties & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE != 0 {
        "the command queue runs its commands out of order; create one without CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE"
    } else {
        return Ok(kept);
    };
    Err(context.not_supported("adopting a command queue", reason.into()))
}

/// A queue of an OpenCL device, of which [`Queue::raw`](arrow_device::Queue::raw) is one: an in-order command queue.
pub struct OpenClQueue {
    pub(crate) shared: Arc<Shared>,
    pub(crate) queue: Arc<runtime::Queue>,
    pub(crate) number: u64,
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
        let (context, cl) = (&shared.context, shared.context.cl);
        let _inside = context.enter_usable()?;
        // SAFETY: context and device are live and belong together. Without a property the queue is in order.
        let made = unsafe { cl.clCreateCommandQueue(context.raw(), context.device(), 0) };
        // SAFETY: the queue was just made, and nobody else has it.
        let queue = unsafe { Object::own(cl, QUEUE, context.check(made)?) };
        Ok(Self::with(shared, queue))
    }

    /// Wraps a queue, which is of the device's context, for the device, and in order.
    pub(crate) fn with(shared: &Arc<Shared>, object: Object) -> Arc<Self> {
        let last = OnceLock::new();
        let queue = Arc::new(runtime::Queue { object, last });
        shared.queues.add(queue.clone());
        Arc::new(Self {
            shared: shared.clone(),
            queue,
            number: queue_number(),
        })
    }

    /// Returns the command queue. It lives as long as this value; retain it to keep it longer.
    ///
    /// Kernels that are enqueued there run in the order of the queue, after the events that it was told to wait for. A command
    /// that is given a failed event to wait for may end the process (PoCL) or run nevertheless (Intel's runtime).
    pub fn handle(&self) -> cl_command_queue {
        self.queue.object.raw()
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
        let context = &self.shared.context;
        let _inside = context.enter_usable()?;
        // SAFETY: the caller guarantees the kernel (see `# Safety`).
        context.check(unsafe { self.shared.memory.set_kernel_arg(kernel, index, address) })
    }
}
