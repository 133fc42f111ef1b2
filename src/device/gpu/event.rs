//! Events in places to which `sync_event` can point.

use std::any::Any;

use super::api::RawEvent;
use crate::device::backend::EventPtr;

/// An event in a place to which `sync_event` can point.
#[repr(C)]
pub(crate) struct EventCell {
    pub(super) raw: RawEvent,
    /// The owner of an event that was given; `None` if it is our own.
    given: Option<Box<dyn Any + Send>>,
}

impl EventCell {
    /// Makes the pointer for an event that was given. `owner` is dropped when the event is needed no
    /// more.
    pub(crate) fn given(raw: RawEvent, owner: Box<dyn Any + Send>) -> Option<EventPtr> {
        let given = Some(owner);
        Box::new(Self { raw, given }).into_ptr()
    }

    /// Makes a cell for an event of our own.
    pub(super) fn own(raw: RawEvent) -> Box<Self> {
        Box::new(Self { raw, given: None })
    }

    pub(super) fn is_own(&self) -> bool {
        self.given.is_none()
    }

    pub(super) fn into_ptr(self: Box<Self>) -> Option<EventPtr> {
        // The handle is the first member.
        EventPtr::new(Box::into_raw(self).cast())
    }

    /// # Safety
    /// `event` is from [`into_ptr`](Self::into_ptr), and is taken back once.
    pub(super) unsafe fn from_ptr(event: EventPtr) -> Box<Self> {
        // SAFETY: the caller guarantees a pointer that `into_ptr` made from a box, taken back once
        // (see `# Safety`).
        unsafe { Box::from_raw(event.as_ptr().cast::<Self>()) }
    }
}

/// Returns the event that `sync_event` points to.
///
/// # Safety
/// `event` points to an event handle.
pub(super) unsafe fn event_of(event: EventPtr) -> RawEvent {
    // SAFETY: the caller guarantees that a handle may be read there (see `# Safety`); any bits are
    // a `RawEvent`.
    unsafe { event.as_ptr().cast::<RawEvent>().read() }
}
