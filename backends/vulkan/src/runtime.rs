//! [`VulkanDevice`]: what arrow-device's engine asks of a Vulkan device.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use arrow_device::device::engine::{Health, Memories, Runtime};
use arrow_device::device::{Capabilities, CopyKind, CopyOp, DevicePtr, EventPtr, Relation};
use arrow_device::{Error, Result};
use ash::vk;

use crate::memory::{Buffer, Place, Transfers};
use crate::order::{Event, TURN, VulkanQueue};
use crate::sys::Context;

/// The shortest and the longest pause between two polls of a foreign event by a thread that waits for it.
const PAUSE: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// A Vulkan device: the runtime of an arrow-device device.
///
/// [`VulkanConfig`](crate::VulkanConfig) opens one.
pub struct VulkanDevice {
    /// Of each VkQueue, one.
    orders: Vec<Arc<VulkanQueue>>,
    /// How many queues were made.
    made: AtomicUsize,
    memories: Memories<Arc<Buffer>>,
    pub(crate) context: Arc<Context>,
}

impl VulkanDevice {
    /// The first of the VkQueues, of which there is one at least, is that of the first queue.
    pub(crate) fn new(context: Arc<Context>, orders: Vec<Arc<VulkanQueue>>) -> Self {
        Self {
            orders,
            made: AtomicUsize::new(1),
            memories: Memories::default(),
            context,
        }
    }

    /// Returns the buffer behind an address of the device, and the offset.
    pub(crate) fn at(&self, address: DevicePtr, bytes: usize) -> Result<Place> {
        let found = self.memories.find(address, bytes).map(place);
        found.ok_or_else(|| {
            let device = self.context.health.id();
            Error::InvalidArgument(
                format!(
                    "{bytes} bytes at {address:?} are in no VkBuffer that {device} knows; make the producer's VkBuffer known with \
                     VulkanDevice::wrap"
                )
                .into(),
            )
        })
    }

    /// Returns one of the device's VkQueues with a share of it.
    fn order(&self, stream: &VulkanQueue) -> Result<&Arc<VulkanQueue>> {
        let found = self
            .orders
            .iter()
            .find(|order| std::ptr::eq(&***order, stream));
        found.ok_or_else(|| Error::InvalidArgument("a queue of another device".into()))
    }

    fn is_done_within(&self, event: &Event, nanoseconds: u64) -> Result<bool> {
        let event = match event {
            Event::Mark(point) | Event::Recorded(point, _) => return point.is_reached(nanoseconds),
            Event::Foreign(event) => *event,
        };
        // SAFETY: whoever has made the event of a foreign one guarantees that it is live (contract of `Runtime::foreign_event`); it was
        // not created with VK_EVENT_CREATE_DEVICE_ONLY_BIT (VUID-vkGetEventStatus-event-03940); the call needs no exclusive access.
        let answer = unsafe { self.context.device.get_event_status(event) };
        self.context.check("vkGetEventStatus", answer)
    }

    /// # Safety
    /// As [`Runtime::copy`].
    unsafe fn transfer(&self, stream: &VulkanQueue, transfers: &Transfers) -> Result<u64> {
        // SAFETY: `give` passes a command buffer that records, of a family that `serves`; the caller guarantees the rest.
        unsafe {
            let record = |device: &ash::Device, own| transfers.record(device, own);
            stream.give(record, &[], transfers.staging.clone())
        }
    }
}

fn place((buffer, offset): (Arc<Buffer>, usize)) -> Place {
    (buffer.raw, offset as u64)
}

// SAFETY:
// - memory is aligned (`Buffer::aligned`); that of the host is mapped, and none of the device counts as readable by the host;
// - work is submitted in its order to one VkQueue, where barriers order what it does, after the points that the order waits for;
// - an event stands for a submission that the timeline says is complete, in which a barrier makes the writes before it visible to
//   the host; foreign events are vouched for by whoever imports them;
// - `synchronize` waits for all VkQueues; once the device is lost, none of them has work that runs (`VulkanQueue::end`).
unsafe impl Runtime for VulkanDevice {
    type Stream = VulkanQueue;
    type Event = Event;
    type Memory = Arc<Buffer>;

    fn health(&self) -> &Health {
        &self.context.health
    }

    fn memories(&self) -> &Memories<Arc<Buffer>> {
        &self.memories
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(self.context.health.id())
    }

    fn new_stream(&self) -> Result<Arc<VulkanQueue>> {
        // The VkQueues are used in turn.
        let at = self.made.fetch_add(1, Ordering::Relaxed) % self.orders.len();
        Ok(self.orders[at].clone())
    }

    fn allocate(&self, bytes: usize, _: &VulkanQueue) -> Result<Arc<Buffer>> {
        Buffer::on_device(&self.context, bytes).map(Arc::new)
    }

    fn allocate_host(&self, bytes: usize) -> Result<Option<Arc<Buffer>>> {
        Buffer::on_host(&self.context, bytes).map(|buffer| Some(Arc::new(buffer)))
    }

    fn base(&self, memory: &Arc<Buffer>) -> DevicePtr {
        memory.base
    }

    fn max_allocation(&self) -> usize {
        self.context.info.max_allocation
    }

    fn trim(&self) {
        self.orders.iter().for_each(|order| order.forget_ended());
    }

    unsafe fn copy(
        &self,
        stream: &VulkanQueue,
        copies: &[CopyOp],
        under_way: &mut bool,
    ) -> Result<()> {
        let (mut transfers, mut down) = (Transfers::default(), Vec::new());
        for op in copies {
            // Ordinary memory is copied by way of staging memory.
            let mut stage = || -> Result<_> {
                let buffer = Arc::new(Buffer::on_host(&self.context, op.bytes)?);
                transfers.staging.push(buffer.clone());
                Ok((buffer.base.as_ptr().cast::<u8>(), (buffer.raw, 0)))
            };
            let on_host = |address| self.memories.find_host(address, op.bytes).map(place);
            let (mut src, mut dst) = (None, None);
            match op.kind {
                CopyKind::HostToDevice => {
                    src = on_host(op.src);
                    if src.is_none() {
                        let (staged, place) = stage()?;
                        // SAFETY: the caller guarantees the source, which may be read now (contract of `RawQueue::copy`). Nothing else
                        // uses the staging memory yet.
                        unsafe {
                            staged.copy_from_nonoverlapping(op.src.as_ptr().cast(), op.bytes)
                        };
                        src = Some(place);
                    }
                }
                CopyKind::DeviceToHost => {
                    dst = on_host(op.dst);
                    if dst.is_none() {
                        let (staged, place) = stage()?;
                        down.push((staged, op));
                        dst = Some(place);
                    }
                }
                _ => {}
            }
            let or_here = |found: Option<Place>, address| {
                found.map_or_else(|| self.at(address, op.bytes), Ok)
            };
            transfers.copy(or_here(src, op.src)?, or_here(dst, op.dst)?, op.bytes);
        }
        // SAFETY: the caller guarantees the memory, without overlaps, until the copies have completed (contract of `RawQueue::copy`).
        let number = unsafe { self.transfer(stream, &transfers) }?;
        *under_way = true;
        if !down.is_empty() {
            // Only direct callers of a queue copy to ordinary memory, and downloads that get no staging memory.
            while !stream.is_complete(number, TURN)? {}
        }
        for (staged, op) in down {
            // SAFETY: the caller guarantees the destination. The staging memory, which `transfers` keeps, was written by the copies,
            // which have completed.
            unsafe { staged.copy_to_nonoverlapping(op.dst.as_ptr().cast(), op.bytes) };
        }
        Ok(())
    }

    unsafe fn fill(
        &self,
        stream: &VulkanQueue,
        dst: DevicePtr,
        byte: u8,
        bytes: usize,
    ) -> Result<()> {
        let transfers = Transfers::fill(&self.context, self.at(dst, bytes)?, byte, bytes)?;
        // SAFETY: the caller guarantees the memory until the fill has completed (contract of `RawQueue::fill`).
        unsafe { self.transfer(stream, &transfers) }.map(drop)
    }

    fn record(&self, stream: &VulkanQueue) -> Result<Event> {
        self.order(stream)?.record_event()
    }

    fn mark(&self, stream: &VulkanQueue) -> Result<Event> {
        Ok(Event::Mark(self.order(stream)?.next()))
    }

    fn pointer(&self, event: &Event) -> *mut c_void {
        match event {
            Event::Recorded(_, event) | Event::Foreign(event) => {
                std::ptr::from_ref(event).cast_mut().cast()
            }
            Event::Mark(_) => std::ptr::null_mut(),
        }
    }

    unsafe fn foreign_event(&self, event: EventPtr) -> Result<Event> {
        // SAFETY: the caller guarantees a live event, to whose handle this points.
        Ok(Event::Foreign(unsafe {
            event.as_ptr().cast::<vk::Event>().read()
        }))
    }

    fn is_done(&self, event: &Event) -> Result<bool> {
        self.is_done_within(event, 0)
    }

    fn wait_host(&self, event: &Event) -> Result<()> {
        let mut pause = PAUSE.0;
        loop {
            // In turns: threads that wait must not keep the process from ending.
            let inside = self.context.health.enter()?;
            if self.is_done_within(event, TURN)? {
                return Ok(());
            }
            drop(inside);
            if let Event::Foreign(_) = event {
                std::thread::sleep(pause);
                pause = (pause * 2).min(PAUSE.1);
            }
        }
    }

    fn wait(&self, stream: &VulkanQueue, event: &Event, _is_own: bool) -> Result<bool> {
        Ok(stream.wait_for(event))
    }

    fn synchronize(&self, _streams: &[Arc<VulkanQueue>]) -> Result<()> {
        let all = self.orders.iter();
        // Each of them, whatever becomes of the others.
        let finished: Vec<_> = all.map(|order| order.finish()).collect();
        match self.context.health.check() {
            Ok(()) => finished.into_iter().collect(),
            Err(_) => self.orders.iter().try_for_each(|order| order.end()),
        }
    }

    fn accepts_events_of(&self, other: &Self) -> bool {
        self.relation(other).waits
    }

    /// Those of the same VkDevice, of which a program may have made several devices.
    fn relation(&self, other: &Self) -> Relation {
        Relation {
            copies: false,
            waits: other.device().handle() == self.device().handle(),
        }
    }
}

impl Drop for VulkanDevice {
    /// Two VkQueues that have waited for each other keep each other until they forget it. The engine has waited for all work.
    fn drop(&mut self) {
        self.orders.iter().for_each(|order| order.settle());
    }
}

impl fmt::Debug for VulkanDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Context { health, info, .. } = &*self.context;
        write!(f, "Vulkan({}: {info})", health.id())
    }
}
