//! What of the figures is the simulated device's, which does on a processor what a GPU does beside it.

use std::hint::black_box;
use std::time::{Duration, Instant};

use arrow_device::device::sim::SimDevice;
use arrow_device::{Device, DeviceBufferMut};

/// Bytes of the simulated device that are used once before anything is measured.
const WARM: usize = 192 << 20;
/// Bytes of the memcpy that is measured.
const COPY: usize = 64 << 20;

/// Time that the simulated device has spent by itself, on any thread.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Simulation {
    /// Filling fresh and freed memory.
    pub filling: Duration,
    /// Copying: what a GPU's copy engine does.
    pub copying: Duration,
}

impl Simulation {
    /// What a device has spent so far; nothing if it is not simulated.
    pub(crate) fn of(device: &Device) -> Self {
        let sim = device.backend().as_any().downcast_ref::<SimDevice>();
        sim.map_or(Self::default(), |sim| {
            let report = sim.report();
            Self {
                filling: report.fill_time,
                copying: report.copy_time,
            }
        })
    }

    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            filling: self.filling.saturating_sub(before.filling),
            copying: self.copying.saturating_sub(before.copying),
        }
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            filling: self.filling + other.filling,
            copying: self.copying + other.copying,
        }
    }
}

/// Uses the first 192 MiB of a simulated device's memory, which the system provides only then: that is no part of any transfer.
/// If the device has less, the transfers say so.
pub(crate) fn warm(device: &Device) {
    drop(DeviceBufferMut::allocate(&device.default_queue(), WARM));
    // The device fills what was freed: not while something is measured. If it fails, the transfers say so.
    let _ = device.synchronize();
}

/// 10^9 bytes per second of one thread's memcpy, the best of a few.
pub(crate) fn memcpy() -> f64 {
    let (from, mut to) = (vec![1u8; COPY], vec![2u8; COPY]);
    let time = |to: &mut Vec<u8>| {
        let start = Instant::now();
        to.copy_from_slice(black_box(&from));
        black_box(to.as_ptr());
        start.elapsed()
    };
    let best = (0..5).map(|_| time(&mut to)).min().unwrap_or_default();
    COPY as f64 / best.as_secs_f64() / 1e9
}
