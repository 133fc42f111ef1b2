//! A program's own Vulkan: instance, device and queue, as an engine has them.
#![allow(dead_code)] // tests that include it use what they need

use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use arrow_device::{Device, Error};
use arrow_device_vulkan::{VulkanConfig, VulkanParts};
use ash::vk;

/// Whether a missing driver, layer or tool is an error: in CI.
pub(crate) fn is_required() -> bool {
    std::env::var_os("ARROW_DEVICE_VULKAN_REQUIRED").is_some_and(|value| value != "0")
}

/// Says why a test is skipped, or fails if it must not be.
#[track_caller]
pub(crate) fn skip<T>(why: impl std::fmt::Display) -> Option<T> {
    assert!(!is_required(), "{why}");
    eprintln!("skipped: {why}");
    None
}

/// Vulkan wants nobody to ask for the status of an event while the host sets it (VUID-vkSetEvent-event-parameter's host
/// synchronization). A program whose host sets events gives this crate functions that lock.
mod events {
    use std::collections::HashMap;
    use std::ffi::{CStr, c_void};
    use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

    use ash::vk;

    /// The real functions of the devices.
    type Real = HashMap<vk::Device, vk::PFN_vkGetEventStatus>;

    pub(super) fn alone() -> MutexGuard<'static, Real> {
        static REAL: LazyLock<Mutex<Real>> = LazyLock::new(Mutex::default);
        REAL.lock().unwrap_or_else(PoisonError::into_inner)
    }

    unsafe extern "system" fn get_event_status(device: vk::Device, event: vk::Event) -> vk::Result {
        let real = alone();
        // SAFETY: these are the caller's arguments. `lock` has stored the function before it handed this one out.
        unsafe { real[&device](device, event) }
    }

    /// The device with this function instead of its own.
    pub(super) fn lock(instance: &ash::Instance, device: &ash::Device) -> ash::Device {
        alone().insert(device.handle(), device.fp_v1_0().get_event_status);
        let find = |name: &CStr| match name.to_bytes() {
            b"vkGetEventStatus" => get_event_status as *const c_void,
            // SAFETY: instance and device are live.
            _ => unsafe { instance.get_device_proc_addr(device.handle(), name.as_ptr()) }
                .map_or(std::ptr::null(), |found| found as *const c_void),
        };
        // SAFETY: each function is the device's, or has the same type.
        unsafe { ash::Device::load_with(find, device.handle()) }
    }
}

pub(crate) struct Program {
    pub entry: ash::Entry,
    pub instance: ash::Instance,
    pub physical: vk::PhysicalDevice,
    pub device: ash::Device,
    pub family: u32,
    pub queue: Arc<Mutex<vk::Queue>>,
}

impl Program {
    /// `None` if there is no Vulkan device.
    #[track_caller]
    pub(crate) fn new() -> Option<Arc<Self>> {
        // SAFETY: Vulkan's loader may be loaded on any thread.
        match unsafe { ash::Entry::load() } {
            Ok(entry) => Self::with(entry)
                .map(Some)
                .unwrap_or_else(|e| skip(format!("no Vulkan device: {e}"))),
            Err(e) => skip(format!("no Vulkan: {e}")),
        }
    }

    fn with(entry: ash::Entry) -> Result<Arc<Self>, vk::Result> {
        let version = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_2);
        let info = vk::InstanceCreateInfo::default().application_info(&version);
        // SAFETY: `info` and what it refers to live until the call ends.
        let instance = unsafe { entry.create_instance(&info, None) }?;
        let made = (|| {
            // SAFETY: the instance is live.
            let physical = unsafe { instance.enumerate_physical_devices() }?;
            let physical = *physical.first().ok_or(vk::Result::ERROR_UNKNOWN)?;
            let priorities = [1.0];
            let queues = [vk::DeviceQueueCreateInfo::default()
                .queue_family_index(0)
                .queue_priorities(&priorities)];
            let mut features = vk::PhysicalDeviceVulkan12Features::default()
                .buffer_device_address(true)
                .timeline_semaphore(true);
            let info = vk::DeviceCreateInfo::default()
                .queue_create_infos(&queues)
                .push_next(&mut features);
            // SAFETY: as above.
            let device = unsafe { instance.create_device(physical, &info, None) }?;
            Ok((physical, events::lock(&instance, &device)))
        })();
        match made {
            Ok((physical, device)) => {
                // SAFETY: the device was made with this queue.
                let queue = unsafe { device.get_device_queue(0, 0) };
                Ok(Arc::new(Self {
                    entry,
                    instance,
                    physical,
                    device,
                    family: 0,
                    queue: Arc::new(Mutex::new(queue)),
                }))
            }
            Err(e) => {
                // SAFETY: nothing of the instance is live.
                unsafe { instance.destroy_instance(None) };
                Err(e)
            }
        }
    }

    /// The device as one of arrow-device's, which keeps the program.
    pub(crate) fn adopt(self: &Arc<Self>, config: VulkanConfig) -> Result<Device, Error> {
        let parts = VulkanParts {
            entry: self.entry.clone(),
            instance: self.instance.clone(),
            physical_device: self.physical,
            device: self.device.clone(),
            queue_family: self.family,
            queue: self.queue.clone(),
            keep: Box::new(self.clone()),
        };
        // SAFETY: the objects belong together and live as long as the program. It enabled buffer addresses and timeline semaphores,
        // and uses its queue under the lock only.
        unsafe { config.adopt(parts) }
    }

    /// Sets an event, by the host.
    pub(crate) fn set_event(&self, event: vk::Event) -> Result<(), vk::Result> {
        let _alone = events::alone();
        // SAFETY: the tests pass live events; nobody else uses it meanwhile, as all that polls it locks.
        unsafe { self.device.set_event(event) }
    }

    /// Waits for what the program has submitted.
    pub(crate) fn idle(&self) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the queue is live, and locked.
        let _ = unsafe { self.device.queue_wait_idle(*queue) };
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: nobody uses them any more: whoever does has a reference to this.
        unsafe {
            let _ = self.device.device_wait_idle();
            self.device.destroy_device(None);
            self.instance.destroy_instance(None);
        }
    }
}

/// Keeps a program's queue busy until it is opened.
pub(crate) struct Gate {
    program: Arc<Program>,
    semaphore: vk::Semaphore,
}

impl Gate {
    pub(crate) fn new(program: &Arc<Program>) -> Self {
        let device = &program.device;
        let mut kind =
            vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
        let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        let queue = program.queue.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the device is live, and the queue is locked. The semaphore lives until its wait is over (`drop`).
        let semaphore = unsafe {
            let semaphore = device.create_semaphore(&info, None).unwrap();
            let (semaphores, values) = ([semaphore], [1]);
            let mut timeline =
                vk::TimelineSemaphoreSubmitInfo::default().wait_semaphore_values(&values);
            let work = [vk::SubmitInfo::default()
                .wait_semaphores(&semaphores)
                .wait_dst_stage_mask(&[vk::PipelineStageFlags::ALL_COMMANDS])
                .push_next(&mut timeline)];
            device
                .queue_submit(*queue, &work, vk::Fence::null())
                .unwrap();
            semaphore
        };
        drop(queue);
        Self {
            program: program.clone(),
            semaphore,
        }
    }

    /// Once.
    pub(crate) fn open(&self) {
        let info = vk::SemaphoreSignalInfo::default()
            .semaphore(self.semaphore)
            .value(1);
        // SAFETY: the semaphore is live.
        unsafe { self.program.device.signal_semaphore(&info) }.unwrap();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // SAFETY: the semaphore is live.
        let value = unsafe {
            self.program
                .device
                .get_semaphore_counter_value(self.semaphore)
        };
        if value == Ok(0) {
            self.open();
        }
        self.program.idle();
        // SAFETY: its wait is over, and nobody else has it.
        unsafe { self.program.device.destroy_semaphore(self.semaphore, None) };
    }
}

/// Returns whether `done` becomes true within ten seconds.
pub(crate) fn soon(mut done: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(10) {
        if done() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

/// Ends the process if its tests hang.
pub(crate) fn limit() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_secs(600));
            eprintln!("the tests have hung: ten minutes are over");
            std::process::abort();
        });
    });
}
