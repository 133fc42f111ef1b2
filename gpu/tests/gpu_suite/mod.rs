//! What must hold on every GPU, whoever made it and whether it is a real one or a stand-in. The program
//! that includes this says whose devices they are (`crate::vendor`) and where (`crate::places`).

use std::any::Any;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_device::{Device, Devices, ImportOptions, Result};

use crate::vendor::{DEVICE, MEMORIES, Memory, open_device, unset_context};

pub(crate) mod conformance;
pub(crate) mod foreign;
pub(crate) mod hold;
mod memory;
pub(crate) mod transfer;

/// The kinds of memory that the host reads too.
pub(crate) fn host_memories() -> impl Iterator<Item = Memory> {
    MEMORIES.into_iter().filter(|memory| *memory != DEVICE)
}

/// Devices to test on.
pub(crate) struct Place {
    pub ordinal: usize,
    /// Further devices.
    pub others: Vec<usize>,
    /// How much work is given to tests in which work must overlap.
    #[allow(dead_code)] // not every vendor's tests launch kernels
    pub rows: usize,
    /// Whether work runs only when it is waited for.
    pub lazy: bool,
    /// Whether device memory comes from a pool.
    #[allow(dead_code)] // not every vendor's tests ask
    pub pools: bool,
    /// Of all cases of every type each `share`th is tested.
    pub share: usize,
    /// Fails while memory is not given back, or after something was done wrong. A real driver does not tell.
    pub balance: Option<Arc<dyn Fn() -> std::result::Result<(), String> + Send + Sync>>,
    /// What was not given back, or done wrong, now that everything was dropped; `None` if nothing, or
    /// if the driver does not tell.
    pub unclean: Box<dyn Fn() -> Option<String>>,
    /// Keeps other tests of the program away: what one holds up may hold up all.
    #[allow(dead_code)] // held, not read
    pub alone: Option<Box<dyn Any>>,
}

/// Runs a test at every place there is.
#[track_caller]
pub(crate) fn everywhere(test: impl Fn(&Place)) {
    at(crate::places::places(), test);
}

/// Runs a test at some places.
#[track_caller]
pub(crate) fn at(places: Vec<Place>, test: impl Fn(&Place)) {
    for place in places {
        test(&place);
        unset_context();
        let mut left = None;
        let clean = soon(|| {
            left = (place.unclean)();
            left.is_none()
        });
        assert!(clean, "{}", left.unwrap_or_default());
    }
}

impl Place {
    /// Opens the device.
    pub(crate) fn open(&self, memory: Memory) -> Opened {
        self.open_with(open_device(memory, self.ordinal))
    }

    pub(crate) fn open_with(&self, device: Result<Device>) -> Opened {
        let device = device.unwrap();
        let devices = Devices::new();
        devices.add(device.clone()).unwrap();
        Opened {
            device,
            options: ImportOptions {
                devices: Some(devices),
                ..Default::default()
            },
        }
    }
}

/// A device, with import options that find it.
pub(crate) struct Opened {
    pub device: Device,
    pub options: ImportOptions,
}

impl Deref for Opened {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

impl Opened {
    /// All of the device's data was dropped: waits until its memory was freed.
    #[track_caller]
    pub(crate) fn assert_done(&self) {
        let freed = soon(|| {
            // A lazy device runs only what somebody waits for.
            let _ = self.synchronize();
            let stats = self.stats();
            stats.allocations == stats.frees
        });
        assert!(freed, "{:?}: {:?}", self.device, self.stats());
        self.synchronize().unwrap();
        assert_eq!(self.take_drop_error().map(|e| e.to_string()), None);
    }
}

/// Whether something becomes true within a while.
pub(crate) fn soon(mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(10);
    while !done() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}
