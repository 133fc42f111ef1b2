//! The physical devices, and what each offers.

use std::ffi::CStr;
use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};

use arrow_device::device::DeviceId;
use arrow_device::device::parts::{Process, exit};
use arrow_device::{ArrowDeviceType, Result};
use ash::vk;

use crate::codes::{Answer, Of, absent, absent_after};

/// What Vulkan reports about a physical device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct VulkanDeviceInfo {
    /// The device's name.
    pub name: String,
    /// The version of Vulkan that it supports, such as `1.3.230`.
    pub version: String,
    /// What it is: `discrete GPU`, `integrated GPU`, `virtual GPU`, `CPU` or `other device`.
    pub kind: &'static str,
    /// The size in bytes of the largest allocation.
    pub max_allocation: usize,
    /// What the device lacks that arrow-device needs; `None` if it can be opened.
    pub lacks: Option<&'static str>,
}

impl fmt::Display for VulkanDeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, Vulkan {})", self.name, self.kind, self.version)
    }
}

/// Returns the physical devices, in the order in which `vulkan:N` numbers them: that of `vkEnumeratePhysicalDevices`.
///
/// # Errors
/// Returns [`Error::DeviceNotAvailable`](arrow_device::Error::DeviceNotAvailable) with the reason if there is no Vulkan loader or
/// no driver.
pub fn devices() -> Result<Vec<VulkanDeviceInfo>> {
    let id = DeviceId::new(ArrowDeviceType::VULKAN, 0);
    let _inside = exit::enter().ok_or_else(|| absent(id, "the process is ending"))?;
    let instance = Instance::get(id)?;
    let listed = instance.list(id)?;
    // SAFETY: the instance is live and has listed the devices.
    let describe = |physical| unsafe { describe(&instance.instance, physical) };
    Ok(listed.into_iter().map(describe).collect())
}

/// The instance of this crate, with the loader's functions. It is never destroyed: with its last instance the loader unloads drivers,
/// some of which then crash at the end of a thread that has called them.
pub(crate) struct Instance {
    process: Process,
    /// Keeps the loader.
    _entry: ash::Entry,
    pub(crate) instance: ash::Instance,
}

impl Instance {
    /// Makes the instance at the first call. After an error, the next call tries again.
    pub(crate) fn get(id: DeviceId) -> Result<&'static Self> {
        static MADE: OnceLock<Instance> = OnceLock::new();
        let made = match MADE.get() {
            Some(made) => made,
            None => {
                // A second one of two threads stays, unused.
                let made = Self::new(id)?;
                MADE.get_or_init(|| made)
            }
        };
        let code = vk::Result::ERROR_INITIALIZATION_FAILED.as_raw();
        made.process.check(id, code)?;
        Ok(made)
    }

    fn new(id: DeviceId) -> Result<Self> {
        // SAFETY: the library is the system's Vulkan loader, whose initialisation is as sound as that of any library of the system. It
        // is not unloaded while its functions are used, since the result stays; after an error they are not used.
        let entry = unsafe { ash::Entry::load() };
        let entry = entry.map_err(|e| {
            let reason = format!(
                "Vulkan's loader cannot be loaded ({e}); install it and a driver (Debian and Ubuntu: libvulkan1, and the GPU's driver \
                 or mesa-vulkan-drivers)"
            );
            absent(id, reason)
        })?;
        let made = (|| {
            // SAFETY: the entry's functions are those of the loader; the result is a number.
            let version = unsafe { entry.try_enumerate_instance_version() };
            // `None` is a loader of Vulkan 1.0.
            let version = version.of("vkEnumerateInstanceVersion")?;
            let version = version.unwrap_or(vk::API_VERSION_1_0);
            if version < vk::API_VERSION_1_2 {
                return Ok(None);
            }
            let application = vk::ApplicationInfo::default()
                .engine_name(c"arrow-device")
                .api_version(version.min(vk::API_VERSION_1_3));
            let mut create = vk::InstanceCreateInfo::default().application_info(&application);
            // On Apple's systems Vulkan is a layer over Metal, which is listed on request only.
            let portability = [ash::khr::portability_enumeration::NAME.as_ptr()];
            if cfg!(target_vendor = "apple") {
                create = create
                    .flags(vk::InstanceCreateFlags::ENUMERATE_PORTABILITY_KHR)
                    .enabled_extension_names(&portability);
            }
            // SAFETY: the structures are filled in and live during the call (VUID-vkCreateInstance-pCreateInfo-parameter), and the
            // version is one that the loader has.
            let made = unsafe { entry.create_instance(&create, None) };
            made.of("vkCreateInstance").map(Some)
        })();
        match made {
            Ok(Some(instance)) => Ok(Self {
                process: Process::this(),
                _entry: entry,
                instance,
            }),
            // Its instances lack functions that this crate calls.
            Ok(None) => Err(absent(id, OLD_LOADER)),
            Err(failed) if failed.code == vk::Result::ERROR_INCOMPATIBLE_DRIVER => {
                Err(absent(id, NO_DRIVER))
            }
            Err(failed) => Err(absent_after(id, failed)),
        }
    }

    /// Returns the physical devices, of which there is one at least.
    pub(crate) fn list(&self, id: DeviceId) -> Result<Vec<vk::PhysicalDevice>> {
        // SAFETY: the instance is live.
        let listed = unsafe { self.instance.enumerate_physical_devices() };
        let listed = listed.of("vkEnumeratePhysicalDevices");
        match listed.map_err(|failed| absent_after(id, failed))? {
            none if none.is_empty() => Err(absent(id, NO_DRIVER)),
            some => Ok(some),
        }
    }
}

const OLD_LOADER: &str = "Vulkan's loader is older than Vulkan 1.2; update it";

const NO_DRIVER: &str = "Vulkan's loader finds no driver with a device; install the GPU's, or one for processors (Debian and Ubuntu: \
     mesa-vulkan-drivers)";

/// What was asked of a physical device.
pub(crate) struct Asked {
    pub(crate) info: VulkanDeviceInfo,
    pub(crate) families: Vec<vk::QueueFamilyProperties>,
}

/// # Safety
/// The instance is live, and the physical device is one of its own.
unsafe fn describe(instance: &ash::Instance, physical: vk::PhysicalDevice) -> VulkanDeviceInfo {
    // SAFETY: the caller guarantees both.
    unsafe { ask(instance, physical) }.info
}

/// Asks a physical device for what the backend needs to know.
///
/// # Safety
/// The instance is live, and the physical device is one of its own.
pub(crate) unsafe fn ask(instance: &ash::Instance, physical: vk::PhysicalDevice) -> Asked {
    // SAFETY: the caller guarantees both. The functions of Vulkan 1.0 exist in every instance.
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
        // SAFETY: the caller guarantees that the instance is live and has listed the device; one that lists a device of Vulkan 1.2 has the functions of Vulkan 1.1. Each structure that is
        // chained belongs to the device's version, and lives during the call.
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
        } else if family_of(&families).is_none() {
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
    Asked { info, families }
}

/// Returns whether queues of a family do all that the backend needs: they run kernels, copy, and set events.
pub(crate) fn serves(family: &vk::QueueFamilyProperties) -> bool {
    family.queue_count > 0 && family.queue_flags.contains(vk::QueueFlags::COMPUTE)
}

/// Returns the first queue family that serves.
pub(crate) fn family_of(families: &[vk::QueueFamilyProperties]) -> Option<u32> {
    let at = families.iter().position(serves)?;
    u32::try_from(at).ok()
}

/// Of what a device was made: the physical device, the queue family, and the number of its queues.
pub(crate) type Kind = (vk::PhysicalDevice, u32, usize);

/// Devices of this crate that nobody uses. They are used again, and never destroyed: NVIDIA's driver locks up if a device is destroyed
/// while a thread that has called the driver ends, and to make one takes it 150 ms.
static IDLE: Mutex<Vec<(Kind, ash::Device)>> = Mutex::new(Vec::new());

/// Keeps a device of [`take_device`], whose work has ended and of which nothing is left.
pub(crate) fn keep_device(kind: Kind, device: ash::Device) {
    let idle = IDLE.lock();
    idle.unwrap_or_else(PoisonError::into_inner)
        .push((kind, device));
}

/// Returns a device of this crate: one that nobody uses, or else a new one.
///
/// # Safety
/// The physical device is one of the instance's and lacks nothing, and the family has as many queues.
pub(crate) unsafe fn take_device(instance: &'static Instance, kind: Kind) -> Answer<ash::Device> {
    let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(at) = idle.iter().position(|(other, _)| *other == kind) {
        return Ok(idle.swap_remove(at).1);
    }
    drop(idle);
    // SAFETY: the instance is live, and the caller guarantees the rest.
    unsafe { create_device(&instance.instance, kind) }
}

/// Makes a device, with `count` queues of the family, and the features that kernels on columns use, as far as there are any.
///
/// # Safety
/// The instance is live, the physical device is one of its own and lacks nothing, and the family has as many queues.
unsafe fn create_device(
    instance: &ash::Instance,
    (physical, family, count): Kind,
) -> Answer<ash::Device> {
    let mut has_16 = vk::PhysicalDevice16BitStorageFeatures::default();
    let mut has_12 = vk::PhysicalDeviceVulkan12Features::default();
    let mut has = vk::PhysicalDeviceFeatures2::default()
        .push_next(&mut has_16)
        .push_next(&mut has_12);
    // SAFETY: the caller guarantees both, of Vulkan 1.2, whose structures these are; they live during the call.
    unsafe { instance.get_physical_device_features2(physical, &mut has) };
    let has = has.features;
    let mut use_16 = vk::PhysicalDevice16BitStorageFeatures::default()
        .storage_buffer16_bit_access(has_16.storage_buffer16_bit_access == vk::TRUE);
    let mut use_12 = vk::PhysicalDeviceVulkan12Features::default()
        .buffer_device_address(true)
        .timeline_semaphore(true)
        .scalar_block_layout(has_12.scalar_block_layout == vk::TRUE)
        .shader_float16(has_12.shader_float16 == vk::TRUE)
        .shader_int8(has_12.shader_int8 == vk::TRUE)
        .storage_buffer8_bit_access(has_12.storage_buffer8_bit_access == vk::TRUE);
    let features = vk::PhysicalDeviceFeatures::default()
        .shader_float64(has.shader_float64 == vk::TRUE)
        .shader_int16(has.shader_int16 == vk::TRUE)
        .shader_int64(has.shader_int64 == vk::TRUE);
    let priorities = vec![1.0; count];
    let queues = [vk::DeviceQueueCreateInfo::default()
        .queue_family_index(family)
        .queue_priorities(&priorities)];
    // Must be enabled where it is offered (VUID-VkDeviceCreateInfo-pProperties-04451), which is on Apple's systems.
    let portability = [ash::khr::portability_subset::NAME.as_ptr()];
    let mut create = vk::DeviceCreateInfo::default()
        .queue_create_infos(&queues)
        .enabled_features(&features)
        .push_next(&mut use_16)
        .push_next(&mut use_12);
    if cfg!(target_vendor = "apple") {
        create = create.enabled_extension_names(&portability);
    }
    // SAFETY: the caller guarantees instance, physical device and family. All features that are enabled were offered
    // (VUID-VkDeviceCreateInfo: a feature that is not is an error), each structure is chained once, and all live during the call.
    unsafe { instance.create_device(physical, &create, None) }.of("vkCreateDevice")
}
