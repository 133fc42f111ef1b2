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
//! let imported = unsafe { DeviceRecordBatch::import(array, &schema) }?;
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
//! [`VulkanDevice::wrap_buffer`] makes a program's VkBuffer a buffer of the device without a copy.
//!
//! An address does not name its VkBuffer. So arrays of another producer are copied (downloaded, for instance) only if they lie in a
//! VkBuffer that was made known with `wrap_buffer`; a shader reads them in any case.
//!
//! Staging memory is mapped and coherent host memory, from and to which the device copies. Other host memory is copied by way of
//! such memory. Copies and fills are exact to the byte, at any alignment.
//!
//! # Queues
//!
//! [`VulkanConfig::open`] takes up to four VkQueues of one family, which the device's queues use in turn; an adopted device has one.
//! A program gives its command buffers to [`VulkanQueue::submit`], which runs them in the order of the queue. It may also submit to
//! the VkQueue itself, after [`VulkanQueue::submitted`]: its commands then see what the queue has written so far, and what is queued
//! afterwards comes after them. On another VkQueue, the program waits for the semaphore that `submitted` returns. Memory belongs to
//! the family of the queues.
//!
//! # Events
//!
//! `sync_event` points to a `VkEvent`.
//!
//! - **Out:** commands set it, after a barrier behind all that the array consists of. It may be polled with `vkGetEventStatus`. Commands
//!   may wait for it (`vkCmdWaitEvents`) only on the VkQueue of the queue that recorded it ([`VulkanQueue::shared_queue`]), and only
//!   after [`VulkanQueue::submitted`]: Vulkan allows no other VkQueue, and what is held back is submitted later. It is reset and used
//!   again once the array was released, so commands that wait for it must have run by then.
//! - **In:** Vulkan has no wait of the host for an event, and on the device only commands of the queue that sets it may wait for it.
//!   So a thread polls it, at intervals of up to a millisecond, and the host holds the work of the queue that waits back until it is
//!   set. No call blocks, and other queues go on. The producer makes its writes available before it sets the event
//!   (`vkCmdPipelineBarrier` before `vkCmdSetEvent`), and sets it by commands, or with [`set_event`]: Vulkan allows no
//!   other use of an event while the host sets it, and this crate polls it.
//!
//! An event of another VkDevice is refused if this crate has recorded it. Otherwise Vulkan cannot tell, nor whether an event was made
//! with `VK_EVENT_CREATE_DEVICE_ONLY_BIT`, which cannot be polled: importing either is undefined behaviour, and so excluded by the
//! contract of the unsafe import. A null handle is refused.
//!
//! If the VkDevice is lost, or cannot take work that was held back (`vkQueueSubmit` fails, for lack of memory for example), the device
//! has failed: from then on each of its operations returns that error, and no event is reported as complete. Consumers of events that
//! were exported before learn from Vulkan that the VkDevice is lost. Otherwise they learn nothing: events of work that was held back
//! are never set.
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
//! | `physical.rs`, `codes.rs` | the loader, the physical devices and what each offers; errors of calls |
//! | `context.rs` | a device of Vulkan, its end, and the lock of a VkQueue |
//! | `memory.rs` | buffers with addresses |
//! | `lane.rs`, `batch.rs`, `submit.rs` | the order of a queue's work; what is submitted, held back and under way; when |
//! | `event.rs` | the places that `sync_event` points to, and what is asked of events |
//! | `shared.rs`, `copy.rs` | what the queues of a device share: memory for reuse; copies and fills as commands |
//! | `queue.rs`, `device.rs` | the implementations of the traits |
//! | `config.rs`, `registry.rs` | how devices are opened, and found by name |
#![deny(unsafe_op_in_unsafe_fn)]

mod batch;
mod codes;
mod config;
mod context;
mod copy;
mod device;
mod event;
mod lane;
mod memory;
mod physical;
mod queue;
mod registry;
mod shared;
mod submit;

pub use ash;
pub use config::{VulkanConfig, VulkanParts};
pub use context::SharedQueue;
pub use device::VulkanDevice;
pub use event::set_event;
pub use physical::{VulkanDeviceInfo, devices};
pub use queue::VulkanQueue;
pub use registry::register;

/// The programs of the page, which are tested as they stand.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod page {}
