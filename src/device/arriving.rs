//! [`Arriving`]: what is known of an array whose import looks for its device.

use std::fmt;

use crate::device::{DeviceId, DevicePtr, EventPtr};

/// An array that is being imported, for [`Devices::register_resolver`](crate::Devices::register_resolver).
///
/// Only the `unsafe` imports make such a value, and they pass it to resolvers while they run. A resolver may therefore rely
/// on what the import's caller vouched for: the event is live and of the type that belongs to the device type, and the
/// address is one of that type's.
pub struct Arriving<'a> {
    id: DeviceId,
    event: Option<EventPtr>,
    address: &'a dyn Fn() -> Option<DevicePtr>,
}

impl<'a> Arriving<'a> {
    /// # Safety
    /// `event` points to a live event of the device type of `id`.
    pub(crate) unsafe fn new(
        id: DeviceId,
        event: Option<EventPtr>,
        address: &'a dyn Fn() -> Option<DevicePtr>,
    ) -> Self {
        Self { id, event, address }
    }

    /// Returns the device type and id that the array states.
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// Returns the event, which lives as long as this value, or `None` if there is nothing to wait for.
    pub fn event(&self) -> Option<EventPtr> {
        self.event
    }

    /// Returns the address of the first buffer that is not null, from the root to its descendants, or `None` if the array has
    /// no such buffer. Looks for it at each call; the cost is that of the structs before it.
    pub fn address(&self) -> Option<DevicePtr> {
        (self.address)()
    }
}

impl fmt::Debug for Arriving<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arriving")
            .field("id", &self.id)
            .field("event", &self.event)
            .finish_non_exhaustive()
    }
}
