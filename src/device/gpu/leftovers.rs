//! What could not be freed or destroyed when its owner was dropped, and the queues whose work it
//! may wait for.

use std::mem::take;
use std::sync::{Arc, Mutex, Weak};

use super::api::RawStream;
use super::entry::Current;
use super::runtime::Memory;
use crate::device::backend::DevicePtr;
use crate::device::lock;

/// A queue, by the work that it has.
pub(super) trait Work: Send + Sync {
    /// Returns the queue's number.
    fn id(&self) -> u64;

    /// Whether its stream is being captured, or the library cannot tell: then it must be neither
    /// queried nor waited for.
    fn is_captured(&self, current: &Current<'_>) -> bool;

    /// Whether all of its work has completed.
    fn is_idle(&self, current: &Current<'_>) -> bool;

    /// Waits for its work. Returns whether that succeeded.
    fn wait(&self, current: &Current<'_>) -> bool;

    /// Tries again to free what could not be freed before; returns whether it succeeded, or never
    /// will.
    ///
    /// # Safety
    /// As [`RawQueue::free`](crate::device::RawQueue::free).
    unsafe fn try_free(&self, base: DevicePtr, bytes: usize) -> bool;
}

/// Memory that could not be freed.
pub(super) enum Leftover {
    /// Memory that queued work may still use: freed once all work of the device has ended.
    Memory(Memory, DevicePtr),
    /// Memory whose queue frees it in its order, once that is allowed: the queue's stream is being
    /// captured.
    OfQueue {
        queue: Arc<dyn Work>,
        base: DevicePtr,
        bytes: usize,
    },
}

/// What a context has to look after.
#[derive(Default)]
pub(super) struct Leftovers {
    memory: Mutex<Vec<Leftover>>,
    streams: Mutex<Streams>,
}

#[derive(Default)]
struct Streams {
    queues: Vec<Weak<dyn Work>>,
    /// Our own streams whose queues were dropped while they had work. Destroying one might wait.
    dropped: Vec<RawStream>,
    /// How many threads wait for streams that they have taken out of `dropped`.
    waiting: usize,
}

impl Streams {
    /// Destroys streams that have no work any more.
    fn sweep(&mut self, current: &Current<'_>) {
        self.dropped.retain(|stream| {
            // SAFETY: the stream was created by its queue, whose drop handed it over.
            let busy = unsafe { current.is_idle(*stream) } == Ok(false);
            if !busy {
                // SAFETY: the stream was created by its queue, whose drop handed it over: nothing
                // uses it any more.
                unsafe { current.destroy_stream(*stream) };
            }
            busy
        });
    }
}

impl Leftovers {
    /// Adds memory that could not be freed.
    pub(super) fn add(&self, leftover: Leftover) {
        lock(&self.memory).push(leftover);
    }

    /// Takes out all memory, to be given back to [`free`](Self::free).
    pub(super) fn take(&self) -> Vec<Leftover> {
        take(&mut *lock(&self.memory))
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.memory).is_empty() && lock(&self.streams).dropped.is_empty()
    }

    /// Frees what may be freed, and keeps the rest. `settled`: all work has ended since it was
    /// taken out.
    pub(super) fn free(&self, memory: Vec<Leftover>, settled: bool, current: Option<&Current<'_>>) {
        // What one queue refuses, it refuses for one reason.
        let mut refused = Vec::new();
        let kept = |leftover: &Leftover| match leftover {
            Leftover::Memory(memory, ptr) => {
                // SAFETY: the memory was allocated with this kind, its owner has given it up, and
                // all work that could use it has ended.
                let free = |current: &Current<'_>| unsafe { current.try_free(*memory, *ptr) };
                !(settled && current.is_some_and(free))
            }
            Leftover::OfQueue { queue, .. } if refused.contains(&queue.id()) => true,
            Leftover::OfQueue { queue, base, bytes } => {
                // SAFETY: the memory comes from `RawQueue::free`, whose caller guarantees that it
                // was allocated on this device, is freed once, and that the queue's stream has
                // waited for its uses.
                let done = unsafe { queue.try_free(*base, *bytes) };
                if !done {
                    refused.push(queue.id());
                }
                !done
            }
        };
        let kept: Vec<_> = memory.into_iter().filter(kept).collect();
        lock(&self.memory).extend(kept);
    }

    /// Adds a queue of the context.
    pub(super) fn add_queue(&self, queue: Weak<dyn Work>) {
        let queues = &mut lock(&self.streams).queues;
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(queue);
    }

    /// Destroys a stream of our own once it has no work.
    pub(super) fn add_stream(&self, stream: RawStream, current: &Current<'_>) {
        let mut streams = lock(&self.streams);
        streams.dropped.push(stream);
        streams.sweep(current);
    }

    /// The queues that are there.
    fn queues(&self) -> Vec<Arc<dyn Work>> {
        let streams = lock(&self.streams);
        streams.queues.iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether all queues are known to have no work.
    pub(super) fn are_idle(&self, current: &Current<'_>) -> bool {
        {
            let mut streams = lock(&self.streams);
            streams.sweep(current);
            if !streams.dropped.is_empty() || streams.waiting > 0 {
                return false;
            }
        }
        let idle = |queue: &Arc<dyn Work>| !queue.is_captured(current) && queue.is_idle(current);
        self.queues().iter().all(idle)
    }

    /// Waits for the work of all queues, those that were dropped included. Returns false if that
    /// failed, or if one is being captured: then it waits for none.
    pub(super) fn wait(&self, current: &Current<'_>) -> bool {
        let queues = self.queues();
        if queues.iter().any(|queue| queue.is_captured(current)) {
            return false;
        }
        let dropped = {
            let mut streams = lock(&self.streams);
            streams.waiting += 1;
            take(&mut streams.dropped)
        };
        // SAFETY: the streams were created by their queues, whose drops handed them over, and were
        // taken out above, so that no other thread destroys them.
        let wait = |stream: &RawStream| unsafe { current.synchronize_stream(*stream) }.is_ok();
        let mut done = dropped.iter().all(wait);
        {
            let mut streams = lock(&self.streams);
            streams.waiting -= 1;
            streams.dropped.extend(dropped);
            streams.sweep(current);
        }
        for queue in &queues {
            // The capture may have begun meanwhile.
            if queue.is_captured(current) {
                return false;
            }
            done &= queue.wait(current);
        }
        done
    }

    /// Destroys all streams, at the end of the context.
    pub(super) fn destroy_streams(&self, current: &Current<'_>) {
        for stream in take(&mut lock(&self.streams).dropped) {
            // SAFETY: the stream was created by its queue, whose drop handed it over: nothing uses
            // it any more.
            unsafe { current.destroy_stream(stream) };
        }
    }
}
