//! What the tests against Arrow C++ need of this side: arrays and batches to hand over, in device structs and in plain
//! host ones, and comparisons of what comes back.

pub(crate) mod answer;
mod arrays;
mod async_streams;
mod batches;
mod layout;
mod spelling;
mod streams;

use std::ffi::CString;

use arrow_array::Array;
use arrow_data::ArrayData;
use arrow_device::{Device, Devices, ImportOptions, Queue, SyncPolicy, Validation};

use crate::sim::PeersSim;
use answer::Failure;

/// The simulated device, or the CPU if there is none.
fn device(sim: Option<&PeersSim>) -> Device {
    sim.map_or_else(Devices::cpu, |sim| sim.device.clone())
}

/// A queue of that device's that nothing else uses: work elsewhere is ordered after its own by events only.
fn queue(sim: Option<&PeersSim>) -> Result<Queue, Failure> {
    let device = device(sim);
    match sim {
        Some(_) => Ok(device.new_queue()?),
        None => Ok(device.default_queue()),
    }
}

/// Imports find the CPU, and the simulated device.
fn options(sim: Option<&PeersSim>, full: bool) -> ImportOptions {
    let devices = sim.map_or_else(Devices::new, |sim| sim.devices.clone());
    let validation = if full {
        Validation::Full
    } else {
        Validation::Structure
    };
    let options = ImportOptions::default().with_devices(devices);
    options.with_validation(validation)
}

fn policy(wait: bool) -> SyncPolicy {
    if wait {
        SyncPolicy::Wait
    } else {
        SyncPolicy::Event
    }
}

fn name(text: impl Into<Vec<u8>>) -> CString {
    CString::new(text).unwrap_or_default()
}

/// How many holders the buffers of an array have, all together: one more for each export that lives.
fn holders(array: &dyn Array) -> usize {
    fn count(data: &ArrayData) -> usize {
        let own = data.buffers().iter().map(|b| b.strong_count());
        let nulls = data.nulls().map(|n| n.buffer().strong_count());
        let children = data.child_data().iter().map(count);
        own.chain(nulls).chain(children).sum()
    }
    count(&array.to_data())
}

/// # Safety
/// `out` is null or valid for a write; what is there needs no release.
unsafe fn write<T>(out: *mut T, value: T) -> Result<(), Failure> {
    if out.is_null() {
        return Err("out is null".into());
    }
    // SAFETY: `out` is not null, so the caller guarantees that it is valid for a write (see `# Safety`).
    unsafe { out.write(value) };
    Ok(())
}
