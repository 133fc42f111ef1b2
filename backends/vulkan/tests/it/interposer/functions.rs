//! The Vulkan functions that the crate and its allocator call and that can fail or make objects, each with what is done when it is
//! called. All others are passed on as they are.

use std::ffi::{CStr, c_char, c_void};
use std::mem::transmute;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ash::vk::*;

use super::account::{before, count, gone, made, submitted, unmapped, used};

/// Functions that return a `VkResult`. What follows in braces is done after success.
macro_rules! fallible {
    ($($name:ident($($arg:ident: $type:ty),*) $after:block)*) => {
        $(#[allow(non_snake_case)]
        mod $name {
            use super::*;
            pub(super) static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
            pub(super) unsafe extern "system" fn call($($arg: $type),*) -> Result {
                let instead = before(stringify!($name));
                // Even if it fails, the command buffer does not record any more.
                if let Some(code) = instead && stringify!($name) != "vkEndCommandBuffer" {
                    return code;
                }
                // SAFETY: `replace` hands this function out only after it has stored the loader's function of this name.
                let real = unsafe {
                    transmute::<*mut c_void, unsafe extern "system" fn($($type),*) -> Result>(REAL.load(Ordering::Acquire))
                };
                let _using = stringify!($name).starts_with("vkQueue").then(using_queues);
                // SAFETY: these are the caller's arguments.
                let code = unsafe { real($($arg),*) };
                if code.as_raw() >= 0 {
                    $after
                }
                instead.unwrap_or(code)
            }
        })*

        fn find_fallible(name: &[u8]) -> Option<(*mut c_void, &'static AtomicPtr<c_void>)> {
            $(if name == stringify!($name).as_bytes() {
                return Some(($name::call as *mut c_void, &$name::REAL));
            })*
            None
        }
    };
}

/// Functions that return nothing. What follows in braces is done before.
macro_rules! infallible {
    ($($name:ident($($arg:ident: $type:ty),*) $first:block)*) => {
        $(#[allow(non_snake_case)]
        mod $name {
            use super::*;
            pub(super) static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
            pub(super) unsafe extern "system" fn call($($arg: $type),*) {
                $first
                // SAFETY: the loader returned this address for the function of this name and signature.
                let real = unsafe {
                    transmute::<*mut c_void, unsafe extern "system" fn($($type),*)>(REAL.load(Ordering::Acquire))
                };
                // SAFETY: these are the caller's arguments.
                unsafe { real($($arg),*) }
            }
        })*

        fn find_infallible(name: &[u8]) -> Option<(*mut c_void, &'static AtomicPtr<c_void>)> {
            $(if name == stringify!($name).as_bytes() {
                return Some(($name::call as *mut c_void, &$name::REAL));
            })*
            None
        }
    };
}

/// Nobody submits meanwhile.
fn using_queues() -> MutexGuard<'static, ()> {
    static QUEUES: Mutex<()> = Mutex::new(());
    QUEUES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for all work of these devices.
pub(super) fn settle(devices: Vec<Device>) {
    let real = vkDeviceWaitIdle::REAL.load(Ordering::Acquire);
    let _using = using_queues();
    for device in devices {
        // SAFETY: a program that has a device has asked for its functions, so that this one is stored.
        let wait = unsafe { transmute::<*mut c_void, PFN_vkDeviceWaitIdle>(real) };
        // SAFETY: the device is live: one thread at a time makes and destroys devices in the tests that let calls fail. No queue is
        // used meanwhile.
        let _ = unsafe { wait(device) };
    }
}

type Callbacks = *const AllocationCallbacks<'static>;

/// What a successful call has stored there.
fn stored<T: Copy>(out: *mut T) -> T {
    // SAFETY: the function has succeeded, which is to have written its result.
    unsafe { *out }
}

/// The version that the loader pretends to have; 0: its own.
pub(crate) static VERSION: AtomicU32 = AtomicU32::new(0);

fn pretend(version: *mut u32) {
    let instead = VERSION.load(Ordering::SeqCst);
    if instead > 0 {
        // SAFETY: the function has succeeded, which is to have written its result there.
        unsafe { version.write(instead) };
    }
}

/// Keeps account of submissions.
fn look_at(count: u32, submits: *const SubmitInfo<'_>) {
    for at in 0..count as usize {
        // SAFETY: the function has succeeded with as many structures, whose arrays have the lengths that they say. The crate and its
        // tests chain nothing but values of timelines, to all semaphores.
        unsafe {
            let submit = &*submits.add(at);
            let values = submit
                .p_next
                .cast::<TimelineSemaphoreSubmitInfo<'_>>()
                .as_ref();
            let pairs = |semaphores: *const Semaphore, values: *const u64, count: u32| {
                let pair = |i: usize| ((*semaphores.add(i)).as_raw(), *values.add(i));
                (0..count as usize).map(pair).collect::<Vec<_>>()
            };
            let of = |values: &TimelineSemaphoreSubmitInfo<'_>| {
                let waited = (submit.p_wait_semaphores, values.p_wait_semaphore_values);
                let signalled = (submit.p_signal_semaphores, values.p_signal_semaphore_values);
                (
                    pairs(waited.0, waited.1, submit.wait_semaphore_count),
                    pairs(signalled.0, signalled.1, submit.signal_semaphore_count),
                )
            };
            let (waits, signals) = values.map(of).unwrap_or_default();
            submitted(submit.command_buffer_count, &waits, &signals);
        }
    }
}

fallible! {
    vkCreateInstance(info: *const InstanceCreateInfo<'_>, callbacks: Callbacks, out: *mut Instance) { made("instance", stored(out)) }
    vkEnumerateInstanceVersion(version: *mut u32) { pretend(version) }
    vkEnumeratePhysicalDevices(instance: Instance, count: *mut u32, out: *mut PhysicalDevice) {}
    vkCreateDevice(physical: PhysicalDevice, info: *const DeviceCreateInfo<'_>, callbacks: Callbacks, out: *mut Device) { made("device", stored(out)) }
    vkDeviceWaitIdle(device: Device) {}
    vkQueueWaitIdle(queue: Queue) {}
    vkQueueSubmit(queue: Queue, count: u32, submits: *const SubmitInfo<'_>, fence: Fence) { look_at(count, submits) }
    vkAllocateMemory(device: Device, info: *const MemoryAllocateInfo<'_>, callbacks: Callbacks, out: *mut DeviceMemory) { made("memory", stored(out)) }
    vkMapMemory(device: Device, memory: DeviceMemory, from: DeviceSize, bytes: DeviceSize, flags: MemoryMapFlags, out: *mut *mut c_void) { made("mapped memory", memory) }
    vkCreateBuffer(device: Device, info: *const BufferCreateInfo<'_>, callbacks: Callbacks, out: *mut Buffer) { made("buffer", stored(out)) }
    vkBindBufferMemory(device: Device, buffer: Buffer, memory: DeviceMemory, at: DeviceSize) {}
    vkCreateEvent(device: Device, info: *const EventCreateInfo<'_>, callbacks: Callbacks, out: *mut Event) { made("event", stored(out)) }
    vkGetEventStatus(device: Device, event: Event) { used("event", event) }
    vkSetEvent(device: Device, event: Event) { used("event", event) }
    vkResetEvent(device: Device, event: Event) { used("event", event) }
    vkCreateSemaphore(device: Device, info: *const SemaphoreCreateInfo<'_>, callbacks: Callbacks, out: *mut Semaphore) { made("semaphore", stored(out)) }
    vkGetSemaphoreCounterValue(device: Device, semaphore: Semaphore, out: *mut u64) {}
    vkWaitSemaphores(device: Device, info: *const SemaphoreWaitInfo<'_>, timeout: u64) {}
    vkCreateCommandPool(device: Device, info: *const CommandPoolCreateInfo<'_>, callbacks: Callbacks, out: *mut CommandPool) { made("command pool", stored(out)) }
    vkAllocateCommandBuffers(device: Device, info: *const CommandBufferAllocateInfo<'_>, out: *mut CommandBuffer) {}
    vkBeginCommandBuffer(commands: CommandBuffer, info: *const CommandBufferBeginInfo<'_>) {}
    vkEndCommandBuffer(commands: CommandBuffer) {}
}

infallible! {
    vkDestroyInstance(instance: Instance, callbacks: Callbacks) { gone("instance", instance) }
    vkDestroyDevice(device: Device, callbacks: Callbacks) { gone("device", device) }
    vkFreeMemory(device: Device, memory: DeviceMemory, callbacks: Callbacks) {
        unmapped(memory);
        gone("memory", memory)
    }
    vkUnmapMemory(device: Device, memory: DeviceMemory) { gone("mapped memory", memory) }
    vkDestroyBuffer(device: Device, buffer: Buffer, callbacks: Callbacks) { gone("buffer", buffer) }
    vkDestroyEvent(device: Device, event: Event, callbacks: Callbacks) { gone("event", event) }
    vkDestroySemaphore(device: Device, semaphore: Semaphore, callbacks: Callbacks) { gone("semaphore", semaphore) }
    vkCmdPipelineBarrier(commands: CommandBuffer, from: PipelineStageFlags, to: PipelineStageFlags, flags: DependencyFlags, count_1: u32, memory: *const MemoryBarrier<'_>, count_2: u32, buffers: *const BufferMemoryBarrier<'_>, count_3: u32, images: *const ImageMemoryBarrier<'_>) { count("vkCmdPipelineBarrier") }
    vkDestroyCommandPool(device: Device, pool: CommandPool, callbacks: Callbacks) { gone("command pool", pool) }
}

/// The real loader's `vkGetDeviceProcAddr`, stored when it is asked for.
static DEVICE_FUNCTION: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// The function to call instead of the loader's `real`, if there is one.
fn replace(name: *const c_char, real: PFN_vkVoidFunction) -> PFN_vkVoidFunction {
    let real = real?;
    // SAFETY: the caller of both functions below passes a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    let call = match name {
        b"vkGetInstanceProcAddr" => get_instance_proc_addr as *mut c_void,
        b"vkGetDeviceProcAddr" => {
            DEVICE_FUNCTION.store(real as *mut c_void, Ordering::Release);
            get_device_proc_addr as *mut c_void
        }
        _ => {
            let Some((call, keep)) = find_fallible(name).or_else(|| find_infallible(name)) else {
                return Some(real);
            };
            keep.store(real as *mut c_void, Ordering::Release);
            call
        }
    };
    // SAFETY: `call` is a function, of the type that the function of this name has.
    Some(unsafe { transmute::<*mut c_void, unsafe extern "system" fn()>(call) })
}

pub(crate) unsafe extern "system" fn get_instance_proc_addr(
    instance: Instance,
    name: *const c_char,
) -> PFN_vkVoidFunction {
    // SAFETY: these are the caller's arguments.
    let real = unsafe { super::loader::real()(instance, name) };
    replace(name, real)
}

unsafe extern "system" fn get_device_proc_addr(
    device: Device,
    name: *const c_char,
) -> PFN_vkVoidFunction {
    // SAFETY: `replace` has stored the loader's function before it handed this one out.
    let real = unsafe {
        transmute::<*mut c_void, PFN_vkGetDeviceProcAddr>(DEVICE_FUNCTION.load(Ordering::Acquire))
    };
    // SAFETY: these are the caller's arguments.
    replace(name, unsafe { real(device, name) })
}
