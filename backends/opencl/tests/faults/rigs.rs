//! Devices for the suite of streams.

use std::rc::Rc;

use arrow_device::{Devices, ImportOptions};
use arrow_device_opencl::OpenClMemory;

use crate::fake;
use crate::opencl::{memories, open, unclean};
use crate::stream_suite::Rig;

/// One for each kind of memory. Only this test uses the stand-in as long as they live.
pub(crate) fn rigs() -> Vec<Rig> {
    let alone = Rc::new(fake::alone());
    // The addresses of handles are not exported.
    let memories = memories()
        .into_iter()
        .filter(|memory| *memory != OpenClMemory::Handles);
    let rigs = memories.map(|memory| {
        let device = open(memory);
        let devices = Devices::new();
        devices.add(device.clone()).unwrap();
        let (alone, subject) = (alone.clone(), device.clone());
        Rig {
            device,
            options: ImportOptions::default().with_devices(devices),
            unclean: Box::new(move || {
                let _ = &alone;
                unclean(&subject)
                    .or_else(|| (fake::misuses() > 0).then(|| "given back twice".into()))
            }),
            fail_nth: Box::new(|n| fake::fail("*", n, -5)),
            failed: Box::new(fake::clear),
        }
    });
    rigs.collect()
}
