//! # WebGPU devices for [`arrow_device`]

mod wgsl;

pub use wgpu;
pub use wgsl::{ARROW_NO_BITMAP, ARROW_WGSL};
