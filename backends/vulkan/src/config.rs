//! How a Vulkan device is opened.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex};

use arrow_device::device::DeviceId;
use arrow_device::device::parts::exit;
use arrow_device::{ArrowDeviceType, Device, Result};
use ash::vk;

use crate::codes::{absent, absent_after};
use crate::context::{Context, Origin, SharedQueue};
use crate::device::VulkanDevice;
use crate::physical::{Asked, Instance, VulkanDeviceInfo, ask, family_of, serves, take_device};
use crate::shared::Shared;

/// How many VkQueues [`VulkanConfig::open`] uses at most.
const QUEUES: u32 = 4;

/// How a Vulkan device is opened. `Devices::open("vulkan:0")` uses the defaults once the crate is [registered](crate::register).
///
/// ```no_run
/// use arrow_device_vulkan::VulkanConfig;
/// let device = VulkanConfig::new(0).with_idle_limit(1 << 30).open()?;
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct VulkanConfig {
    ordinal: usize,
    id: i64,
    idle_bytes: usize,
    /// How often each VkQueue is listed.
    repeat: usize,
}

/// What a program has of Vulkan, for [`VulkanConfig::adopt`].
pub struct VulkanParts {
    /// The loader's functions, of which the instance was made.
    pub entry: ash::Entry,
    /// The instance.
    pub instance: ash::Instance,
    /// The physical device.
    pub physical_device: vk::PhysicalDevice,
    /// The device, with the features `bufferDeviceAddress` and `timelineSemaphore`.
    pub device: ash::Device,
    /// The queue family of the queue, which runs compute commands.
    pub queue_family: u32,
    /// A queue of the device, with the lock under which the program uses it.
    pub queue: Arc<dyn SharedQueue>,
    /// What keeps device and instance: it is dropped once the crate has destroyed all that it made of them. A program that has its
    /// device in an `Arc` passes a clone.
    pub keep: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for VulkanParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VulkanParts")
            .field("instance", &self.instance.handle())
            .field("physical_device", &self.physical_device)
            .field("device", &self.device.handle())
            .field("queue_family", &self.queue_family)
            .finish_non_exhaustive()
    }
}

impl VulkanConfig {
    /// Configures the physical device of this number ([`devices`](crate::devices)).
    pub fn new(ordinal: usize) -> Self {
        Self {
            ordinal,
            id: i64::try_from(ordinal).unwrap_or(i64::MAX),
            idle_bytes: 256 << 20,
            repeat: 1,
        }
    }

    /// Sets the id that arrays of the device carry; by default the device's number.
    #[must_use]
    pub fn with_id(mut self, id: i64) -> Self {
        self.id = id;
        self
    }

    /// Sets how many bytes of freed memory are kept for reuse, 256 MiB by default.
    /// [`Device::trim`](arrow_device::Device::trim) frees what is kept.
    #[must_use]
    pub fn with_idle_limit(mut self, bytes: usize) -> Self {
        self.idle_bytes = bytes;
        self
    }

    /// Makes the device treat each VkQueue as two, for tests of devices with several.
    #[doc(hidden)]
    #[must_use]
    pub fn with_repeated_queues(mut self) -> Self {
        self.repeat = 2;
        self
    }

    pub(crate) fn id(&self) -> DeviceId {
        DeviceId::new(ArrowDeviceType::VULKAN, self.id)
    }

    /// Opens the device with a VkDevice of its own, with up to four VkQueues of one family, which the queues of the device use in turn.
    /// The VkDevice is kept for the next call when the device is dropped, and this crate's VkInstance to the end of the process. Features for kernels on columns are enabled where the device has them: 8-, 16- and 64-bit integers,
    /// 16- and 64-bit floats, 8- and 16-bit storage, and scalar block layout.
    ///
    /// # Errors
    /// Returns [`Error::DeviceNotAvailable`](arrow_device::Error::DeviceNotAvailable) with the reason if there is no Vulkan loader,
    /// no driver, no such device, or if the device lacks what is needed.
    pub fn open(&self) -> Result<Device> {
        let id = self.id();
        let _inside = exit::enter().ok_or_else(|| absent(id, ENDING))?;
        let instance = Instance::get(id)?;
        let listed = instance.list(id)?;
        let count = listed.len();
        let Some(physical) = listed.into_iter().nth(self.ordinal) else {
            let number = self.ordinal;
            return Err(absent(
                id,
                format!(
                    "there is no device {number}, since Vulkan lists {count}; they are numbered from 0"
                ),
            ));
        };
        // SAFETY: the instance is live and has listed the device.
        let Asked { info, families } = unsafe { ask(&instance.instance, physical) };
        let family = check(id, &info, family_of(&families))?;
        let most = families.get(family as usize);
        let count = most.map_or(1, |family| family.queue_count.clamp(1, QUEUES));
        // SAFETY: the instance has listed the device; `check` found that the device lacks nothing, and the family has as many queues.
        let device = unsafe { take_device(instance, (physical, family, count as usize)) };
        let device = device.map_err(|failed| absent_after(id, failed))?;
        let queues = (0..count).map(|number| {
            // SAFETY: the device was made with as many queues of the family, and without flags for them
            // (VUID-vkGetDeviceQueue-queueFamilyIndex-00384, -queueIndex-00385, -flags-01841).
            let queue = unsafe { device.get_device_queue(family, number) };
            Arc::new(Mutex::new(queue)) as Arc<dyn SharedQueue>
        });
        let queues = queues.collect();
        let (instance, origin) = (instance.instance.clone(), Origin::Own(count as usize));
        // SAFETY: all belong together, and are nobody else's; the instance is never destroyed.
        let context = unsafe { Context::new(id, instance, physical, device, family, origin) };
        self.open_in(context, info, queues)
    }

    /// Opens a device on the instance, device and queue that the program has. The number of the configuration is not used except as
    /// the id. All queues of the device submit to the program's VkQueue, under its lock.
    ///
    /// # Errors
    /// Returns [`Error::DeviceNotAvailable`](arrow_device::Error::DeviceNotAvailable) if the device is older than Vulkan 1.2 or lacks
    /// a feature, or the family runs no compute commands: Vulkan sets events in such families only.
    ///
    /// # Safety
    /// - All of `parts` is live and belongs together: the device was made of the physical device and has queues of the family, of
    ///   which `queue` is one. Instance and device were made for Vulkan 1.2 or later (`ApplicationInfo::api_version`), and the device
    ///   with the features `bufferDeviceAddress` and `timelineSemaphore`.
    /// - Instance and device, and the library of `entry`, live until `keep` is dropped.
    /// - The program uses the VkQueue under the lock of `queue` only, and does not call `vkDeviceWaitIdle`, which wants all queues,
    ///   without it.
    pub unsafe fn adopt(self, parts: VulkanParts) -> Result<Device> {
        let id = self.id();
        let _inside = exit::enter().ok_or_else(|| absent(id, ENDING))?;
        let VulkanParts {
            entry,
            instance,
            physical_device: physical,
            device,
            queue_family: family,
            queue,
            keep,
        } = parts;
        // A device for an older version has no such functions, nor has its instance those that are used below.
        // SAFETY: instance and device are live; the names end with a null byte.
        let has = |name: &std::ffi::CStr| unsafe {
            instance.get_device_proc_addr(device.handle(), name.as_ptr())
        };
        if has(c"vkGetBufferDeviceAddress").is_none() || has(c"vkWaitSemaphores").is_none() {
            return Err(absent(
                id,
                "the program's VkDevice was made for a version before Vulkan 1.2; set ApplicationInfo::api_version of its instance",
            ));
        }
        // SAFETY: the caller guarantees that the instance is live and the physical device its own (see `# Safety`).
        let Asked { info, families } = unsafe { ask(&instance, physical) };
        let given = families.get(family as usize).filter(|given| serves(given));
        check(id, &info, given.map(|_| family))?;
        let origin = Origin::Program(keep, entry);
        // SAFETY: the caller guarantees that all are live, belong together, and live as long as `keep`.
        let context = unsafe { Context::new(id, instance, physical, device, family, origin) };
        self.open_in(context, info, vec![queue])
    }

    fn open_in(
        &self,
        context: Context,
        info: VulkanDeviceInfo,
        queues: Vec<Arc<dyn SharedQueue>>,
    ) -> Result<Device> {
        let queues = vec![queues; self.repeat].concat();
        let shared = Shared::new(context, info, queues, self.idle_bytes)?;
        Device::new(Arc::new(VulkanDevice::new(shared)?))
    }
}

const ENDING: &str = "the process is ending";

/// Returns the queue family, or what is missing.
fn check(id: DeviceId, info: &VulkanDeviceInfo, family: Option<u32>) -> Result<u32> {
    match (info.lacks, family) {
        (None, Some(family)) => Ok(family),
        (Some(lacks), _) => Err(absent(id, format!("{info} lacks {lacks}"))),
        (None, None) => Err(absent(
            id,
            format!(
                "the queue family of the program's VkQueue on {info} runs no compute commands; pass a VkQueue of one that does"
            ),
        )),
    }
}
