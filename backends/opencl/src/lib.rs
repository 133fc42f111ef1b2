//! # OpenCL devices for [`arrow_device`]
//!
//! Arrow data in the memory of an OpenCL device, for kernels in OpenCL C, and exchanged through the Arrow C Device data interface
//! (`ARROW_DEVICE_OPENCL`).
//!
//! ```no_run
//! use arrow_device::{DeviceRecordBatch, Devices, SyncPolicy};
//! use arrow_device_opencl::{OpenClDevice, register};
//!
//! # fn main() -> arrow_device::Result<()> {
//! # let batch = arrow_array::record_batch!(("id", Int64, [1, 2, 3]))?;
//! register(Devices::global());
//! let device = Devices::open("opencl:0")?; // or an error that says what is missing
//! println!("{device}: {}", OpenClDevice::of(&device)?.info());
//!
//! let on_device = device.upload(&batch)?; // one allocation; returns before the copy is done
//! let (array, schema) = on_device.export(SyncPolicy::Event)?; // for any consumer in this process
//! // SAFETY: `export` made both structs, and nothing else uses them.
//! let imported = unsafe { DeviceRecordBatch::import(array, &schema, None) }?;
//! assert_eq!(imported.to_host()?, batch); // waits for the copy back
//! # Ok(())
//! # }
//! ```
//!
//! Kernels are launched on the command queue of a queue ([`OpenClQueue::handle`]) and get columns by
//! [`OpenClQueue::set_kernel_arg`]; the example `kernel` is a whole program.
//!
//! Building needs nothing of OpenCL. At run time the crate loads OpenCL's loader (`libOpenCL.so.1`, `OpenCL.dll`) and uses the drivers
//! that it finds, from OpenCL 1.2 on.
//!
//! # Devices
//!
//! `opencl:N` is device `N` of all platforms together, in the order in which the loader lists platforms and each platform lists its
//! devices. The order is the same in every process as long as the installed drivers, the hardware and the environment are: installing
//! a driver, or a variable such as `OCL_ICD_VENDORS`, may change it. [`devices`] lists names, platforms and kinds of memory.
//!
//! A program that has a context and an in-order command queue already passes them to [`OpenClConfig::adopt`];
//! [`Queue::adopt`](arrow_device::Queue::adopt) makes a queue of a further command queue. Memory belongs to a context, which an id does not name:
//! [`register`] says how imports find the right one. A device in another context may read wrong values: NVIDIA's driver copies zeros from
//! the shared virtual memory of another context, without an error.
//!
//! # Memory
//!
//! | memory | chosen | addresses | the host reads it |
//! | --- | --- | --- | --- |
//! | [`Usm`](OpenClMemory::Usm): cl_intel_unified_shared_memory | first, where there is any | of the device | no |
//! | [`Svm`](OpenClMemory::Svm): coarse-grained shared virtual memory | second | of the device | no |
//! | [`Handles`](OpenClMemory::Handles): `cl_mem` buffers | on request only | placeholders, which end the process if they are read | no |
//!
//! Freed memory is kept for the next allocation, because runtimes allocate slowly ([`OpenClConfig::with_idle_limit`]). Arrays in
//! `Handles` are not exported, since no other library knows what their addresses stand for: [`OpenClDevice::resolve`] returns the
//! `cl_mem` and the offset, and [`OpenClDevice::wrap`] makes a buffer of a program's own `cl_mem` without a copy.
//!
//! # Events
//!
//! `sync_event` points to a `cl_event`. An exported one is a marker on a queue that has been flushed. An imported one may be of any
//! context and platform: queues wait for it without blocking the host. If its producer has not flushed its queue, the work before it begins
//! when something waits for it: to ask (`is_ready`) does not start it.
//!
//! What runtimes make of events that fail differs: PoCL 3.1 ends the process when a command waits for one, and Intel's CPU runtime
//! lets the command run, on wrong data. So nothing of a failure is passed into the runtime:
//!
//! - An event that has failed when it is waited for or asked about is an error of that call.
//! - If a pending event fails after a queue was told to wait for it, the device has failed: from then on each of its operations
//!   returns that error, and a device that waits for its events fails too.
//!
//! Three things remain to the program. A command that it enqueues itself, on a queue of this crate or its own, and that fails or waits
//! for an event that fails, meets the runtime's behaviour. And an event that was exported before a failure completes like any other,
//! because a failed one could end the consumer's process: who consumes arrays of a device that has failed is not told. And a copy or
//! fill that the runtime accepts and that fails later is seen only if the runtime also fails the events after it, as PoCL does.
//!
//! # Layout
//!
//! | file | contents |
//! | --- | --- |
//! | `sys.rs` | the runtime's functions, loaded at run time; references to its objects |
//! | `platform.rs` | the devices of all platforms, and what each offers |
//! | `open.rs`, `registry.rs` | how a device is opened, and how imports find it |
//! | `context.rs` | a device in a context, and its errors |
//! | `runtime.rs` | the provider: the device, its queues and events |
//! | `memory.rs` | allocations, copies and fills |
//! | `handles.rs` | OpenCL's handles behind devices and queues, and a program's own |
#![deny(unsafe_op_in_unsafe_fn)]

mod context;
mod handles;
mod memory;
mod open;
mod platform;
mod registry;
mod runtime;
mod sys;

pub use open::OpenClConfig;
pub use opencl_sys;
pub use platform::{OpenClDeviceInfo, OpenClMemory, devices};
pub use registry::{OpenClDevices, register};
pub use runtime::{OpenClDevice, OpenClQueue};

/// The programs of the page, which are tested as they stand.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod page {}
