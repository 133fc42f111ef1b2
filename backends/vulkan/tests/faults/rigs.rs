//! Devices for the suite of streams.

use std::rc::Rc;

use arrow_device::{Devices, ImportOptions};
use ash::vk;

use crate::interposer::account::{alone, clear, fail, misuses};
use crate::interposer::replace;
use crate::program::Program;
use crate::stream_suite::Rig;
use crate::vulkan::{is_there, unclean};

/// One on a program's device, if there is any. Only this test uses the interposer as long as it lives.
pub(crate) fn rigs() -> Vec<Rig> {
    let alone = Rc::new(alone());
    if !replace() || !is_there() {
        return Vec::new();
    }
    let device = Program::new().adopt();
    let devices = Devices::new();
    devices.add(device.clone()).unwrap();
    let subject = device.clone();
    vec![Rig {
        device,
        options: ImportOptions::default().with_devices(devices),
        unclean: Box::new(move || {
            let _ = &alone;
            let misuses = misuses();
            unclean(&subject).or_else(|| (!misuses.is_empty()).then(|| format!("{misuses:?}")))
        }),
        fail_nth: Box::new(|n| fail("*", n, vk::Result::ERROR_OUT_OF_DEVICE_MEMORY)),
        failed: Box::new(|| !clear().is_empty()),
    }]
}
