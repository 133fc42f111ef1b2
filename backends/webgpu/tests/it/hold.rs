//! Work that ends when a test says so. No shader can wait for the host, but on Vulkan's devices the queue below wgpu can.
//!
//! wgpu chains its submissions by binary semaphores, beside the order of the queue. For those Mesa's driver for CPUs waits within the call
//! that submits, until the work before has run: held work would hold up the test. So the devices of these tests submit without them.

use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use arrow_device::Queue;
use arrow_device_conformance::Hold;
use arrow_device_wgpu::wgpu::hal::{Adapter, api::Vulkan};
use arrow_device_wgpu::{WgpuDevice, wgpu};
use ash::vk;

use crate::rigs::now;
use crate::timeline::Timeline;

/// The devices of [`open_below`].
static BELOW: Mutex<Vec<vk::Device>> = Mutex::new(Vec::new());
/// The driver's function. The driver is loaded anew after its last instance.
static SUBMIT: Mutex<Option<vk::PFN_vkQueueSubmit>> = Mutex::new(None);

fn lock<T>(mutex: &'static Mutex<T>) -> MutexGuard<'static, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Requests a device, whose queue [`hold`] can hold up if it is one of Vulkan's.
pub(crate) fn open_below(
    adapter: &wgpu::Adapter,
    descriptor: &wgpu::DeviceDescriptor<'_>,
) -> (wgpu::Device, wgpu::Queue) {
    // SAFETY: the adapter is used below wgpu, and not destroyed.
    let Some(raw) = (unsafe { adapter.as_hal::<Vulkan>() }) else {
        return now(adapter.request_device(descriptor)).unwrap();
    };
    let (features, limits) = (descriptor.required_features, &descriptor.required_limits);
    let hints = &descriptor.memory_hints;
    // SAFETY: the second device has the first one's handle and functions, of which one has another with its type, and keeps it.
    unsafe {
        let first = raw.open(features, limits, hints).unwrap();
        let functions = first.device.raw_device().clone();
        let (handle, family) = (functions.handle(), first.device.queue_family_index());
        let instance = raw.shared_instance().raw_instance().clone();
        *lock(&SUBMIT) = Some(functions.fp_v1_0().queue_submit);
        let replaced = |name: &CStr| match name.to_bytes() {
            b"vkQueueSubmit" => submit as *const c_void,
            _ => {
                let found = instance.get_device_proc_addr(handle, name.as_ptr());
                found.map_or(null(), |found| found as *const c_void)
            }
        };
        let device = ash::Device::load_with(replaced, handle);
        lock(&BELOW).push(handle);
        let extensions = raw.required_device_extensions(features);
        let keep = Box::new(move || {
            lock(&BELOW).retain(|other| *other != handle);
            drop(first);
        });
        let second = raw.device_from_raw(
            device,
            Some(keep),
            &extensions,
            features,
            limits,
            hints,
            family,
            0,
        );
        adapter
            .create_device_from_hal(second.unwrap(), descriptor)
            .unwrap()
    }
}

/// Submits without binary semaphores.
unsafe extern "system" fn submit(
    queue: vk::Queue,
    count: u32,
    submits: *const vk::SubmitInfo<'_>,
    fence: vk::Fence,
) -> vk::Result {
    /// What wgpu says is the value of a binary semaphore beside timelines.
    const BINARY: u64 = !0;
    assert!(count <= 1, "wgpu submits one by one");
    // SAFETY: the structures are those of a call of `vkQueueSubmit`; wgpu and these tests chain nothing but values of timelines.
    unsafe {
        let real = lock(&SUBMIT).unwrap();
        let Some(asked) = submits.as_ref() else {
            return real(queue, count, submits, fence);
        };
        let values = asked.p_next.cast::<vk::TimelineSemaphoreSubmitInfo<'_>>();
        let values = values.as_ref().copied().unwrap_or_default();
        let timelines = |count: u32, semaphores: *const vk::Semaphore, values: *const u64| {
            let count = if values.is_null() { 0 } else { count as usize };
            let all = (0..count).map(|i| (*semaphores.add(i), *values.add(i)));
            all.filter(|(_, value)| *value != BINARY)
                .unzip::<_, _, Vec<_>, Vec<_>>()
        };
        let waits = timelines(
            asked.wait_semaphore_count,
            asked.p_wait_semaphores,
            values.p_wait_semaphore_values,
        );
        let signals = timelines(
            asked.signal_semaphore_count,
            asked.p_signal_semaphores,
            values.p_signal_semaphore_values,
        );
        let stages = vec![vk::PipelineStageFlags::ALL_COMMANDS; waits.0.len()];
        let mut values = vk::TimelineSemaphoreSubmitInfo::default()
            .wait_semaphore_values(&waits.1)
            .signal_semaphore_values(&signals.1);
        let mut submit = *asked;
        submit.p_next = null_mut::<c_void>();
        let submit = submit
            .wait_semaphores(&waits.0)
            .wait_dst_stage_mask(&stages)
            .signal_semaphores(&signals.0)
            .push_next(&mut values);
        real(queue, 1, &raw const submit, fence)
    }
}

/// Keeps a device of [`open_below`] busy, and others not.
pub(crate) fn hold(queue: &Queue) -> Hold {
    let gpu = WgpuDevice::of(queue.device()).unwrap();
    let (device, kept) = (gpu.device().clone(), gpu.queue().clone());
    // SAFETY: the device is used below wgpu, and not destroyed.
    let Some(raw) = (unsafe { device.as_hal::<Vulkan>() }) else {
        return Hold::default();
    };
    let (functions, held) = (raw.raw_device().clone(), raw.raw_queue());
    if !lock(&BELOW).contains(&functions.handle()) {
        return Hold::default();
    }
    let family = raw.queue_family_index();
    drop(raw);
    // SAFETY: the device lives until the hold is opened, and has the family. No other thread uses the queue meanwhile: the tests that hold
    // a device give it no work on others.
    let timeline = unsafe {
        let timeline = Timeline::new(&functions, family);
        timeline.block(held);
        timeline
    };
    // wgpu then waits for it too.
    gpu.queue().submit([]);
    Hold::new(move || {
        timeline.signal(1);
        // It may be in use still.
        std::mem::forget(timeline);
        drop((device, kept));
    })
}
