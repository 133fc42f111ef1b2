//! The native handles of devices and queues, and a program's own buffers and commands.

use std::sync::Arc;

use arrow_device::device::DevicePtr;
use arrow_device::device::engine::Engine;
use arrow_device::{Device, DeviceBuffer, Error, Queue, Result};
use ash::vk;

use crate::memory::{Buffer, address};
use crate::order::VulkanQueue;
use crate::runtime::VulkanDevice;
use crate::sys::{SharedQueue, VulkanDeviceInfo};

impl VulkanDevice {
    /// Returns the Vulkan device behind a device.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if it is not a Vulkan device of this crate.
    pub fn of(device: &Device) -> Result<&Self> {
        Engine::of(device).map(Engine::runtime)
    }

    /// Returns what Vulkan reports about the physical device.
    pub fn info(&self) -> &VulkanDeviceInfo {
        &self.context.info
    }

    /// Returns the functions of the instance. They may be called as long as this value lives.
    pub fn instance(&self) -> &ash::Instance {
        &self.context.instance
    }

    /// Returns the physical device.
    pub fn physical_device(&self) -> vk::PhysicalDevice {
        self.context.physical
    }

    /// Returns the functions of the device. They may be called as long as this value lives; what is made with them is destroyed
    /// before.
    pub fn device(&self) -> &ash::Device {
        &self.context.device
    }

    /// Returns the index of the queue family to which the memory belongs, and of which command buffers must be.
    pub fn queue_family(&self) -> u32 {
        self.context.family
    }

    /// Returns the VkBuffer in which all of `bytes` bytes at an address lie, and the offset of the address in bytes. The buffer
    /// lives as long as the memory does. It has the usages for storage buffers, transfers and device addresses.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if they are not in memory that the device knows.
    pub fn resolve(&self, address: DevicePtr, bytes: usize) -> Result<(vk::Buffer, u64)> {
        let _inside = self.context.health.enter()?;
        self.at(address, bytes)
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
    pub unsafe fn wrap<K: Send + Sync + 'static>(
        device: &Device,
        buffer: vk::Buffer,
        bytes: usize,
        keep: K,
    ) -> Result<DeviceBuffer> {
        let context = &Self::of(device)?.context;
        let inside = context.health.enter()?;
        if buffer == vk::Buffer::null() || bytes == 0 {
            return Err(Error::InvalidArgument(
                "wrap wants a VkBuffer and its length in bytes, which is more than 0".into(),
            ));
        }
        // SAFETY: the caller guarantees the buffer, which is bound and has the usage for addresses (see `# Safety`).
        let base = unsafe { address(context, buffer) }?;
        if base.is_null() {
            let reason = "the VkBuffer has no address; create it with VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT";
            return Err(context.not_supported("wrap", reason.into()));
        }
        drop(inside);
        let memory = Arc::new(Buffer::of_program(buffer, base, Some(Box::new(keep))));
        // SAFETY: the caller guarantees the memory, which lives until `keep` is dropped.
        unsafe { DeviceBuffer::wrap::<Self>(device, memory, bytes) }
    }
}

impl VulkanQueue {
    /// Returns the Vulkan queue behind a queue.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if its device is not a Vulkan device of this crate.
    pub fn of(queue: &Queue) -> Result<&Self> {
        Engine::<VulkanDevice>::stream(queue).map(|queue| &**queue)
    }

    /// Returns the VkQueue that the queue submits to, with its lock. [`submit`](Self::submit) submits in the order of the queue; a
    /// program that uses the VkQueue itself calls [`submitted`](Self::submitted) before. Only that makes what a queue has written
    /// visible to the program's commands.
    pub fn shared_queue(&self) -> &Arc<dyn SharedQueue> {
        &self.queue
    }

    /// Submits command buffers of the program, in the order of the queue: after all work of the queue so far, and after the events
    /// that it was told to wait for. What that work has written is visible to the commands, and what they write is visible to later
    /// work of the queue, without a barrier of the program's; only commands that write to host memory end with one, to the host. Never
    /// waits.
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
        let _inside = self.context.health.enter()?;
        // SAFETY: the caller guarantees the command buffers (see `# Safety`).
        unsafe { self.give_behind_barrier(commands) }.map(drop)
    }

    /// Returns a timeline semaphore of this crate and the value that it has once all work of the queue so far has completed, for a
    /// submission of the program's own that waits for it and then sees what that work has written. What is submitted afterwards to
    /// [the same VkQueue](Self::shared_queue) need not wait: a barrier orders it. The semaphore lives as long as this queue. Never
    /// waits.
    ///
    /// # Errors
    /// Returns the device's own error.
    pub fn submitted(&self) -> Result<(vk::Semaphore, u64)> {
        let _inside = self.context.health.enter()?;
        // With what the queue was told to wait for, which belongs to the work so far.
        Ok((self.timeline, self.barrier()?))
    }
}
