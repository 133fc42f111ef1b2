//! Tests of the simulated device. Under Miri, which has no addresses without memory, they end at once.

use std::sync::Arc;

use super::*;
use crate::device::{CopyKind, CopyOp};

mod ends;
mod faults;
mod memory;
mod queues;

/// A device, or `None` where there are none.
fn device(config: SimConfig) -> Option<Arc<SimDevice>> {
    match SimDevice::new(config) {
        Ok(device) => Some(device),
        Err(error) if cfg!(any(miri, not(target_os = "linux"))) => {
            assert!(matches!(error, Error::DeviceNotAvailable { .. }), "{error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn deferred() -> Option<Arc<SimDevice>> {
    device(SimConfig {
        mode: SimMode::Deferred,
        ..small()
    })
}

fn small() -> SimConfig {
    SimConfig {
        capacity_bytes: 16 << 20,
        ..SimConfig::default()
    }
}

fn sim(queue: &Arc<dyn RawQueue>) -> &SimQueue {
    queue.downcast_ref().unwrap()
}

impl SimQueue {
    /// Launches a kernel of these tests: no arrow data is near.
    fn run(
        &self,
        kernel: impl FnOnce(&mut SimMemory<'_>) -> Result<(), String> + Send + 'static,
    ) -> Result<()> {
        // SAFETY: the tests' memory is no arrow data.
        unsafe { self.launch(kernel) }
    }
}

/// Queues a copy to the device. `host` outlives the work in every caller.
fn upload(queue: &Arc<dyn RawQueue>, host: &[u8], dst: DevicePtr) -> Result<()> {
    let copy = CopyOp {
        src: DevicePtr::new(host.as_ptr().cast_mut().cast()),
        dst,
        bytes: host.len(),
        kind: CopyKind::HostToDevice,
    };
    // SAFETY: callers keep `host` until they have waited.
    unsafe { queue.copy(&[copy]) }
}

/// Queues a copy to the host.
fn download(queue: &Arc<dyn RawQueue>, src: DevicePtr, host: &mut [u8]) -> Result<()> {
    let copy = CopyOp {
        src,
        dst: DevicePtr::new(host.as_mut_ptr().cast()),
        bytes: host.len(),
        kind: CopyKind::DeviceToHost,
    };
    // SAFETY: callers keep `host` until they have waited.
    unsafe { queue.copy(&[copy]) }
}

fn fill(queue: &Arc<dyn RawQueue>, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
    // SAFETY: checked when it runs.
    unsafe { queue.fill(dst, byte, bytes) }
}

fn free(queue: &Arc<dyn RawQueue>, base: DevicePtr, bytes: usize) -> Result<()> {
    // SAFETY: what breaks the rules is noted and refused, which is what is tested.
    unsafe { queue.free(base, bytes) }
}

/// What `bytes` bytes of device memory hold, after waiting.
fn contents(
    device: &SimDevice,
    queue: &Arc<dyn RawQueue>,
    src: DevicePtr,
    bytes: usize,
) -> Vec<u8> {
    let mut host = vec![0; bytes];
    download(queue, src, &mut host).unwrap();
    finish(device, queue).unwrap();
    host
}

/// Waits for all work of a queue.
fn finish(device: &SimDevice, queue: &Arc<dyn RawQueue>) -> Result<()> {
    let event = queue.record()?;
    // SAFETY: just recorded, released once.
    unsafe {
        let waited = device.wait_event(event);
        device.release_event(event);
        waited
    }
}

fn query(device: &SimDevice, event: EventPtr) -> Result<bool> {
    // SAFETY: dead events are refused without following the pointer.
    unsafe { device.query_event(event) }
}

fn wait(device: &SimDevice, event: EventPtr) -> Result<()> {
    // SAFETY: dead events are refused without following the pointer.
    unsafe { device.wait_event(event) }
}

fn release(device: &SimDevice, event: EventPtr) {
    // SAFETY: dead events are refused without following the pointer.
    unsafe { device.release_event(event) }
}

fn code(result: Result<impl std::fmt::Debug>) -> i32 {
    match result {
        Err(Error::Device { code, .. }) => code,
        other => panic!("{other:?}"),
    }
}
