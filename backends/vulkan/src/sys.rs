//! Vulkan's loader and instance, errors of calls, and [`Context`]: a device of Vulkan, and what every part of the backend needs of it.

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use arrow_device::device::engine::Health;
use arrow_device::device::{DeviceId, device_error};
use arrow_device::{ArrowDeviceType, Error, Result};
use ash::prelude::VkResult;
use ash::vk;
use gpu_allocator::vulkan::Allocator;

/// Returns [`Error::DeviceNotAvailable`].
pub(crate) fn absent(device: DeviceId, reason: impl Into<String>) -> Error {
    Error::DeviceNotAvailable {
        device,
        reason: reason.into().into(),
    }
}

/// Returns [`Error::DeviceNotAvailable`] because a call has failed.
pub(crate) fn absent_after(device: DeviceId, call: &str, code: vk::Result) -> Error {
    let number = code.as_raw();
    absent(
        device,
        format!("{call} failed: VK_{code:?} (code {number})"),
    )
}

/// Returns the instance of this crate, which the first call makes, and the physical devices, of which there is one at least. After an
/// error, the next call tries again. The instance is never destroyed: with its last one the loader unloads drivers, some of which then
/// crash at the end of a thread that has called them.
pub(crate) fn instance(id: DeviceId) -> Result<(&'static ash::Instance, Vec<vk::PhysicalDevice>)> {
    // With what keeps the loader, and what says whether this is the process that has made the instance.
    static MADE: OnceLock<(Health, ash::Entry, ash::Instance)> = OnceLock::new();
    let (health, _, instance) = match MADE.get() {
        Some(made) => made,
        None => {
            // A second one of two threads stays, unused.
            let (entry, instance) = make_instance(id)?;
            let health = Health::new(DeviceId::new(ArrowDeviceType::VULKAN, 0));
            MADE.get_or_init(|| (health, entry, instance))
        }
    };
    drop(health.enter()?);
    // SAFETY: the instance is live.
    match unsafe { instance.enumerate_physical_devices() } {
        Ok(none) if none.is_empty() => Err(absent(id, NO_DRIVER)),
        Ok(some) => Ok((instance, some)),
        Err(code) => Err(absent_after(id, "vkEnumeratePhysicalDevices", code)),
    }
}

fn make_instance(id: DeviceId) -> Result<(ash::Entry, ash::Instance)> {
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
    // SAFETY: the entry's functions are those of the loader; the result is a number.
    let version = unsafe { entry.try_enumerate_instance_version() };
    let version = version.map_err(|code| absent_after(id, "vkEnumerateInstanceVersion", code));
    // `None` is a loader of Vulkan 1.0.
    let version = version?.unwrap_or(vk::API_VERSION_1_0);
    if version < vk::API_VERSION_1_2 {
        // Its instances lack functions that this crate calls.
        let reason = "Vulkan's loader is older than Vulkan 1.2; update it";
        return Err(absent(id, reason));
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
    // SAFETY: the structures are filled in and live during the call (VUID-vkCreateInstance-pCreateInfo-parameter), and the version is
    // one that the loader has.
    match unsafe { entry.create_instance(&create, None) } {
        Ok(instance) => Ok((entry, instance)),
        Err(vk::Result::ERROR_INCOMPATIBLE_DRIVER) => Err(absent(id, NO_DRIVER)),
        Err(code) => Err(absent_after(id, "vkCreateInstance", code)),
    }
}

const NO_DRIVER: &str = "Vulkan's loader finds no driver with a device; install the GPU's, or one for processors (Debian and Ubuntu: \
     mesa-vulkan-drivers)";

/// Devices of this crate that nobody uses. They are used again, and never destroyed: NVIDIA's driver locks up if a device is destroyed
/// while a thread that has called the driver ends, and to make one takes it 150 ms.
pub(crate) static IDLE: Mutex<Vec<(vk::PhysicalDevice, ash::Device)>> = Mutex::new(Vec::new());

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

/// A device of Vulkan. Instance and device are live and belong to the physical device, and the device has queues of the family.
pub(crate) struct Context {
    pub(crate) health: Health,
    pub(crate) instance: ash::Instance,
    pub(crate) physical: vk::PhysicalDevice,
    pub(crate) device: ash::Device,
    pub(crate) family: u32,
    pub(crate) info: VulkanDeviceInfo,
    /// Takes memory from the driver in large pieces.
    pub(crate) allocator: ManuallyDrop<Mutex<Allocator>>,
    /// What keeps a program's device, and the loader; `None` for a device of this crate.
    pub(crate) keep: ManuallyDrop<Option<(Box<dyn Any + Send + Sync>, ash::Entry)>>,
}

impl Context {
    /// Makes the answer of a call an error that names the device. One that is lost has failed; its work may not have ended yet.
    pub(crate) fn check<T>(&self, call: &'static str, answer: VkResult<T>) -> Result<T> {
        answer.map_err(|code| {
            let id = self.health.id();
            let error = device_error(id, call, code.as_raw(), format!("VK_{code:?}"));
            match code {
                vk::Result::ERROR_DEVICE_LOST => self.health.fail(error),
                _ => error,
            }
        })
    }

    pub(crate) fn out_of_memory(&self, operation: &'static str, bytes: usize) -> Error {
        Error::OutOfMemory {
            device: self.health.id(),
            operation,
            bytes,
        }
    }

    pub(crate) fn not_supported(&self, operation: &'static str, reason: String) -> Error {
        Error::NotSupported {
            device: self.health.id(),
            operation,
            reason: reason.into(),
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let Ok(_inside) = self.health.enter_even_if_failed() else {
            return;
        };
        // All that was made of the device holds this context and was destroyed before, after its work (`VulkanQueue::drop`).
        // SAFETY: the values are not used again. No buffer is left, so that this frees all memory.
        let keep = unsafe {
            ManuallyDrop::drop(&mut self.allocator);
            ManuallyDrop::take(&mut self.keep)
        };
        match keep {
            None if self.health.check().is_ok() => {
                lock(&IDLE).push((self.physical, self.device.clone()));
            }
            // A lost device is of no use to anybody, and not destroyed either. A program's objects may go now, and then the library.
            keep => drop(keep),
        }
    }
}

/// A VkQueue and the lock that guards it: Vulkan wants one thread at a time to use a queue, so a program and this crate share the
/// program's lock. `Mutex<vk::Queue>` is one.
///
/// The crate calls [`with`](Self::with) while it holds a lock of its own. While a program has its lock, it must therefore not call
/// this crate or drop anything of it: that could wait for ever. Within `with` the crate submits (`vkQueueSubmit`), and waits for the
/// device only after that was lost.
///
/// # Safety
/// `with` calls `work` once, on the calling thread, with the same live VkQueue each time, and lets no other thread use that VkQueue
/// meanwhile. It does not panic.
pub unsafe trait SharedQueue: Send + Sync {
    /// Calls `work` with the VkQueue, which nothing else uses meanwhile.
    fn with(&self, work: &mut dyn FnMut(vk::Queue));
}

// SAFETY: the mutex excludes all others that keep to it, and `work` is called once. A program that shares the VkQueue takes the
// same lock (see `VulkanConfig::adopt`).
unsafe impl SharedQueue for Mutex<vk::Queue> {
    fn with(&self, work: &mut dyn FnMut(vk::Queue)) {
        work(*lock(self));
    }
}

/// Locks a mutex. No code of this crate leaves what it protects half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
