//! Simulated devices.

use arrow_device::device::sim::{SimConfig, SimDevice, SimMode};
use arrow_device::{Device, Devices, ImportOptions};

use crate::stream_suite::Rig;

/// None where there are no simulated devices.
pub(crate) fn rigs() -> Vec<Rig> {
    let open = |mode| {
        let sim = SimDevice::new(SimConfig {
            mode,
            ..SimConfig::default()
        })
        .ok()?;
        let device = Device::new(sim.clone()).unwrap();
        let devices = Devices::new();
        devices.add(device.clone()).unwrap();
        let (report, faults) = (sim.clone(), sim.clone());
        Some(Rig {
            device,
            options: ImportOptions {
                devices: Some(devices),
                ..Default::default()
            },
            unclean: Box::new(move || {
                let report = report.report();
                (!report.is_clean()).then(|| format!("{report:#?}"))
            }),
            fail_nth: Box::new(move |n| faults.faults().fail_nth(None, n)),
            failed: Box::new(move || {
                let fired = sim.faults().fired() > 0;
                sim.faults().clear();
                fired
            }),
        })
    };
    let modes = [SimMode::Async, SimMode::Deferred];
    modes.into_iter().filter_map(open).collect()
}
