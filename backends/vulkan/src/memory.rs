//! Memory: buffers with addresses, from the sub-allocator, and the commands that copy and fill.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use arrow_device::Result;
use arrow_device::device::DevicePtr;
use ash::vk;
use gpu_allocator::vulkan::{Allocation, AllocationCreateDesc, AllocationScheme};
use gpu_allocator::{AllocationError, MemoryLocation};

use crate::sys::{Context, lock};

/// The alignment in bytes that arrow-device asks for.
const ALIGNMENT: u64 = 64;

/// A buffer that can be used for storage and copies, and has an address.
pub struct Buffer {
    pub(crate) raw: vk::Buffer,
    /// Its address: the device's, or for host memory, the host's.
    pub(crate) base: DevicePtr,
    allocation: Option<Allocation>,
    /// `None` for a program's buffer.
    context: Option<Arc<Context>>,
    /// What keeps a program's buffer.
    _keep: Option<Box<dyn Any + Send + Sync>>,
}

/// A buffer, and an offset in bytes.
pub(crate) type Place = (vk::Buffer, u64);

impl Buffer {
    /// Describes a program's buffer, which its drop leaves alone.
    pub(crate) fn of_program(
        raw: vk::Buffer,
        base: DevicePtr,
        keep: Option<Box<dyn Any + Send + Sync>>,
    ) -> Self {
        Self {
            raw,
            base,
            allocation: None,
            context: None,
            _keep: keep,
        }
    }

    /// Allocates memory of the device, which counts as not readable by the host.
    pub(crate) fn on_device(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let mut buffer = Self::new(context, bytes, MemoryLocation::GpuOnly)?;
        // SAFETY: the buffer is bound, and has the usage for addresses.
        buffer.base = unsafe { address(context, buffer.raw) }?;
        buffer.aligned(context)
    }

    /// Allocates host memory that the device copies from and to: mapped and coherent, and cached where there is any.
    pub(crate) fn on_host(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let mut buffer = Self::new(context, bytes, MemoryLocation::GpuToCpu)?;
        let mapped = buffer.allocation.as_ref().and_then(Allocation::mapped_ptr);
        buffer.base = mapped.map_or(DevicePtr::NULL, |mapped| DevicePtr::new(mapped.as_ptr()));
        buffer.aligned(context)
    }

    fn aligned(self, context: &Context) -> Result<Self> {
        let base = self.base;
        if base.is_null() || !base.address().is_multiple_of(ALIGNMENT as usize) {
            let reason = format!(
                "the driver returned the address {base:?}, which is not aligned to {ALIGNMENT} bytes"
            );
            return Err(context.not_supported("allocate", reason));
        }
        Ok(self)
    }

    fn new(context: &Arc<Context>, bytes: usize, location: MemoryLocation) -> Result<Self> {
        if bytes > context.info.max_allocation {
            let what = "a single allocation (the most is maxMemoryAllocationSize or maxBufferSize; use smaller batches)";
            return Err(context.out_of_memory(what, bytes));
        }
        let device = &context.device;
        let create = vk::BufferCreateInfo::default()
            .size(bytes as u64)
            .usage(
                vk::BufferUsageFlags::TRANSFER_SRC
                    | vk::BufferUsageFlags::TRANSFER_DST
                    | vk::BufferUsageFlags::STORAGE_BUFFER
                    | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS,
            )
            .sharing_mode(vk::SharingMode::EXCLUSIVE);
        // SAFETY: the device is live, with bufferDeviceAddress enabled; the size is more than 0 and within maxBufferSize
        // (VUID-VkBufferCreateInfo-size-00912, VUID-VkBufferCreateInfo-size-06409).
        let raw = unsafe { device.create_buffer(&create, None) };
        let raw = context.check("vkCreateBuffer", raw)?;
        // Destroyed with the buffer's value from now on.
        let mut buffer = Self::of_program(raw, DevicePtr::NULL, None);
        buffer.context = Some(context.clone());
        // SAFETY: the buffer was just made.
        let mut requirements = unsafe { device.get_buffer_memory_requirements(raw) };
        requirements.alignment = requirements.alignment.max(ALIGNMENT);
        let allocation = lock(&context.allocator).allocate(&AllocationCreateDesc {
            name: "",
            requirements,
            location,
            linear: true,
            allocation_scheme: AllocationScheme::GpuAllocatorManaged,
        });
        let allocation = allocation.map_err(|e| match e {
            // vkAllocateMemory fails for lack of memory, or because there are too many allocations.
            AllocationError::OutOfMemory
            | AllocationError::Internal(_)
            | AllocationError::FailedToMap(_) => context.out_of_memory("vkAllocateMemory", bytes),
            e => context.not_supported("allocate", e.to_string()),
        })?;
        // SAFETY: neither buffer nor memory are in use; the memory is of a type that the buffer's requirements name, and offset and
        // size are as these ask (VUID-vkBindBufferMemory-memory-01035, -memoryOffset-01036, -size-01037). Its memory was allocated
        // with VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT (-bufferDeviceAddress-03339). Binding memory needs no other synchronisation.
        let bound =
            unsafe { device.bind_buffer_memory(raw, allocation.memory(), allocation.offset()) };
        buffer.allocation = Some(allocation);
        context.check("vkBindBufferMemory", bound)?;
        Ok(buffer)
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {:?}", self.raw, self.base)
    }
}

impl Drop for Buffer {
    /// Frees the memory at once: nothing may use it any more.
    fn drop(&mut self) {
        let Some(context) = &self.context else { return };
        let allocation = self.allocation.take();
        let Ok(_inside) = context.health.enter_even_if_failed() else {
            std::mem::forget(allocation);
            return;
        };
        // SAFETY: this value made the buffer and destroys it once. All submitted commands that refer to it have completed
        // (VUID-vkDestroyBuffer-buffer-00922): whoever drops it has seen that: the engine, and `Flying`.
        unsafe { context.device.destroy_buffer(self.raw, None) };
        if let Some(allocation) = allocation {
            // Fails only if the sub-allocator's own books are wrong; the memory is then freed with it.
            let _ = lock(&context.allocator).free(allocation);
        }
    }
}

/// Returns the address of a buffer.
///
/// # Safety
/// The buffer is live, of the context's device, bound, and has the usage for addresses.
pub(crate) unsafe fn address(context: &Context, raw: vk::Buffer) -> Result<DevicePtr> {
    let info = vk::BufferDeviceAddressInfo::default().buffer(raw);
    // SAFETY: the caller guarantees the buffer; bufferDeviceAddress is enabled
    // (VUID-vkGetBufferDeviceAddress-bufferDeviceAddress-03324, VUID-VkBufferDeviceAddressInfo-buffer-02601).
    let address = unsafe { context.device.get_buffer_device_address(&info) };
    let address = usize::try_from(address).map_err(|_| {
        let reason = format!("the address {address:#x} does not fit the host's pointers");
        context.not_supported("allocate", reason)
    })?;
    // The host does not follow it.
    Ok(DevicePtr::new(std::ptr::without_provenance_mut(address)))
}

/// Copies, and at most one fill, in any order.
#[derive(Default)]
pub(crate) struct Transfers {
    /// (source, destination, region)
    copies: Vec<(vk::Buffer, vk::Buffer, vk::BufferCopy)>,
    /// (buffer, offset, bytes, word)
    fill: Option<(vk::Buffer, u64, u64, u32)>,
    /// Lives until they have completed.
    pub(crate) staging: Vec<Arc<Buffer>>,
}

impl Transfers {
    /// Adds a copy, within both buffers.
    pub(crate) fn copy(&mut self, src: Place, dst: Place, bytes: usize) {
        let region = vk::BufferCopy {
            src_offset: src.1,
            dst_offset: dst.1,
            size: bytes as u64,
        };
        self.copies.push((src.0, dst.0, region));
    }

    /// Makes those that set `bytes` bytes, within the buffer. Vulkan fills whole words: what is left, at most three bytes on each side,
    /// is copied from staging memory.
    pub(crate) fn fill(
        context: &Arc<Context>,
        (buffer, start): Place,
        byte: u8,
        bytes: usize,
    ) -> Result<Self> {
        let end = start + bytes as u64;
        let first = start.next_multiple_of(4).min(end);
        let last = (end - end % 4).max(first);
        let mut this = Self::default();
        for (start, end) in [(start, first), (last, end)] {
            if start < end {
                let staged = Buffer::on_host(context, 4)?;
                // SAFETY: the buffer has four bytes, mapped and coherent, and nothing else uses them yet.
                unsafe { staged.base.as_ptr().cast::<u8>().write_bytes(byte, 4) };
                this.copy((staged.raw, 0), (buffer, start), (end - start) as usize);
                this.staging.push(Arc::new(staged));
            }
        }
        let words = (buffer, first, last - first, u32::from_ne_bytes([byte; 4]));
        this.fill = (first < last).then_some(words);
        Ok(this)
    }

    /// Records them between barriers: after all earlier commands of the VkQueue, and before all later ones and the host.
    ///
    /// # Safety
    /// The command buffer is in the recording state, outside a render pass, and its pool's family runs compute or graphics commands.
    /// No destination overlaps another range.
    pub(crate) unsafe fn record(&self, device: &ash::Device, commands: vk::CommandBuffer) {
        use vk::{AccessFlags as Access, PipelineStageFlags as Stage};
        let all = Access::MEMORY_READ | Access::MEMORY_WRITE;
        let before = vk::MemoryBarrier::default()
            .src_access_mask(all)
            .dst_access_mask(Access::TRANSFER_READ | Access::TRANSFER_WRITE);
        let after = vk::MemoryBarrier::default()
            .src_access_mask(Access::TRANSFER_WRITE)
            .dst_access_mask(all | Access::HOST_READ | Access::HOST_WRITE);
        let barrier = |from, to, barrier| {
            let (none, barriers) = (vk::DependencyFlags::empty(), [barrier]);
            // SAFETY: the caller guarantees the command buffer; each access is one of a stage of its side
            // (VUID-vkCmdPipelineBarrier-srcAccessMask-02815, -dstAccessMask-02816).
            unsafe { device.cmd_pipeline_barrier(commands, from, to, none, &barriers, &[], &[]) };
        };
        barrier(Stage::ALL_COMMANDS, Stage::TRANSFER, before);
        // SAFETY: the caller guarantees the command buffer, and ranges that do not overlap (VUID-vkCmdCopyBuffer-pRegions-00117). Each
        // lies within its buffer (`VulkanDevice::at`), whose usage allows to copy from and to (-srcBuffer-00118, -dstBuffer-00120), and a fill
        // consists of whole words (VUID-vkCmdFillBuffer-dstOffset-00025, -size-00028).
        unsafe {
            if let Some((buffer, at, size, word)) = self.fill {
                device.cmd_fill_buffer(commands, buffer, at, size, word);
            }
            for (src, dst, region) in &self.copies {
                device.cmd_copy_buffer(commands, *src, *dst, &[*region]);
            }
        }
        barrier(Stage::TRANSFER, Stage::ALL_COMMANDS | Stage::HOST, after);
    }
}
