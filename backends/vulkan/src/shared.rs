//! [`Shared`]: what a device and its queues share, and its end.

use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use arrow_device::device::parts::{Pool, Worker};
use arrow_device::device::{DevicePtr, EventPtr};
use arrow_device::{Error, Result};

use crate::event;
use crate::memory::{Buffer, Buffers, Place, find};
use crate::order::{Order, Point};
use crate::sys::Context;

/// The shortest and the longest pause between two polls of a foreign event by a thread that waits for it.
const PAUSE: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// What a device and its queues share.
pub(crate) struct Shared {
    pub(crate) context: Arc<Context>,
    /// One of each VkQueue.
    pub(crate) orders: Vec<Arc<Order>>,
    /// Device memory in use.
    pub(crate) live: Buffers,
    /// Host memory in use.
    pub(crate) host: Buffers,
    pub(crate) pool: Pool<Idle>,
}

/// Memory in the pool.
pub(crate) struct Idle {
    pub(crate) after: Point,
    pub(crate) buffer: Arc<Buffer>,
}

impl Idle {
    pub(crate) fn is_done(&self) -> bool {
        matches!(self.after.is_reached(), Ok(true))
    }
}

impl Shared {
    /// Returns the buffer behind an address, and the offset.
    pub(crate) fn at(&self, address: DevicePtr, bytes: usize) -> Result<Place> {
        let live = find(&self.live, address, bytes);
        let found = live.or_else(|| find(&self.host, address, bytes));
        found.ok_or_else(|| {
            let device = self.context.id;
            Error::InvalidArgument(
                format!(
                    "{bytes} bytes at {address:?} are in no VkBuffer that {device} knows; make the producer's VkBuffer known with \
                     VulkanDevice::wrap_buffer"
                )
                .into(),
            )
        })
    }

    /// Asks the driver for memory. If it has none left, this waits for the work that uses what is in the pool, which is then freed.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Buffer> {
        let is_possible = bytes <= self.context.info.max_allocation;
        match Buffer::on_device(&self.context, bytes) {
            Err(Error::OutOfMemory { .. }) if is_possible && !self.pool.is_empty() => {
                self.finish()?;
                self.free_idle(true);
                Buffer::on_device(&self.context, bytes)
            }
            made => made,
        }
    }

    /// Makes this thread wait for all work.
    pub(crate) fn finish(&self) -> Result<()> {
        self.orders.iter().try_for_each(|order| order.finish())
    }

    /// Frees memory that nothing uses any more: what is over the limits, or all of it.
    pub(crate) fn free_idle(&self, all: bool) {
        self.orders.iter().for_each(|order| order.pay());
        drop(self.pool.take_done(all, Idle::is_done));
    }

    /// Makes this thread wait for an event. Vulkan has no call for a foreign one, so this asks again and again.
    ///
    /// # Safety
    /// The event is live, of this crate or of the VkDevice.
    pub(crate) unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        self.context.check_process()?;
        if let Some(point) = event::recorded(event) {
            return point.wait();
        }
        let mut pause = PAUSE.0;
        // SAFETY: the caller guarantees a live event (see `# Safety`).
        while !unsafe { self.query_event(event) }? {
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE.1);
        }
        Ok(())
    }

    /// Returns whether an event is set.
    ///
    /// # Safety
    /// As [`wait_event`](Self::wait_event).
    pub(crate) unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        let _inside = self.context.enter()?;
        if let Some(point) = event::recorded(event) {
            return point.is_reached();
        }
        // SAFETY: the caller guarantees a live event, which was not created with VK_EVENT_CREATE_DEVICE_ONLY_BIT
        // (VUID-vkGetEventStatus-event-03940); the call needs no exclusive access.
        let answer = unsafe { self.context.device.get_event_status(event::read(event)) };
        self.context.check("vkGetEventStatus", answer)
    }
}

impl Drop for Shared {
    /// Destroys everything once the work has ended.
    fn drop(&mut self) {
        let Some(_inside) = self.context.enter_to_drop() else {
            return;
        };
        let memory = (
            take(&mut self.live),
            take(&mut self.host),
            take(&mut self.pool),
        );
        let orders = take(&mut self.orders);
        let is_idle = orders.iter().all(|order| order.is_idle());
        let end = move || {
            for order in &orders {
                match is_idle {
                    true => order.forget_ended(),
                    // After an error nothing runs any more, either.
                    false => drop(order.settle()),
                }
            }
            drop((memory, orders));
        };
        match is_idle {
            true => end(),
            // Dropping the worker does not wait.
            false => Worker::new("arrow-device vulkan end").push(end),
        }
    }
}
