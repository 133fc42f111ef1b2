//! oneAPI devices for [`arrow_device`]: Arrow data in SYCL's unified shared memory (USM).
#![doc = include_str!("../README.md")]

mod config;
mod device;
mod event;
mod exit;
mod library;
mod memory;
mod object;
mod queue;
mod shared;
mod sys;
#[cfg(all(test, sycl))]
mod tests;

// What unit tests share with the others uses the crate by its name.
#[cfg(all(test, sycl))]
extern crate self as arrow_device_oneapi;

use std::sync::Arc;

#[cfg(doc)]
use arrow_device::Error;
use arrow_device::device::{Arriving, DeviceId};
use arrow_device::{ArrowDeviceType, Device, Devices, Result};

pub use self::config::OneApiConfig;
pub use self::device::{OneApiDevice, adopt_queue};
pub use self::memory::OneApiMemory;
pub use self::queue::OneApiQueue;

/// Returns the number of devices that SYCL lists, those without unified shared memory included.
///
/// # Errors
/// Returns [`Error::DeviceNotAvailable`] with the reason if the crate was built without SYCL or its library is missing.
pub fn device_count() -> Result<usize> {
    let id = DeviceId::new(ArrowDeviceType::ONEAPI, 0);
    sys::Sycl::get(id)?
        .device_count()
        .map_err(|failed| failed.absent(id))
}

/// Registers oneAPI devices with a set of devices: `oneapi:N` is the `N`-th device of `sycl::device::get_devices()`, with its own
/// memory, in the default context of its platform.
pub fn register(devices: &Devices) {
    register_with(devices, Vec::new());
}

/// As [`register`], with devices that the program has opened: of a queue's context, for example. Imports find the one in whose
/// context an array's memory is, or that has recorded its event. Of several devices with one id, the first one is `oneapi:N`.
///
/// A later call replaces the devices of an earlier one.
pub fn register_with(devices: &Devices, opened: Vec<Device>) {
    let opened: Arc<[Device]> = opened.into();
    let known = opened.clone();
    devices.register(ArrowDeviceType::ONEAPI, move |number| {
        let id = DeviceId::new(ArrowDeviceType::ONEAPI, number);
        if let Some(known) = known.iter().find(|device| device.id() == id) {
            return Ok(known.clone());
        }
        let wrong = || sys::absent(id, "oneAPI devices are numbered from 0");
        OneApiConfig::new(usize::try_from(number).map_err(|_| wrong())?).open()
    });
    devices.register_resolver(ArrowDeviceType::ONEAPI, move |array| {
        resolve(&opened, array)
    });
}

/// Finds the device of an array that is imported.
fn resolve(opened: &[Device], array: &Arriving<'_>) -> Result<Option<Device>> {
    let candidates = opened.iter().filter(|device| device.id() == array.id());
    let candidates = candidates.filter_map(|device| Some((device, OneApiDevice::of(device)?)));
    if let Some(event) = array.event() {
        let recorded = candidates
            .clone()
            .find(|(_, backend)| backend.has_recorded(event));
        if let Some((device, _)) = recorded {
            return Ok(Some(device.clone()));
        }
    }
    if let Some(address) = array.address() {
        for (device, backend) in candidates {
            if backend.owns(address)? {
                return Ok(Some(device.clone()));
            }
        }
    }
    Ok(None)
}
