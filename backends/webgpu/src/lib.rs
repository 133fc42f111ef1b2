//! # WebGPU devices for [`arrow_device`]
//!
//! Arrow data in the buffers of a `wgpu::Device`, for compute shaders on any GPU that wgpu drives (Vulkan, Metal, Direct3D 12), and
//! exchanged through the Arrow C Device data interface (`ARROW_DEVICE_WEBGPU`).
//!
//! ```no_run
//! use arrow_device::{DeviceRecordBatch, Devices, SyncPolicy};
//! use arrow_device_wgpu::{WgpuDevice, register};
//!
//! # fn main() -> arrow_device::Result<()> {
//! # let batch = arrow_array::record_batch!(("id", Int64, [1, 2, 3]))?;
//! register(Devices::global());
//! let device = Devices::open("webgpu:0")?; // or an error that says what is missing
//! println!("{device}: {}", WgpuDevice::of(&device)?.info().name);
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
//! # Devices
//!
//! `webgpu:N` is adapter `N` of [`devices`] ([`register`]), and [`WgpuConfig::best`] is the best one. A program that has a `wgpu::Device`
//! already, as those of bevy, cubecl, burn and egui have, passes it with its queue to [`WgpuConfig::adopt`]; the same one is adopted once.
//! The crate is for one major version of wgpu, which it re-exports: [`wgpu`].
//!
//! # Kernels
//!
//! [`WgpuDevice::bind`] makes a binding of the loan of a column (`values_on`, `validity_on`, ...) or of a `DeviceBufferMut`, and
//! [`ARROW_WGSL`] has functions that read what WGSL has no types for. What differs from other devices:
//!
//! - A binding begins at a multiple of the device's alignment (32 to 256 bytes), so the column begins within it: the shader skips
//!   [`Binding::skip`] bytes, or [`Binding::first`] elements, or [`Binding::first_bit`] bits of a bitmap.
//! - A binding ends at most `max_storage_buffer_binding_size` after its start (by default 128 MiB; [`WgpuConfig::open`] asks for what the adapter has), and
//!   memory that is larger than `max_buffer_size` is in several `wgpu::Buffer`s. [`WgpuDevice::resolve_parts`] returns the parts. Batches
//!   that are uploaded in pieces of some million rows need none of this.
//! - A shader binds 8 storage buffers on every device, and more on many. Values and bitmap are two; a query of several columns is
//!   several dispatches, as in the example `column_math`.
//! - `f16`, `i64` and `f64` are beyond WebGPU. Devices of [`WgpuConfig::open`] have them where the adapter does (`wgpu::Features::SHADER_INT64` and
//!   others); shaders for all devices use the functions.
//! - In one dispatch a `wgpu::Buffer` is either read or written. The columns of a batch that was uploaded share one; each
//!   `DeviceBufferMut` has its own.
//! - A column without a validity bitmap has nothing to bind in its place: bind its values once more, with [`ARROW_NO_BITMAP`] as the first
//!   bit.
//! - Columns without rows can be bound, and a dispatch of 0 workgroups does nothing.
//!
//! # In and out without a copy
//!
//! [`WgpuDevice::wrap`] makes a buffer for columns of a program's `wgpu::Buffer`, and keeps what the program passes along until no work
//! uses it. [`WgpuDevice::take`] hands out the `wgpu::Buffer` of a whole allocation, such as a kernel's result. The columns of an
//! uploaded batch share an allocation, and are not taken one by one. Beyond the bytes of the column the buffer may hold what other columns
//! had there before.
//!
//! # Memory
//!
//! wgpu has buffers and no addresses. So each allocation has a range of reserved addresses, which end the process if the host reads them,
//! and behind it one `wgpu::Buffer`, or several where it is larger than the device's largest (`max_buffer_size`). Each begins
//! at a multiple of 256 bytes of the range. Freed memory is kept for the next allocation
//! ([`WgpuConfig::with_idle_limit`]).
//!
//! Uploads read their source when they are called, into staging memory; downloads are copied from staging memory by the thread that waits
//! for them. Copies may have any offset and length: whole words (4 bytes) are copied by WebGPU, other bytes by a compute
//! shader. Transfers of arrays have whole words only.
//!
//! # Order and events
//!
//! A `wgpu::Device` has one queue, and all queues of a device of this crate are that one. Work runs in the order in which it is submitted,
//! the program's own submissions included. What `wgpu::Queue::write_buffer` writes counts from the next submission on, of the
//! program or of this crate, or from the next event or download of this crate if that is earlier, since wgpu then submits it, too. A
//! command encoder counts from its submission on: submit it before the loans that it uses are dropped, and before the memory that
//! it writes is frozen. An event of this crate includes what the program has submitted before.
//!
//! So nobody who can reach the memory has to wait for anything, and `sync_event` is null in exports
//! ([`QueueOrder`](arrow_device::device::ExportSync::QueueOrder)); the specification has no event type for WebGPU. Who wants the bytes on the
//! host downloads them.
//!
//! Somebody has to poll a `wgpu::Device` so that work is seen to have ended: a thread that waits does ([`Polling`] says how), and so does
//! each question whether an event has completed. What nobody waits for or asks about is not polled for, though it runs.
//!
//! # Failures
//!
//! Errors that wgpu reports of a call of this crate (validation, out of memory) are errors of the operation; a panic within wgpu, also that
//! of a program's callback which wgpu calls there, is the end of the device, as is its loss or
//! `wgpu::Device::destroy`: from then on each operation returns that error. So is a panic of a program's callback in a poll or a submission
//! of the program, if wgpu then drops the callbacks of this crate, which it does without a call. The program's own callbacks for errors and
//! loss are neither called for that nor replaced.
//!
//! wgpu runs a program's callbacks within submissions and polls, those of this crate too. They may use the crate; what wgpu reports of their
//! own calls may then be taken for an error of the operation of this crate that they run in.
//!
//! `wgpu::Device::destroy` must not run while another thread transfers: wgpu 30 then frees staging memory that is mapped, which this crate
//! cannot prevent.
//!
//! # Layout
//!
//! | file | contents |
//! | --- | --- |
//! | `open.rs` | how devices are opened and adopted |
//! | `sys.rs` | the calls into wgpu: errors, panics, loss, waiting |
//! | `runtime.rs` | the provider of the engine |
//! | `memory.rs`, `staging.rs` | addresses over buffers; memory that the host writes and reads |
//! | `copy.rs`, `bytes.rs`, `bytes.wgsl` | copies and fills: whole words, and any bytes |
//! | `order.rs`, `landing.rs` | the events of a device, and who waits; downloads on their way to the host |
//! | `handles.rs`, `bind.rs`, `wgsl.rs`, `arrow.wgsl` | wgpu's objects, and buffers in and out; columns as bindings; functions for shaders |
#![deny(unsafe_op_in_unsafe_fn)]

#[cfg(target_family = "wasm")]
compile_error!(
    "arrow-device-wgpu does not work on WebAssembly: there the host can wait for a download only by returning to the browser, and \
     addresses that stand for buffers cannot be reserved"
);

mod bind;
mod bytes;
mod copy;
mod handles;
mod landing;
mod memory;
mod open;
mod order;
mod runtime;
mod staging;
mod sys;
mod wgsl;

use arrow_device::{ArrowDeviceType, DeviceId, Devices};
pub use bind::{Bindable, Binding};
pub use memory::Place;
pub use open::{WgpuConfig, devices};
pub use order::Polling;
pub use runtime::WgpuDevice;
pub use wgpu;
pub use wgsl::{ARROW_NO_BITMAP, ARROW_WGSL};

/// Registers WebGPU with a set of devices: `Devices::open("webgpu:0")` opens adapter 0 of [`devices`] with the defaults of
/// [`WgpuConfig`], at its first use. A program that chose its own `wgpu::Device` adds the device of [`WgpuConfig::adopt`] instead
/// ([`Devices::add`]).
///
/// ```no_run
/// use arrow_device::Devices;
/// arrow_device_wgpu::register(Devices::global());
/// let device = Devices::open("webgpu:0")?;
/// # Ok::<(), arrow_device::Error>(())
/// ```
pub fn register(devices: &Devices) {
    devices.register(ArrowDeviceType::WEBGPU, |number| {
        let id = DeviceId::new(ArrowDeviceType::WEBGPU, number);
        let wrong = |_| open::absent(id, "WebGPU adapters are numbered from 0");
        WgpuConfig::new(usize::try_from(number).map_err(wrong)?).open()
    });
}

/// The programs of the page, which are tested as they stand.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod page {}
