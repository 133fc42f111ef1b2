//! A program's device, of which a few functions are counted, or fail: what no result of a driver for processors shows. A
//! submission without a command buffer, and one that waits for a value whose signal has not been submitted, ends the process.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::mem::{transmute, transmute_copy};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow_device::Device;
use arrow_device_conformance::{next_id, soon};
use arrow_device_vulkan::VulkanConfig;
use arrow_device_vulkan::ash::{self, vk};

use crate::program::Program;
use crate::rigs::is_there;

#[derive(Default)]
struct Seen {
    calls: BTreeMap<&'static str, u64>,
    /// Which call fails, with what; and whether all later ones do.
    fault: Option<(&'static str, vk::Result, bool)>,
    /// Of each semaphore, the last value to which a submission sets it.
    signalled: BTreeMap<vk::Semaphore, u64>,
    device: vk::Device,
}

static SEEN: Mutex<Option<Seen>> = Mutex::new(None);
static QUEUES: Mutex<()> = Mutex::new(());

fn lock<T>(mutex: &'static Mutex<T>) -> MutexGuard<'static, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn seen<T>(look: impl FnOnce(&mut Seen) -> T) -> T {
    look(lock(&SEEN).get_or_insert_default())
}

/// A program, one at a time, of whose devices the calls are looked at.
pub(crate) struct Watched {
    pub(crate) program: Arc<Program>,
    _alone: MutexGuard<'static, ()>,
}

impl Watched {
    /// `None` if there is no device.
    pub(crate) fn new() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = lock(&ALONE);
        let program = is_there().then(Program::new)?;
        let device = program.device.handle();
        seen(|seen| {
            *seen = Seen {
                device,
                ..Seen::default()
            }
        });
        Some(Self { program, _alone })
    }

    pub(crate) fn adopt(&self) -> arrow_device::Result<Device> {
        let mut parts = self.program.parts();
        let device = parts.device.handle();
        let real = |name: &CStr| {
            // SAFETY: instance and device are live; the name ends with a null byte.
            let real = unsafe { parts.instance.get_device_proc_addr(device, name.as_ptr()) };
            real.map_or(null_mut(), |real| real as *mut c_void)
        };
        let replaced = |name: &CStr| match find(name) {
            Some((call, keep)) => {
                keep.store(real(name), Ordering::Release);
                call.cast_const()
            }
            None => real(name).cast_const(),
        };
        // SAFETY: each function is the device's of that name, or has its type and calls it.
        parts.device = unsafe { ash::Device::load_with(replaced, device) };
        let config = VulkanConfig::new(0).with_id(next_id());
        // SAFETY: all parts are live, belong together, and live as long as the program, which they keep.
        unsafe { config.adopt(parts) }
    }

    /// How often a function was called, or a submission waited for a `semaphore`.
    pub(crate) fn calls(&self, name: &str) -> u64 {
        seen(|seen| seen.calls.get(name).copied().unwrap_or(0))
    }

    pub(crate) fn fail(&self, name: &'static str, code: vk::Result, all_later: bool) {
        seen(|seen| seen.fault = Some((name, code, all_later)));
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        seen(|seen| seen.fault = None);
        if !std::thread::panicking() {
            let is_alone = || Arc::strong_count(&self.program) == 1;
            assert!(soon(is_alone), "the program's device is kept");
        }
    }
}

/// Notes a call, and returns with what it fails, if it does.
fn before(name: &'static str) -> Option<vk::Result> {
    let (code, device) = seen(|seen| {
        *seen.calls.entry(name).or_default() += 1;
        let (_, code, all_later) = seen.fault.filter(|(which, ..)| *which == name)?;
        if !all_later {
            seen.fault = None;
        }
        Some((code, seen.device))
    })?;
    if code == vk::Result::ERROR_DEVICE_LOST {
        // Drivers end the work of a device that is lost.
        let _using = lock(&QUEUES);
        let wait = vkDeviceWaitIdle::REAL.load(Ordering::Acquire);
        // SAFETY: the function is the device's, which lives as long as it is watched. No VkQueue is used meanwhile.
        let _ = unsafe { transmute::<*mut c_void, vk::PFN_vkDeviceWaitIdle>(wait)(device) };
    }
    Some(code)
}

/// Looks at submissions.
///
/// # Safety
/// The structures are those of a call of `vkQueueSubmit`.
unsafe fn look_at(count: u32, submits: *const vk::SubmitInfo<'_>) {
    for at in 0..count as usize {
        // SAFETY: the caller guarantees the structures. The crate and its tests chain nothing but values of timelines, to all semaphores.
        let (submit, values) = unsafe {
            let submit = &*submits.add(at);
            let values = submit.p_next.cast::<vk::TimelineSemaphoreSubmitInfo<'_>>();
            (submit, values.as_ref())
        };
        let pairs = |count: u32, semaphores: *const vk::Semaphore, values: *const u64| {
            // SAFETY: both arrays have as many elements.
            let pair = |i| unsafe { (*semaphores.add(i), *values.add(i)) };
            (0..count as usize).map(pair).collect::<Vec<_>>()
        };
        seen(|seen| {
            assert!(submit.command_buffer_count > 0);
            let Some(values) = values else { return };
            let (waits, signals) = (
                (submit.p_wait_semaphores, values.p_wait_semaphore_values),
                (submit.p_signal_semaphores, values.p_signal_semaphore_values),
            );
            for (semaphore, value) in pairs(submit.wait_semaphore_count, waits.0, waits.1) {
                *seen.calls.entry("semaphore").or_default() += 1;
                // The host signals others.
                let signalled = seen.signalled.get(&semaphore);
                assert!(signalled.is_none_or(|signalled| *signalled >= value));
            }
            let signals = pairs(submit.signal_semaphore_count, signals.0, signals.1);
            seen.signalled.extend(signals);
        });
    }
}

/// What functions return: a code, or nothing, and then they do not fail.
trait Answer: Sized {
    fn instead(name: &'static str) -> Option<vk::Result>;
}

impl Answer for vk::Result {
    fn instead(name: &'static str) -> Option<vk::Result> {
        before(name)
    }
}

impl Answer for () {
    fn instead(name: &'static str) -> Option<vk::Result> {
        seen(|seen| *seen.calls.entry(name).or_default() += 1);
        None
    }
}

macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),*) -> $answer:ty $first:block)*) => {
        $(#[allow(non_snake_case)]
        mod $name {
            use super::*;

            pub(super) static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

            pub(super) unsafe extern "system" fn call($($arg: $type),*) -> $answer {
                let instead = <$answer>::instead(stringify!($name));
                if let Some(code) = instead {
                    // SAFETY: what fails returns a code.
                    return unsafe { transmute_copy::<vk::Result, $answer>(&code) };
                }
                let _using = stringify!($name).starts_with("vkQueue").then(|| lock(&QUEUES));
                $first
                // SAFETY: the function of this name and type was stored before this one was handed out; the arguments are the caller's.
                unsafe {
                    let real = REAL.load(Ordering::Acquire);
                    transmute::<*mut c_void, unsafe extern "system" fn($($type),*) -> $answer>(real)($($arg),*)
                }
            }
        })*

        /// The function to call instead, and where the real one is kept.
        fn find(name: &CStr) -> Option<(*mut c_void, &'static AtomicPtr<c_void>)> {
            match name.to_str() {
                $(Ok(stringify!($name)) => Some(($name::call as *mut c_void, &$name::REAL)),)*
                _ => None,
            }
        }
    };
}

type Callbacks = *const vk::AllocationCallbacks<'static>;

functions! {
    vkQueueSubmit(queue: vk::Queue, count: u32, submits: *const vk::SubmitInfo<'_>, fence: vk::Fence) -> vk::Result {
        // SAFETY: these are the caller's structures.
        unsafe { look_at(count, submits) }
    }
    vkQueueWaitIdle(queue: vk::Queue) -> vk::Result {}
    vkDeviceWaitIdle(device: vk::Device) -> vk::Result {}
    vkDestroyBuffer(device: vk::Device, buffer: vk::Buffer, callbacks: Callbacks) -> () {}
    vkWaitSemaphores(device: vk::Device, info: *const vk::SemaphoreWaitInfo<'_>, timeout: u64) -> vk::Result {}
    vkCmdPipelineBarrier(commands: vk::CommandBuffer, from: vk::PipelineStageFlags, to: vk::PipelineStageFlags, flags: vk::DependencyFlags, count_1: u32, memory: *const vk::MemoryBarrier<'_>, count_2: u32, buffers: *const vk::BufferMemoryBarrier<'_>, count_3: u32, images: *const vk::ImageMemoryBarrier<'_>) -> () {}
}
