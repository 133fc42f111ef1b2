//! Events: points in the work of queues.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use arrow_device::device::EventPtr;

/// What `sync_event` points to. A real backend has an event of its runtime here.
#[derive(Default, Debug)]
pub(crate) struct Event {
    done: Mutex<bool>,
    completed: Condvar,
}

impl Event {
    /// Called by the queue, after all its earlier work.
    pub(crate) fn complete(&self) {
        *lock(&self.done) = true;
        self.completed.notify_all();
    }

    pub(crate) fn is_done(&self) -> bool {
        *lock(&self.done)
    }

    pub(crate) fn wait(&self) {
        let waited = self.completed.wait_while(lock(&self.done), |done| !*done);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// The events that were recorded and not yet released, by address. A pointer from outside is looked
/// up here and never followed, so none can do harm. A backend of a runtime that has events gives
/// such a pointer to the runtime, where it may be an event of another program.
#[derive(Default, Debug)]
pub(crate) struct Events(Mutex<HashMap<usize, Arc<Event>>>);

impl Events {
    /// Returns the pointer of a new event; never `None`.
    pub(crate) fn add(&self, event: Arc<Event>) -> Option<EventPtr> {
        let pointer = Arc::as_ptr(&event).cast_mut();
        lock(&self.0).insert(pointer.addr(), event);
        EventPtr::new(pointer.cast())
    }

    pub(crate) fn find(&self, event: EventPtr) -> Option<Arc<Event>> {
        lock(&self.0).get(&event.as_ptr().addr()).cloned()
    }

    pub(crate) fn release(&self, event: EventPtr) {
        let released = lock(&self.0).remove(&event.as_ptr().addr());
        drop(released);
    }

    pub(crate) fn len(&self) -> usize {
        lock(&self.0).len()
    }
}

/// Locks a mutex whose content is whole whenever it is free, also after a panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
