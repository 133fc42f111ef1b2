//! Stands between the crate and Vulkan's loader, for the whole process: counts calls, keeps account of objects and submissions, and
//! lets calls fail.

use ash::vk::Result;

use crate::fork_kit::{alone, is_alone};
use crate::rigs::is_there;
use crate::suite::Faults;

pub(crate) mod account;
pub(crate) mod functions;
mod loader;

pub(crate) use loader::replace;

/// Runs a test in a process of its own, in which the interposer takes the loader's place. True there, if there is a device.
#[track_caller]
pub(crate) fn interposed(test: &str) -> bool {
    interposed_at_first(test) && is_there()
}

/// As [`interposed`], before anything was asked of Vulkan.
#[track_caller]
pub(crate) fn interposed_at_first(test: &str) -> bool {
    alone(test, || {});
    is_alone() && replace()
}

/// For the suite of streams.
pub(crate) fn faults() -> Faults {
    if is_alone() {
        replace();
    }
    Faults {
        interposed,
        fail_nth: |n| account::fail("*", n, Result::ERROR_OUT_OF_DEVICE_MEMORY),
        clear: || !account::clear().is_empty(),
        misused: || {
            let misuses = account::misuses();
            (!misuses.is_empty()).then(|| format!("{misuses:?}"))
        },
    }
}
