//! The queues of a device, those that were dropped included: their work may still run.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::codes;
use crate::context::{Context, lock};
use crate::event::{Work, work_before};
use crate::object::{CommandQueue, Event};
use crate::sys::{Answer, Cl, call};

/// The pause between two attempts to wait for a queue.
const PAUSE: Duration = Duration::from_millis(10);

#[derive(Clone)]
struct Tracked {
    number: u64,
    queue: Arc<CommandQueue>,
    dropped: bool,
    /// An event after the last work of a queue that was dropped; `None` if it could not be recorded.
    last: Option<Arc<Event>>,
}

impl Tracked {
    fn is_done(&self, context: &Context) -> bool {
        // SAFETY: `last` keeps the event alive.
        let done = |event: &Arc<Event>| unsafe { work_before(context, event.raw()) } == Work::Done;
        self.dropped && self.last.as_ref().is_some_and(done)
    }
}

/// The queues of a device.
#[derive(Default)]
pub(crate) struct Queues(Mutex<Vec<Tracked>>);

impl Queues {
    pub(crate) fn add(&self, number: u64, queue: Arc<CommandQueue>) {
        let (dropped, last) = (false, None);
        lock(&self.0).push(Tracked {
            number,
            queue,
            dropped,
            last,
        });
    }

    /// A queue was dropped, with an event after its last work if one could be recorded.
    pub(crate) fn drop_queue(&self, context: &Context, number: u64, last: Option<Event>) {
        if let Some(queue) = lock(&self.0)
            .iter_mut()
            .find(|queue| queue.number == number)
        {
            queue.dropped = true;
            queue.last = last.map(Arc::new);
        }
        self.are_done(context);
    }

    /// Returns whether all queues were dropped and have ended, and forgets those that have.
    pub(crate) fn are_done(&self, context: &Context) -> bool {
        // The runtime is called outside the lock: to ask, and to release the queues.
        let mut ended = lock(&self.0).clone();
        ended.retain(|queue| queue.is_done(context));
        let mut queues = lock(&self.0);
        queues.retain(|queue| ended.iter().all(|ended| ended.number != queue.number));
        queues.is_empty()
    }

    /// Makes this thread wait for the work of all queues, and forgets those that were dropped before.
    pub(crate) fn finish(&self, context: &Context, patience: Patience) -> Answer<()> {
        let queues = lock(&self.0).clone();
        let mut outcome = Ok(());
        for tracked in queues {
            let finished = finish(context.cl, &tracked.queue, patience);
            if finished.is_ok() && tracked.dropped {
                let mut queues = lock(&self.0);
                let place = queues
                    .iter()
                    .position(|queue| queue.number == tracked.number);
                let over = place.map(|place| queues.swap_remove(place));
                drop(queues);
                drop(over);
            }
            outcome = outcome.and(finished);
        }
        outcome
    }
}

/// When a wait for a queue gives up.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// At the first error.
    Once,
    /// Once the queue's work certainly does not run any more, as long as it takes. There is no bound: to give up while the runtime
    /// answers with other errors, such as `CL_OUT_OF_RESOURCES`, would free memory that work may still use.
    UntilEnded,
}

/// Makes this thread wait for the work of a queue.
pub(crate) fn finish(cl: &Cl, queue: &CommandQueue, patience: Patience) -> Answer<()> {
    loop {
        // SAFETY: the queue is live.
        match unsafe { call!(cl, clFinish(queue.raw())) } {
            Err(failed) if patience == Patience::UntilEnded && !codes::is_gone(failed.code) => {
                // Such as a lack of memory, which says nothing about the work.
                std::thread::sleep(PAUSE);
            }
            finished => return finished,
        }
    }
}
