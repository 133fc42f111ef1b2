//! # WebGPU devices for [`arrow_device`]
