//! The backend of a GPU, of either vendor.

use std::ffi::c_int;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::api::{RawStream, is_done};
use super::context::Context;
use super::kept::{EventCell, event_of};
use super::queue::GpuQueue;
use super::runtime::{Found, Library, Memory, PointerKind, Runtime, not_ours};
use crate::device::backend::{
    AddressClass, Backend, Capabilities, DevicePtr, EventPtr, PointerInfo, RawQueue, Relation,
};
use crate::device::parts::Worker;
use crate::device::{Device, DeviceId, lock};
use crate::error::{Error, Result};

/// A GPU, driven through its vendor's [`Runtime`].
pub(crate) struct Gpu<R: Runtime> {
    pub(crate) context: Arc<Context<R>>,
    queue: Arc<GpuQueue<R>>,
    /// Dropped last, after the queue.
    _end: End<R>,
}

impl<R: Runtime> Gpu<R> {
    pub(crate) fn new(id: DeviceId, runtime: R) -> Result<Self> {
        let context = Arc::new(Context::new(id, runtime)?);
        Ok(Self {
            queue: Arc::new(GpuQueue::new(context.clone())?),
            _end: End(context.clone()),
            context,
        })
    }

    /// Returns the backend of a device of this vendor's.
    pub(crate) fn of(device: &Device) -> Result<&Self> {
        let gpu = device.backend().downcast_ref();
        gpu.ok_or_else(|| not_ours::<R::Library>(device))
    }

    /// Returns the device's number of another backend of the vendor's.
    fn ordinal_of(other: &dyn Backend) -> Option<c_int> {
        let other = other.downcast_ref::<Self>()?;
        Some(other.context.runtime.ordinal())
    }

    /// Returns the class of memory, and why it is not accepted.
    fn judge(&self, kind: PointerKind, range: Range<usize>) -> PointerInfo {
        use PointerKind as P;
        let (context, memory) = (&self.context, self.context.memory);
        let (vendor, advice) = (R::Library::VENDOR, R::Library::ADVICE);
        let reaches = |of: Option<usize>| of.is_none_or(|of| context.runtime.reaches_context(of));
        let of_class = |class| PointerInfo::new(class, range.clone());
        let inaccessible = |why: String| of_class(AddressClass::Inaccessible).with_reason(why);
        match kind {
            P::Device(of, _) if memory != Memory::Device => inaccessible(format!(
                "it is memory of {vendor} device {of}, which the host cannot read"
            )),
            P::Device(of, _) if of != context.runtime.ordinal() => {
                inaccessible(format!("it is memory of {vendor} device {of}"))
            }
            P::Device(_, of) if reaches(of) => of_class(AddressClass::Device),
            // Kernels of this context cannot reach the memory.
            P::Device(..) => inaccessible(format!("it is memory of another context{advice}")),
            P::Managed if memory == Memory::Host && !context.reads_managed => inaccessible(
                "it is managed memory, which the host must not read while the device works".into(),
            ),
            P::Managed | P::Host { mapped: true } => of_class(AddressClass::HostAccessible),
            P::Host { .. } if memory == Memory::Host => of_class(AddressClass::HostAccessible),
            P::Host { .. } => {
                let why = "the device does not reach it at this address";
                of_class(AddressClass::Host).with_reason(why)
            }
            P::Unknown => {
                let why = "the driver does not know it: it is ordinary host memory, or none";
                of_class(AddressClass::Host).with_reason(why)
            }
        }
    }
}

// SAFETY:
// - page-locked memory is host memory, and so is managed memory where the host and the device may
//   use it at once;
// - the library vouches for the first and the last byte of what `classify` accepts, or for the
//   range that it returns; memory that it does not know is `Host`, which the
//   caller of an import guarantees; where the library cannot tell, it is `Inaccessible`;
// - a completed event means that its stream's work is done and visible to the host;
// - `settle` returns when all work is done or the context is lost.
unsafe impl<R: Runtime> Backend for Gpu<R> {
    fn capabilities(&self) -> Capabilities {
        let mut this = Capabilities::new(self.context.id);
        this.host_readable = match self.context.memory {
            Memory::Device => false,
            Memory::Host => true,
            // Otherwise the host must not touch any managed memory while the device works.
            Memory::Managed => self.context.reads_managed,
        };
        this
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.queue.clone())
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(Arc::new(GpuQueue::new(self.context.clone())?))
    }

    /// Checks that there is a handle. Whether it is an event's cannot be seen.
    unsafe fn check_event(&self, event: EventPtr) -> Result<()> {
        let ptr = event.as_ptr().cast::<*mut ()>();
        // SAFETY: the caller guarantees that a handle's bytes may be read there if the pointer is
        // aligned (contract of `check_event`); any bits are a `RawEvent`, which is not followed.
        if !ptr.is_aligned() || unsafe { event_of(event) }.0 == 0 {
            let why = "is not the address of an event, or that of a null handle";
            return Err(Error::argument(format!("{ptr:p} {why}")));
        }
        Ok(())
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        let current = self.context.enter()?;
        // SAFETY: the caller of `query_event` guarantees that the event is live.
        let done = unsafe { current.calls().query_event(event_of(event)) };
        self.context.check(is_done(done))
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        let current = self.context.enter()?;
        // SAFETY: the caller of `wait_event` guarantees that the event is live.
        let done = unsafe { current.calls().wait_event(event_of(event)) };
        self.context.check(done)
    }

    unsafe fn release_event(&self, event: EventPtr) {
        // SAFETY: the caller of `release_event` guarantees an event that this backend made, with
        // `EventCell::into_ptr`, and that releases it once.
        let cell = unsafe { EventCell::from_ptr(event) };
        self.context.recycle(cell);
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        // Memory that the library cannot identify must not be touched.
        let unknown = PointerInfo::new(AddressClass::Inaccessible, address.range(bytes));
        let current = self.context.enter();
        match current.and_then(|current| self.context.check(current.allocation_of(address, bytes)))
        {
            Ok(found) => found.map_or(unknown, |(kind, range)| self.judge(kind, range)),
            Err(e) => unknown.with_reason(e.to_string()),
        }
    }

    fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        if bytes == 0 {
            return Err(Error::argument("host allocation of 0 bytes"));
        }
        self.context.check_process()?;
        // Page-locked memory needs no staging.
        if self.context.memory == Memory::Host || isize::try_from(bytes).is_err() {
            return Ok(None);
        }
        self.context.allocate_staging(bytes)
    }

    unsafe fn free_host(&self, address: DevicePtr, bytes: usize) {
        if !self.context.is_forked() {
            lock(&self.context.heap.staging).idle.push((address, bytes));
        }
    }

    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        // The library itself copies to page-locked memory with the host.
        if address.is_null() || self.context.memory == Memory::Host {
            return !address.is_null();
        }
        // A wrong answer costs only time: the library stages what is not page-locked by itself.
        let current = self.context.enter().ok();
        let found = current.and_then(|current| current.look_up(address.address()).ok());
        let end = address.range(bytes).end;
        found.is_some_and(|Found { kind, range }| {
            matches!(kind, PointerKind::Host { .. }) && range.is_none_or(|range| end <= range.end)
        })
    }

    fn relation(&self, other: &dyn Backend) -> Relation {
        let Some(other) = Self::ordinal_of(other) else {
            return Relation::default();
        };
        Relation {
            // Devices of one library copy from each other without the host. Host memory takes copies only from its own device: no
            // call there names another's context.
            copies: self.context.memory == Memory::Device
                || other == self.context.runtime.ordinal(),
            // A stream can wait for events of any device and context of the library.
            waits: true,
        }
    }

    unsafe fn stream_wait(&self, stream: usize, event: EventPtr) -> Result<bool> {
        let (current, stream) = (self.context.enter()?, RawStream(stream));
        // SAFETY: the caller of `stream_wait` guarantees that stream and event are live. The event may be of any context.
        let waited = unsafe {
            current.check_stream(stream)?;
            current.calls().wait(stream, event_of(event), 0)
        };
        self.context.check(waited)?;
        Ok(true)
    }

    fn synchronize(&self) -> Result<()> {
        self.context.synchronize()
    }

    fn settle(&self) -> Result<()> {
        self.context.settle()
    }

    fn trim(&self) {
        self.context.trim();
    }
}

impl<R: Runtime> fmt::Debug for Gpu<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple(R::Library::VENDOR)
            .field(&self.context)
            .finish()
    }
}

/// The end of a device: frees what it has kept.
struct End<R: Runtime>(Arc<Context<R>>);

impl<R: Runtime> Drop for End<R> {
    fn drop(&mut self) {
        let context = self.0.clone();
        if context.is_forked() || context.is_clear() {
            return;
        }
        // The drop of a device waits for nothing, unless the system starts no thread.
        Worker::new("arrow-device gpu free").push(move || {
            // Even after an error nothing runs any more.
            let _ = context.settle();
            context.trim();
        });
    }
}
