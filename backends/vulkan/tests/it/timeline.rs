//! Work on a VkQueue that waits for the host. The tests of WebGPU have it too.

use ash::vk;

/// A timeline semaphore of a program's, and commands that wait for it.
pub(crate) struct Timeline {
    functions: ash::Device,
    semaphore: vk::Semaphore,
    pool: vk::CommandPool,
}

impl Timeline {
    /// # Safety
    /// The device lives as long as the result, with timeline semaphores enabled, and has the family.
    pub(crate) unsafe fn new(functions: &ash::Device, family: u32) -> Self {
        let mut kind =
            vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
        let create = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        let pool = vk::CommandPoolCreateInfo::default().queue_family_index(family);
        // SAFETY: the caller guarantees the device (see `# Safety`).
        let made = unsafe {
            let pool = functions.create_command_pool(&pool, None);
            (functions.create_semaphore(&create, None), pool)
        };
        Self {
            functions: functions.clone(),
            semaphore: made.0.unwrap(),
            pool: made.1.unwrap(),
        }
    }

    /// Submits commands to a queue, behind which nothing runs before the semaphore has the value 1.
    ///
    /// # Safety
    /// The queue is one of the device's and of the family, and no other thread uses it now.
    pub(crate) unsafe fn block(&self, queue: vk::Queue) {
        let allocate = vk::CommandBufferAllocateInfo::default()
            .command_pool(self.pool)
            .command_buffer_count(1);
        let all = vk::PipelineStageFlags::ALL_COMMANDS;
        let (none, begin) = (vk::DependencyFlags::empty(), Default::default());
        let (semaphores, values, stages) = ([self.semaphore], [1], [all]);
        let mut wait = vk::TimelineSemaphoreSubmitInfo::default().wait_semaphore_values(&values);
        let functions = &self.functions;
        // SAFETY: the caller guarantees the queue; all is made, recorded and used as its structures say, and lives until it has run.
        unsafe {
            let commands = functions.allocate_command_buffers(&allocate).unwrap();
            functions.begin_command_buffer(commands[0], &begin).unwrap();
            functions.cmd_pipeline_barrier(commands[0], all, all, none, &[], &[], &[]);
            functions.end_command_buffer(commands[0]).unwrap();
            let submit = vk::SubmitInfo::default()
                .wait_semaphores(&semaphores)
                .wait_dst_stage_mask(&stages)
                .command_buffers(&commands)
                .push_next(&mut wait);
            let submitted = functions.queue_submit(queue, &[submit], vk::Fence::null());
            submitted.unwrap();
        }
    }

    pub(crate) fn signal(&self, value: u64) {
        let signal = vk::SemaphoreSignalInfo::default()
            .semaphore(self.semaphore)
            .value(value);
        // SAFETY: the semaphore is live and has a smaller value.
        unsafe { self.functions.signal_semaphore(&signal) }.unwrap();
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        // SAFETY: both are destroyed once, after the work that waits.
        unsafe {
            self.functions.destroy_command_pool(self.pool, None);
            self.functions.destroy_semaphore(self.semaphore, None);
        }
    }
}
