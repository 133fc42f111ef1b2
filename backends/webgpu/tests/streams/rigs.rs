//! Devices for the suite of streams.

use arrow_device::{Devices, ImportOptions};

use crate::stream_suite::Rig;
use crate::webgpu::{try_open, unclean};

/// The best adapter, if there is any.
pub(crate) fn rigs() -> Vec<Rig> {
    // wgpu cannot be told to fail at its nth call: `failures.rs` has what can be made to fail.
    let test = std::thread::current().name().map(str::to_owned);
    if test.is_some_and(|test| test.contains("every_failure_in_a_stream")) {
        return Vec::new();
    }
    let Some(device) = try_open() else {
        return Vec::new();
    };
    let devices = Devices::new();
    devices.add(device.clone()).unwrap();
    let subject = device.clone();
    vec![Rig {
        device,
        options: ImportOptions::default().with_devices(devices),
        unclean: Box::new(move || unclean(&subject)),
        fail_nth: Box::new(|n| unreachable!("no call can be made to fail, not the {n}th")),
        failed: Box::new(|| false),
    }]
}
