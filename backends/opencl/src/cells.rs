//! The places that `sync_event` points to.
//!
//! A cell holds a `cl_event` of this crate. Cells are recycled and known by their addresses: an event pointer that is not in the
//! table is a foreign producer's.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::take;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock};

use arrow_device::device::EventPtr;
use arrow_device::device::parts::{Failure, Process};
use opencl_sys::cl_event;

use crate::context::lock;
use crate::event::Producer;
use crate::object::Event;
use crate::sys::Cl;

/// A `cl_event` for readers of the C struct; null while the cell is not used.
#[repr(transparent)]
struct Cell(AtomicPtr<c_void>);

/// The cells of all devices, and the failures of these, which tell whose they are.
static OWNERS: LazyLock<RwLock<HashMap<usize, Arc<Failure>>>> = LazyLock::new(RwLock::default);

/// Returns the failure of the device to which the pointer belongs; `None`: it is a foreign producer's.
pub(crate) fn owner(event: EventPtr) -> Option<Arc<Failure>> {
    let owners = OWNERS.read().unwrap_or_else(PoisonError::into_inner);
    owners.get(&event.as_ptr().addr()).cloned()
}

/// Reads the handle, which may be null.
///
/// # Safety
/// The pointer is aligned for a pointer and points to as many readable bytes.
pub(crate) unsafe fn read(event: EventPtr) -> cl_event {
    let place = event.as_ptr().cast::<Cell>();
    // SAFETY: the caller guarantees readable bytes; any bits are a pointer. A cell of this crate that is given up at the same
    // time is written atomically.
    unsafe { (*place).0.load(Ordering::Acquire) }
}

/// The cells of one device.
pub(crate) struct Cells {
    failure: Arc<Failure>,
    /// Of boxes; those in use are owned by whoever has the event.
    idle: Mutex<Vec<EventPtr>>,
    process: Process,
    used: AtomicUsize,
}

impl Cells {
    /// Makes them for the device with this failure.
    pub(crate) fn new(failure: Arc<Failure>) -> Self {
        Self {
            failure,
            idle: Mutex::default(),
            process: Process::this(),
            used: AtomicUsize::new(0),
        }
    }

    /// Returns who has made an event.
    pub(crate) fn producer(&self, event: EventPtr) -> Producer {
        match owner(event) {
            Some(failure) if Arc::ptr_eq(&failure, &self.failure) => Producer::This,
            Some(failure) => Producer::Other(failure),
            None => Producer::Foreign,
        }
    }

    /// Returns how many cells hold an event.
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Puts an event into a cell, which owns it from now on.
    pub(crate) fn put(&self, event: Event) -> Option<EventPtr> {
        let idle = lock(&self.idle).pop();
        let place = idle.or_else(|| {
            let cell = Box::into_raw(Box::new(Cell(AtomicPtr::new(null_mut()))));
            let mut owners = OWNERS.write().unwrap_or_else(PoisonError::into_inner);
            owners.insert(cell.addr(), self.failure.clone());
            EventPtr::new(cell.cast())
        })?;
        // SAFETY: the box above is freed only when this value is dropped.
        let cell = unsafe { &*place.as_ptr().cast::<Cell>() };
        cell.0.store(event.into_raw(), Ordering::Release);
        self.used.fetch_add(1, Ordering::Relaxed);
        Some(place)
    }

    /// Takes the event out of a cell, which is recycled.
    ///
    /// # Safety
    /// The pointer is from [`put`](Self::put) of this value, and is not used again.
    pub(crate) unsafe fn take(&self, cl: &'static Cl, place: EventPtr) -> Option<Event> {
        // SAFETY: the caller guarantees a cell of this value, which lives as long as this value.
        let cell = unsafe { &*place.as_ptr().cast::<Cell>() };
        let event = NonNull::new(cell.0.swap(null_mut(), Ordering::AcqRel));
        lock(&self.idle).push(place);
        self.used.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: `put` moved a reference into the cell, which is taken out once.
        event.map(|event| unsafe { Event::own(cl, event) })
    }
}

impl Drop for Cells {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // The table may be locked for ever. What it names stays.
            return;
        }
        let mut owners = OWNERS.write().unwrap_or_else(PoisonError::into_inner);
        for place in take(&mut *lock(&self.idle)) {
            let cell = place.as_ptr().cast::<Cell>();
            owners.remove(&cell.addr());
            // SAFETY: `put` has made the box. The table, which is locked, named it to nobody who still reads it.
            drop(unsafe { Box::from_raw(cell) });
        }
    }
}
