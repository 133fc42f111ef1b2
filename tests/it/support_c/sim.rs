//! Simulated devices for interchange tests.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_device::device::sim::{SimConfig, SimDevice, SimMode};
use arrow_device::{Device, Devices, ImportOptions};

/// A device, with import options that find it. `sim` is `None` for the CPU.
pub(crate) struct Place {
    pub device: Device,
    pub sim: Option<Arc<SimDevice>>,
    pub options: ImportOptions,
}

pub(crate) fn cpu() -> Place {
    Place {
        device: Devices::cpu(),
        sim: None,
        options: ImportOptions {
            devices: Some(Devices::new()),
            ..Default::default()
        },
    }
}

/// `None` where there are no simulated devices (Miri).
pub(crate) fn simulated(mode: SimMode) -> Option<Place> {
    if cfg!(miri) {
        return None;
    }
    let sim = SimDevice::new(SimConfig {
        mode,
        ..SimConfig::default()
    })
    .unwrap();
    let device = Device::new(sim.clone()).unwrap();
    let devices = Devices::new();
    devices.add(device.clone()).unwrap();
    Some(Place {
        device,
        sim: Some(sim),
        options: ImportOptions {
            devices: Some(devices),
            ..Default::default()
        },
    })
}

/// The CPU and one simulated device of each mode.
pub(crate) fn places() -> Vec<Place> {
    let sims = [SimMode::Async, SimMode::Deferred].map(simulated);
    [Some(cpu())].into_iter().chain(sims).flatten().collect()
}

impl Place {
    pub(crate) fn sim(&self) -> &SimDevice {
        self.sim.as_ref().unwrap()
    }

    /// Panics unless everything is freed and released, nothing was done wrong, once the release thread has caught up.
    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        let Some(sim) = &self.sim else { return };
        let until = Instant::now() + Duration::from_secs(5);
        loop {
            let _ = self.device.synchronize();
            self.device.trim();
            if sim.report().is_clean() {
                return;
            }
            if Instant::now() > until {
                sim.assert_clean();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} ({})", self.sim, self.device)
    }
}
