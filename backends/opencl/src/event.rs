//! Events: what is asked of a `cl_event`, of this crate or of a foreign producer.
//!
//! Runtimes do not agree about failed events. PoCL 3.1 ends the process if a failed event is waited for by a command, never
//! calls a callback of an event that fails, and calls one that is set later with the status of success. Intel's CPU runtime
//! reports the status of success for an event whose predecessor failed, and then only `clWaitForEvents` and the callback show the
//! failure. So here every source is asked, and nothing of a failure is passed into the runtime.

use std::collections::HashMap;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use arrow_device::device::parts::Failure;
use opencl_sys::*;

use crate::context::{Context, in_callback, lock, user_event};
use crate::object::Event;
use crate::sys::{Answer, Cl, Failed, call, info};

/// Returns an error if the command of an event has failed.
fn of_status(status: cl_int) -> Answer<()> {
    match status {
        CL_COMPLETE.. => Ok(()),
        code => Err(Failed {
            call: "the producer's work before an event",
            code,
        }),
    }
}

/// # Safety
/// The event is live.
unsafe fn status(cl: &Cl, event: cl_event) -> Answer<cl_int> {
    let what = CL_EVENT_COMMAND_EXECUTION_STATUS;
    // SAFETY: the caller guarantees the event; the status is an integer.
    unsafe { info!(cl, clGetEventInfo(event, what) as cl_int) }
}

/// The state of an event.
enum State {
    Pending,
    /// It has completed or failed.
    Ended(Answer<()>),
}

/// Returns the state of an event; an error if it cannot be asked for. Never waits.
///
/// # Safety
/// The event is live.
unsafe fn state(cl: &Cl, event: cl_event) -> Answer<State> {
    // SAFETY: the caller guarantees the event.
    let status = unsafe { status(cl, event) }?;
    if status != CL_COMPLETE {
        return Ok(match of_status(status) {
            Ok(()) => State::Pending,
            failed => State::Ended(failed),
        });
    }
    // Does not wait any more, and reports failures that the status does not show.
    // SAFETY: the caller guarantees a live event (see `# Safety`), which is the whole list.
    match unsafe { call!(cl, clWaitForEvents(1, &raw const event)) } {
        Err(failed) if failed.code != CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST => Err(failed),
        ended => Ok(State::Ended(ended)),
    }
}

/// Returns whether the event has completed; an error if it has failed. Never waits.
///
/// # Safety
/// The event is live.
pub(crate) unsafe fn is_complete(cl: &Cl, event: cl_event) -> Answer<bool> {
    // SAFETY: the caller guarantees the event.
    match unsafe { state(cl, event) }? {
        State::Pending => Ok(false),
        State::Ended(outcome) => outcome.map(|()| true),
    }
}

/// What an event after the work of a queue of this crate says about that work.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    MayRun,
    Done,
    /// Some of it has failed, and the rest may still run: PoCL fails an event at once if a command before it fails, also while
    /// others are queued. Only a wait for the queue tells.
    Failed,
}

/// Returns what an event of this crate says about the work before it. Work that has failed is the end of the device. Never waits.
///
/// # Safety
/// The event is live.
pub(crate) unsafe fn work_before(context: &Context, event: cl_event) -> Work {
    // SAFETY: the caller guarantees the event.
    match unsafe { state(context.cl, event) } {
        Ok(State::Ended(Ok(()))) => Work::Done,
        Ok(State::Ended(Err(failed))) => {
            context.failure.set(context.error(failed));
            Work::Failed
        }
        Ok(State::Pending) | Err(_) => Work::MayRun,
    }
}

/// Makes this thread wait for the event; an error if it has failed.
///
/// # Safety
/// The event is live.
pub(crate) unsafe fn wait(cl: &Cl, event: cl_event) -> Answer<()> {
    // SAFETY: the caller guarantees the event.
    let waited = unsafe { call!(cl, clWaitForEvents(1, &raw const event)) };
    // It says more than that some event has failed.
    // SAFETY: the caller guarantees a live event (see `# Safety`).
    of_status(unsafe { status(cl, event) }?)?;
    waited
}

/// Makes sure that an event of a foreign producer makes progress if it is pending: its queue may not have been flushed.
///
/// # Safety
/// The event is live.
pub(crate) unsafe fn flush(cl: &Cl, event: cl_event) {
    // SAFETY: the caller guarantees the event.
    if !matches!(unsafe { status(cl, event) }, Ok(status) if status > CL_COMPLETE) {
        // Its queue may be gone: an event keeps none alive.
        return;
    }
    // SAFETY: the caller guarantees a live event (see `# Safety`); the queue is read as a pointer, null for user events.
    let queue = unsafe {
        info!(
            cl,
            clGetEventInfo(event, CL_EVENT_COMMAND_QUEUE) as cl_command_queue
        )
    };
    if let Ok(queue) = queue
        && !queue.is_null()
    {
        // A queue that its owner has released was flushed by that, and Intel's runtime refuses its handle.
        // SAFETY: a queue is deleted only once its commands have finished, and this one was pending just now.
        let _: Answer<()> = unsafe { call!(cl, clFlush(queue)) };
    }
}

/// Returns the context of an event.
///
/// # Safety
/// The event is live.
pub(crate) unsafe fn context(cl: &Cl, event: cl_event) -> Answer<cl_context> {
    // SAFETY: the caller guarantees the event; the context is a pointer.
    unsafe { info!(cl, clGetEventInfo(event, CL_EVENT_CONTEXT) as cl_context) }
}

type Action = Box<dyn FnOnce(Answer<()>) + Send>;

/// What is to be done when events end, by the number that the runtime passes to the callback. A number may be passed twice, or
/// never.
static ACTIONS: LazyLock<Mutex<HashMap<usize, Action>>> = LazyLock::new(Mutex::default);

fn act(number: usize, outcome: Answer<()>) {
    let action = lock(&ACTIONS).remove(&number);
    if let Some(action) = action {
        action(outcome);
    }
}

unsafe extern "C" fn ended(event: cl_event, status_given: cl_int, number: *mut c_void) {
    // Nothing unwinds into the runtime. The panic hook has reported it.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let Ok(cl) = Cl::get() else { return };
        // SAFETY: the runtime passes the event, which is live while this runs.
        let Ok(seen) = (unsafe { status(cl, event) }) else {
            // The status that was given may hide a failure. The poll of `on_end` decides.
            return;
        };
        let outcome = of_status(status_given).and(of_status(seen));
        in_callback(|| act(number.addr(), outcome));
    }));
}

/// Calls `action` with the outcome once the event has ended, on a thread of the runtime or of the context's worker, or on this
/// one. It must neither block nor make a blocking call of the runtime. After an error it is dropped.
///
/// # Safety
/// The event is live.
pub(crate) unsafe fn on_end(
    context: &Context,
    event: cl_event,
    action: impl FnOnce(Answer<()>) + Send + 'static,
) -> Answer<()> {
    static NUMBER: AtomicUsize = AtomicUsize::new(1);
    let cl = context.cl;
    // SAFETY: the caller guarantees the event.
    let kept = unsafe { Event::retain(cl, event) }?;
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    lock(&ACTIONS).insert(number, Box::new(action));
    let data = std::ptr::without_provenance_mut(number);
    // SAFETY: the event is live. The callback is called with `data`, which it does not follow.
    let set = unsafe {
        call!(
            cl,
            clSetEventCallback(event, CL_COMPLETE, Some(ended), data)
        )
    };
    if let Err(failed) = set {
        let action = lock(&ACTIONS).remove(&number);
        return match action {
            Some(_) => Err(failed),
            // The callback was called all the same.
            None => Ok(()),
        };
    }
    // For runtimes that do not call it if the event fails.
    let (outcome, mut tries) = (Arc::new(Mutex::new(Ok(()))), 0);
    let seen = outcome.clone();
    let poll = move || {
        if !lock(&ACTIONS).contains_key(&number) {
            return true;
        }
        // SAFETY: `kept` keeps the event alive.
        let ended = match unsafe { state(cl, kept.raw()) } {
            Ok(State::Pending) => return false,
            Ok(State::Ended(outcome)) => outcome,
            // The runtime may be short of memory.
            Err(_) if tries < TRIES => {
                tries += 1;
                return false;
            }
            failed => failed.map(|_| ()),
        };
        *lock(&seen) = ended;
        true
    };
    context
        .worker
        .watch(poll, move || act(number, *lock(&outcome)));
    Ok(())
}

/// How often in all an event may be asked for in vain before it is taken for failed.
const TRIES: usize = 1000;

/// The producer of an event.
pub(crate) enum Producer {
    /// The device itself.
    This,
    /// Another device of this crate, which may have failed although its events complete.
    Other(Arc<Failure>),
    Foreign,
}

impl Producer {
    pub(crate) fn check(&self) -> Answer<()> {
        match self {
            Self::Other(failure) if failure.is_set() => Err(Failed {
                call: "the work of another device before an event",
                code: CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST,
            }),
            _ => Ok(()),
        }
    }
}

/// Makes later work of a queue wait for an event of any context, without waiting itself, and flushes the queue of a foreign
/// event. An event that has failed is an error. If a pending one fails later, the device has failed.
///
/// # Safety
/// Queue and event are live, and `queue` is of `queue_context`.
pub(crate) unsafe fn make_wait(
    context: &Arc<Context>,
    queue: cl_command_queue,
    queue_context: cl_context,
    event: cl_event,
    producer: Producer,
) -> Answer<()> {
    let cl = context.cl;
    // SAFETY: the caller guarantees the event.
    if unsafe { is_complete(cl, event) }? {
        return producer.check();
    }
    // SAFETY: the caller guarantees a live queue and a live event (see `# Safety`); a barrier is given an event of its own context.
    unsafe {
        match producer {
            Producer::This if queue_context == context.raw() => {
                return call!(
                    cl,
                    clEnqueueBarrierWithWaitList(queue, 1, &raw const event, std::ptr::null_mut())
                );
            }
            Producer::This | Producer::Other(_) => {}
            Producer::Foreign => flush(cl, event),
        }
    }
    // Events of other contexts cannot be waited for, and foreign ones may fail: one of our own follows it, which never fails.
    // SAFETY: the caller guarantees the queue, which keeps its context alive.
    let bridge = unsafe { user_event(cl, queue_context) }?;
    let bridge = Bridge { cl, event: bridge };
    let raw = bridge.event.raw();
    // SAFETY: the queue and the new event are live and of one context. If the rest fails, the bridge opens when it is dropped.
    unsafe {
        call!(
            cl,
            clEnqueueBarrierWithWaitList(queue, 1, &raw const raw, std::ptr::null_mut())
        )
    }?;
    let owner = context.clone();
    let follow = move |outcome: Answer<()>| {
        if let Err(failed) = outcome.and_then(|()| producer.check()) {
            // Before the work behind the bridge runs.
            owner.failure.set(owner.error(failed));
        }
        drop(bridge);
    };
    // SAFETY: the caller guarantees the event.
    unsafe { on_end(context, event, follow) }
}

/// A user event that completes when this is dropped, so that no work waits for it for ever.
struct Bridge {
    cl: &'static Cl,
    event: Event,
}

impl Drop for Bridge {
    fn drop(&mut self) {
        // Tried again in case the runtime is short of memory: the queue would hang.
        for _ in 0..16 {
            // SAFETY: the event is a user event, live and pending.
            let set =
                unsafe { call!(self.cl, clSetUserEventStatus(self.event.raw(), CL_COMPLETE)) };
            if set.is_ok() {
                return;
            }
        }
    }
}
