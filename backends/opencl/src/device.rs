//! [`OpenClDevice`]: the backend.

use std::fmt;
use std::ptr::null;
use std::sync::Arc;

use arrow_device::device::{
    AddressClass, Backend, Capabilities, DevicePtr, EventPtr, ExportSync, PointerInfo, RawQueue,
    Relation,
};
use arrow_device::{Device, DeviceBuffer, Error, Queue, Result};
use opencl_sys::*;

use crate::cells;
use crate::event::{self, Producer};
use crate::memory::{Allocation, Kind, OpenClMemory, handle};
use crate::object::{CommandQueue, MemObject};
use crate::platform::OpenClDeviceInfo;
use crate::queue::OpenClQueue;
use crate::shared::Shared;
use crate::sys::{Answer, call, create, info};

/// An OpenCL device in a context: the backend of an arrow-device device.
///
/// [`OpenClConfig`](crate::OpenClConfig) opens one.
pub struct OpenClDevice {
    shared: Arc<Shared>,
    queue: Arc<OpenClQueue>,
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
    pub(crate) fn new(shared: Shared, queue: Option<CommandQueue>) -> Result<Self> {
        let shared = Arc::new(shared);
        let queue = match queue {
            Some(queue) => OpenClQueue::with(&shared, queue),
            None => OpenClQueue::new(&shared)?,
        };
        Ok(Self { shared, queue })
    }

    /// Returns what OpenCL reports about the device.
    pub fn info(&self) -> &OpenClDeviceInfo {
        &self.shared.info
    }

    /// Returns which memory the device allocates.
    pub fn memory(&self) -> OpenClMemory {
        self.shared.kind.name()
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
        let Shared {
            kind,
            context,
            live,
            ..
        } = &*self.shared;
        if !matches!(kind, Kind::Handles) {
            let reason = format!(
                "its memory ({:?}) has addresses and no cl_mem; pass the address to the kernel",
                kind.name()
            );
            return Err(context.not_supported("handle", reason));
        }
        context.check_usable()?;
        let found = handle(live, address).map(|(_, mem, offset)| (mem, offset));
        found.ok_or_else(|| {
            Error::InvalidArgument(format!("{address:?} is not in memory of {}", context.id).into())
        })
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
        let raw = OpenClQueue::with(&this.shared, queue);
        // SAFETY: the queue was made of this device.
        Ok(unsafe { device.wrap_queue(raw) })
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
        let context = &this.shared.context;
        let refused = |reason: String| Err(context.not_supported("wrap_mem", reason));
        if !matches!(this.shared.kind, Kind::Handles) {
            return refused(
                "its memory has no handles; open the device with OpenClMemory::Handles".into(),
            );
        }
        context.check_usable()?;
        let cl = context.cl;
        // SAFETY: the caller guarantees the buffer (see `# Safety`); each value is read as what the specification says it is.
        let (mem, of, kind, bytes) = context.check(unsafe {
            MemObject::retain(cl, mem).and_then(|mem| {
                let raw = mem.raw();
                let of = info!(cl, clGetMemObjectInfo(raw, CL_MEM_CONTEXT) as cl_context)?;
                let kind = info!(
                    cl,
                    clGetMemObjectInfo(raw, CL_MEM_TYPE) as cl_mem_object_type
                )?;
                let bytes = info!(cl, clGetMemObjectInfo(raw, CL_MEM_SIZE) as usize)?;
                Ok((mem, of, kind, bytes))
            })
        })?;
        if of != context.raw() {
            return refused("the cl_mem is of another context; adopt that context".into());
        }
        if kind != CL_MEM_OBJECT_BUFFER {
            return refused("the cl_mem is an image or a pipe, and not a buffer".into());
        }
        let memory = Arc::new(Allocation::of_handle(context, mem, bytes)?);
        let base = memory.base();
        this.shared.live.insert(base, bytes, memory);
        let owner = Wrapped {
            shared: this.shared.clone(),
            base,
        };
        // SAFETY: the address stands for the whole buffer, which `owner` keeps; the caller guarantees that it does not change.
        Ok(unsafe { DeviceBuffer::from_raw(device, base, bytes, Box::new(owner), None) })
    }

    /// Returns how many allocations, exported or recorded events, and pieces of host memory are in use, for tests of leaks.
    #[doc(hidden)]
    pub fn in_use(&self) -> (usize, usize, usize) {
        let shared = &self.shared;
        (shared.live.len(), shared.cells.used(), shared.host.len())
    }
}

/// Keeps a program's buffer.
struct Wrapped {
    shared: Arc<Shared>,
    base: DevicePtr,
}

impl Drop for Wrapped {
    fn drop(&mut self) {
        if self.shared.context.is_forked() {
            return;
        }
        drop(self.shared.live.remove(self.base));
    }
}

/// Takes a reference of a command queue, if it can be a queue of the device.
///
/// # Safety
/// The command queue is live.
pub(crate) unsafe fn check_queue(shared: &Shared, queue: cl_command_queue) -> Result<CommandQueue> {
    let context = &shared.context;
    context.check_usable()?;
    let cl = context.cl;
    // SAFETY: the caller guarantees the command queue; each value is read as what the specification says it is.
    let (queue, of, device, properties) = context.check(unsafe {
        CommandQueue::retain(cl, queue).and_then(|queue| {
            let raw = queue.raw();
            let of = info!(
                cl,
                clGetCommandQueueInfo(raw, CL_QUEUE_CONTEXT) as cl_context
            )?;
            let device = info!(
                cl,
                clGetCommandQueueInfo(raw, CL_QUEUE_DEVICE) as cl_device_id
            )?;
            let what = CL_QUEUE_PROPERTIES;
            let properties = info!(
                cl,
                clGetCommandQueueInfo(raw, what) as cl_command_queue_properties
            )?;
            Ok((queue, of, device, properties))
        })
    })?;
    let refused =
        |reason: &str| Err(context.not_supported("adopting a command queue", reason.into()));
    if of != context.raw() || device != context.device() {
        return refused(
            "the command queue is of another context or device; create it for the device's own",
        );
    }
    if properties & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE != 0 {
        return refused(
            "the command queue runs its commands out of order; create one without CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE",
        );
    }
    Ok(queue)
}

impl Shared {
    /// Returns the live event.
    ///
    /// # Safety
    /// The pointer points to a live event.
    unsafe fn read(&self, event: EventPtr) -> cl_event {
        // SAFETY: the caller guarantees a live event.
        let raw = unsafe { cells::read(event) };
        if cells::owner(event).is_none() {
            // SAFETY: the caller guarantees a live event, whose handle this is.
            unsafe { event::flush(self.context.cl, raw) };
        }
        raw
    }
}

// SAFETY:
// - only fine-grained shared virtual memory counts as readable by the host, which it is, and `Kind::allocate` initialises it;
// - `classify` vouches only for live allocations of this device, for their whole length; it never answers `Host`;
// - a marker of an in-order queue completes after all work before it, which the host then sees;
// - `settle` waits for every queue, dropped ones included, until its work has finished or the runtime answers that queue, context or
//   device is gone, whose work runs no more. Any other error says nothing about the work: `settle` asks again, for as long as it
//   takes;
// - `allocate_host` returns host memory of the runtime.
unsafe impl Backend for OpenClDevice {
    fn capabilities(&self) -> Capabilities {
        let mut this = Capabilities::new(self.shared.context.id);
        this.host_readable = matches!(self.shared.kind, Kind::FineSvm(_));
        if matches!(self.shared.kind, Kind::Handles) {
            this.exports = ExportSync::Refused(
                "its addresses stand for cl_mem buffers, which no other library knows; open the device with other memory (OpenClMemory::Svm), \
                 or hand over the cl_mem of OpenClDevice::handle",
            );
        }
        this
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.queue.clone())
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(OpenClQueue::new(&self.shared)?)
    }

    unsafe fn check_event(&self, event: EventPtr) -> Result<()> {
        let id = self.shared.context.id;
        let ptr = event.as_ptr().cast::<cl_event>();
        if !ptr.is_aligned() {
            return Err(Error::InvalidArgument(
                format!("{id}: {ptr:p} is not the address of an event").into(),
            ));
        }
        if matches!(self.shared.cells.producer(event), Producer::Other(_)) {
            return Err(Error::InvalidArgument(
                format!("the event is not of {id}, but of another OpenCL device; import with a set of devices that has that device").into(),
            ));
        }
        // SAFETY: the pointer is aligned, so the caller guarantees that a handle's bytes may be read there.
        if unsafe { cells::read(event) }.is_null() {
            return Err(Error::InvalidArgument(
                format!("{id}: the event is a null handle").into(),
            ));
        }
        Ok(())
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        let context = &self.shared.context;
        context.check_process()?;
        // SAFETY: the caller guarantees a live event (contract of `query_event`).
        let complete = context.check(unsafe {
            let event = self.shared.read(event);
            event::is_complete(context.cl, event)
        })?;
        // After the query: work that failed before the event has set it by now.
        context.failure.check()?;
        if complete {
            context.check(self.shared.cells.producer(event).check())?;
        }
        Ok(complete)
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        let context = &self.shared.context;
        context.check_process()?;
        // SAFETY: the caller guarantees a live event (contract of `wait_event`).
        context.check(unsafe {
            let event = self.shared.read(event);
            event::wait(context.cl, event)
        })?;
        context.failure.check()?;
        context.check(self.shared.cells.producer(event).check())
    }

    unsafe fn release_event(&self, event: EventPtr) {
        if self.shared.context.is_forked() {
            return;
        }
        // SAFETY: the caller guarantees an event of `record`, which `Cells::put` made, and that it is released once.
        drop(unsafe { self.shared.cells.take(self.shared.context.cl, event) });
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        let Shared {
            context,
            live,
            host,
            ..
        } = &*self.shared;
        let other = |class| PointerInfo::new(class, address.range(bytes));
        if context.is_forked() {
            return other(AddressClass::Inaccessible);
        }
        let own = live.classify(address, bytes, AddressClass::Device);
        let found = own.or_else(|| host.classify(address, bytes, AddressClass::HostAccessible));
        // OpenCL cannot be asked about addresses of other contexts, nor about host memory. Of memory that is imported to a device
        // that the host reads, the import's caller guarantees that the host can read it.
        found.unwrap_or_else(|| other(AddressClass::Unknown))
    }

    fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        let Shared {
            kind,
            context,
            host,
            ..
        } = &*self.shared;
        // The runtimes that have no other memory from which they copy faster.
        let Kind::Usm(usm) = kind else {
            return Ok(None);
        };
        if bytes == 0 {
            return Err(Error::InvalidArgument("host allocation of 0 bytes".into()));
        }
        context.check_usable()?;
        if bytes > self.shared.info.max_allocation {
            return Ok(None);
        }
        // SAFETY: the context is live.
        let made = unsafe { create!(usm, clHostMemAllocINTEL(context.raw(), null(), bytes, 64)) };
        let base = DevicePtr::new(context.check_allocation(made, bytes)?.as_ptr());
        host.insert(base, bytes, ());
        Ok(Some(base))
    }

    unsafe fn free_host(&self, address: DevicePtr, _bytes: usize) {
        let Shared {
            kind,
            context,
            host,
            ..
        } = &*self.shared;
        if context.is_forked() {
            return;
        }
        if let (Kind::Usm(usm), Some(_)) = (kind, host.remove(address)) {
            // An error has no place to go.
            // SAFETY: `allocate_host` returned the memory, the caller guarantees that no copy uses it any more, and it was taken out
            // of the table, once. The call does not wait.
            let _: Answer<()> =
                unsafe { call!(usm, clMemFreeINTEL(context.raw(), address.as_ptr())) };
        }
    }

    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        let Shared {
            context,
            info,
            host,
            ..
        } = &*self.shared;
        if context.is_forked() {
            return false;
        }
        // A processor copies from any memory of the host, on threads of the runtime.
        let any = info.is_cpu && address.address().checked_add(bytes).is_some();
        let is_host = || {
            let found = host.classify(address, bytes, AddressClass::Host);
            found.is_some_and(|found| found.class == AddressClass::Host)
        };
        !address.is_null() && (any || is_host())
    }

    /// Events of other contexts are followed by one of this context.
    fn relation(&self, other: &dyn Backend) -> Relation {
        Relation {
            copies: false,
            waits: other.downcast_ref::<Self>().is_some(),
        }
    }

    unsafe fn stream_wait(&self, stream: usize, event: EventPtr) -> Result<bool> {
        let context = &self.shared.context;
        let queue: cl_command_queue = std::ptr::with_exposed_provenance_mut(stream);
        context.check_usable()?;
        let producer = self.shared.cells.producer(event);
        // SAFETY: the caller guarantees a live command queue and a live event (contract of `stream_wait`).
        context.check(unsafe {
            let of = info!(
                context.cl,
                clGetCommandQueueInfo(queue, CL_QUEUE_CONTEXT) as cl_context
            );
            let event = cells::read(event);
            of.and_then(|of| event::make_wait(context, queue, of, event, producer))
        })?;
        Ok(true)
    }

    fn trim(&self) {
        self.shared.trim();
    }

    fn synchronize(&self) -> Result<()> {
        self.shared.synchronize()
    }

    fn settle(&self) -> Result<()> {
        self.shared.settle()
    }
}

impl fmt::Debug for OpenClDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.shared.context.id;
        write!(
            f,
            "OpenCL({name}: {}, {:?})",
            self.shared.info,
            self.memory()
        )
    }
}
