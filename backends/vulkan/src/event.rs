//! Events: the VkEvents that this crate records, and what is asked of any.

use std::collections::{HashMap, VecDeque};
use std::mem::take;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock};

use arrow_device::Result;
use arrow_device::device::EventPtr;
use ash::prelude::VkResult;
use ash::vk;

use crate::codes::{Answer, Of};
use crate::context::{Context, lock, without_polls};
use crate::lane::Point;

/// What `sync_event` points to.
#[repr(transparent)]
struct Cell(vk::Event);

/// The points of the live events of this crate, of all devices, by the addresses of their cells: an event pointer that is not in
/// the table is a foreign producer's.
static RECORDED: LazyLock<RwLock<HashMap<usize, Point>>> = LazyLock::new(RwLock::default);

/// Returns the point that an event of this crate stands for; `None`: it is a foreign producer's.
pub(crate) fn recorded(event: EventPtr) -> Option<Point> {
    let recorded = RECORDED.read().unwrap_or_else(PoisonError::into_inner);
    recorded.get(&event.as_ptr().addr()).cloned()
}

/// Reads the handle, which may be null.
///
/// # Safety
/// The pointer is aligned for a VkEvent and points to as many readable bytes.
pub(crate) unsafe fn read(event: EventPtr) -> vk::Event {
    // SAFETY: the caller guarantees readable bytes; any bits are a handle.
    unsafe { event.as_ptr().cast::<Cell>().read() }.0
}

/// Returns whether an event is set. Never waits.
///
/// # Safety
/// The event is live, of the context's VkDevice, and was not created with VK_EVENT_CREATE_DEVICE_ONLY_BIT.
pub(crate) unsafe fn is_set(context: &Context, event: vk::Event) -> Answer<bool> {
    // SAFETY: the caller guarantees the event (VUID-vkGetEventStatus-event-03940); the call needs no exclusive access.
    unsafe { context.device.get_event_status(event) }.of("vkGetEventStatus")
}

/// Sets an event of a program, by the host (`vkSetEvent`), while none of this crate's threads asks for an event.
///
/// Vulkan allows no other use of an event while the host sets it, and this crate asks for the events of arrays that it imports. Drivers
/// are not known to mind, but the validation layer reports it. Events that commands set (`vkCmdSetEvent`) need nothing of the kind.
///
/// # Errors
/// Returns the code of `vkSetEvent`.
///
/// # Safety
/// The event is live, of this VkDevice, and not for the device only. Nobody else uses it at the same time.
pub unsafe fn set_event(device: &ash::Device, event: vk::Event) -> VkResult<()> {
    let _alone = without_polls();
    // SAFETY: the caller guarantees the event (VUID-vkSetEvent-event-03941) and that nobody else uses it; this crate does not now.
    unsafe { device.set_event(event) }
}

/// The events of one device. They are recycled, with their cells.
pub(crate) struct Events {
    context: Arc<Context>,
    /// Not set, and used by nobody.
    idle: Mutex<Vec<EventPtr>>,
    /// Released before the commands that set them had run, by the numbers of the lanes.
    resting: Mutex<HashMap<u64, VecDeque<(EventPtr, Point)>>>,
    used: AtomicUsize,
}

impl Events {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        Self {
            context: context.clone(),
            idle: Mutex::default(),
            resting: Mutex::default(),
            used: AtomicUsize::new(0),
        }
    }

    /// Returns how many events are in use.
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns an event that is not set.
    pub(crate) fn take(&self) -> Result<(EventPtr, vk::Event)> {
        let mut idle = lock(&self.idle).pop();
        if idle.is_none() {
            self.recycle();
            idle = lock(&self.idle).pop();
        }
        if let Some(cell) = idle {
            // SAFETY: the cell is one of this value's boxes, which live as long as it.
            return Ok((cell, unsafe { read(cell) }));
        }
        // SAFETY: the device is live. Without the flag for the device only, the host may ask for the event.
        let event = unsafe {
            let device = &self.context.device;
            device.create_event(&vk::EventCreateInfo::default(), None)
        };
        let event = self.context.check(event.of("vkCreateEvent"))?;
        let cell = Box::into_raw(Box::new(Cell(event)));
        match EventPtr::new(cell.cast()) {
            Some(cell) => Ok((cell, event)),
            // A box has an address.
            None => Err(self.context.not_supported("record", "a null event".into())),
        }
    }

    /// An event is in use from now on: the commands that set it were queued.
    pub(crate) fn put(&self, cell: EventPtr, point: Point) {
        let mut recorded = RECORDED.write().unwrap_or_else(PoisonError::into_inner);
        recorded.insert(cell.as_ptr().addr(), point);
        self.used.fetch_add(1, Ordering::Relaxed);
    }

    /// Gives back an event that was taken and is not set by any commands.
    pub(crate) fn give_back(&self, cell: EventPtr) {
        lock(&self.idle).push(cell);
    }

    /// An event is not used any more.
    pub(crate) fn release(&self, cell: EventPtr) {
        let point = {
            let mut recorded = RECORDED.write().unwrap_or_else(PoisonError::into_inner);
            recorded.remove(&cell.as_ptr().addr())
        };
        if let Some(point) = point {
            self.used.fetch_sub(1, Ordering::Relaxed);
            self.rest(cell, point);
        }
    }

    /// Resets the events that were released and set: of each lane, those before the first one that is pending.
    pub(crate) fn recycle(&self) {
        let mut set = Vec::new();
        lock(&self.resting).retain(|_, lane| {
            let is_reached = |(_, point): &(_, Point)| matches!(point.is_reached(), Ok(true));
            while lane.front().is_some_and(is_reached) {
                set.extend(lane.pop_front());
            }
            !lane.is_empty()
        });
        for (cell, point) in set {
            // SAFETY: the cell is one of this value's boxes, which live as long as it.
            let event = unsafe { read(cell) };
            // SAFETY: the event is live and not for the device only (VUID-vkResetEvent-event-03823); the commands that set it have
            // completed, and who waited for it has released it (VUID-vkResetEvent-event-03821). Only this thread has it.
            match unsafe { self.context.device.reset_event(event) } {
                Ok(()) => lock(&self.idle).push(cell),
                // Tried again later.
                Err(_) => self.rest(cell, point),
            }
        }
    }

    fn rest(&self, cell: EventPtr, point: Point) {
        let mut resting = lock(&self.resting);
        let lane = resting.entry(point.lane.number).or_default();
        lane.push_back((cell, point));
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let Some(_inside) = self.context.enter_to_drop() else {
            return;
        };
        let idle = self.idle.get_mut().unwrap_or_else(PoisonError::into_inner);
        let resting = self.resting.get_mut();
        let resting = resting.unwrap_or_else(PoisonError::into_inner);
        let resting = take(resting).into_values().flatten();
        let cells = take(idle).into_iter();
        for cell in cells.chain(resting.map(|(cell, _)| cell)) {
            // SAFETY: `take` has made the box, which nobody uses any more.
            let cell = unsafe { Box::from_raw(cell.as_ptr().cast::<Cell>()) };
            // SAFETY: `take` has made the event, which is destroyed once; the commands that set it have completed, for which
            // `Shared::drop` has waited (VUID-vkDestroyEvent-event-01145).
            unsafe { self.context.device.destroy_event(cell.0, None) };
        }
    }
}
