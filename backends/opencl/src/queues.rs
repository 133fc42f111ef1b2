//! The queues of a device, those that were dropped included: their work may still run.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::context::{Context, lock};
use crate::event::has_ended;
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
    fn has_ended(&self, cl: &Cl) -> bool {
        // SAFETY: `last` keeps the event alive.
        let ended = |event: &Arc<Event>| unsafe { has_ended(cl, event.raw()) };
        self.dropped && self.last.as_ref().is_some_and(ended)
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
        let mut queues = lock(&self.0);
        let mut ended = queues.clone();
        ended.retain(|queue| queue.has_ended(context.cl));
        queues.retain(|queue| ended.iter().all(|ended| ended.number != queue.number));
        let done = queues.is_empty();
        drop(queues);
        // Released outside the lock.
        drop(ended);
        done
    }

    /// Makes this thread wait for the work of all queues, and forgets those that were dropped before. A wait that fails is tried
    /// so many times.
    pub(crate) fn finish(&self, context: &Context, tries: usize) -> Answer<()> {
        let queues = lock(&self.0).clone();
        let mut outcome = Ok(());
        for tracked in queues {
            let finished = finish(context.cl, &tracked.queue, tries);
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

/// Makes this thread wait for the work of a queue, trying so many times.
pub(crate) fn finish(cl: &Cl, queue: &CommandQueue, tries: usize) -> Answer<()> {
    let mut tries = tries;
    loop {
        // SAFETY: the queue is live.
        let finished = unsafe { call!(cl, clFinish(queue.raw())) };
        if finished.is_ok() || tries <= 1 {
            return finished;
        }
        tries -= 1;
        std::thread::sleep(PAUSE);
    }
}
