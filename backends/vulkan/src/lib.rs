//! # Vulkan devices for [`arrow_device`]
//!
//! Arrow data in the memory of a Vulkan device, for compute shaders that follow addresses, and exchanged through the Arrow C Device
//! data interface (`ARROW_DEVICE_VULKAN`).
//!
//! ```no_run
//! use arrow_device::{DeviceRecordBatch, Devices, SyncPolicy};
//! use arrow_device_vulkan::{VulkanDevice, register};
//!
//! # fn main() -> arrow_device::Result<()> {
//! # let batch = arrow_array::record_batch!(("id", Int64, [1, 2, 3]))?;
//! register(Devices::global());
//! let device = Devices::open("vulkan:0")?; // or an error that says what is missing
//! println!("{device}: {}", VulkanDevice::of(&device)?.info());
//!
//! let on_device = device.upload(&batch)?; // one allocation; returns before the copy is done
//! let (array, schema) = on_device.export(SyncPolicy::Event)?; // for any consumer in this process
//! // SAFETY: `export` made both structs, and nothing else uses them.
//! let imported = unsafe { DeviceRecordBatch::import(array, &schema, None) }?;
//! assert_eq!(imported.to_host()?, batch);
//! # Ok(())
//! # }
//! ```
//!
//! Building needs nothing of Vulkan. At run time the crate loads Vulkan's loader (`libvulkan.so.1`, `vulkan-1.dll`,
//! `libvulkan.dylib`) and uses the drivers that it finds, from Vulkan 1.2 on, with the features `bufferDeviceAddress` and
//! `timelineSemaphore`, and with a queue family for compute.
//!
//! # Devices
//!
//! `vulkan:N` is number `N` of `vkEnumeratePhysicalDevices`. The order is the same in every process as long as the installed drivers
//! and layers, the hardware and the environment are. [`devices`] lists names, versions, and what each lacks.
//!
//! A program that has an instance, a device and a queue already passes them, with the lock of the queue, to [`VulkanConfig::adopt`].
//! [`SharedQueue`] says what may be done while that lock is held.
//!
//! A process may end while its devices are in use, also by other threads: those then stay where they are, because drivers and layers
//! crash if they are called at that time.
//!
//! # Memory
//!
//! Each allocation is a VkBuffer with an address (`VkDeviceAddress`), in memory that gpu-allocator takes from the driver in large
//! pieces. What is freed is kept for the next allocation ([`VulkanConfig::with_idle_limit`]). Addresses go to shaders as they are, in
//! push constants for example; [`VulkanDevice::resolve`] returns VkBuffer and offset for those that want descriptors, and
//! [`VulkanDevice::wrap`] makes a program's VkBuffer a buffer of the device without a copy.
//!
//! An address does not name its VkBuffer. So arrays of another producer are copied (downloaded, for instance) only if they lie in a
//! VkBuffer that was made known with `wrap`; a shader reads them in any case.
//!
//! Staging memory is mapped and coherent host memory, from and to which the device copies. A copy from other host memory goes through
//! such memory when it is queued, and a copy to other host memory, which only direct callers of a queue make, waits for the device.
//! Copies and fills are exact to the byte, at any alignment.
//!
//! # Queues
//!
//! [`VulkanConfig::open`] takes up to four VkQueues of one family, which the device's queues use in turn; an adopted device has one.
//! Queues of one VkQueue work in one order. A program gives its command buffers to [`VulkanQueue::submit`], which runs them in that
//! order. It may also submit to the VkQueue itself, after [`VulkanQueue::submitted`]: its commands then see what the queue has written so
//! far, and what is queued afterwards comes after them. On another VkQueue, the program waits for the semaphore that `submitted` returns.
//! Memory belongs to the family of the queues.
//!
//! What is queued is submitted at once. Each submission has commands, and waits only for semaphore values whose signal was submitted
//! before, so that neither a driver nor the host holds any work back.
//!
//! # Events
//!
//! `sync_event` points to a `VkEvent`.
//!
//! - **Out:** commands set it, after a barrier behind all that the array consists of. It may be polled with `vkGetEventStatus`. Commands
//!   may wait for it (`vkCmdWaitEvents`) only on the VkQueue of the queue that recorded it ([`VulkanQueue::shared_queue`]): Vulkan allows
//!   no other. It is reset and used again once the array was released, so commands that wait for it must have run by then.
//! - **In:** on the device only commands of the VkQueue that sets an event may wait for it, and Vulkan has no wait of the host for one.
//!   So the thread that makes a queue wait for a pending event of another library, as a kernel's loan of the array or its download does,
//!   waits itself: it polls the event, at intervals of up to a millisecond. An import does not wait. The producer makes its writes
//!   available before it sets the event (`vkCmdPipelineBarrier` before `vkCmdSetEvent`), and sets it by commands, or by the host before
//!   it hands the array over: Vulkan allows no other use of an event while the host sets it, and this crate polls it.
//!
//! An event of another VkDevice is refused if this crate has recorded it. Otherwise Vulkan cannot tell, nor whether an event was made
//! with `VK_EVENT_CREATE_DEVICE_ONLY_BIT`, which cannot be polled: importing either is undefined behaviour, and so excluded by the
//! contract of the unsafe import. A null handle is refused.
//!
//! If the VkDevice is lost, the device has failed: from then on each of its operations returns that error, and no event is reported as
//! complete. Consumers of events that were exported before learn it from Vulkan.
//!
//! # Limits
//!
//! - The host's pointers hold the device's addresses. On a host of 32 bits, an allocation whose address is larger is an error.
//! - One allocation has at most [`VulkanDeviceInfo::max_allocation`] bytes.
//! - On lavapipe, Mesa's driver for processors, addresses of the device are ordinary pointers. So it does not show if the host
//!   follows one, as a GPU does; what it proves is the use of Vulkan, under the validation layer.
//!
//! # Layout
//!
//! | file | contents |
//! | --- | --- |
//! | `open.rs` | the physical devices, how one is opened, and a program's own adopted |
//! | `sys.rs` | the loader, errors of calls, a device of Vulkan and its end, the lock of a VkQueue |
//! | `memory.rs` | buffers with addresses; copies and fills as commands |
//! | `order.rs` | the order of a VkQueue's work: what is submitted, and when it is done; the VkEvents that are recorded |
//! | `runtime.rs` | what arrow-device's engine asks of a device, and the end of one |
//! | `handles.rs` | native handles, and a program's own buffers and commands |
#![deny(unsafe_op_in_unsafe_fn)]

mod handles;
mod memory;
mod open;
mod order;
mod runtime;
mod sys;

use arrow_device::{ArrowDeviceType, DeviceId, Devices};
pub use ash;
pub use open::{VulkanConfig, VulkanParts, devices};
pub use order::VulkanQueue;
pub use runtime::VulkanDevice;
pub use sys::{SharedQueue, VulkanDeviceInfo};

/// Registers Vulkan with a set of devices: `Devices::open("vulkan:0")` opens the first physical device, with the defaults of
/// [`VulkanConfig`], at its first use.
///
/// Memory and events belong to a VkDevice, which an id does not name. An import uses the device that the set has for the id: add the
/// one of [`VulkanConfig::adopt`] with [`Devices::add`] before the id is used for another.
///
/// ```no_run
/// use arrow_device::Devices;
/// arrow_device_vulkan::register(Devices::global());
/// let device = Devices::open("vulkan:0")?;
/// # Ok::<(), arrow_device::Error>(())
/// ```
pub fn register(devices: &Devices) {
    devices.register(ArrowDeviceType::VULKAN, |number| {
        let id = DeviceId::new(ArrowDeviceType::VULKAN, number);
        let wrong = |_| sys::absent(id, "Vulkan devices are numbered from 0");
        VulkanConfig::new(usize::try_from(number).map_err(wrong)?).open()
    });
}

/// The programs of the page, which are tested as they stand.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod page {}
