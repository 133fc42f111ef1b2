//! oneAPI devices for [`arrow_device`]: Arrow data in SYCL's unified shared memory (USM).
#![doc = include_str!("../README.md")]

mod handles;
mod library;
mod memory;
mod open;
mod runtime;
mod sys;
#[cfg(all(test, sycl))]
mod tests;
// What unit tests share with the others uses the crate by its name.
#[cfg(all(test, sycl))]
extern crate self as arrow_device_oneapi;

use std::sync::Arc;

#[cfg(doc)]
use arrow_device::Error;
use arrow_device::device::engine::Engine;
use arrow_device::device::{AddressClass, DeviceId, DevicePtr, EventPtr};
use arrow_device::{ArrowDeviceType, Device, Devices, Result};

pub use self::open::OneApiConfig;
pub use self::runtime::{OneApiDevice, OneApiQueue};
pub use self::sys::OneApiMemory;

/// Returns the number of devices that SYCL lists, those without unified shared memory included.
///
/// # Errors
/// Returns [`Error::DeviceNotAvailable`] with the reason if the crate was built without SYCL or its library is missing.
pub fn device_count() -> Result<usize> {
    let id = DeviceId::new(ArrowDeviceType::ONEAPI, 0);
    let count = sys::Sycl::get(id)?.device_count();
    count.map_err(|e| sys::absent_after(id, e))
}

/// Registers oneAPI devices with a set of devices: `oneapi:N` is the `N`-th device of `sycl::device::get_devices()`, with its own
/// memory, in the default context of its platform.
pub fn register(devices: &Devices) {
    register_with(devices, Vec::new());
}

/// As [`register`], with devices that the program has opened: of a queue's context, for example. Imports find the one in whose
/// context an array's memory is, or that has recorded its event, and among them one of shared or host memory for such memory only. Of
/// several devices with one id, the first one is `oneapi:N`.
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
        let wrong = |_| sys::absent(id, "oneAPI devices are numbered from 0");
        OneApiConfig::new(usize::try_from(number).map_err(wrong)?).open()
    });
    devices.register_resolver(ArrowDeviceType::ONEAPI, move |id, event, address| {
        resolve(&opened, id, event, address)
    });
}

/// Finds the device of an array that is imported: one that may use the memory, if there is one.
fn resolve(
    opened: &[Device],
    id: DeviceId,
    event: Option<EventPtr>,
    address: Option<DevicePtr>,
) -> Result<Option<Device>> {
    let of_this_id = opened.iter().filter(|device| device.id() == id);
    let of_this_id = of_this_id.filter_map(|device| Some((device, Engine::of(device).ok()?)));
    let fits = |device: &Device| {
        let class = address.map(|at| device.backend().classify(at, 1).class);
        !matches!(class, Some(AddressClass::Host | AddressClass::Inaccessible))
    };
    let fitting: Vec<(&Device, &Engine<OneApiDevice>)> = of_this_id
        .clone()
        .filter(|(device, _)| fits(device))
        .collect();
    if let Some(event) = event {
        let recorder = fitting
            .iter()
            .find(|(_, engine)| engine.has_recorded(event));
        if let Some((device, _)) = recorder {
            return Ok(Some((*device).clone()));
        }
    }
    if let Some(address) = address {
        for (device, engine) in &fitting {
            if engine.runtime().owns(address)? {
                return Ok(Some((*device).clone()));
            }
        }
    }
    // The id names the first one, unless that must not use the memory.
    let mut of_this_id = of_this_id.map(|(device, _)| device);
    let first = fitting.first().map(|(device, _)| *device);
    Ok(first
        .filter(|first| of_this_id.next() != Some(first))
        .cloned())
}
