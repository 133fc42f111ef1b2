//! Events: the places that `sync_event` points to, and what is asked of a `cl_event`, of this crate or of a foreign producer.
//!
//! Runtimes do not agree about failed events. PoCL 3.1 ends the process if a failed event is waited for by a command. Intel's CPU runtime
//! reports the status of success for an event whose predecessor failed, and then only `clWaitForEvents` shows the failure. So here both
//! are asked, and nothing of a failure is passed into the runtime.

use std::ptr::null_mut;
use std::sync::Arc;

use arrow_device::device::parts::{Failure, Ranges, Worker};
use arrow_device::device::{DevicePtr, EventPtr};
use opencl_sys::*;

use crate::context::Context;
use crate::sys::{Answer, Cl, EVENT, Failed, Object};

/// The events of all devices of this crate by the places that `sync_event` points to, with the failures of the devices. A place that is
/// not in the table is a foreign producer's.
static PLACES: Ranges<Arc<Failure>> = Ranges::new();

/// Puts an event of the device with this failure into a place, which owns it from now on.
pub(crate) fn publish(failure: &Arc<Failure>, event: Object) -> Option<EventPtr> {
    let place: *mut cl_event = Box::into_raw(Box::new(event.into_raw()));
    let bytes = size_of::<cl_event>();
    PLACES.insert(DevicePtr::new(place.cast()), bytes, failure.clone());
    EventPtr::new(place.cast())
}

/// Takes the event out of its place, which is gone.
///
/// # Safety
/// The pointer is from [`publish`], and is not used again.
pub(crate) unsafe fn take(cl: &'static Cl, place: EventPtr) -> Option<Object> {
    PLACES.remove(DevicePtr::new(place.as_ptr()));
    // SAFETY: `publish` made the box, and moved a reference into it, which is taken out once (see `# Safety`).
    let event = unsafe { *Box::from_raw(place.as_ptr().cast::<cl_event>()) };
    let event = std::ptr::NonNull::new(event)?;
    // SAFETY: the event is live, and the reference that was in the box is this value's now.
    Some(unsafe { Object::own(cl, EVENT, event) })
}

/// Returns the failure of the device to which the place belongs; `None`: it is a foreign producer's.
pub(crate) fn owner(place: EventPtr) -> Option<Arc<Failure>> {
    let found = PLACES.find(DevicePtr::new(place.as_ptr()))?;
    (found.offset == 0).then_some(found.value)
}

/// Returns an error if the device whose events these are has failed, although they complete.
pub(crate) fn check_owner(owner: &Option<Arc<Failure>>) -> Answer {
    match owner {
        Some(failure) if failure.is_set() => Err(Failed {
            call: "the work of another device before an event",
            code: CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST,
        }),
        _ => Ok(()),
    }
}

/// Reads the handle, which may be null.
///
/// # Safety
/// The pointer is aligned for a pointer and points to as many readable bytes.
pub(crate) unsafe fn read(place: EventPtr) -> cl_event {
    // SAFETY: the caller guarantees readable bytes; any bits are a pointer.
    unsafe { *place.as_ptr().cast::<cl_event>() }
}

/// # Safety
/// The event is live.
unsafe fn status(cl: &Cl, event: cl_event) -> Answer<cl_int> {
    // SAFETY: the caller guarantees the event; the status is an integer.
    unsafe { cl.clGetEventInfo(event, CL_EVENT_COMMAND_EXECUTION_STATUS) }
}

/// Returns an error if the command of an event has failed.
fn of_status(code: cl_int) -> Answer {
    let call = "the producer's work before an event";
    match code {
        CL_COMPLETE.. => Ok(()),
        _ => Err(Failed { call, code }),
    }
}

/// Returns how an event has ended; `None`: it is pending. An error if it cannot be asked about. Never waits.
///
/// # Safety
/// The event is live.
unsafe fn outcome(cl: &Cl, event: cl_event) -> Answer<Option<Answer>> {
    // SAFETY: the caller guarantees a live event (see `# Safety`).
    let status = unsafe { status(cl, event) }?;
    if status != CL_COMPLETE {
        return Ok(of_status(status).err().map(Err));
    }
    // Does not wait any more, and reports failures that the status does not show.
    // SAFETY: the caller guarantees a live event (see `# Safety`), which is the whole list.
    match unsafe { cl.clWaitForEvents(1, &raw const event) } {
        Err(failed) if failed.code != CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST => Err(failed),
        ended => Ok(Some(ended)),
    }
}

/// Returns whether the event has completed; an error if it has failed. Never waits.
///
/// # Safety
/// The event is live.
pub(crate) unsafe fn is_complete(cl: &Cl, event: cl_event) -> Answer<bool> {
    // SAFETY: the caller guarantees a live event (see `# Safety`).
    let outcome = unsafe { outcome(cl, event) }?;
    outcome.map_or(Ok(false), |ended| ended.map(|()| true))
}

/// Returns whether the work before an event of a device has ended well. Work that has failed is the end of the device, and the rest before
/// the event may still run: PoCL fails an event at once if a command before it fails. Never waits.
pub(crate) fn is_done(context: &Context, event: &Object) -> bool {
    // SAFETY: the object is a live event.
    match unsafe { outcome(context.cl, event.raw()) } {
        Ok(Some(Err(failed))) => {
            context.failure.set(context.error(failed));
            false
        }
        outcome => matches!(outcome, Ok(Some(Ok(())))),
    }
}

/// Makes this thread wait for the event; an error if it has failed.
///
/// # Safety
/// The event is live.
pub(crate) unsafe fn wait(cl: &Cl, event: cl_event) -> Answer {
    // SAFETY: the caller guarantees a live event (see `# Safety`).
    let waited = unsafe { cl.clWaitForEvents(1, &raw const event) };
    // It says more than that some event has failed.
    // SAFETY: the caller guarantees a live event (see `# Safety`).
    of_status(unsafe { status(cl, event) }?)?;
    waited
}

/// Sees to it that a foreign producer's event makes progress: its queue may not have been flushed. That queue's handle is not used, since an
/// event keeps no queue alive, and the producer may release it at any time. A thread that waits for the event flushes the queue instead
/// (OpenCL's specification, "Flush and Finish").
fn flush(cl: &'static Cl, event: cl_event) -> Answer {
    // SAFETY: the caller of `make_wait`, from which alone this is called, guarantees the event.
    unsafe {
        if status(cl, event)? != CL_QUEUED as cl_int {
            return Ok(());
        }
        let kept = Object::retain(cl, EVENT, event)?;
        Worker::new("arrow-device opencl flush").push(move || {
            let _inside = cl.enter();
            if _inside.is_some() {
                // The queue that was made to wait asks how it ends.
                let _: Answer = wait(cl, kept.raw());
            }
        });
    }
    Ok(())
}

/// How often in all an event may be asked for in vain before it is taken for failed.
const TRIES: usize = 1000;

/// Makes later work of a queue wait for an event of any context, without waiting itself. An event that has failed is an error. If a
/// pending one fails later, the device has failed.
///
/// # Safety
/// Queue and event are live, and `queue` is of `queue_context`.
pub(crate) unsafe fn make_wait(
    context: &Arc<Context>,
    queue: cl_command_queue,
    queue_context: cl_context,
    place: EventPtr,
) -> Answer {
    let (cl, owner) = (context.cl, owner(place));
    // SAFETY: the caller guarantees a live event (see `# Safety`).
    let event = unsafe { read(place) };
    // SAFETY: the caller guarantees a live event (see `# Safety`).
    if unsafe { is_complete(cl, event) }? {
        return check_owner(&owner);
    }
    let wait_for = |event: cl_event| {
        // SAFETY: the caller guarantees a live queue (see `# Safety`); the events below are live and of its context.
        unsafe { cl.clEnqueueBarrierWithWaitList(queue, 1, &raw const event, null_mut()) }
    };
    let is_own = owner
        .as_ref()
        .is_some_and(|owner| Arc::ptr_eq(owner, &context.failure));
    if is_own && queue_context == context.raw() {
        return wait_for(event);
    }
    if owner.is_none() {
        flush(cl, event)?;
    }
    // Events of other contexts cannot be waited for, and foreign ones may fail: one of our own follows it, which never fails.
    // SAFETY: the caller guarantees the event, and the queue, which keeps its context alive. The new event is nobody else's.
    let (kept, bridge) = unsafe {
        let kept = Object::retain(cl, EVENT, event)?;
        (
            kept,
            Bridge(
                cl,
                Object::own(cl, EVENT, cl.clCreateUserEvent(queue_context)?),
            ),
        )
    };
    // If this fails, the bridge opens when it is dropped.
    wait_for(bridge.1.raw())?;
    let (context_, mut tries) = (context.clone(), 0);
    let has_ended = move || {
        let Some(_inside) = cl.enter() else {
            return false;
        };
        // SAFETY: `kept` keeps the event alive.
        let ended = match unsafe { outcome(cl, kept.raw()) } {
            Ok(None) => return false,
            Ok(Some(ended)) => ended,
            // The runtime may be short of memory.
            Err(_) if tries < TRIES => {
                tries += 1;
                return false;
            }
            Err(failed) => Err(failed),
        };
        if let Err(failed) = ended.and_then(|()| check_owner(&owner)) {
            // Before the work behind the bridge runs.
            context_.failure.set(context_.error(failed));
        }
        true
    };
    context.worker.watch(has_ended, move || drop(bridge));
    Ok(())
}

/// A user event that completes when this is dropped, so that no work waits for it for ever.
struct Bridge(&'static Cl, Object);

impl Drop for Bridge {
    fn drop(&mut self) {
        let Some(_inside) = self.0.enter() else {
            return;
        };
        // Tried again in case the runtime is short of memory: the queue would hang.
        // SAFETY: the event is a user event, live and pending.
        let open = || unsafe { self.0.clSetUserEventStatus(self.1.raw(), CL_COMPLETE) };
        (0..16).any(|_| open().is_ok());
    }
}
