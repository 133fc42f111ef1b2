//! Devices for the suite of streams.

use std::rc::Rc;
use std::time::{Duration, Instant};

use arrow_device::{Device, Devices, ImportOptions};
use arrow_device_opencl::{OpenClDevice, OpenClMemory};

use crate::fake;
use crate::opencl::{memories, open};
use crate::stream_suite::Rig;

/// Returns what the device, the only one, has not given back, if anything.
pub(crate) fn unclean(device: &Device) -> Option<String> {
    crate::opencl::unclean(device).or_else(|| {
        if fake::misuses() > 0 {
            return Some(format!("{} were given back twice", fake::misuses()));
        }
        // A context and the default queue, which is owned once.
        let (live, queues) = (fake::live(), OpenClDevice::of(device).unwrap().queues());
        let owned = 1 + queues as u64;
        (live != owned).then(|| format!("{device}: {live} references instead of {owned}"))
    })
}

/// Waits until the device has given everything back.
#[track_caller]
pub(crate) fn assert_clean(device: &Device) {
    let start = Instant::now();
    while let Some(left) = unclean(device) {
        assert!(start.elapsed() < Duration::from_secs(10), "{left}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// One device at a time, opened when its turn comes, would be better; so the references of all are counted together.
pub(crate) fn rigs() -> Vec<Rig> {
    let alone = Rc::new(fake::alone());
    // The addresses of handles are not exported.
    let memories = memories().into_iter().filter(|memory| *memory != OpenClMemory::Handles);
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
                crate::opencl::unclean(&subject).or_else(|| (fake::misuses() > 0).then(|| "given back twice".into()))
            }),
            fail_nth: Box::new(|n| fake::fail("*", n, -5)),
            failed: Box::new(fake::clear),
        }
    });
    rigs.collect()
}
