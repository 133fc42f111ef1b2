//! A compute pipeline, as any program that uses Vulkan has them.

use std::io::Cursor;

use arrow_device::Queue;
use arrow_device::device::DevicePtr;
use arrow_device_vulkan::ash::util::read_spv;
use arrow_device_vulkan::ash::vk;
use arrow_device_vulkan::{VulkanDevice, VulkanQueue};

use crate::Result;

/// How the kernel finds its memory.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Arguments {
    /// By addresses in push constants, with buffer references in the shader.
    Addresses,
    /// By descriptors of `VkBuffer`s.
    Handles,
}

/// The kernel of `kernel.comp`, for one launch.
pub(crate) struct Kernel<'a> {
    queue: &'a Queue,
    vulkan: &'a VulkanDevice,
    arguments: Arguments,
    sets: vk::DescriptorSetLayout,
    layout: vk::PipelineLayout,
    pipeline: vk::Pipeline,
    descriptors: vk::DescriptorPool,
    commands: vk::CommandPool,
}

impl<'a> Kernel<'a> {
    pub(crate) fn new(queue: &'a Queue, arguments: Arguments) -> Result<Self> {
        let vulkan = VulkanDevice::of(queue.device())?;
        let vk = vulkan.device();
        let code = match arguments {
            Arguments::Addresses => &include_bytes!("kernel.spv")[..],
            Arguments::Handles => include_bytes!("handles.spv"),
        };
        let code = read_spv(&mut Cursor::new(code))?;
        let bindings = [0, 1].map(|binding| {
            vk::DescriptorSetLayoutBinding::default()
                .binding(binding)
                .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                .descriptor_count(1)
                .stage_flags(vk::ShaderStageFlags::COMPUTE)
        });
        // SAFETY: the device is live, and each structure and what it refers to live until its call has returned.
        unsafe {
            let info = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
            let sets = vk.create_descriptor_set_layout(&info, None)?;
            let ranges = [vk::PushConstantRange::default()
                .stage_flags(vk::ShaderStageFlags::COMPUTE)
                .size(24)];
            let layouts = [sets];
            let info = vk::PipelineLayoutCreateInfo::default()
                .set_layouts(&layouts)
                .push_constant_ranges(&ranges);
            let layout = vk.create_pipeline_layout(&info, None)?;
            let info = vk::ShaderModuleCreateInfo::default().code(&code);
            let module = vk.create_shader_module(&info, None)?;
            let stage = vk::PipelineShaderStageCreateInfo::default()
                .stage(vk::ShaderStageFlags::COMPUTE)
                .module(module)
                .name(c"main");
            let info = vk::ComputePipelineCreateInfo::default()
                .stage(stage)
                .layout(layout);
            let pipelines = vk.create_compute_pipelines(vk::PipelineCache::null(), &[info], None);
            vk.destroy_shader_module(module, None);
            let sizes = [vk::DescriptorPoolSize::default()
                .ty(vk::DescriptorType::STORAGE_BUFFER)
                .descriptor_count(2)];
            let info = vk::DescriptorPoolCreateInfo::default()
                .max_sets(1)
                .pool_sizes(&sizes);
            let descriptors = vk.create_descriptor_pool(&info, None)?;
            let info =
                vk::CommandPoolCreateInfo::default().queue_family_index(vulkan.queue_family());
            Ok(Self {
                queue,
                vulkan,
                arguments,
                sets,
                layout,
                pipeline: pipelines.map_err(|(_, code)| code)?[0],
                descriptors,
                commands: vk.create_command_pool(&info, None)?,
            })
        }
    }

    /// Submits the kernel, which stores twice the `rows` floats at `from` to `to`, in the order of the queue. Does not wait for it.
    ///
    /// # Safety
    /// Both are addresses of this many floats in memory of the device, which is freed in the order of the queue, if at all. What is
    /// at `from` is ready in the order of the queue. The kernel is launched once.
    pub(crate) unsafe fn launch(&self, from: DevicePtr, to: DevicePtr, rows: u32) -> Result<()> {
        if rows == 0 {
            return Ok(()); // a descriptor cannot be empty
        }
        let vk = self.vulkan.device();
        let mut push = Vec::new();
        let mut set = None;
        match self.arguments {
            Arguments::Addresses => {
                for memory in [from, to] {
                    push.extend((memory.address() as u64).to_ne_bytes());
                }
            }
            Arguments::Handles => {
                let layouts = [self.sets];
                let info = vk::DescriptorSetAllocateInfo::default()
                    .descriptor_pool(self.descriptors)
                    .set_layouts(&layouts);
                // SAFETY: the pool has room for one set of this layout.
                let bound = unsafe { vk.allocate_descriptor_sets(&info) }?[0];
                for (binding, memory) in [(0, from), (1, to)] {
                    push.extend(self.bind(bound, binding, memory, rows)?.to_ne_bytes());
                }
                set = Some(bound);
            }
        }
        push.extend(rows.to_ne_bytes());

        let info = vk::CommandBufferAllocateInfo::default()
            .command_pool(self.commands)
            .command_buffer_count(1);
        // SAFETY: the objects are live, until the queue has run the commands (`drop`). The kernel stays within `rows`.
        unsafe {
            let commands = vk.allocate_command_buffers(&info)?[0];
            let info = vk::CommandBufferBeginInfo::default()
                .flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
            vk.begin_command_buffer(commands, &info)?;
            vk.cmd_bind_pipeline(commands, vk::PipelineBindPoint::COMPUTE, self.pipeline);
            if let Some(set) = set {
                let compute = vk::PipelineBindPoint::COMPUTE;
                vk.cmd_bind_descriptor_sets(commands, compute, self.layout, 0, &[set], &[]);
            }
            let stages = vk::ShaderStageFlags::COMPUTE;
            vk.cmd_push_constants(commands, self.layout, stages, 0, &push);
            // Every device has room for so many groups; with more rows, each invocation has several.
            vk.cmd_dispatch(commands, rows.div_ceil(64).min(65_535), 1, 1);
            vk.end_command_buffer(commands)?;

            // What the queue has written before is visible to the kernel, and what the kernel writes to what comes after it.
            VulkanQueue::of(self.queue)?.submit(&[commands])?;
        }
        Ok(())
    }

    /// Binds a buffer. A descriptor starts at a multiple of the device's alignment: the result is where the floats start after that.
    fn bind(
        &self,
        set: vk::DescriptorSet,
        binding: u32,
        memory: DevicePtr,
        rows: u32,
    ) -> Result<u32> {
        let vulkan = self.vulkan;
        let bytes = rows as usize * size_of::<f32>();
        let (buffer, offset) = vulkan.resolve(memory, bytes)?;
        let device = vulkan.physical_device();
        // SAFETY: the physical device is that of the instance.
        let properties = unsafe { vulkan.instance().get_physical_device_properties(device) };
        let skip = offset % properties.limits.min_storage_buffer_offset_alignment;
        let places = [vk::DescriptorBufferInfo::default()
            .buffer(buffer)
            .offset(offset - skip)
            .range(skip + bytes as u64)];
        let write = vk::WriteDescriptorSet::default()
            .dst_set(set)
            .dst_binding(binding)
            .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
            .buffer_info(&places);
        // SAFETY: set and buffer are live, and no work uses the set yet.
        unsafe { vulkan.device().update_descriptor_sets(&[write], &[]) };
        Ok(u32::try_from(skip)? / size_of::<f32>() as u32)
    }
}

impl Drop for Kernel<'_> {
    fn drop(&mut self) {
        let vk = self.vulkan.device();
        // After an error nothing runs any more, either.
        let _ = self.queue.synchronize();
        // SAFETY: the objects were made here, and the queue has run the commands that use them.
        unsafe {
            vk.destroy_command_pool(self.commands, None);
            vk.destroy_descriptor_pool(self.descriptors, None);
            vk.destroy_pipeline(self.pipeline, None);
            vk.destroy_pipeline_layout(self.layout, None);
            vk.destroy_descriptor_set_layout(self.sets, None);
        }
    }
}
