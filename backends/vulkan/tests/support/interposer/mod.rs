//! Stands between the crate and Vulkan's loader, for the whole process: counts calls, keeps account of objects, and lets calls fail or
//! take long.
#![allow(dead_code)] // tests that include it use what they need

pub(crate) mod account;
pub(crate) mod functions;
mod loader;

pub(crate) use loader::replace;
