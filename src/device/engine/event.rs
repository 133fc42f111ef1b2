//! [`EngineEvent`]: those that queues of engines have recorded are found by what `sync_event` points to; what is not there is a foreign
//! producer's.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::health::{Guarded, NO_CODE};
use super::runtime::Runtime;
use super::shared::Shared;
use crate::device::backend::{EventPtr, device_error};
use crate::device::{DeviceId, lock};
use crate::error::{Error, Result};

static EVENTS: Mutex<BTreeMap<usize, Entry>> = Mutex::new(BTreeMap::new());

/// An event of a device; which one, is behind the type.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) device: DeviceId,
    event: Arc<dyn Any + Send + Sync>,
}

/// An event that a queue or a foreign producer has recorded.
pub(super) struct EngineEvent<R: Runtime> {
    pub(super) event: Guarded<R::Event>,
    /// Of the device that has recorded it; of the one that asks about a foreign producer's.
    pub(super) shared: Arc<Shared<R>>,
    is_foreign: bool,
}

impl<R: Runtime> EngineEvent<R> {
    fn new(shared: &Arc<Shared<R>>, event: R::Event, is_foreign: bool) -> Arc<Self> {
        Arc::new(Self {
            event: Guarded::new(event, &shared.health),
            shared: shared.clone(),
            is_foreign,
        })
    }

    /// Puts an event into the table.
    pub(super) fn publish(shared: &Arc<Shared<R>>, event: R::Event) -> Result<EventPtr> {
        let recorded = Self::new(shared, event, false);
        let pointer = EventPtr::new(shared.runtime.pointer(&recorded.event));
        let pointer = pointer.ok_or_else(|| Error::argument("a null event"))?;
        let entry = Entry {
            device: shared.health.id(),
            event: recorded,
        };
        lock(&EVENTS).insert(pointer.as_ptr().addr(), entry);
        Ok(pointer)
    }

    /// Finds an event that a device of this runtime has recorded.
    pub(super) fn find(event: EventPtr) -> Option<Arc<Self>> {
        find(event)?.event.downcast().ok()
    }

    /// Finds an event that a device of this runtime has recorded, or makes one of a foreign producer's.
    ///
    /// # Safety
    /// `event` points to a live event of the type of `shared`'s device.
    pub(super) unsafe fn of(shared: &Arc<Shared<R>>, event: EventPtr) -> Result<Arc<Self>> {
        if let Some(recorded) = Self::find(event) {
            return Ok(recorded);
        }
        // SAFETY: the caller guarantees a live event of the device's type (see `# Safety`).
        let event = unsafe { shared.runtime.foreign_event(event) }?;
        Ok(Self::new(shared, event, true))
    }

    pub(super) fn release(event: EventPtr) {
        // The event is dropped without the lock.
        let _released = { lock(&EVENTS).remove(&event.as_ptr().addr()) };
    }

    /// Returns whether the event has completed, and the device has not failed: runtimes let work run after work that has failed. An error
    /// names the device `on` which this is asked.
    pub(super) fn is_done(&self, on: &Shared<R>) -> Result<bool> {
        self.check(on)?;
        let is_done = self.shared.runtime.is_done(&self.event);
        self.check(on)?;
        is_done
    }

    /// Whether it was recorded by this device, and not by another one or a foreign producer.
    pub(super) fn is_of(&self, device: &Shared<R>) -> bool {
        !self.is_foreign && std::ptr::eq(&*self.shared, device)
    }

    /// Returns the failure of the event's device.
    pub(super) fn check(&self, on: &Shared<R>) -> Result<()> {
        self.shared.health.check().map_err(|e| {
            if std::ptr::eq(&*self.shared, on) {
                return e;
            }
            let operation = "the work of another device before an event";
            device_error(on.health.id(), operation, NO_CODE, e.to_string())
        })
    }
}

/// Finds an event that a device has recorded; `None` if it is a foreign producer's.
pub(super) fn find(event: EventPtr) -> Option<Entry> {
    lock(&EVENTS).get(&event.as_ptr().addr()).cloned()
}

/// Returns how many events of a device are in use.
pub(super) fn count<R: Runtime>(shared: &Shared<R>) -> usize {
    let events = lock(&EVENTS);
    let recorded = events
        .values()
        .filter_map(|entry| entry.event.downcast_ref::<EngineEvent<R>>());
    recorded.filter(|recorded| recorded.is_of(shared)).count()
}
