//! A program with an instance, a device and a queue of its own.

use std::sync::{Arc, Mutex};

use arrow_device::{Device, Result};
use arrow_device_conformance::next_id;
use arrow_device_vulkan::ash::{self, vk};
use arrow_device_vulkan::{SharedQueue, VulkanConfig, VulkanParts};

/// What the program has. Its drop destroys all of it.
pub(crate) struct Program {
    pub(crate) entry: ash::Entry,
    pub(crate) instance: ash::Instance,
    pub(crate) physical: vk::PhysicalDevice,
    pub(crate) device: ash::Device,
    pub(crate) queue: Arc<Mutex<vk::Queue>>,
    pub(crate) pool: vk::CommandPool,
}

/// The family of the program's queue.
pub(crate) const FAMILY: u32 = 0;

impl Program {
    pub(crate) fn new() -> Arc<Self> {
        // SAFETY: the library is the system's loader.
        let entry = unsafe { ash::Entry::load() }.unwrap();
        Self::with_entry(entry, vk::API_VERSION_1_2)
    }

    /// Makes a program with a loader's functions, of a version of Vulkan.
    pub(crate) fn with_entry(entry: ash::Entry, version: u32) -> Arc<Self> {
        let application = vk::ApplicationInfo::default().api_version(version);
        let create = vk::InstanceCreateInfo::default().application_info(&application);
        let priorities = [1.0];
        let queues = [vk::DeviceQueueCreateInfo::default()
            .queue_family_index(FAMILY)
            .queue_priorities(&priorities)];
        let mut features = vk::PhysicalDeviceVulkan12Features::default()
            .buffer_device_address(true)
            .timeline_semaphore(true);
        let mut device = vk::DeviceCreateInfo::default().queue_create_infos(&queues);
        if version >= vk::API_VERSION_1_2 {
            device = device.push_next(&mut features);
        }
        let pool = vk::CommandPoolCreateInfo::default().queue_family_index(FAMILY);
        // SAFETY: all is made as its structures say; lavapipe's family 0 runs everything.
        unsafe {
            let instance = entry.create_instance(&create, None).unwrap();
            let physical = instance.enumerate_physical_devices().unwrap()[0];
            let device = instance.create_device(physical, &device, None).unwrap();
            let queue = device.get_device_queue(FAMILY, 0);
            let pool = device.create_command_pool(&pool, None).unwrap();
            Arc::new(Self {
                entry,
                instance,
                physical,
                device,
                queue: Arc::new(Mutex::new(queue)),
                pool,
            })
        }
    }

    pub(crate) fn parts(self: &Arc<Self>) -> VulkanParts {
        VulkanParts {
            entry: self.entry.clone(),
            instance: self.instance.clone(),
            physical_device: self.physical,
            device: self.device.clone(),
            queue_family: FAMILY,
            queue: self.queue.clone() as Arc<dyn SharedQueue>,
            keep: Box::new(self.clone()),
        }
    }

    pub(crate) fn try_adopt(self: &Arc<Self>) -> Result<Device> {
        let config = VulkanConfig::new(0).with_id(next_id());
        // SAFETY: all parts are live, belong together, and live as long as the program, which they keep.
        unsafe { config.adopt(self.parts()) }
    }

    pub(crate) fn adopt(self: &Arc<Self>) -> Device {
        self.try_adopt().unwrap()
    }

    /// Records commands of the program.
    pub(crate) fn record(&self, commands: impl FnOnce(vk::CommandBuffer)) -> vk::CommandBuffer {
        let allocate = vk::CommandBufferAllocateInfo::default()
            .command_pool(self.pool)
            .command_buffer_count(1);
        // SAFETY: the pool is live, and tests use it on one thread. The command buffer is freed with it.
        unsafe {
            let buffer = self.device.allocate_command_buffers(&allocate).unwrap()[0];
            let begin = vk::CommandBufferBeginInfo::default();
            self.device.begin_command_buffer(buffer, &begin).unwrap();
            commands(buffer);
            self.device.end_command_buffer(buffer).unwrap();
            buffer
        }
    }

    /// A buffer of the program's, with addresses, which the host can map.
    pub(crate) fn buffer(self: &Arc<Self>, bytes: usize) -> Arc<ProgramBuffer> {
        let usage = vk::BufferUsageFlags::TRANSFER_SRC
            | vk::BufferUsageFlags::TRANSFER_DST
            | vk::BufferUsageFlags::STORAGE_BUFFER
            | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS;
        let create = vk::BufferCreateInfo::default()
            .size(bytes as u64)
            .usage(usage);
        let mut flags =
            vk::MemoryAllocateFlagsInfo::default().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
        // SAFETY: all is made as its structures say, in memory that the host reads and writes without a flush.
        unsafe {
            let raw = self.device.create_buffer(&create, None).unwrap();
            let needs = self.device.get_buffer_memory_requirements(raw);
            let types = self
                .instance
                .get_physical_device_memory_properties(self.physical);
            let mapped =
                vk::MemoryPropertyFlags::HOST_VISIBLE | vk::MemoryPropertyFlags::HOST_COHERENT;
            let fits = |(index, kind): (u32, &vk::MemoryType)| {
                (needs.memory_type_bits >> index & 1 == 1 && kind.property_flags.contains(mapped))
                    .then_some(index)
            };
            let index = (0..).zip(types.memory_types_as_slice()).find_map(fits);
            let allocate = vk::MemoryAllocateInfo::default()
                .allocation_size(needs.size)
                .memory_type_index(index.unwrap())
                .push_next(&mut flags);
            let memory = self.device.allocate_memory(&allocate, None).unwrap();
            self.device.bind_buffer_memory(raw, memory, 0).unwrap();
            let whole = vk::WHOLE_SIZE;
            let none = vk::MemoryMapFlags::empty();
            let mapped = self.device.map_memory(memory, 0, whole, none).unwrap();
            Arc::new(ProgramBuffer {
                program: self.clone(),
                raw,
                memory,
                bytes,
                mapped: mapped.expose_provenance(),
            })
        }
    }
}

impl Program {
    /// Whether the device is NVIDIA's.
    pub(crate) fn is_nvidia(&self) -> bool {
        // SAFETY: the physical device is the instance's, which lives as long as the program.
        let of = unsafe { self.instance.get_physical_device_properties(self.physical) };
        of.vendor_id == 0x10DE
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: everything is destroyed once, with nothing left that was made of it.
        unsafe {
            self.device.device_wait_idle().unwrap();
            self.device.destroy_command_pool(self.pool, None);
            // NVIDIA's driver hangs if a thread of another test ends meanwhile.
            if self.is_nvidia() {
                return;
            }
            self.device.destroy_device(None);
            self.instance.destroy_instance(None);
        }
    }
}

pub(crate) struct ProgramBuffer {
    program: Arc<Program>,
    pub(crate) raw: vk::Buffer,
    memory: vk::DeviceMemory,
    pub(crate) bytes: usize,
    mapped: usize,
}

impl ProgramBuffer {
    pub(crate) fn write(&self, values: &[i64]) {
        assert!(size_of_val(values) <= self.bytes);
        let mapped: *mut i64 = std::ptr::with_exposed_provenance_mut(self.mapped);
        // SAFETY: the memory is mapped, has room, and no commands use it now.
        unsafe { mapped.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    }
}

impl Drop for ProgramBuffer {
    fn drop(&mut self) {
        // SAFETY: both are destroyed once; no commands use them any more.
        unsafe {
            self.program.device.destroy_buffer(self.raw, None);
            self.program.device.free_memory(self.memory, None);
        }
    }
}
