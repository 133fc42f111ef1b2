//! Events: when data is ready.

use std::sync::Arc;
use std::task::Waker;

use crate::device::backend::EventPtr;
use crate::device::{Counters, Device, Place};
use crate::error::Result;

/// A point in a queue's work. Clones are the same event; the last one gives it back to the device
/// for reuse.
#[derive(Clone, Debug)]
pub struct SyncEvent(Arc<Owned>);

#[derive(Debug)]
struct Owned {
    device: Device,
    ptr: EventPtr,
    place: Place,
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: `ptr` came from `record` of a queue of this device (`SyncEvent::from_recorded`)
        // and this is its last use.
        unsafe { self.device.backend().release_event(self.ptr) }
    }
}

impl SyncEvent {
    /// # Safety
    /// `ptr` was recorded by a queue of `device` and is owned by nobody else.
    pub(crate) unsafe fn from_recorded(device: Device, ptr: EventPtr, place: Place) -> Self {
        Self(Arc::new(Owned { device, ptr, place }))
    }

    pub(super) fn place(&self) -> Place {
        self.0.place
    }

    pub(crate) fn as_ref(&self) -> EventRef<'_> {
        EventRef {
            device: &self.0.device,
            ptr: self.0.ptr,
        }
    }

    /// The device whose work the event stands for.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The pointer for `ArrowDeviceArray.sync_event`; valid as long as a clone of this event lives.
    pub fn as_ptr(&self) -> EventPtr {
        self.0.ptr
    }

    /// Whether the work before this event has completed. Never waits.
    pub fn is_complete(&self) -> Result<bool> {
        self.as_ref().is_complete()
    }

    /// Makes this thread wait until the work before this event has completed: one host wait.
    pub fn wait(&self) -> Result<()> {
        self.as_ref().wait()
    }

    /// As [`wait`](Self::wait), on a thread that holds up nobody.
    pub(crate) fn wait_uncounted(&self) -> Result<()> {
        // SAFETY: the event is live.
        unsafe { self.device().backend().wait_event(self.0.ptr) }
    }

    /// Calls `waker` once the event completes, without keeping this thread. `true` if it has
    /// completed already, and then the waker is not called. The event may be dropped meanwhile.
    pub fn notify(&self, waker: &Waker) -> Result<bool> {
        if self.is_complete()? {
            return Ok(true);
        }
        let waker = waker.clone();
        let done = vec![self.clone()];
        self.device().reaper().after(done, move || waker.wake());
        Ok(false)
    }
}

/// A borrowed event, ours or a foreign producer's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EventRef<'a> {
    device: &'a Device,
    ptr: EventPtr,
}

impl<'a> EventRef<'a> {
    /// # Safety
    /// `ptr` points to a live event of `device`'s type for as long as the result is used.
    pub(crate) unsafe fn new(device: &'a Device, ptr: EventPtr) -> Self {
        Self { device, ptr }
    }

    pub(crate) fn device(&self) -> &'a Device {
        self.device
    }

    pub(crate) fn ptr(&self) -> EventPtr {
        self.ptr
    }

    pub(crate) fn is_complete(&self) -> Result<bool> {
        // SAFETY: the event is live (contract of the constructors).
        unsafe { self.device.backend().query_event(self.ptr) }
    }

    pub(crate) fn wait(&self) -> Result<()> {
        Counters::add(&self.device.counters().host_waits, 1);
        // SAFETY: as above.
        unsafe { self.device.backend().wait_event(self.ptr) }
    }
}
