//! [`OpenClDevice`], the provider of the engine: a device in a context, its queues and events.
//!
//! Runtimes do not agree about failed events. PoCL 3.1 ends the process if a failed event is waited for by a command. Intel's CPU runtime
//! reports the status of success for an event whose predecessor failed, and then only `clWaitForEvents` shows the failure. So here both
//! are asked, and nothing of a failure is passed into the runtime.

use std::ffi::c_void;
use std::fmt;
use std::ptr::{null, null_mut, with_exposed_provenance_mut};
use std::sync::Arc;

use arrow_device::Result;
use arrow_device::device::engine::{Health, Memories, Runtime};
use arrow_device::device::{Capabilities, CopyOp, DevicePtr, EventPtr, ExportSync, Relation};
use opencl_sys::*;

use crate::context::Context;
use crate::memory::{Allocation, Memory};
use crate::platform::Kind;
use crate::sys::{Answer, Cl, EVENT, Failed, Object, QUEUE, call, made};

/// An OpenCL device in a context: the provider of an arrow-device device.
///
/// [`OpenClConfig`](crate::OpenClConfig) opens one.
pub struct OpenClDevice {
    pub(crate) context: Arc<Context>,
    pub(crate) memory: Arc<Memory>,
}

impl OpenClDevice {
    pub(crate) fn new(context: Context) -> Self {
        let context = Arc::new(context);
        let memory = Arc::new(Memory::new(context.clone()));
        Self { context, memory }
    }
}

impl fmt::Debug for OpenClDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (id, info, memory) = (self.context.health.id(), self.info(), self.memory());
        write!(f, "OpenCL({id}: {info}, {memory:?})")
    }
}

/// A queue of an OpenCL device: an in-order command queue.
#[derive(Debug)]
pub struct OpenClQueue {
    pub(crate) memory: Arc<Memory>,
    pub(crate) object: Object,
}

impl OpenClQueue {
    /// Makes a command queue. Without a property it is in order.
    pub(crate) fn new(device: &OpenClDevice) -> Result<Arc<Self>> {
        let (context, cl) = (&device.context, device.context.cl);
        // SAFETY: context and device are live and belong together.
        let made = unsafe { call!(made cl.clCreateCommandQueue(context.raw(), context.device, 0)) };
        // SAFETY: the queue was just made, and nobody else has it.
        let object = unsafe { Object::own(cl, QUEUE, context.check(made)?) };
        Ok(Self::with(device, object))
    }

    fn with(device: &OpenClDevice, object: Object) -> Arc<Self> {
        let memory = device.memory.clone();
        Arc::new(Self { memory, object })
    }

    /// Takes a reference of a program's command queue, if it can be a queue of the device.
    ///
    /// # Safety
    /// The command queue is live, or null.
    pub(crate) unsafe fn adopt(
        device: &OpenClDevice,
        queue: cl_command_queue,
    ) -> Result<Arc<Self>> {
        let (context, cl) = (&device.context, device.context.cl);
        // SAFETY: the caller guarantees the command queue; each value is asked for as what the specification says it is.
        let asked = unsafe {
            Object::retain(cl, QUEUE, queue).and_then(|kept| {
                let of: cl_context = call!(info cl.clGetCommandQueueInfo(queue, CL_QUEUE_CONTEXT))?;
                let of_device: cl_device_id =
                    call!(info cl.clGetCommandQueueInfo(queue, CL_QUEUE_DEVICE))?;
                let properties: cl_bitfield =
                    call!(info cl.clGetCommandQueueInfo(queue, CL_QUEUE_PROPERTIES))?;
                Ok((kept, of, of_device, properties))
            })
        };
        let (object, of, of_device, properties) = context.check(asked)?;
        let reason = if of != context.raw() || of_device != context.device {
            "the command queue is of another context or device; create it for the device's own"
        } else if properties & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE != 0 {
            "the command queue runs its commands out of order; create one without CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE"
        } else {
            return Ok(Self::with(device, object));
        };
        Err(context.not_supported("adopting a command queue", reason))
    }

    /// Makes later work wait for an event of the queue's context.
    fn barrier(&self, event: cl_event) -> Answer {
        let (cl, queue) = (self.memory.context.cl, self.object.raw());
        // SAFETY: queue and event are live and of one context.
        unsafe {
            call!(code cl.clEnqueueBarrierWithWaitList(queue, 1, &raw const event, null_mut()))
        }
    }
}

/// An event of this crate or of a foreign producer, of which it has a reference.
#[derive(Debug)]
pub struct Event {
    object: Object,
    is_own: bool,
}

impl Event {
    fn status(&self, cl: &Cl) -> Answer<cl_int> {
        // SAFETY: the event is live; the status is an integer.
        unsafe {
            call!(info cl.clGetEventInfo(self.object.raw(), CL_EVENT_COMMAND_EXECUTION_STATUS))
        }
    }

    /// Returns how the event has ended; `None`: it is pending. An error if it cannot be asked about. Never waits.
    fn outcome(&self, cl: &Cl) -> Answer<Option<Answer>> {
        let code = self.status(cl)?;
        let call = "the producer's work before an event";
        if code != CL_COMPLETE {
            return Ok((code < CL_COMPLETE).then_some(Err(Failed { call, code })));
        }
        // Does not wait any more, and reports failures that the status does not show.
        match self.wait(cl) {
            Err(failed) if failed.code != CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST => {
                Err(failed)
            }
            ended => Ok(Some(ended)),
        }
    }

    fn wait(&self, cl: &Cl) -> Answer {
        let event = self.object.raw();
        // SAFETY: the event is live, and is the whole list.
        unsafe { call!(code cl.clWaitForEvents(1, &raw const event)) }
    }

    /// Sees to it that a foreign producer's event makes progress: its queue may not have been flushed. That queue's handle is not used, since
    /// an event keeps no queue alive, and the producer may release it at any time. A thread that waits for the event flushes the queue
    /// instead (OpenCL's specification, "Flush and Finish").
    fn flush(&self, context: &Arc<Context>) -> Answer {
        let cl = context.cl;
        if self.is_own || self.status(cl)? != CL_QUEUED as cl_int {
            return Ok(());
        }
        // SAFETY: the event is live.
        let object = unsafe { Object::retain(cl, EVENT, self.object.raw()) }?;
        let (kept, context) = (Self { object, ..*self }, context.clone());
        let wait = move || {
            if let Ok(_inside) = context.health.enter_even_if_failed() {
                // The queue that was made to wait asks how it ends.
                let _: Answer = kept.wait(cl);
            }
        };
        let thread = std::thread::Builder::new().name("arrow-device opencl flush".into());
        // Without a thread it makes progress when its producer flushes the queue.
        let _ = thread.spawn(wait);
        Ok(())
    }
}

/// A user event that completes when this is dropped, so that no work waits for it for ever.
struct Gate(&'static Cl, Object);

impl Drop for Gate {
    fn drop(&mut self) {
        // Tried again in case the runtime is short of memory: the queue would hang.
        // SAFETY: the event is a user event, live and pending.
        let open = || unsafe { (self.0.clSetUserEventStatus)(self.1.raw(), CL_COMPLETE) };
        (0..16).any(|_| open() == CL_SUCCESS);
    }
}

/// Whether a queue for which a wait fails with this code runs nothing any more.
fn is_gone(code: cl_int) -> bool {
    matches!(
        code,
        CL_INVALID_COMMAND_QUEUE | CL_INVALID_CONTEXT | CL_INVALID_DEVICE | CL_DEVICE_NOT_AVAILABLE
    )
}

/// Returns how two waits have ended together. A queue that is gone runs nothing, but one whose wait has failed in another way may.
fn both(one: Answer, other: Answer) -> Answer {
    match (one, other) {
        (Err(one), Err(other)) if is_gone(one.code) => Err(other),
        (one, other) => one.and(other),
    }
}

// SAFETY:
// - memory is aligned (`Allocation::new`), and no memory of a device counts as readable by the host; that of `allocate_host` is the host's;
// - the queues are in order: `new` makes them so, and `adopt` refuses others; a wait is a barrier;
// - events are markers, which complete after all earlier commands of an in-order queue, which the host then sees;
// - `synchronize` waits for every queue until its work has finished, or the runtime answers that queue, context or device is gone, whose
//   work runs no more. Any other error says nothing about the work.
unsafe impl Runtime for OpenClDevice {
    type Stream = OpenClQueue;
    type Event = Event;
    type Memory = Arc<Allocation>;

    fn health(&self) -> &Health {
        &self.context.health
    }

    fn memories(&self) -> &Memories<Arc<Allocation>> {
        &self.memory.all
    }

    fn capabilities(&self) -> Capabilities {
        let mut this = Capabilities::new(self.context.health.id());
        if matches!(self.context.kind, Kind::Handles) {
            this.exports = ExportSync::Refused(
                "its addresses stand for cl_mem buffers, which no other library knows; open the device with other memory (OpenClMemory::Svm), \
                 or hand over the cl_mem of OpenClDevice::resolve",
            );
        }
        this
    }

    fn new_stream(&self) -> Result<Arc<OpenClQueue>> {
        OpenClQueue::new(self)
    }

    unsafe fn adopt_stream(&self, handle: usize) -> Result<Arc<OpenClQueue>> {
        // SAFETY: the caller guarantees a live command queue (contract of `adopt_stream`).
        unsafe { OpenClQueue::adopt(self, with_exposed_provenance_mut(handle)) }
    }

    fn stream_handle(&self, queue: &OpenClQueue) -> Option<usize> {
        Some(queue.handle().expose_provenance())
    }

    fn allocate(&self, bytes: usize, _: &OpenClQueue) -> Result<Arc<Allocation>> {
        Allocation::new(&self.context, bytes).map(Arc::new)
    }

    /// The runtimes without unified shared memory have no other memory from which they copy faster.
    fn allocate_host(&self, bytes: usize) -> Result<Option<Arc<Allocation>>> {
        let Kind::Usm(usm) = self.context.kind else {
            return Ok(None);
        };
        Allocation::on_host(&self.context, usm, bytes).map(|made| Some(Arc::new(made)))
    }

    fn base(&self, memory: &Arc<Allocation>) -> DevicePtr {
        memory.base
    }

    fn max_allocation(&self) -> usize {
        self.context.info.max_allocation
    }

    unsafe fn copy(
        &self,
        queue: &OpenClQueue,
        copies: &[CopyOp],
        under_way: &mut bool,
    ) -> Result<()> {
        for op in copies {
            // SAFETY: the caller guarantees memory for all bytes until the copies have completed (contract of `copy`); the queue is live.
            let queued = unsafe { self.memory.copy(queue.handle(), op) };
            self.context.check(queued)?;
            *under_way = true;
        }
        Ok(())
    }

    unsafe fn fill(
        &self,
        queue: &OpenClQueue,
        dst: DevicePtr,
        byte: u8,
        bytes: usize,
    ) -> Result<()> {
        // SAFETY: the caller guarantees `bytes` bytes until the fill has completed (contract of `fill`); the queue is live.
        let queued = unsafe { self.memory.fill(queue.handle(), dst, byte, bytes) };
        self.context.check(queued)
    }

    /// The queue is flushed, or the event might never complete.
    fn record(&self, queue: &OpenClQueue) -> Result<Event> {
        let (cl, queue) = (self.context.cl, queue.handle());
        let mut event: cl_event = null_mut();
        // SAFETY: the queue is live, and the place for the event valid. The event is nobody else's.
        let marked = unsafe {
            let code = (cl.clEnqueueMarkerWithWaitList)(queue, 0, null(), &raw mut event);
            made("clEnqueueMarkerWithWaitList", event, code).and_then(|event| {
                let object = Object::own(cl, EVENT, event);
                call!(code cl.clFlush(queue)).map(|()| object)
            })
        };
        let (object, is_own) = (self.context.check(marked)?, true);
        Ok(Event { object, is_own })
    }

    fn pointer(&self, event: &Event) -> *mut c_void {
        event.object.place()
    }

    unsafe fn foreign_event(&self, event: EventPtr) -> Result<Event> {
        // SAFETY: the caller guarantees the pointer to a live event (contract of `foreign_event`).
        let kept = unsafe {
            let event: cl_event = event.as_ptr().cast::<cl_event>().read();
            Object::retain(self.context.cl, EVENT, event)
        };
        let (object, is_own) = (self.context.check(kept)?, false);
        Ok(Event { object, is_own })
    }

    /// Work that has failed is the end of the device, and the rest before the event may still run: PoCL fails an event at once if a command
    /// before it fails. A foreign event that has failed says nothing about this device.
    fn is_done(&self, event: &Event) -> Result<bool> {
        let context = &self.context;
        match context.check(event.outcome(context.cl))? {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(failed)) => {
                let error = context.error(failed);
                Err(if event.is_own {
                    context.health.fail(error)
                } else {
                    error
                })
            }
        }
    }

    fn wait_host(&self, event: &Event) -> Result<()> {
        loop {
            let _inside = self.context.health.enter()?;
            let waited = event.wait(self.context.cl);
            // It says more than that some event has failed.
            if self.is_done(event)? {
                return Ok(());
            }
            self.context.check(waited)?;
        }
    }

    /// A queue waits for events of its own context that cannot fail unseen.
    fn wait(&self, queue: &OpenClQueue, event: &Event, is_own: bool) -> Result<bool> {
        if self.is_done(event)? {
            return Ok(true);
        }
        let waited = match is_own {
            true => queue.barrier(event.object.raw()),
            false => event.flush(&self.context),
        };
        self.context.check(waited).map(|()| is_own)
    }

    /// Events of other contexts cannot be waited for, and foreign ones may fail: one of our own follows such an event, and never fails.
    fn gate(&self, queue: &OpenClQueue) -> Result<Option<Box<dyn Send>>> {
        let (cl, context) = (self.context.cl, self.context.raw());
        // SAFETY: the context is live. The event is nobody else's.
        let made = unsafe {
            let made = call!(made cl.clCreateUserEvent(context));
            made.map(|event| Gate(cl, Object::own(cl, EVENT, event)))
        };
        let gate = self.context.check(made)?;
        // If this fails, the gate is open when it is dropped.
        self.context.check(queue.barrier(gate.1.raw()))?;
        Ok(Some(Box::new(gate)))
    }

    fn synchronize(&self, queues: &[Arc<OpenClQueue>]) -> Result<()> {
        let (context, cl) = (&self.context, self.context.cl);
        let _inside = context.health.enter_even_if_failed()?;
        let mut outcome = Ok(());
        for queue in queues {
            // SAFETY: the queue is live.
            let finished = unsafe { call!(code cl.clFinish(queue.handle())) };
            outcome = both(outcome, finished);
        }
        outcome.map_err(|failed| match is_gone(failed.code) {
            // SAFETY: each queue has finished, or is gone, whose work runs no more (`both`).
            true => unsafe { context.health.lose(context.error(failed)) },
            false => context.error(failed),
        })
    }

    /// A processor copies from any memory of the host, on threads of the runtime.
    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        self.context.info.is_cpu && address.address().checked_add(bytes).is_some()
    }

    /// Events of other contexts are followed by one of this context.
    fn relation(&self, _: &Self) -> Relation {
        Relation {
            copies: false,
            waits: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The device would be lost, and its memory freed, while the work of the other queue runs.
    #[test]
    fn a_queue_that_is_gone_does_not_hide_one_that_works() {
        let wait = |code| {
            Err(Failed {
                call: "clFinish",
                code,
            })
        };
        let both = |one, other| both(wait(one), wait(other)).unwrap_err().code;
        let (gone, works) = (CL_INVALID_COMMAND_QUEUE, CL_OUT_OF_RESOURCES);
        assert_eq!([both(gone, works), both(works, gone)], [works; 2]);
        assert_eq!(both(gone, CL_INVALID_CONTEXT), CL_INVALID_CONTEXT);
        assert!(super::both(wait(gone), Ok(())).is_err());
        assert!(super::both(Ok(()), wait(gone)).is_err());
    }
}
