//! # Vulkan devices for [`arrow_device`]
