//! What a device keeps for its next use: events, in places to which `sync_event` can point, and memory that its library allocates
//! slowly, in no stream's order, and frees only after waiting for the device: page-locked and managed memory, and device memory where
//! there are no pools.
//!
//! On an H200 `cuMemFreeHost` waits for all queued work of the context; such a free may also hold a
//! lock of the library meanwhile, so that a host function that waits for another thread's call of the
//! library never returns (reported for `cuMemFree` and `cuMemFreeHost`). So nothing is freed when it is
//! dropped, but where the device is waited for anyway
//! ([`Backend::synchronize`](crate::device::Backend::synchronize)).

use std::any::Any;
use std::sync::Mutex;

use super::api::RawEvent;
use crate::device::backend::{DevicePtr, EventPtr};
use crate::device::lock;
use crate::device::parts::{Block, Pool, Ranges};

/// An event in a place to which `sync_event` can point.
#[repr(C)]
pub(crate) struct EventCell {
    pub(super) raw: RawEvent,
    /// Whether it is our own, and is used again.
    pub(super) is_own: bool,
    /// The owner of an event that was given. One without an owner is destroyed.
    pub(super) owner: Option<Box<dyn Any + Send>>,
}

impl EventCell {
    /// Makes the pointer for an event that was given. When it is needed no more, `owner` is dropped, or
    /// else the event is destroyed.
    pub(crate) fn given(raw: RawEvent, owner: Option<Box<dyn Any + Send>>) -> Option<EventPtr> {
        let is_own = false;
        Box::new(Self { raw, is_own, owner }).into_ptr()
    }

    /// Makes a cell for an event of our own.
    pub(super) fn own(raw: RawEvent) -> Box<Self> {
        let (is_own, owner) = (true, None);
        Box::new(Self { raw, is_own, owner })
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

/// An event after the last use of memory.
pub(super) type After = Box<EventCell>;

/// What a device has allocated without a pool of the library's.
#[derive(Default)]
pub(crate) struct Heap {
    /// The device's own memory in use.
    pub(crate) live: Ranges<()>,
    /// Idle memory of the device's, with an event after its last use.
    pub(super) idle: Pool<After>,
    /// The device's memory that could not be freed in a queue's order: freed once all work has
    /// ended.
    pub(super) given_up: Mutex<Vec<DevicePtr>>,
    pub(super) staging: Mutex<Staging>,
}

/// Page-locked memory for staging.
#[derive(Default)]
pub(super) struct Staging {
    /// Of all that there is.
    pub(super) bytes: usize,
    /// What nobody uses any more.
    pub(super) idle: Vec<(DevicePtr, usize)>,
}

impl Heap {
    /// Whether nothing is left to be freed that may have to be waited for.
    pub(super) fn is_empty(&self) -> bool {
        self.idle.is_empty()
            && lock(&self.staging).idle.is_empty()
            && lock(&self.given_up).is_empty()
    }

    /// Takes a block back that a queue has used; `after` stands for all its work so far.
    pub(super) fn give_back(&self, base: DevicePtr, bytes: usize, queue: u64, after: After) {
        // Adopted memory is not in the table.
        let bytes = self.live.remove(base).map_or(bytes, |(bytes, ())| bytes);
        self.idle.give(Block {
            base,
            bytes,
            queue,
            after,
        });
    }

    /// Frees memory of the device's that could not be freed in a queue's order, and that queued work
    /// may still use, once all work has ended.
    pub(crate) fn give_up(&self, base: DevicePtr) {
        self.live.remove(base);
        lock(&self.given_up).push(base);
    }
}
