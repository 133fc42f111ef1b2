//! Events: the VkEvents that this crate records, to each of which a `sync_event` points.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use arrow_device::Result;
use arrow_device::device::EventPtr;
use ash::vk;

use crate::order::{Order, Point, full_barrier};
use crate::sys::{Context, lock};

/// The points of the live events of this crate, of all devices, by the addresses of their cells: an event pointer that is not in
/// the table is a foreign producer's.
static RECORDED: LazyLock<RwLock<HashMap<usize, Point>>> = LazyLock::new(RwLock::default);

/// Returns the point that an event of this crate stands for; `None`: it is a foreign producer's.
pub(crate) fn recorded(event: EventPtr) -> Option<Point> {
    let recorded = RECORDED.read().unwrap_or_else(PoisonError::into_inner);
    recorded.get(&event.as_ptr().addr()).cloned()
}

/// Returns how many events of a device are in use.
pub(crate) fn events_of(context: &Context) -> usize {
    let recorded = RECORDED.read().unwrap_or_else(PoisonError::into_inner);
    let of = |point: &&Point| std::ptr::eq(&*point.order.context, context);
    recorded.values().filter(of).count()
}

/// An event is not used any more.
pub(crate) fn release(event: EventPtr) {
    let mut recorded = RECORDED.write().unwrap_or_else(PoisonError::into_inner);
    let point = recorded.remove(&event.as_ptr().addr());
    drop(recorded);
    if let Some(Point { order, number }) = point {
        lock(&order.released).push_back((event, number));
    }
}

/// Reads the handle, which may be null.
///
/// # Safety
/// The pointer is aligned for a VkEvent and points to as many readable bytes.
pub(crate) unsafe fn read(event: EventPtr) -> vk::Event {
    // SAFETY: the caller guarantees readable bytes; any bits are a handle.
    unsafe { event.as_ptr().cast::<vk::Event>().read() }
}

/// Records an event: submits commands that set it after all work of the order so far.
pub(crate) fn record(order: &Arc<Order>) -> Result<EventPtr> {
    let _inside = order.context.enter()?;
    let event = take(order)?;
    // SAFETY: the event is one of the order's, which lives as long as it.
    let raw = unsafe { read(event) };
    let set = |device: &ash::Device, own| {
        let all = vk::PipelineStageFlags::ALL_COMMANDS;
        // SAFETY: `submit` passes a command buffer that records, of a family that `serves` (VUID-vkCmdSetEvent-commandBuffer-cmdpool);
        // the event is live and of this device. All stages exist (VUID-vkCmdSetEvent-stageMask-parameter), and none is the host's
        // (-stageMask-01149).
        unsafe {
            // To set an event makes nothing available, such as what a program's commands have written.
            full_barrier(device, own);
            device.cmd_set_event(own, raw, all);
        }
    };
    // SAFETY: the order keeps the event until its commands have completed (`Order::drop`); they begin with a barrier.
    match unsafe { order.submit(set, &[], Vec::new()) } {
        Ok(number) => {
            let order = order.clone();
            let mut recorded = RECORDED.write().unwrap_or_else(PoisonError::into_inner);
            recorded.insert(event.as_ptr().addr(), Point { order, number });
            Ok(event)
        }
        Err(e) => {
            // No commands set it.
            lock(&order.released).push_front((event, 0));
            Err(e)
        }
    }
}

/// Returns an event that is not set: the first that was released, if its commands have set it, or else a new one.
fn take(order: &Order) -> Result<EventPtr> {
    let device = &order.context.device;
    let mut released = lock(&order.released);
    let is_set = |number| matches!(order.is_complete(number), Ok(true));
    if let Some(&(event, number)) = released.front()
        && is_set(number)
    {
        // SAFETY: the event is one of the order's, live and not for the device only (VUID-vkResetEvent-event-03823); the commands that
        // set it have completed, and who waited for it has released it (VUID-vkResetEvent-event-03821). Only this thread has it.
        let reset = unsafe { device.reset_event(read(event)) };
        order.context.check("vkResetEvent", reset)?;
        released.pop_front();
        return Ok(event);
    }
    drop(released);
    // SAFETY: the device is live. Without the flag for the device only, the host may ask for the event.
    let event = unsafe { device.create_event(&vk::EventCreateInfo::default(), None) };
    let event = order.context.check("vkCreateEvent", event)?;
    let cell = Box::into_raw(Box::new(event));
    let null = || order.context.not_supported("record", "a null event".into());
    EventPtr::new(cell.cast()).ok_or_else(null)
}
