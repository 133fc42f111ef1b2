//! # WebGPU devices for [`arrow_device`]
//!
//! Arrow data on whatever GPU a machine has, by [wgpu]: Vulkan, Metal, Direct3D 12. Columns are bound to compute shaders in WGSL, whose
//! results are columns again.
//!
//! ```no_run
//! use arrow_device_wgpu::WgpuDevice;
//!
//! # fn main() -> arrow_device::Result<()> {
//! # let batch = arrow_array::record_batch!(("id", Int64, [1, 2, 3]))?;
//! let device = arrow_device_wgpu::open()?; // or an error that says what is missing
//! println!("{}", WgpuDevice::of(&device)?.info().name);
//!
//! let on_device = device.upload(&batch)?; // one allocation; does not wait for the copy
//! assert_eq!(on_device.to_host()?, batch); // waits for the copy back
//! # Ok(())
//! # }
//! ```
//!
//! # Kernels
//!
//! [`WgpuDevice::bind`] makes a binding of the loan of a column (`values_on`, `validity_on`, ...) or of a `DeviceBufferMut`, and
//! [`ARROW_WGSL`] has functions that read what WGSL has no types for. What differs from other devices:
//!
//! - A binding begins at a multiple of the device's alignment (32 to 256 bytes), so the column begins within it: the shader skips
//!   [`Binding::skip`] bytes, or [`Binding::first`] elements, or [`Binding::first_bit`] bits of a bitmap.
//! - A binding ends at most `max_storage_buffer_binding_size` after its start (by default 128 MiB; [`open`] asks for what the adapter has), and
//!   memory that is larger than `max_buffer_size` is in several `wgpu::Buffer`s. [`WgpuDevice::resolve_parts`] returns the parts. Batches
//!   that are uploaded in pieces of some million rows need none of this.
//! - A shader binds 8 storage buffers on every device, and more on many. Values and bitmap are two; a query of several columns is
//!   several dispatches, as in the example `column_math`.
//! - `f16`, `i64` and `f64` are beyond WebGPU. Devices of [`open`] have them where the adapter does (`wgpu::Features::SHADER_INT64` and
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
//! uploaded batch share an allocation, and are not taken one by one.
//!
//! # Order
//!
//! All queues of a device are its one `wgpu::Queue`, on which work runs in the order in which it is submitted. This crate submits each
//! upload, copy and fill during the call, and a download when it starts. So:
//!
//! - a program's submission runs after all that this crate was given before, and before all that it is given later; neither side waits;
//! - what `wgpu::Queue::write_buffer` was given is written at the beginning of the next submission, the program's or this crate's;
//! - a command encoder counts from its submission on, not from when commands were added. Submit it before the loans that it uses are
//!   dropped, and before the memory that it writes is frozen.
#![deny(unsafe_op_in_unsafe_fn)]

#[cfg(target_family = "wasm")]
compile_error!(
    "arrow-device-wgpu does not work on WebAssembly: the host waits for downloads there only by returning to the browser, and addresses \
     cannot be reserved"
);

mod access;
mod bell;
mod bytes;
mod config;
mod copy;
mod device;
mod event;
mod landing;
mod memory;
mod queue;
mod registry;
mod shared;
mod staging;
mod sys;
mod wgsl;

pub use access::{Bindable, Binding, Place};
pub use config::{WgpuConfig, adopt};
pub use device::WgpuDevice;
pub use event::Polling;
pub use registry::register;
pub use wgpu;
pub use wgsl::{ARROW_NO_BITMAP, ARROW_WGSL};

/// Opens the best adapter: [`WgpuConfig::new`]`().open()`.
///
/// # Errors
/// As [`WgpuConfig::open`].
pub fn open() -> arrow_device::Result<arrow_device::Device> {
    WgpuConfig::new().open()
}
