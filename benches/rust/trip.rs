//! The main job's parts on the simulated device: what the crate does, and what the simulation adds.

use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arrow_array::RecordBatch;
use arrow_device::device::sim::{SimBacking, SimConfig, SimDevice, SimMode};
use arrow_device::{Device, DeviceRecordBatch};

use crate::batches::Result;

/// Runs and times what is measured.
pub(crate) type Time = fn(&mut dyn FnMut() -> Result<()>) -> Result<Duration>;

/// Zeros, which come from the system as they are used.
fn zeros(bytes: usize) -> Option<SimBacking> {
    let mut memory = vec![0u8; bytes.checked_add(64)?];
    let start = memory.as_mut_ptr();
    let start = NonNull::new(start.wrapping_add(start.align_offset(64)))?;
    // SAFETY: the vector has as many bytes from there on, and is not used otherwise.
    Some(unsafe { SimBacking::new(start, bytes, Arc::new(memory)) })
}

/// A device that runs nothing until it is waited for and fills no memory: an upload to it is the crate's part alone.
fn held() -> Result<(&'static Device, &'static SimDevice)> {
    static HELD: OnceLock<(Device, Arc<SimDevice>)> = OnceLock::new();
    if HELD.get().is_none() {
        let config = SimConfig {
            mode: SimMode::Deferred,
            memory: Some(zeros),
            ..SimConfig::default()
        };
        let sim = SimDevice::new(config)?;
        let device = Device::new(sim.clone())?;
        // As the memcpy beside it.
        device.set_packing_threads(1);
        let _ = HELD.set((device, sim));
    }
    let (device, sim) = HELD.get().ok_or("no device")?;
    Ok((device, sim))
}

/// Times what makes batches; what comes after is not timed.
fn each<T>(
    n: usize,
    time: Time,
    make: impl Fn() -> Result<T>,
    after: impl Fn(T) -> Result<()>,
) -> Result<Duration> {
    let mut took = Duration::ZERO;
    for _ in 0..n {
        let mut kept = None;
        took += time(&mut || {
            kept = Some(black_box(make()?));
            Ok(())
        })?;
        after(kept.ok_or("nothing was made")?)?;
    }
    Ok(took)
}

/// Runs what is left to do, and waits until staging memory is back.
fn settle(device: &Device, sim: &SimDevice) -> Result<()> {
    device.synchronize()?;
    while sim.report().live_events > 0 {
        std::thread::yield_now();
    }
    Ok(())
}

/// Up, until the call returns: the packing, and what queues the copies.
pub(crate) fn up_held(host: &RecordBatch, n: usize, time: Time) -> Result<Duration> {
    let (device, sim) = held()?;
    let up = || Ok(device.upload(host)?);
    each(n, time, up, |batch| {
        drop(batch);
        settle(device, sim)
    })
}

/// A device as [`Devices::simulated`](arrow_device::Devices::simulated) makes it.
fn fresh() -> Result<(Device, Arc<SimDevice>)> {
    let sim = SimDevice::new(SimConfig::default())?;
    Ok((Device::new(sim.clone())?, sim))
}

fn up(device: &Device, host: &RecordBatch) -> Result<DeviceRecordBatch> {
    let batch = device.upload(host)?;
    batch.wait()?;
    Ok(batch)
}

/// Up, until it is there: with the simulated device's own copies, and its poison.
pub(crate) fn up_whole(host: &RecordBatch, n: usize, time: Time) -> Result<Duration> {
    static DEVICE: OnceLock<(Device, Arc<SimDevice>)> = OnceLock::new();
    if DEVICE.get().is_none() {
        let _ = DEVICE.set(fresh()?);
    }
    let (device, sim) = DEVICE.get().ok_or("no device")?;
    each(
        n,
        time,
        || up(device, host),
        |batch| {
            drop(batch);
            settle(device, sim)
        },
    )
}

/// The same on a device that nobody has used yet.
pub(crate) fn up_cold(host: &RecordBatch, n: usize, time: Time) -> Result<Duration> {
    let mut took = Duration::ZERO;
    for _ in 0..n {
        let (device, _) = fresh()?;
        took += each(1, time, || up(&device, host), |_| Ok(()))?;
    }
    Ok(took)
}

/// Down from a device into host memory that nobody has used yet.
pub(crate) fn download_cold(host: &RecordBatch, n: usize, time: Time) -> Result<Duration> {
    let mut took = Duration::ZERO;
    for _ in 0..n {
        let (device, _) = fresh()?;
        let there = up(&device, host)?;
        device.trim();
        took += each(1, time, || Ok(there.to_host()?), |_| Ok(()))?;
    }
    Ok(took)
}
