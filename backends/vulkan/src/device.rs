//! [`VulkanDevice`]: the backend.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use arrow_device::device::{
    AddressClass, Backend, Capabilities, DevicePtr, EventPtr, PointerInfo, RawQueue, Relation,
};
use arrow_device::{Device, DeviceBuffer, Error, Result};
use ash::vk;

use crate::codes::Answer;
use crate::context::SharedQueue;
use crate::event;
use crate::lane::Point;
use crate::memory::{Buffer, Place, address};
use crate::physical::VulkanDeviceInfo;
use crate::queue::VulkanQueue;
use crate::shared::{Objects, Shared};

/// The shortest and the longest pause between two polls of a foreign event by a thread that waits for it.
const PAUSE: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// A Vulkan device: the backend of an arrow-device device.
///
/// [`VulkanConfig`](crate::VulkanConfig) opens one.
pub struct VulkanDevice {
    shared: Arc<Shared>,
    queue: Arc<VulkanQueue>,
}

impl VulkanDevice {
    /// Returns the Vulkan device behind a device.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if it is not a Vulkan device of this crate.
    pub fn of(device: &Device) -> Result<&Self> {
        let found = device.backend().downcast_ref();
        found.ok_or_else(|| {
            Error::InvalidArgument(format!("{device} is not a Vulkan device").into())
        })
    }

    pub(crate) fn new(shared: Shared) -> Result<Self> {
        let shared = Arc::new(shared);
        let queue = VulkanQueue::new(&shared)?;
        Ok(Self { shared, queue })
    }

    /// Returns what Vulkan reports about the physical device.
    pub fn info(&self) -> &VulkanDeviceInfo {
        &self.shared.info
    }

    /// Returns the functions of the instance. They may be called as long as this value lives.
    pub fn instance(&self) -> &ash::Instance {
        &self.shared.context.instance
    }

    /// Returns the physical device.
    pub fn physical_device(&self) -> vk::PhysicalDevice {
        self.shared.context.physical
    }

    /// Returns the functions of the device. They may be called as long as this value lives; what is made with them is destroyed
    /// before.
    pub fn device(&self) -> &ash::Device {
        &self.shared.context.device
    }

    /// Returns the index of the queue family to which the memory belongs, and of which command buffers must be.
    pub fn queue_family(&self) -> u32 {
        self.shared.context.family
    }

    /// Returns the VkQueue of the default queue, with its lock. [`VulkanQueue::submit`] submits in the order of a queue; a program
    /// that uses the VkQueue itself calls [`VulkanQueue::submitted`] before. Only that makes what a queue has written visible to the
    /// program's commands.
    pub fn queue(&self) -> &Arc<dyn SharedQueue> {
        self.queue.shared_queue()
    }

    /// Returns the VkBuffer in which all of `bytes` bytes at an address lie, and the offset of the address in bytes. The buffer
    /// lives as long as the memory does. It has the usages for storage buffers, transfers and device addresses.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if they are not in memory that the device knows.
    pub fn resolve(&self, address: DevicePtr, bytes: usize) -> Result<(vk::Buffer, u64)> {
        let _inside = self.shared.context.enter_usable()?;
        self.shared.resolve(address, bytes)
    }

    /// Wraps a VkBuffer of the program's as a buffer of the device, and keeps `keep` until it is not used any more. Copies nothing
    /// and waits for nothing. While the result or a slice of it lives, the device finds the VkBuffer by its addresses, also for
    /// arrays that another library has made in it.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a null handle, 0 bytes or a buffer that the device knows already, and
    /// [`Error::NotSupported`] if the buffer has no address.
    ///
    /// # Safety
    /// - `buffer` is a live VkBuffer of this device's VkDevice, has at least `bytes` bytes, is bound to memory, belongs to the queue
    ///   family of the device or is concurrent, and has the usages `TRANSFER_SRC`, `SHADER_DEVICE_ADDRESS` and whatever it is used
    ///   for, such as `TRANSFER_DST` and `STORAGE_BUFFER`.
    /// - It lives until `keep` is dropped.
    /// - Work on it that was submitted before is finished, or ordered before the work that uses the result. Nobody writes to it until
    ///   `keep` is dropped.
    pub unsafe fn wrap_buffer<K: Send + Sync + 'static>(
        device: &Device,
        buffer: vk::Buffer,
        bytes: usize,
        keep: K,
    ) -> Result<DeviceBuffer> {
        let this = Self::of(device)?;
        let Shared {
            context, objects, ..
        } = &*this.shared;
        let _inside = context.enter_usable()?;
        if buffer == vk::Buffer::null() || bytes == 0 {
            return Err(Error::InvalidArgument(
                "wrap_buffer wants a VkBuffer and its length in bytes, which is more than 0".into(),
            ));
        }
        // SAFETY: the caller guarantees the buffer, which is bound and has the usage for addresses (see `# Safety`).
        let base = unsafe { address(context, buffer) }?;
        if base.is_null() {
            let reason = "the VkBuffer has no address; create it with VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT";
            return Err(context.not_supported("wrap_buffer", reason.into()));
        }
        let known = Arc::new(Buffer::of_program(buffer, base, bytes));
        if !objects.live.insert_apart(base, bytes, known) {
            return Err(Error::InvalidArgument(
                format!("{bytes} bytes at {base:?} overlap a VkBuffer that {device} knows already; wrap it once")
                    .into(),
            ));
        }
        let owner = Wrapped {
            shared: this.shared.clone(),
            base,
            _keep: keep,
        };
        // SAFETY: the addresses are those of the buffer, which `owner` keeps; the caller guarantees that it does not change.
        Ok(unsafe { DeviceBuffer::from_raw(device, base, bytes, Box::new(owner), None) })
    }

    /// Returns how many buffers, recorded events, and pieces of host memory are in use, for tests of leaks.
    #[doc(hidden)]
    pub fn in_use(&self) -> (usize, usize, usize) {
        let Objects {
            live, events, host, ..
        } = &*self.shared.objects;
        (live.len(), events.used(), host.len())
    }
}

/// Keeps a program's buffer.
struct Wrapped<K> {
    shared: Arc<Shared>,
    base: DevicePtr,
    _keep: K,
}

impl<K> Drop for Wrapped<K> {
    fn drop(&mut self) {
        if !self.shared.context.is_forked() {
            drop(self.shared.objects.live.remove(self.base));
        }
    }
}

impl Shared {
    /// Returns a function that tells whether an event has ended: one of this crate, or a foreign one. Never waits. Its error means
    /// that this will never be known; that of the answer says nothing about the work, and the function may be called again.
    ///
    /// # Safety
    /// The event is live, of this crate or of the VkDevice of this device, when the function is called, unless the device has failed by
    /// then.
    pub(crate) unsafe fn ending(
        &self,
        known: Option<Point>,
        event: EventPtr,
    ) -> impl Fn() -> Result<Answer<bool>> + Send + 'static {
        let context = self.context.clone();
        // SAFETY: the caller guarantees a live event.
        let raw = unsafe { event::read(event) };
        move || {
            let _inside = context.enter()?;
            let ended = match &known {
                Some(point) => {
                    // Another device may have failed.
                    point.lane.context.check_alive()?;
                    point.is_reached()
                }
                // SAFETY: the caller guarantees a live event of the VkDevice, until the device has failed (see `# Safety`).
                None => context.poll(|| unsafe { event::is_set(&context, raw) })?,
            };
            if let Err(failed) = ended
                && failed.is_lost()
            {
                return Err(context.error(failed));
            }
            // A device that has failed says nothing about its work any more.
            context.check_alive()?;
            Ok(ended)
        }
    }
}

// SAFETY:
// - no memory counts as readable by the host;
// - `classify` vouches only for live memory of this device, for the whole length; it never answers `Host`;
// - an event stands for a batch that the timeline says is complete, after whose commands a barrier makes their writes visible to
//   the host; foreign events are vouched for by whoever imports them;
// - `settle` waits for all queues, dropped ones included, until that succeeds, or else sets the failure;
// - `allocate_host` returns mapped memory.
unsafe impl Backend for VulkanDevice {
    fn capabilities(&self) -> Capabilities {
        let mut this = Capabilities::new(self.shared.context.id);
        this.polls_foreign_events = true;
        this
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.queue.clone())
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(VulkanQueue::new(&self.shared)?)
    }

    unsafe fn check_event(&self, event: EventPtr) -> Result<()> {
        let id = self.shared.context.id;
        self.shared.context.check_process()?;
        let refused = |what: String| Err(Error::InvalidArgument(what.into()));
        let ptr = event.as_ptr().cast::<vk::Event>();
        if !ptr.is_aligned() {
            return refused(format!("{ptr:p} is not the address of a VkEvent"));
        }
        if let Some(point) = event::recorded(event)
            && point.lane.context.device.handle() != self.shared.context.device.handle()
        {
            return refused(format!(
                "the event is not of {id}, but of another Vulkan device; import with a set of devices that has that device"
            ));
        }
        // SAFETY: the pointer is aligned, so the caller guarantees that a handle's bytes may be read there.
        if unsafe { event::read(event) } == vk::Event::null() {
            return refused("the event is a null handle".into());
        }
        Ok(())
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        self.shared.context.check_process()?;
        let known = event::recorded(event);
        // SAFETY: the caller guarantees a live event (contract of `query_event`).
        let ended = unsafe { self.shared.ending(known, event) };
        self.shared.context.check(ended()?)
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        let Shared { context, lanes, .. } = &*self.shared;
        context.check_process()?;
        let known = event::recorded(event);
        if let Some(point) = &known
            && Arc::ptr_eq(&point.lane.context, context)
        {
            return lanes.wait_for(point);
        }
        // SAFETY: the caller guarantees a live event (contract of `wait_event`).
        let ended = unsafe { self.shared.ending(known, event) };
        // Vulkan has no wait of the host for a VkEvent.
        let mut pause = PAUSE.0;
        while !context.check(ended()?)? {
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE.1);
        }
        Ok(())
    }

    unsafe fn release_event(&self, event: EventPtr) {
        if let Some(_inside) = self.shared.context.enter_to_drop() {
            self.shared.objects.events.release(event);
        }
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        let Shared {
            context, objects, ..
        } = &*self.shared;
        let Objects { live, host, .. } = &**objects;
        let other = |class| PointerInfo::new(class, address.range(bytes));
        if context.is_forked() {
            return other(AddressClass::Inaccessible);
        }
        let own = live.classify(address, bytes, AddressClass::Device);
        let found = own.or_else(|| host.classify(address, bytes, AddressClass::HostAccessible));
        // Vulkan cannot be asked about addresses.
        found.unwrap_or_else(|| other(AddressClass::Unknown))
    }

    fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        let Shared {
            context,
            memory,
            objects,
            ..
        } = &*self.shared;
        if bytes == 0 {
            return Err(Error::InvalidArgument("host allocation of 0 bytes".into()));
        }
        let _inside = context.enter_usable()?;
        if bytes > memory.most {
            return Ok(None);
        }
        let buffer = memory.allocate(bytes, Place::Host)?;
        let base = buffer.base;
        objects.host.insert(base, bytes, Arc::new(buffer));
        Ok(Some(base))
    }

    unsafe fn free_host(&self, address: DevicePtr, _bytes: usize) {
        let Shared {
            context,
            lanes,
            objects,
            ..
        } = &*self.shared;
        if let Some(_inside) = context.enter_to_drop() {
            // Batches that have completed may still keep the memory; they give it back then.
            let buffer = objects.host.remove(address);
            lanes.forget_ended();
            drop(buffer);
        }
    }

    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        let Shared {
            context, objects, ..
        } = &*self.shared;
        let found = AddressClass::HostAccessible;
        !context.is_forked()
            && !address.is_null()
            && objects
                .host
                .classify(address, bytes, found)
                .is_some_and(|info| info.class == found)
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
        self.shared.trim();
    }

    fn synchronize(&self) -> Result<()> {
        self.shared.context.check_process()?;
        self.shared.lanes.finish()
    }

    fn settle(&self) -> Result<()> {
        self.shared.context.check_process()?;
        self.shared.lanes.settle()
    }
}

impl fmt::Debug for VulkanDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = self.shared.context.id;
        write!(f, "Vulkan({id}: {})", self.shared.info)
    }
}
