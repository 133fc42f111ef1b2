//! The implementations of [`Backend`] and [`RawQueue`].

use std::fmt;
use std::ptr::{null, with_exposed_provenance_mut};
use std::sync::Arc;

use arrow_device::device::{
    AddressClass, Backend, Capabilities, CopyOp, DevicePtr, EventPtr, ExportSync, PointerInfo,
    RawQueue, Relation,
};
use arrow_device::{Error, Result};
use opencl_sys::*;

use crate::event;
use crate::handles::{OpenClDevice, OpenClQueue};
use crate::platform::Kind;
use crate::runtime::{Patience, finish};
use crate::sys::Answer;

fn invalid<T>(text: String) -> Result<T> {
    Err(Error::InvalidArgument(text.into()))
}

// SAFETY:
// - no memory of a device counts as readable by the host;
// - `classify` vouches only for live allocations of this device, for their whole length; it never answers `Host`;
// - a marker of an in-order queue completes after all work before it, which the host then sees;
// - `settle` waits for every queue, dropped ones included, until its work has finished or the runtime answers that queue, context or
//   device is gone, whose work runs no more. Any other error says nothing about the work: `settle` asks again, for as long as it
//   takes;
// - `allocate_host` returns host memory of the runtime.
unsafe impl Backend for OpenClDevice {
    fn capabilities(&self) -> Capabilities {
        let mut this = Capabilities::new(self.shared.context.id);
        if matches!(self.shared.context.kind, Kind::Handles) {
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
        let context = &self.shared.context;
        let (_inside, id) = (context.enter()?, context.id);
        let ptr = event.as_ptr().cast::<cl_event>();
        if !ptr.is_aligned() {
            return invalid(format!("{id}: {ptr:p} is not the address of an event"));
        }
        if event::owner(event).is_some_and(|owner| !Arc::ptr_eq(&owner, &context.failure)) {
            return invalid(format!(
                "the event is not of {id}, but of another OpenCL device; import with a set of devices that has that device"
            ));
        }
        // SAFETY: the pointer is aligned, so the caller guarantees that a handle's bytes may be read there.
        if unsafe { event::read(event) }.is_null() {
            return invalid(format!("{id}: the event is a null handle"));
        }
        Ok(())
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        let context = &self.shared.context;
        let _inside = context.enter()?;
        // SAFETY: the caller guarantees a live event (contract of `query_event`).
        let complete = unsafe { event::is_complete(context.cl, event::read(event)) };
        let complete = context.check(complete)?;
        // After the query: work that failed before the event has set it by now.
        context.failure.check()?;
        if complete {
            context.check(event::check_owner(&event::owner(event)))?;
        }
        Ok(complete)
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        let context = &self.shared.context;
        let _inside = context.enter()?;
        // SAFETY: the caller guarantees a live event (contract of `wait_event`).
        context.check(unsafe { event::wait(context.cl, event::read(event)) })?;
        context.failure.check()?;
        context.check(event::check_owner(&event::owner(event)))
    }

    unsafe fn release_event(&self, event: EventPtr) {
        let cl = self.shared.context.cl;
        if let Some(_inside) = cl.enter() {
            // SAFETY: the caller guarantees an event of `record`, which `publish` made, and that it is released once.
            drop(unsafe { event::take(cl, event) });
        }
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        let other = |class| PointerInfo::new(class, address.range(bytes));
        if !self.shared.context.cl.process.is_this() {
            return other(AddressClass::Inaccessible);
        }
        let (live, host) = (&self.shared.memory.live, &self.shared.host);
        let own = live.classify(address, bytes, AddressClass::Device);
        let found = own.or_else(|| host.classify(address, bytes, AddressClass::HostAccessible));
        // OpenCL cannot be asked about addresses of other contexts, nor about host memory.
        found.unwrap_or_else(|| other(AddressClass::Unknown))
    }

    fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        let context = &self.shared.context;
        // The runtimes that have no other memory from which they copy faster.
        let Kind::Usm(usm) = context.kind else {
            return Ok(None);
        };
        if bytes == 0 {
            return invalid("host allocation of 0 bytes".into());
        }
        let _inside = context.enter_usable()?;
        if bytes > context.info.max_allocation {
            return Ok(None);
        }
        // SAFETY: the context is live.
        let made = unsafe { usm.clHostMemAllocINTEL(context.raw(), null(), bytes, 64) };
        let base = DevicePtr::new(context.check_allocation(made, bytes)?.as_ptr());
        self.shared.host.insert(base, bytes, ());
        Ok(Some(base))
    }

    unsafe fn free_host(&self, address: DevicePtr, _bytes: usize) {
        let context = &self.shared.context;
        let Some(_inside) = context.cl.enter() else {
            return;
        };
        if let (Kind::Usm(usm), Some(_)) = (context.kind, self.shared.host.remove(address)) {
            // An error has no place to go.
            // SAFETY: `allocate_host` returned the memory, the caller guarantees that no copy uses it any more, and it was taken out
            // of the table, once. The call does not wait.
            let _: Answer = unsafe { usm.clMemFreeINTEL(context.raw(), address.as_ptr()) };
        }
    }

    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        let context = &self.shared.context;
        if address.is_null() || !context.cl.process.is_this() {
            return false;
        }
        // A processor copies from any memory of the host, on threads of the runtime.
        let is_any = context.info.is_cpu && address.address().checked_add(bytes).is_some();
        let found = || {
            self.shared
                .host
                .classify(address, bytes, AddressClass::Host)
        };
        is_any || found().is_some_and(|found| found.class == AddressClass::Host)
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
        let queue: cl_command_queue = with_exposed_provenance_mut(stream);
        let (_inside, cl) = (context.enter_usable()?, context.cl);
        // SAFETY: the caller guarantees a live command queue and a live event (contract of `stream_wait`); the context is a pointer.
        let made = unsafe {
            cl.clGetCommandQueueInfo(queue, CL_QUEUE_CONTEXT)
                .and_then(|of: cl_context| event::make_wait(context, queue, of, event))
        };
        context.check(made).map(|()| true)
    }

    fn trim(&self) {
        if let Some(_inside) = self.shared.context.cl.enter() {
            self.shared.trim();
        }
    }

    fn synchronize(&self) -> Result<()> {
        let context = &self.shared.context;
        let _inside = context.enter()?;
        let finished = self.shared.queues.finish(context.cl, Patience::Once);
        context.failure.check()?;
        context.check(finished)
    }

    fn settle(&self) -> Result<()> {
        let context = &self.shared.context;
        let _inside = context.enter()?;
        if let Err(failed) = self.shared.queues.finish(context.cl, Patience::UntilEnded) {
            context.failure.set(context.error(failed));
        }
        context.failure.check()
    }
}

impl fmt::Debug for OpenClDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (id, info, memory) = (self.shared.context.id, self.info(), self.memory());
        write!(f, "OpenCL({id}: {info}, {memory:?})")
    }
}

// SAFETY:
// - memory of `allocate` is aligned (`Allocation::new`), and comes from the pool only to the queue that used it last or after
//   that use;
// - the queues are in order: `new` makes them so, and `OpenClDevice::adopt_queue` refuses others; a wait is a barrier;
// - events are markers, which complete after all earlier commands of an in-order queue.
unsafe impl RawQueue for OpenClQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        let _inside = self.shared.context.enter_usable()?;
        if bytes == 0 {
            return invalid("allocation of 0 bytes".into());
        }
        self.shared.allocate(self.number, bytes)
    }

    unsafe fn free(&self, base: DevicePtr, _bytes: usize) -> Result<()> {
        let Some(_inside) = self.shared.context.cl.enter() else {
            return Ok(());
        };
        // Without an event the memory stays with this queue.
        let after = self.shared.marker(&self.queue).ok();
        self.shared.free(self.number, base, after)
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        let context = &self.shared.context;
        let _inside = context.enter_usable()?;
        for (queued, op) in copies.iter().enumerate() {
            // SAFETY: the caller guarantees memory for all bytes until the copies have completed (contract of `RawQueue::copy`); the
            // queue is live.
            if let Err(failed) = unsafe { self.shared.memory.copy(self.handle(), op) } {
                if queued > 0
                    // None may be under way after an error.
                    && let Err(failed) = finish(context.cl, &self.queue, Patience::UntilEnded)
                {
                    context.failure.set(context.error(failed));
                }
                return Err(context.error(failed));
            }
        }
        Ok(())
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        let context = &self.shared.context;
        let _inside = context.enter_usable()?;
        // SAFETY: the caller guarantees `bytes` bytes until the fill has completed (contract of `RawQueue::fill`); the queue is live.
        context.check(unsafe { self.shared.memory.fill(self.handle(), dst, byte, bytes) })
    }

    fn record(&self) -> Result<EventPtr> {
        let context = &self.shared.context;
        let _inside = context.enter_usable()?;
        let event = context.check(self.shared.marker(&self.queue))?;
        match event::publish(&context.failure, event) {
            Some(place) => Ok(place),
            None => invalid(format!("{}: recording made a null event", context.id)),
        }
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<()> {
        let context = &self.shared.context;
        let _inside = context.enter_usable()?;
        // SAFETY: the caller guarantees a live event (contract of `RawQueue::wait`); the queue is live and of this context.
        context.check(unsafe { event::make_wait(context, self.handle(), context.raw(), event) })
    }

    fn stream_handle(&self) -> Option<usize> {
        Some(self.handle().expose_provenance())
    }
}

impl Drop for OpenClQueue {
    fn drop(&mut self) {
        let context = &self.shared.context;
        let Some(_inside) = context.cl.enter() else {
            return;
        };
        if let Ok(last) = self.shared.marker(&self.queue) {
            let _ = self.queue.last.set(last);
        }
        self.shared.queues.are_done(context);
    }
}

impl fmt::Debug for OpenClQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Queue({} {:p})", self.shared.context.id, self.handle())
    }
}
