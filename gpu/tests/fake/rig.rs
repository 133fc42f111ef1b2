//! Devices on the stand-in driver. What differs between vendors is in `crate::vendor`.

use arrow_device::{Device, Devices, ImportOptions, Queue, Result};
use arrow_device_conformance::Hold;

use crate::fake::{Group, LAZY, in_mode};
use crate::gpu_suite::hold::held;
pub(crate) use crate::gpu_suite::hold::hold;
pub(crate) use crate::gpu_suite::soon;
use crate::vendor::{DEVICE, Memory, let_go, load, open_device};

/// Keeps a queue's stream busy with a host function that is running when this returns: a driver does not call a function that a
/// failed device has not reached. A lazy device, which runs only what somebody waits for, has not begun it.
pub(crate) fn hold_running(queue: &Queue) -> Hold {
    let (gate, held) = held(queue);
    if !in_mode(LAZY) {
        gate.wait_until_reached();
    }
    held
}

/// A device, with import options that find it.
pub(crate) struct Rig {
    pub(crate) group: Group,
    pub(crate) device: Device,
    pub(crate) options: ImportOptions,
}

impl std::ops::Deref for Rig {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

impl Rig {
    /// Memory of the device itself.
    pub(crate) fn new(flags: u32) -> Self {
        Self::with(flags, DEVICE)
    }

    pub(crate) fn with(flags: u32, memory: Memory) -> Self {
        load();
        let group = Group::open(1, flags);
        Self::of(group, open_device(memory, group.ordinal()))
    }

    pub(crate) fn of(group: Group, device: Result<Device>) -> Self {
        let device = device.unwrap();
        let devices = Devices::new();
        devices.add(device.clone()).unwrap();
        Self {
            group,
            device,
            options: ImportOptions {
                devices: Some(devices),
                ..Default::default()
            },
        }
    }

    /// What the device still has, or did wrong. The device itself may be there.
    pub(crate) fn unclean(&self) -> Option<String> {
        let _ = self.device.synchronize();
        self.device.trim();
        unclean(self.group)
    }

    /// Waits until all has gone that was dropped.
    #[track_caller]
    pub(crate) fn assert_clean(&self, what: impl std::fmt::Display) {
        let mut last = None;
        let done = soon(|| {
            last = self.unclean();
            last.is_none()
        });
        assert!(
            done,
            "{:?}: {what}: {}",
            self.device,
            last.unwrap_or_default()
        );
    }

    /// Everything was dropped: waits until all of it has gone.
    #[track_caller]
    pub(crate) fn assert_done(&self) {
        self.assert_clean("in the end");
        assert_eq!(self.device.take_drop_error().map(|e| e.to_string()), None);
    }

    /// As [`Rig::assert_done`]; then drops the device, and checks that nothing of it is left.
    #[track_caller]
    pub(crate) fn end(self) {
        self.assert_done();
        let group = self.group;
        drop(self);
        assert_gone(group);
        // For other tests: there are not many ordinals.
        group.close();
    }
}

/// As [`Rig::end`], for all devices of a group.
#[track_caller]
pub(crate) fn end_all<const N: usize>(group: Group, rigs: [Rig; N]) {
    let done = soon(|| {
        rigs.iter().for_each(|rig| rig.trim());
        rigs.iter().all(|rig| rig.unclean().is_none())
    });
    assert!(done, "{:?}", rigs[0].unclean());
    drop(rigs);
    assert_gone(group);
    group.close();
}

/// Nothing of a group is left, once the threads that free have done so.
#[track_caller]
pub(crate) fn assert_gone(group: Group) {
    soon(|| left(group).is_empty());
    group.assert_clean();
}

/// What a group still has when all devices were dropped.
pub(crate) fn left(group: Group) -> String {
    group.drain();
    let_go(group);
    group.report()
}

/// What a group has that a device does not keep, or did wrong, when all is done that was queued.
pub(crate) fn unclean(group: Group) -> Option<String> {
    group.drain();
    let live = ["device", "pinned", "managed", "pending"].map(|what| (what, group.live(what)));
    let mut text: String = live
        .iter()
        .filter(|(_, n)| *n > 0)
        .map(|(what, n)| format!("{n} live {what}\n"))
        .collect();
    for line in group.report().lines() {
        if line.starts_with("violation") {
            text.push_str(line);
        }
    }
    (!text.is_empty()).then_some(text)
}
