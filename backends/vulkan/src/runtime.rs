//! The backend: [`VulkanDevice`] and [`VulkanQueue`].

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow_device::device::parts::{Block, Pool, Ranges};
use arrow_device::device::{
    AddressClass, Backend, Capabilities, CopyKind, CopyOp, DevicePtr, EventPtr, PointerInfo,
    RawQueue, Relation,
};
use arrow_device::{Error, Result};
use ash::vk::{self, Handle};

use crate::event;
use crate::memory::{Buffer, Transfers, find};
use crate::order::Order;
use crate::shared::{Idle, Shared};
use crate::sys::{Context, SharedQueue};

/// A Vulkan device: the backend of an arrow-device device.
///
/// [`VulkanConfig`](crate::VulkanConfig) opens one.
pub struct VulkanDevice {
    pub(crate) shared: Arc<Shared>,
    queue: Arc<VulkanQueue>,
    /// How many queues were made.
    made: AtomicUsize,
}

/// A queue of a Vulkan device, of which [`Queue::raw`](arrow_device::Queue::raw) is one. Its work runs in the order of one of the
/// device's VkQueues, which several queues may share.
pub struct VulkanQueue {
    pub(crate) shared: Arc<Shared>,
    pub(crate) order: Arc<Order>,
}

impl VulkanDevice {
    pub(crate) fn new(
        context: Arc<Context>,
        queues: Vec<Arc<dyn SharedQueue>>,
        idle_bytes: usize,
    ) -> Result<Self> {
        let orders = queues.into_iter();
        let orders = orders.map(|queue| Order::new(&context, queue).map(Arc::new));
        let shared = Arc::new(Shared {
            orders: orders.collect::<Result<_>>()?,
            live: Ranges::new(),
            host: Ranges::new(),
            pool: Pool::new(idle_bytes),
            context,
        });
        let order = shared.orders[0].clone();
        Ok(Self {
            queue: Arc::new(VulkanQueue {
                shared: shared.clone(),
                order,
            }),
            shared,
            made: AtomicUsize::new(1),
        })
    }
}

// SAFETY:
// - no memory counts as readable by the host;
// - `classify` vouches only for live memory of this device, for the whole length; it never answers `Host`;
// - an event stands for a submission that the timeline says is complete, in which a barrier makes the writes before it visible to
//   the host; foreign events are vouched for by whoever imports them;
// - `settle` waits for all VkQueues, until that succeeds or the device is lost;
// - `allocate_host` returns mapped memory.
unsafe impl Backend for VulkanDevice {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(self.shared.context.id)
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.queue.clone())
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        let shared = self.shared.clone();
        let _inside = shared.context.enter()?;
        // The VkQueues are used in turn.
        let at = self.made.fetch_add(1, Ordering::Relaxed) % shared.orders.len();
        let order = shared.orders[at].clone();
        Ok(Arc::new(VulkanQueue { shared, order }))
    }

    unsafe fn check_event(&self, event: EventPtr) -> Result<()> {
        let context = &self.shared.context;
        context.check_process()?;
        let refused = |what: String| Err(Error::InvalidArgument(what.into()));
        let ptr = event.as_ptr().cast::<vk::Event>();
        if !ptr.is_aligned() {
            return refused(format!("{ptr:p} is not the address of a VkEvent"));
        }
        if event::recorded(event).is_some_and(|point| !point.is_of(context)) {
            return refused(format!(
                "the event is not of {}, but of another Vulkan device; import with a set of devices that has that device",
                context.id
            ));
        }
        // SAFETY: the pointer is aligned, so the caller guarantees that a handle's bytes may be read there.
        match unsafe { event::read(event) } == vk::Event::null() {
            true => refused("the event is a null handle".into()),
            false => Ok(()),
        }
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        // SAFETY: the caller guarantees a live event (contract of `query_event`).
        unsafe { self.shared.query_event(event) }
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        // SAFETY: the caller guarantees a live event (contract of `wait_event`).
        unsafe { self.shared.wait_event(event) }
    }

    unsafe fn release_event(&self, event: EventPtr) {
        if let Some(_inside) = self.shared.context.enter_to_drop() {
            event::release(event);
        }
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        let Shared { live, host, .. } = &*self.shared;
        let other = |class| PointerInfo::new(class, address.range(bytes));
        if self.shared.context.is_forked() {
            return other(AddressClass::Inaccessible);
        }
        let own = live.classify(address, bytes, AddressClass::Device);
        let found = own.or_else(|| host.classify(address, bytes, AddressClass::HostAccessible));
        // Vulkan cannot be asked about addresses.
        found.unwrap_or_else(|| other(AddressClass::Unknown))
    }

    fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        let _inside = self.shared.context.enter()?;
        if bytes > self.shared.context.info.max_allocation {
            return Ok(None);
        }
        let buffer = Buffer::on_host(&self.shared.context, bytes)?;
        let base = buffer.base;
        self.shared.host.insert(base, bytes, Arc::new(buffer));
        Ok(Some(base))
    }

    unsafe fn free_host(&self, address: DevicePtr, _bytes: usize) {
        if let Some(_inside) = self.shared.context.enter_to_drop() {
            drop(self.shared.host.remove(address));
        }
    }

    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        let Shared { context, host, .. } = &*self.shared;
        !context.is_forked() && find(host, address, bytes).is_some()
    }

    /// Those of the same VkDevice, of which a program may have made several devices.
    fn relation(&self, other: &dyn Backend) -> Relation {
        let other = other.downcast_ref::<Self>();
        let is_same = |other: &Self| other.device().handle() == self.device().handle();
        Relation {
            copies: false,
            waits: other.is_some_and(is_same),
        }
    }

    fn trim(&self) {
        if let Some(_inside) = self.shared.context.enter_to_drop() {
            self.shared.free_idle(true);
            let orders = self.shared.orders.iter();
            orders.for_each(|order| order.forget_ended());
        }
    }

    fn synchronize(&self) -> Result<()> {
        self.shared.finish()
    }

    fn settle(&self) -> Result<()> {
        let orders = self.shared.orders.iter();
        // Each of them, whatever became of the others.
        let settled: Vec<_> = orders.map(|order| order.settle()).collect();
        settled.into_iter().collect()
    }
}

impl VulkanQueue {
    /// # Safety
    /// As [`RawQueue::copy`].
    unsafe fn transfer(&self, transfers: &Transfers) -> Result<u64> {
        // SAFETY: `submit` passes a command buffer that records, of a family that `serves`; the caller guarantees the rest.
        unsafe {
            let record = |device: &ash::Device, own| transfers.record(device, own);
            self.order.submit(record, &[], transfers.staging.clone())
        }
    }
}

// SAFETY:
// - memory of `allocate` is aligned (`Buffer::on_device`), and comes from the pool only to the VkQueue that used it last, or after
//   that use;
// - work is submitted in its order to one VkQueue, where barriers order what it does, after the points that the order waits for;
// - events are set by commands after all earlier ones of the VkQueue, and stand for their submission's number.
unsafe impl RawQueue for VulkanQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        let Shared {
            context,
            pool,
            live,
            ..
        } = &*self.shared;
        let _inside = context.enter()?;
        let rounded = Pool::<Idle>::rounded(bytes).unwrap_or(usize::MAX);
        let buffer = match pool.take(self.order.timeline.as_raw(), rounded, Idle::is_done) {
            Some(block) => block.after.buffer,
            None => {
                self.shared.free_idle(false);
                let least = bytes.max(context.info.max_allocation);
                Arc::new(self.shared.allocate(rounded.min(least))?)
            }
        };
        let base = buffer.base;
        live.insert(base, bytes, buffer);
        Ok(base)
    }

    unsafe fn free(&self, base: DevicePtr, _bytes: usize) -> Result<()> {
        let Shared { pool, live, .. } = &*self.shared;
        let Some(_inside) = self.shared.context.enter_to_drop() else {
            return Ok(());
        };
        let Some((_, buffer)) = live.remove(base) else {
            let reason = format!("{base:?} is not the beginning of an allocation of this device");
            return Err(self.shared.context.not_supported("free", reason));
        };
        let after = self.order.next();
        pool.give(Block {
            base,
            bytes: buffer.bytes,
            queue: self.order.timeline.as_raw(),
            after: Idle { after, buffer },
        });
        if pool.is_over(1) {
            self.shared.free_idle(false);
        }
        Ok(())
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        let Shared { context, host, .. } = &*self.shared;
        let inside = context.enter()?;
        let (mut transfers, mut down) = (Transfers::default(), Vec::new());
        for op in copies {
            // Ordinary memory is copied by way of staging memory.
            let mut stage = || -> Result<_> {
                let buffer = Arc::new(Buffer::on_host(context, op.bytes)?);
                transfers.staging.push(buffer.clone());
                Ok((buffer.base.as_ptr().cast::<u8>(), (buffer.raw, 0)))
            };
            let src = match (op.kind, find(host, op.src, op.bytes)) {
                (_, Some(place)) => place,
                (CopyKind::HostToDevice, None) => {
                    let (staged, place) = stage()?;
                    // SAFETY: the caller guarantees the source, which may be read now (contract of `RawQueue::copy`). Nothing else uses
                    // the staging memory yet.
                    unsafe { staged.copy_from_nonoverlapping(op.src.as_ptr().cast(), op.bytes) };
                    place
                }
                _ => self.shared.at(op.src, op.bytes)?,
            };
            let dst = match (op.kind, find(host, op.dst, op.bytes)) {
                (_, Some(place)) => place,
                (CopyKind::DeviceToHost, None) => {
                    let (staged, place) = stage()?;
                    down.push((staged, op));
                    place
                }
                _ => self.shared.at(op.dst, op.bytes)?,
            };
            transfers.copy(src, dst, op.bytes);
        }
        // SAFETY: the caller guarantees the memory, without overlaps, until the copies have completed (contract of `RawQueue::copy`).
        let number = unsafe { self.transfer(&transfers) }?;
        drop(inside);
        if !down.is_empty() {
            // Only direct callers of a queue copy to ordinary memory.
            self.order.insist(|| self.order.wait(number))?;
        }
        for (staged, op) in down {
            // SAFETY: the caller guarantees the destination. The staging memory, which `transfers` keeps, was written by the copies,
            // which have completed.
            unsafe { staged.copy_to_nonoverlapping(op.dst.as_ptr().cast(), op.bytes) };
        }
        Ok(())
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        let Shared { context, .. } = &*self.shared;
        let _inside = context.enter()?;
        let transfers = Transfers::fill(context, self.shared.at(dst, bytes)?, byte, bytes)?;
        // SAFETY: the caller guarantees the memory until the fill has completed (contract of `RawQueue::fill`).
        unsafe { self.transfer(&transfers) }.map(drop)
    }

    fn record(&self) -> Result<EventPtr> {
        event::record(&self.order)
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<()> {
        self.shared.context.check_process()?;
        match event::recorded(event) {
            Some(point) if point.is_of(&self.shared.context) => {
                self.order.wait_for(point);
                Ok(())
            }
            // SAFETY: the caller guarantees a live event (contract of `RawQueue::wait`).
            _ => unsafe { self.shared.wait_event(event) },
        }
    }
}

impl fmt::Debug for VulkanDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Context { id, info, .. } = &*self.shared.context;
        write!(f, "Vulkan({id}: {info})")
    }
}

impl fmt::Debug for VulkanQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (id, number) = (self.shared.context.id, self.order.timeline.as_raw());
        write!(f, "Queue({id} {number})")
    }
}
