//! Memory: buffers with addresses, from the sub-allocator.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex};

use arrow_device::Result;
use arrow_device::device::DevicePtr;
use arrow_device::device::parts::Ranges;
use ash::vk;
use gpu_allocator::vulkan::{
    Allocation, AllocationCreateDesc, AllocationScheme, Allocator, AllocatorCreateDesc,
};
use gpu_allocator::{AllocationError, AllocationSizes, MemoryLocation};

use crate::codes::Of;
use crate::context::{Context, lock};

/// The alignment in bytes that arrow-device asks for.
const ALIGNMENT: u64 = 64;

/// The sizes in bytes of the memory that the sub-allocator takes from the driver: each is twice the one before.
const BLOCKS: (u64, u64) = (16 << 20, 256 << 20);

/// What every buffer can be used for.
const USAGE: vk::BufferUsageFlags = vk::BufferUsageFlags::from_raw(
    vk::BufferUsageFlags::TRANSFER_SRC.as_raw()
        | vk::BufferUsageFlags::TRANSFER_DST.as_raw()
        | vk::BufferUsageFlags::STORAGE_BUFFER.as_raw()
        | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS.as_raw(),
);

/// Where memory is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Memory of the device, which counts as not readable by the host.
    Device,
    /// Host memory that the device copies from and to: mapped and coherent, and cached where there is any.
    Host,
}

/// The memory of a device.
pub(crate) struct Memory {
    context: Arc<Context>,
    allocator: ManuallyDrop<Mutex<Allocator>>,
    /// The size in bytes of the largest allocation.
    pub(crate) most: usize,
}

impl Memory {
    pub(crate) fn new(context: &Arc<Context>, most: usize) -> Result<Self> {
        let sizes = AllocationSizes::new(BLOCKS.0, BLOCKS.0)
            .with_max_device_memblock_size(BLOCKS.1)
            .with_max_host_memblock_size(BLOCKS.1);
        // Whoever has dropped its buffers has none that leak.
        let mut debug = gpu_allocator::AllocatorDebugSettings::default();
        debug.log_leaks_on_shutdown = false;
        let allocator = Allocator::new(&AllocatorCreateDesc {
            instance: context.instance.clone(),
            device: context.device.clone(),
            physical_device: context.physical,
            debug_settings: debug,
            buffer_device_address: true,
            allocation_sizes: sizes,
        });
        let allocator =
            allocator.map_err(|e| context.not_supported("open", format!("gpu-allocator: {e}")))?;
        Ok(Self {
            context: context.clone(),
            allocator: ManuallyDrop::new(Mutex::new(allocator)),
            most,
        })
    }

    /// Allocates memory.
    pub(crate) fn allocate(self: &Arc<Self>, bytes: usize, place: Place) -> Result<Buffer> {
        let context = &self.context;
        if bytes > self.most {
            let what = "a single allocation (the most is maxMemoryAllocationSize or maxBufferSize; use smaller batches)";
            return Err(context.out_of_memory(what, bytes));
        }
        let device = &context.device;
        let create = vk::BufferCreateInfo::default()
            .size(bytes as u64)
            .usage(USAGE)
            .sharing_mode(vk::SharingMode::EXCLUSIVE);
        // SAFETY: the device is live, with bufferDeviceAddress enabled; the size is more than 0, since callers refuse 0, and within
        // maxBufferSize (VUID-VkBufferCreateInfo-size-00912, VUID-VkBufferCreateInfo-size-06409).
        let raw = unsafe { device.create_buffer(&create, None) };
        let raw = context.check_allocation(raw.of("vkCreateBuffer"), bytes)?;
        // Destroyed with the buffer's value from now on.
        let mut buffer = Buffer {
            raw,
            base: DevicePtr::NULL,
            bytes,
            own: Some(Own {
                memory: self.clone(),
                allocation: None,
            }),
        };
        // SAFETY: the buffer was just made.
        let mut requirements = unsafe { device.get_buffer_memory_requirements(raw) };
        requirements.alignment = requirements.alignment.max(ALIGNMENT);
        let allocation = self.reserve(raw, requirements, place, bytes)?;
        // SAFETY: neither buffer nor memory are in use; the memory is of a type that the buffer's requirements name, and offset and
        // size are as these ask (VUID-vkBindBufferMemory-memory-01035, -memoryOffset-01036, -size-01037). Its memory was allocated
        // with VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT (-bufferDeviceAddress-03339). Binding memory needs no other synchronisation.
        let bound =
            unsafe { device.bind_buffer_memory(raw, allocation.memory(), allocation.offset()) };
        let mapped = allocation.mapped_ptr();
        if let Some(own) = &mut buffer.own {
            own.allocation = Some(allocation);
        }
        context.check_allocation(bound.of("vkBindBufferMemory"), bytes)?;
        buffer.base = match (place, mapped) {
            // SAFETY: the buffer is bound, and has the usage for addresses.
            (Place::Device, _) => unsafe { address(context, raw) }?,
            (Place::Host, Some(mapped)) => DevicePtr::new(mapped.as_ptr()),
            (Place::Host, None) => DevicePtr::NULL,
        };
        if buffer.base.is_null() || !buffer.base.address().is_multiple_of(ALIGNMENT as usize) {
            let reason = format!(
                "the driver returned the address {:?}, which is not aligned to {ALIGNMENT} bytes",
                buffer.base
            );
            return Err(context.not_supported("allocate", reason));
        }
        Ok(buffer)
    }

    /// Takes memory from the sub-allocator: a part of a larger piece, or if there is no memory for one, a piece of its own.
    fn reserve(
        &self,
        raw: vk::Buffer,
        requirements: vk::MemoryRequirements,
        place: Place,
        bytes: usize,
    ) -> Result<Allocation> {
        let context = &self.context;
        let mut desc = AllocationCreateDesc {
            name: "",
            requirements,
            location: match place {
                Place::Device => MemoryLocation::GpuOnly,
                Place::Host => MemoryLocation::GpuToCpu,
            },
            linear: true,
            allocation_scheme: AllocationScheme::GpuAllocatorManaged,
        };
        if usize::try_from(requirements.size).is_ok_and(|size| size > self.most) {
            return Err(context.out_of_memory("vkAllocateMemory", bytes));
        }
        let mut allocator = lock(&self.allocator);
        let mut made = allocator.allocate(&desc);
        if made.is_err() {
            desc.allocation_scheme = AllocationScheme::DedicatedBuffer(raw);
            made = allocator.allocate(&desc);
        }
        made.map_err(|e| match e {
            // vkAllocateMemory fails for lack of memory, or because there are too many allocations.
            AllocationError::OutOfMemory | AllocationError::Internal(_) => {
                context.out_of_memory("vkAllocateMemory", bytes)
            }
            AllocationError::FailedToMap(_) => context.out_of_memory("vkMapMemory", bytes),
            e => context.not_supported("allocate", e.to_string()),
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Some(_inside) = self.context.enter_to_drop() else {
            return;
        };
        // Frees what the sub-allocator keeps.
        // SAFETY: the value is not used again. No buffer is left, since each holds this.
        unsafe { ManuallyDrop::drop(&mut self.allocator) };
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

/// A buffer.
pub(crate) struct Buffer {
    pub(crate) raw: vk::Buffer,
    /// Its address: the device's, or for host memory, the host's.
    pub(crate) base: DevicePtr,
    pub(crate) bytes: usize,
    /// `None` for a program's buffer.
    own: Option<Own>,
}

struct Own {
    memory: Arc<Memory>,
    allocation: Option<Allocation>,
}

impl Buffer {
    /// Describes a program's buffer, which its drop leaves alone.
    pub(crate) fn of_program(raw: vk::Buffer, base: DevicePtr, bytes: usize) -> Self {
        Self {
            raw,
            base,
            bytes,
            own: None,
        }
    }
}

impl Drop for Buffer {
    /// Frees the memory at once: nothing may use it any more.
    fn drop(&mut self) {
        let Some(own) = &mut self.own else { return };
        let context = &own.memory.context;
        let allocation = own.allocation.take();
        let Some(_inside) = context.enter_to_drop() else {
            std::mem::forget(allocation);
            return;
        };
        // SAFETY: this value made the buffer and destroys it once. All submitted commands that refer to it have completed
        // (VUID-vkDestroyBuffer-buffer-00922): whoever drops it has seen that, see `Shared::free`, `free_host` and `Flying`.
        unsafe { context.device.destroy_buffer(self.raw, None) };
        if let Some(allocation) = allocation {
            // Fails only if the sub-allocator's own books are wrong; the memory is then freed with it.
            let _ = lock(&own.memory.allocator).free(allocation);
        }
    }
}

/// The live buffers of a device.
pub(crate) type Buffers = Ranges<Arc<Buffer>>;
