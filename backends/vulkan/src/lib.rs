//! # Vulkan devices for [`arrow_device`]
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
pub use physical::{VulkanDeviceInfo, devices};
pub use queue::VulkanQueue;
pub use registry::register;
