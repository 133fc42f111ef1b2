//! The events that queues of engines have recorded, by what `sync_event` points to: what is not there is a foreign producer's.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use super::health::{Guarded, NO_CODE};
use super::runtime::Runtime;
use super::shared::Shared;
use crate::device::DeviceId;
use crate::device::backend::{EventPtr, device_error};
use crate::error::{Error, Result};

static EVENTS: RwLock<BTreeMap<usize, Entry>> = RwLock::new(BTreeMap::new());

/// An event of a device; which one, is behind the type.
#[derive(Clone)]
struct Entry {
    device: DeviceId,
    event: Arc<dyn Any + Send + Sync>,
}

/// An event that a queue has recorded.
pub(super) struct Recorded<R: Runtime> {
    pub(super) event: Guarded<R::Event>,
    pub(super) shared: Arc<Shared<R>>,
}

impl<R: Runtime> Recorded<R> {
    /// Puts an event into the table.
    pub(super) fn publish(shared: &Arc<Shared<R>>, event: R::Event) -> Result<EventPtr> {
        let recorded = Arc::new(Self {
            event: Guarded::new(event, &shared.health),
            shared: shared.clone(),
        });
        let pointer = EventPtr::new(shared.runtime.pointer(&recorded.event));
        let pointer = pointer.ok_or_else(|| Error::argument("a null event"))?;
        let entry = Entry {
            device: shared.health.id(),
            event: recorded,
        };
        let mut events = EVENTS.write().unwrap_or_else(PoisonError::into_inner);
        events.insert(pointer.as_ptr().addr(), entry);
        Ok(pointer)
    }

    /// Finds an event that a device of this runtime has recorded.
    pub(super) fn find(event: EventPtr) -> Option<Arc<Self>> {
        find(event)?.event.downcast().ok()
    }

    pub(super) fn release(event: EventPtr) {
        let mut events = EVENTS.write().unwrap_or_else(PoisonError::into_inner);
        let released = events.remove(&event.as_ptr().addr());
        drop(events);
        // The event is dropped without the lock.
        drop(released);
    }

    /// Returns whether the event has completed, and the device has not failed: runtimes let work run after work that has failed. An error
    /// names the device `on` which this is asked.
    pub(super) fn is_done(&self, on: &Shared<R>) -> Result<bool> {
        self.check(on)?;
        let is_done = self.shared.runtime.is_done(&self.event);
        self.check(on)?;
        is_done
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

fn find(event: EventPtr) -> Option<Entry> {
    let events = EVENTS.read().unwrap_or_else(PoisonError::into_inner);
    events.get(&event.as_ptr().addr()).cloned()
}

/// Returns which device's queue has recorded an event; `None` if it is a foreign producer's.
pub(super) fn recorder(event: EventPtr) -> Option<DeviceId> {
    find(event).map(|entry| entry.device)
}

/// Returns how many events of a device are in use.
pub(super) fn count<R: Runtime>(shared: &Arc<Shared<R>>) -> usize {
    let events = EVENTS.read().unwrap_or_else(PoisonError::into_inner);
    let recorded = events
        .values()
        .filter_map(|entry| entry.event.downcast_ref::<Recorded<R>>());
    recorded
        .filter(|recorded| Arc::ptr_eq(&recorded.shared, shared))
        .count()
}
