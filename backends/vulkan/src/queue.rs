//! [`VulkanQueue`]: work in order.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arrow_device::device::{CopyOp, DevicePtr, EventPtr, RawQueue};
use arrow_device::{Error, Queue, Result};
use ash::vk;

use crate::batch::{Batch, Wait};
use crate::context::SharedQueue;
use crate::event;
use crate::lane::{Lane, Point};
use crate::shared::Shared;

/// A queue of a Vulkan device, of which [`Queue::raw`](arrow_device::Queue::raw) is one: an order
/// of work on one of the device's VkQueues, which several queues may share.
pub struct VulkanQueue {
    shared: Arc<Shared>,
    lane: Arc<Lane>,
}

impl VulkanQueue {
    /// Returns the Vulkan queue behind a queue.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the queue is another device's.
    pub fn of(queue: &Queue) -> Result<&Self> {
        let found = queue.raw().downcast_ref();
        found.ok_or_else(|| {
            let device = queue.device();
            Error::InvalidArgument(format!("a queue of {device} is not a Vulkan queue").into())
        })
    }

    /// Makes a queue of the device.
    pub(crate) fn new(shared: &Arc<Shared>) -> Result<Arc<Self>> {
        let _inside = shared.context.enter_usable()?;
        Ok(Arc::new(Self {
            lane: shared.lanes.add()?,
            shared: shared.clone(),
        }))
    }

    /// Returns the VkQueue that the queue submits to, with its lock.
    pub fn shared_queue(&self) -> &Arc<dyn SharedQueue> {
        // `Lanes::add` chose the number among the queues.
        &self.shared.lanes.queues[self.lane.queue]
    }

    /// Submits command buffers of the program, in the order of the queue: after all work of the queue so far, and after the events
    /// that it was told to wait for. What that work has written is visible to the commands, and what they write is visible to later
    /// work of the queue, without a barrier of the program's; only commands that write to host memory end with one, to the host. Never
    /// waits: if the queue waits for an event, the host submits the commands later.
    ///
    /// # Errors
    /// Returns the device's own error. The commands do not run then.
    ///
    /// # Safety
    /// - The command buffers are recorded, primary, of the family [`VulkanDevice::queue_family`](crate::VulkanDevice::queue_family),
    ///   and not pending. Until an event that is recorded afterwards has completed, they and whatever they use live, and they are
    ///   neither reset nor submitted again.
    /// - They read memory of columns only while a loan or its owner is kept, and write to memory of a
    ///   [`DeviceBufferMut`](arrow_device::DeviceBufferMut) only.
    pub unsafe fn submit(&self, commands: &[vk::CommandBuffer]) -> Result<()> {
        let batch = Batch {
            commands,
            ..Batch::default()
        };
        // SAFETY: the caller guarantees the command buffers (see `# Safety`).
        unsafe { self.shared.lanes.push(&self.lane, batch) }.map(drop)
    }

    /// Returns a timeline semaphore of this crate and the value that it has once all work of the queue so far has completed, for a
    /// submission of the program's own that waits for it and then sees what that work has written. What is submitted afterwards to
    /// [the same VkQueue](Self::shared_queue) need not wait: a barrier orders it. The semaphore lives as long as this queue.
    ///
    /// Makes this thread wait until that work has been submitted, which takes long only if the queue waits for a pending event.
    /// [`submit`](Self::submit) does not wait.
    ///
    /// # Errors
    /// Returns the device's own error.
    pub fn submitted(&self) -> Result<(vk::Semaphore, u64)> {
        let Shared { lanes, .. } = &*self.shared;
        // What the queue was told to wait for belongs to the work so far.
        // SAFETY: the batch has a barrier only.
        let number = unsafe { lanes.push(&self.lane, Batch::default()) }?;
        lanes.wait_submitted(&self.lane, number)?;
        Ok((self.lane.timeline, number))
    }
}

// SAFETY:
// - memory of `allocate` is aligned (`Memory::allocate`), and comes from the pool only to the queue that used it last or after
//   that use;
// - batches of a lane are submitted in order to one VkQueue, where barriers order what they do; waits are met before or on the
//   device;
// - events are set by commands after all earlier ones of the VkQueue, and stand for the batch's number.
unsafe impl RawQueue for VulkanQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        let _inside = self.shared.context.enter_usable()?;
        if bytes == 0 {
            return Err(Error::InvalidArgument("allocation of 0 bytes".into()));
        }
        self.shared.allocate(&self.lane, bytes)
    }

    unsafe fn free(&self, base: DevicePtr, _bytes: usize) -> Result<()> {
        let Some(_inside) = self.shared.context.enter_to_drop() else {
            return Ok(());
        };
        self.shared.free(&self.lane, base)
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        let Shared { context, lanes, .. } = &*self.shared;
        let _inside = context.enter_usable()?;
        // SAFETY: the caller guarantees memory for all bytes until the copies have completed (contract of `RawQueue::copy`).
        unsafe {
            self.shared
                .copy(copies, |batch| lanes.push(&self.lane, batch))
        }
        .map(drop)
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        let Shared { context, lanes, .. } = &*self.shared;
        let _inside = context.enter_usable()?;
        // SAFETY: the caller guarantees `bytes` bytes until the fill has completed (contract of `RawQueue::fill`).
        unsafe {
            self.shared
                .fill(dst, byte, bytes, |batch| lanes.push(&self.lane, batch))
        }
        .map(drop)
    }

    fn record(&self) -> Result<EventPtr> {
        let Shared {
            context,
            lanes,
            objects,
            ..
        } = &*self.shared;
        let _inside = context.enter_usable()?;
        let (cell, event) = objects.events.take()?;
        let mut set = |device: &ash::Device, commands| {
            let all = vk::PipelineStageFlags::ALL_COMMANDS;
            // SAFETY: `Lanes::push` passes a command buffer that records, of a family that `serves`
            // (VUID-vkCmdSetEvent-commandBuffer-cmdpool); the event is live and of this device. All stages exist
            // (VUID-vkCmdSetEvent-stageMask-parameter), and none is the host's (-stageMask-01149).
            unsafe {
                // To set an event makes nothing available, such as what a program's commands have written.
                crate::batch::record_full_barrier(device, commands);
                device.cmd_set_event(commands, event, all);
            }
        };
        let batch = Batch {
            record: Some(&mut set),
            ..Batch::default()
        };
        // SAFETY: the event lives until its commands have completed (`Events`).
        match unsafe { lanes.push(&self.lane, batch) } {
            Ok(number) => {
                let lane = self.lane.clone();
                objects.events.put(cell, Point { lane, number });
                Ok(cell)
            }
            Err(e) => {
                objects.events.give_back(cell);
                Err(e)
            }
        }
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<()> {
        let Shared { context, lanes, .. } = &*self.shared;
        let _inside = context.enter_usable()?;
        let known = event::recorded(event);
        if let Some(point) = &known
            && Arc::ptr_eq(&point.lane.context, context)
        {
            lanes.wait(&self.lane, Wait::Point(point.clone()));
            return Ok(());
        }
        // SAFETY: the caller guarantees a live event (contract of `RawQueue::wait`), which a foreign producer keeps until this queue's
        // work has ended.
        let ended = unsafe { self.shared.ending(known, event) };
        if context.check(ended()?)? {
            return Ok(());
        }
        let done = Arc::new(AtomicBool::new(false));
        lanes.wait(&self.lane, Wait::Host(done.clone()));
        let (lanes, owner) = (lanes.clone(), context.clone());
        let poll = move || match ended() {
            // Most errors of the call say nothing about the event.
            Ok(ended) => ended.unwrap_or(false),
            Err(e) => {
                // Before the work behind the event is submitted.
                owner.failure.set(e);
                true
            }
        };
        context.worker.watch(poll, move || {
            done.store(true, Ordering::Release);
            lanes.advance();
        });
        Ok(())
    }
}

impl Drop for VulkanQueue {
    fn drop(&mut self) {
        let Shared { context, lanes, .. } = &*self.shared;
        if let Some(_inside) = context.enter_to_drop() {
            if self.lane.owes() {
                // SAFETY: the batch does nothing. Without it, memory that was freed stays where it is until the device is dropped.
                let _ = unsafe { lanes.push(&self.lane, Batch::default()) };
            }
            lanes.drop_lane(&self.lane);
        }
    }
}

impl fmt::Debug for VulkanQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (id, number) = (self.shared.context.id, self.lane.number);
        write!(f, "Queue({id} {number})")
    }
}

#[cfg(test)]
mod tests;
