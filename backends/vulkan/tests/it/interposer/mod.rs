//! Stands between the crate and Vulkan's loader, for the whole process: counts calls, keeps account of objects, and lets calls fail or
//! take long.

use crate::fork_kit::{alone, is_alone};
use crate::rigs::is_there;

pub(crate) mod account;
pub(crate) mod functions;
mod loader;

pub(crate) use loader::replace;

/// Runs a test in a process of its own, in which the interposer takes the loader's place. True there, if there is a device.
#[track_caller]
pub(crate) fn interposed(test: &str) -> bool {
    alone(test, || {});
    is_alone() && replace() && is_there()
}
