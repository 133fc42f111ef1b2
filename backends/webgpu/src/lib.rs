//! # WebGPU devices for [`arrow_device`]
#![deny(unsafe_op_in_unsafe_fn)]

#[cfg(target_family = "wasm")]
compile_error!(
    "arrow-device-wgpu does not work on WebAssembly: the host waits for downloads there only by returning to the browser, and addresses \
     cannot be reserved"
);

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

pub use config::{WgpuConfig, adopt};
pub use device::WgpuDevice;
pub use event::Polling;
pub use registry::register;
pub use wgpu;

/// Opens the best adapter: [`WgpuConfig::new`]`().open()`.
///
/// # Errors
/// As [`WgpuConfig::open`].
pub fn open() -> arrow_device::Result<arrow_device::Device> {
    WgpuConfig::new().open()
}
