//! Events: their C representation, and which of them are live.

use std::collections::{HashMap, VecDeque};
use std::ptr::NonNull;

use crate::device::EventPtr;

/// What `sync_event` of an array on a simulated device points to.
///
/// The specification leaves the event type of `ARROW_DEVICE_EXT_DEV` to the producer. This is the
/// type of simulated devices. It only identifies an event: the device that recorded it looks it up
/// by its address and knows whether it has completed. Only that device's calls accept it, and only
/// until it is released; foreign code must neither write to it nor free it.
#[derive(Debug)]
#[repr(C)]
pub struct SimEvent {
    /// [`SimEvent::MAGIC`] while the event is live.
    pub magic: u64,
    /// Id of the device that recorded it, as in `ArrowDeviceArray.device_id`.
    pub device_id: i64,
    /// The number of the event among those of that device, from 1.
    pub serial: u64,
}

impl SimEvent {
    /// What [`magic`](Self::magic) reads in a live event: "ARROWSIM" as big-endian ASCII.
    pub const MAGIC: u64 = u64::from_be_bytes(*b"ARROWSIM");
}

/// A position in a queue. Reached when that many operations of the queue have run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Point {
    pub(super) queue: u64,
    pub(super) position: u64,
}

/// Released events that are kept before the oldest is used again, so that a stale pointer is
/// noticed.
const POOL_MIN_EVENTS: usize = 64;

/// All event objects of one device.
#[derive(Debug, Default)]
pub(super) struct Events {
    /// By address. Pointers from outside are looked up here and never followed.
    live: HashMap<usize, (NonNull<SimEvent>, Point)>,
    pool: VecDeque<NonNull<SimEvent>>,
    serial: u64,
}

// SAFETY: the pointers are boxes that this struct alone frees; moving it moves their ownership.
unsafe impl Send for Events {}

impl Events {
    /// Returns a new live event at `point`; never `None`.
    pub(super) fn record(&mut self, device_id: i64, point: Point) -> Option<EventPtr> {
        self.serial += 1;
        let event = SimEvent {
            magic: SimEvent::MAGIC,
            device_id,
            serial: self.serial,
        };
        let recycled = if self.pool.len() > POOL_MIN_EVENTS {
            self.pool.pop_front()
        } else {
            None
        };
        let event = match recycled {
            Some(old) => {
                // SAFETY: a pooled event is a leaked box, of which nothing has been used since its
                // release.
                unsafe { old.write(event) };
                old
            }
            None => NonNull::from(Box::leak(Box::new(event))),
        };
        self.live.insert(event.addr().get(), (event, point));
        EventPtr::new(event.as_ptr().cast())
    }

    /// Returns the event's position, or `None` if it is not a live event of this device.
    pub(super) fn find(&self, event: EventPtr) -> Option<Point> {
        let (_, point) = self.live.get(&event.as_ptr().addr())?;
        Some(*point)
    }

    /// Releases an event. Returns whether it was a live event of this device.
    pub(super) fn release(&mut self, event: EventPtr) -> bool {
        let Some((event, _)) = self.live.remove(&event.as_ptr().addr()) else {
            return false;
        };
        // SAFETY: the event was live, so it is a leaked box of `record`'s; its user has just
        // released it.
        unsafe { (*event.as_ptr()).magic = 0 };
        self.pool.push_back(event);
        true
    }

    pub(super) fn live(&self) -> usize {
        self.live.len()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let live = self.live.drain().map(|(_, (event, _))| event);
        for event in live.chain(self.pool.drain(..)) {
            // SAFETY: made by `Box::leak` in `record`, in exactly one of the two collections.
            drop(unsafe { Box::from_raw(event.as_ptr()) });
        }
    }
}
