//! The devices that targets use: made once, and clean between inputs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arrow_device::device::sim::{SimConfig, SimDevice, SimMode};
use arrow_device::{Device, Devices, ImportOptions, Validation};

pub(crate) use crate::support_c::sim::Place;

/// The CPU, a simulated device whose work runs when it is waited for, and one that runs it at once on a thread and that reaches
/// the other. Of the program for GPUs: the CPU and the memories of one.
pub(crate) struct World {
    pub places: Vec<Place>,
}

impl World {
    fn new() -> Self {
        let sim = |mode, peer_access| {
            let config = SimConfig {
                capacity_bytes: 256 << 20,
                mode,
                peer_access,
                ..SimConfig::default()
            };
            let sim = SimDevice::new(config).expect("targets run on Linux");
            let device = Device::new(sim.clone()).expect("the queue is there");
            (device, Some(sim))
        };
        Self::of(vec![
            (Devices::cpu(), None),
            sim(SimMode::Deferred, false),
            sim(SimMode::Async, true),
        ])
    }

    /// The CPU, and others, which imports find.
    pub(crate) fn of(all: Vec<(Device, Option<Arc<SimDevice>>)>) -> Self {
        let devices = Devices::new();
        for (device, _) in &all[1..] {
            devices.add(device.clone()).expect("ids differ");
        }
        let options = ImportOptions {
            devices: Some(devices),
            ..Default::default()
        };
        let place = |(device, sim)| Place {
            device,
            sim,
            options: options.clone(),
        };
        Self {
            places: all.into_iter().map(place).collect(),
        }
    }

    /// The one world; a new one if the last target failed.
    pub(crate) fn enter() -> Entered {
        static WORLD: Mutex<Option<World>> = Mutex::new(None);
        let mut world = WORLD.lock().unwrap_or_else(|poisoned| {
            WORLD.clear_poison();
            let mut world = PoisonError::into_inner(poisoned);
            *world = None;
            world
        });
        world.get_or_insert_with(Self::new);
        Entered(world)
    }

    /// One of the places, by any number.
    pub(crate) fn place(&self, i: usize) -> &Place {
        &self.places[i % self.places.len()]
    }

    pub(crate) fn place_of(&self, device: &Device) -> Option<&Place> {
        self.places.iter().find(|place| place.device == *device)
    }

    /// Waits for what threads of devices do.
    ///
    /// # Panics
    /// If it does not happen.
    #[track_caller]
    pub(crate) fn eventually(&self, what: &str, happened: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(10);
        while !happened() {
            assert!(Instant::now() < end, "never happened: {what}");
            for place in &self.places {
                // Runs what nobody waits for.
                let _ = place.device.synchronize();
            }
            std::thread::yield_now();
        }
    }

    /// Panics unless everything was freed and released, once threads that do so have caught up.
    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        let end = Instant::now() + Duration::from_secs(10);
        let mut pause = Duration::from_micros(2);
        for place in &self.places {
            let Some(sim) = &place.sim else { continue };
            loop {
                let synchronized = place.device.synchronize();
                place.device.trim();
                let report = sim.report();
                assert!(report.error.is_none(), "the device failed: {report:#?}");
                assert!(report.violations.is_empty(), "{report:#?}");
                if synchronized.is_ok() && report.is_clean() && report.pending_operations == 0 {
                    break;
                }
                assert!(Instant::now() < end, "something is left: {report:#?}");
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(5));
            }
            let dropped = place.device.take_drop_error();
            assert!(dropped.is_none(), "a drop failed: {dropped:?}");
        }
    }
}

/// The world while a target uses it.
pub(crate) struct Entered(MutexGuard<'static, Option<World>>);

impl std::ops::Deref for Entered {
    type Target = World;

    fn deref(&self) -> &World {
        self.0.as_ref().expect("made on entering")
    }
}

impl Place {
    pub(crate) fn validating(&self, validation: Validation) -> ImportOptions {
        ImportOptions {
            validation,
            ..self.options.clone()
        }
    }

    pub(crate) fn is_cpu(&self) -> bool {
        self.sim.is_none()
    }
}
