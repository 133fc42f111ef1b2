//! The physical devices, and how one is opened, or a program's own adopted.

use std::any::Any;
use std::ffi::CStr;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex};

use arrow_device::device::DeviceId;
use arrow_device::device::engine::{Engine, Health};
use arrow_device::{ArrowDeviceType, Device, Result};
use ash::prelude::VkResult;
use ash::vk;
use gpu_allocator::vulkan::{Allocator, AllocatorCreateDesc};
use gpu_allocator::{AllocationSizes, AllocatorDebugSettings};

use crate::order::VulkanQueue;
use crate::runtime::VulkanDevice;
use crate::sys::{
    Context, IDLE, SharedQueue, VulkanDeviceInfo, absent, absent_after, instance, lock,
};

/// How many VkQueues [`VulkanConfig::open`] uses at most.
const QUEUES: u32 = 4;

/// The size in bytes of the memory that the sub-allocator takes from the driver. A larger buffer has memory of its own.
const BLOCK: u64 = 64 << 20;

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
        f.debug_struct("VulkanParts").finish_non_exhaustive()
    }
}

impl VulkanConfig {
    /// Configures the physical device of this number ([`devices`](crate::devices)).
    pub fn new(ordinal: usize) -> Self {
        Self {
            ordinal,
            id: i64::try_from(ordinal).unwrap_or(i64::MAX),
            idle_bytes: 256 << 20,
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

    fn id(&self) -> DeviceId {
        DeviceId::new(ArrowDeviceType::VULKAN, self.id)
    }

    /// Opens the device with a VkDevice of its own, with up to four VkQueues of one family, which the queues of the device use in turn.
    /// The VkDevice is kept for the next call when the device is dropped, and this crate's VkInstance to the end of the process.
    /// For kernels on columns all features of Vulkan 1.0 and 1.2 and of 16-bit storage are enabled that the device has (64-bit integers
    /// and scalar block layout, for example), but not `robustBufferAccess`.
    ///
    /// # Errors
    /// Returns [`Error::DeviceNotAvailable`](arrow_device::Error::DeviceNotAvailable) with the reason if there is no Vulkan loader,
    /// no driver, no such device, or if the device lacks what is needed.
    pub fn open(&self) -> Result<Device> {
        let (device, queue, idle_bytes) = self.parts()?;
        // SAFETY: the queue was made of this device.
        unsafe { Engine::open(device, queue, idle_bytes) }
    }

    /// What [`open`](Self::open) gives to the engine, for tests that let its calls fail.
    #[doc(hidden)]
    pub fn parts(&self) -> Result<(VulkanDevice, Arc<VulkanQueue>, usize)> {
        let id = self.id();
        let health = Health::new(id);
        let _inside = health.enter()?;
        let (instance, listed) = instance(id)?;
        let physical = *listed.get(self.ordinal).ok_or_else(|| {
            let count = listed.len();
            let reason = format!("Vulkan lists {count} devices, which are numbered from 0");
            absent(id, reason)
        })?;
        // SAFETY: the instance is live and has listed the device.
        let (info, families) = unsafe { ask(instance, physical) };
        // The first that serves.
        let family = (0..).zip(&families).find(|(_, family)| serves(family));
        let (family, most) = check(id, &info, family)?;
        let count = most.queue_count.min(QUEUES);
        let kept = {
            let mut idle = lock(&IDLE);
            let at = idle.iter().position(|(of, _)| *of == physical);
            at.map(|at| idle.swap_remove(at).1)
        };
        // SAFETY: the instance has listed the device, `check` found that it lacks nothing, and the family has as many queues.
        let make = || unsafe { create_device(instance, physical, family, count) };
        let device = kept.map_or_else(make, Ok);
        let device = device.map_err(|code| absent_after(id, "vkCreateDevice", code))?;
        let queue = |number| -> Arc<dyn SharedQueue> {
            // SAFETY: the device was made with as many queues of the family, and without flags for them
            // (VUID-vkGetDeviceQueue-queueFamilyIndex-00384, -queueIndex-00385, -flags-01841).
            let queue = unsafe { device.get_device_queue(family, number) };
            Arc::new(Mutex::new(queue))
        };
        let queues = (0..count).map(queue).collect();
        let of = (instance.clone(), physical, device, family);
        self.parts_of(health, queues, of, info, None)
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
    pub unsafe fn adopt(&self, parts: VulkanParts) -> Result<Device> {
        let id = self.id();
        let health = Health::new(id);
        let _inside = health.enter()?;
        let (instance, device, family) = (parts.instance, parts.device, parts.queue_family);
        let physical = parts.physical_device;
        // A device for an older version has no such functions, nor has its instance those that are used below.
        // SAFETY: instance and device are live; the names end with a null byte.
        let has =
            |name: &CStr| unsafe { instance.get_device_proc_addr(device.handle(), name.as_ptr()) };
        if has(c"vkGetBufferDeviceAddress").is_none() || has(c"vkWaitSemaphores").is_none() {
            return Err(absent(
                id,
                "the program's VkDevice was made for a version before Vulkan 1.2; set ApplicationInfo::api_version of its instance",
            ));
        }
        // SAFETY: the caller guarantees that the instance is live and the physical device its own (see `# Safety`).
        let (info, families) = unsafe { ask(&instance, physical) };
        let given = families.get(family as usize).filter(|given| serves(given));
        check(id, &info, given)?;
        let of = (instance, physical, device, family);
        let keep = Some((parts.keep, parts.entry));
        let (device, queue, idle_bytes) =
            self.parts_of(health, vec![parts.queue], of, info, keep)?;
        // SAFETY: the queue was made of this device.
        unsafe { Engine::open(device, queue, idle_bytes) }
    }

    /// All is live and belongs together, and lives as long as `keep`. An instance of this crate is never destroyed.
    fn parts_of(
        &self,
        health: Health,
        queues: Vec<Arc<dyn SharedQueue>>,
        (instance, physical, device, family): (ash::Instance, vk::PhysicalDevice, ash::Device, u32),
        info: VulkanDeviceInfo,
        keep: Option<(Box<dyn Any + Send + Sync>, ash::Entry)>,
    ) -> Result<(VulkanDevice, Arc<VulkanQueue>, usize)> {
        let allocator = Allocator::new(&AllocatorCreateDesc {
            instance: instance.clone(),
            device: device.clone(),
            physical_device: physical,
            debug_settings: AllocatorDebugSettings::default(),
            buffer_device_address: true,
            allocation_sizes: AllocationSizes::new(BLOCK, BLOCK),
        });
        let allocator =
            allocator.map_err(|e| absent(self.id(), format!("gpu-allocator failed: {e}")))?;
        let context = Arc::new(Context {
            health,
            instance,
            physical,
            device,
            family,
            info,
            allocator: ManuallyDrop::new(Mutex::new(allocator)),
            keep: ManuallyDrop::new(keep),
        });
        let queues = queues.into_iter();
        let queues = queues.map(|queue| VulkanQueue::new(&context, queue).map(Arc::new));
        let queues: Vec<_> = queues.collect::<Result<_>>()?;
        let first = queues[0].clone();
        Ok((VulkanDevice::new(context, queues), first, self.idle_bytes))
    }
}

/// Returns the queue family, or what is missing.
fn check<F>(id: DeviceId, info: &VulkanDeviceInfo, family: Option<F>) -> Result<F> {
    if let Some(lacks) = info.lacks {
        return Err(absent(id, format!("{info} lacks {lacks}")));
    }
    let none = "runs no compute commands; pass a VkQueue of one that does";
    let reason = || format!("the queue family of the program's VkQueue on {info} {none}");
    family.ok_or_else(|| absent(id, reason()))
}

/// Returns the physical devices, in the order in which `vulkan:N` numbers them: that of `vkEnumeratePhysicalDevices`.
///
/// # Errors
/// Returns [`Error::DeviceNotAvailable`](arrow_device::Error::DeviceNotAvailable) with the reason if there is no Vulkan loader or
/// no driver.
pub fn devices() -> Result<Vec<VulkanDeviceInfo>> {
    let id = DeviceId::new(ArrowDeviceType::VULKAN, 0);
    let _inside = Health::new(id).enter()?;
    let (instance, listed) = instance(id)?;
    // SAFETY: the instance is live and has listed the devices.
    let describe = |physical| unsafe { ask(instance, physical) }.0;
    Ok(listed.into_iter().map(describe).collect())
}

/// Asks a physical device for what the backend needs to know.
///
/// # Safety
/// The instance is live, and the physical device is one of its own.
unsafe fn ask(
    instance: &ash::Instance,
    physical: vk::PhysicalDevice,
) -> (VulkanDeviceInfo, Vec<vk::QueueFamilyProperties>) {
    // SAFETY: the caller guarantees a live instance and its physical device. The functions of Vulkan 1.0 exist in every instance.
    let (properties, families) = unsafe {
        (
            instance.get_physical_device_properties(physical),
            instance.get_physical_device_queue_family_properties(physical),
        )
    };
    let version = properties.api_version;
    let mut lacks = None;
    let mut most = u64::MAX;
    if version < vk::API_VERSION_1_2 {
        lacks = Some("Vulkan 1.2; update the driver");
    } else {
        let mut memory = vk::PhysicalDeviceMaintenance3Properties::default();
        let mut buffers = vk::PhysicalDeviceMaintenance4Properties::default();
        let mut all = vk::PhysicalDeviceProperties2::default().push_next(&mut memory);
        if version >= vk::API_VERSION_1_3 {
            all = all.push_next(&mut buffers);
        }
        let mut features = vk::PhysicalDeviceVulkan12Features::default();
        let mut wanted = vk::PhysicalDeviceFeatures2::default().push_next(&mut features);
        // SAFETY: the caller guarantees that the instance is live and has listed the device; one that lists a device of Vulkan 1.2 has
        // the functions of Vulkan 1.1. Each structure that is chained belongs to the device's version, and lives during the call.
        unsafe {
            instance.get_physical_device_properties2(physical, &mut all);
            instance.get_physical_device_features2(physical, &mut wanted);
        }
        most = memory.max_memory_allocation_size;
        if buffers.max_buffer_size > 0 {
            most = most.min(buffers.max_buffer_size);
        }
        if features.buffer_device_address == vk::FALSE {
            lacks = Some("buffers with addresses (the feature bufferDeviceAddress)");
        } else if features.timeline_semaphore == vk::FALSE {
            lacks = Some("timeline semaphores (the feature timelineSemaphore)");
        } else if !families.iter().any(serves) {
            lacks = Some("a queue family for compute");
        }
    }
    let name = properties.device_name_as_c_str();
    let name = name.map_or_else(|_| "unnamed".into(), CStr::to_string_lossy);
    let info = VulkanDeviceInfo {
        name: name.into_owned(),
        version: format!(
            "{}.{}.{}",
            vk::api_version_major(version),
            vk::api_version_minor(version),
            vk::api_version_patch(version)
        ),
        kind: match properties.device_type {
            vk::PhysicalDeviceType::DISCRETE_GPU => "discrete GPU",
            vk::PhysicalDeviceType::INTEGRATED_GPU => "integrated GPU",
            vk::PhysicalDeviceType::VIRTUAL_GPU => "virtual GPU",
            vk::PhysicalDeviceType::CPU => "CPU",
            _ => "other device",
        },
        max_allocation: usize::try_from(most).unwrap_or(usize::MAX),
        lacks,
    };
    (info, families)
}

/// Returns whether queues of a family do all that the backend needs: they run kernels, copy, and set events.
fn serves(family: &vk::QueueFamilyProperties) -> bool {
    family.queue_count > 0 && family.queue_flags.contains(vk::QueueFlags::COMPUTE)
}

/// Makes a device, with `count` queues of the family, and the features that it has, for kernels on columns.
///
/// # Safety
/// The instance is live, the physical device is one of its own and lacks nothing, and the family has as many queues.
unsafe fn create_device(
    instance: &ash::Instance,
    physical: vk::PhysicalDevice,
    family: u32,
    count: u32,
) -> VkResult<ash::Device> {
    let mut storage = vk::PhysicalDevice16BitStorageFeatures::default();
    let mut of_1_2 = vk::PhysicalDeviceVulkan12Features::default();
    let mut features = vk::PhysicalDeviceFeatures2::default()
        .push_next(&mut storage)
        .push_next(&mut of_1_2);
    // SAFETY: the caller guarantees both, of Vulkan 1.2, whose structures these are; they live during the call.
    unsafe { instance.get_physical_device_features2(physical, &mut features) };
    // It makes all shaders slower, and nothing asks for it.
    features.features.robust_buffer_access = vk::FALSE;
    let priorities = vec![1.0; count as usize];
    let queues = [vk::DeviceQueueCreateInfo::default()
        .queue_family_index(family)
        .queue_priorities(&priorities)];
    // Must be enabled where it is offered (VUID-VkDeviceCreateInfo-pProperties-04451), which is on Apple's systems.
    let portability = [ash::khr::portability_subset::NAME.as_ptr()];
    let mut create = vk::DeviceCreateInfo::default()
        .queue_create_infos(&queues)
        .push_next(&mut features);
    if cfg!(target_vendor = "apple") {
        create = create.enabled_extension_names(&portability);
    }
    // SAFETY: the caller guarantees instance, physical device and family. All features that are enabled were offered, each structure is
    // chained once, and all live during the call.
    unsafe { instance.create_device(physical, &create, None) }
}
