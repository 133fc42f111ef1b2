//! Simulated devices for a peer to build its own device on: memory, queues and events, through C functions.
//!
//! A device is given by its number N; its name is `sim:N`. Addresses are those that a struct's `buffers` hold: the host
//! cannot touch them. Events are what `sync_event` points to. What is done here is not in the device's statistics,
//! which are those of this crate's own work.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use arrow_device::device::sim::{SimConfig, SimDevice, SimMode};
use arrow_device::device::{CopyKind, CopyOp, DeviceId, DevicePtr, EventPtr, RawQueue};
use arrow_device::{ArrowDeviceType, Device, Devices};

use crate::answer::{Outcome, answer};

/// A queue of a device's.
pub(crate) struct PeersQueue {
    device: Device,
    queue: Arc<dyn RawQueue>,
}

fn device(number: i64) -> Outcome<Device> {
    let id = DeviceId::new(ArrowDeviceType::EXT_DEV, number);
    Ok(Devices::global().get(id)?)
}

fn event(event: *mut c_void) -> Outcome<EventPtr> {
    EventPtr::new(event).ok_or_else(|| "the event is null".into())
}

/// Makes a device, which the process keeps. `lazy`: queued work runs only when it is waited for.
///
/// # Safety
/// `number` is valid for writes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_new(lazy: bool, number: &mut i64) -> c_int {
    answer(|| {
        let mode = match lazy {
            true => SimMode::Deferred,
            false => SimMode::Async,
        };
        let sim = SimDevice::new(SimConfig {
            mode,
            ..SimConfig::default()
        })?;
        let device = Device::new(sim)?;
        *number = device.id().id;
        Ok(Devices::global().add(device)?)
    })
}

/// # Safety
/// `out` is valid for writes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_queue_new(
    number: i64,
    out: &mut *mut PeersQueue,
) -> c_int {
    answer(|| {
        let device = device(number)?;
        let queue = device.backend().new_queue()?;
        *out = Box::into_raw(Box::new(PeersQueue { device, queue }));
        Ok(())
    })
}

/// # Safety
/// `queue` came from `peers_sim_queue_new`, and is not used any more.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_queue_drop(queue: *mut PeersQueue) {
    // SAFETY: the pointer came from `Box::into_raw`, and the box is taken back once.
    drop(unsafe { Box::from_raw(queue) });
}

/// # Safety
/// `queue` is live; `out` is valid for writes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_allocate(
    queue: &PeersQueue,
    bytes: usize,
    out: &mut *mut c_void,
) -> c_int {
    answer(|| {
        *out = queue.queue.allocate(bytes)?.as_ptr();
        Ok(())
    })
}

/// After the work that the queue was given so far.
///
/// # Safety
/// `queue` is live; `address` and `bytes` are those of one allocation, which no other work uses any more.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_free(
    queue: &PeersQueue,
    address: *mut c_void,
    bytes: usize,
) -> c_int {
    // SAFETY: the caller guarantees that the block is this queue's and is not used again (see `# Safety`).
    answer(|| Ok(unsafe { queue.queue.free(DevicePtr::new(address), bytes) }?))
}

/// Copies later, in the queue's order, to the device or to the host.
///
/// # Safety
/// `queue` is live; the memory is valid for `bytes` bytes and lives, unchanged, until the copy has completed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_copy(
    queue: &PeersQueue,
    dst: *mut c_void,
    src: *const c_void,
    bytes: usize,
    to_device: bool,
) -> c_int {
    let kind = match to_device {
        true => CopyKind::HostToDevice,
        false => CopyKind::DeviceToHost,
    };
    let copy = CopyOp {
        src: DevicePtr::new(src.cast_mut()),
        dst: DevicePtr::new(dst),
        bytes,
        kind,
    };
    // SAFETY: the caller guarantees both ranges until the copy completes (see `# Safety`).
    answer(|| Ok(unsafe { queue.queue.copy(&[copy]) }?))
}

/// Records an event after the queue's work so far.
///
/// # Safety
/// `queue` is live; `out` is valid for writes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_record(
    queue: &PeersQueue,
    out: &mut *mut c_void,
) -> c_int {
    answer(|| {
        *out = queue.queue.record()?.as_ptr();
        Ok(())
    })
}

/// Makes later work of the queue wait.
///
/// # Safety
/// `queue` is live; the event is one of its device.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_queue_wait(queue: &PeersQueue, on: *mut c_void) -> c_int {
    // SAFETY: the caller guarantees that the event is live and of this device (see `# Safety`).
    answer(|| Ok(unsafe { queue.queue.wait(event(on)?) }.map(drop)?))
}

/// Makes this thread wait for the queue's work so far.
///
/// # Safety
/// `queue` is live.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_queue_finish(queue: &PeersQueue) -> c_int {
    answer(|| {
        let (backend, event) = (queue.device.backend(), queue.queue.record()?);
        // SAFETY: the event was just recorded on this device, and nothing else uses it.
        let waited = unsafe { backend.wait_event(event) };
        // SAFETY: the event was recorded above, and this is its last use.
        unsafe { backend.release_event(event) };
        Ok(waited?)
    })
}

/// Makes this thread wait.
///
/// # Safety
/// The event is live and one of the device.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_wait(number: i64, on: *mut c_void) -> c_int {
    // SAFETY: the caller guarantees that the event is live and of this device (see `# Safety`).
    answer(|| Ok(unsafe { device(number)?.backend().wait_event(event(on)?) }?))
}

/// # Safety
/// The event came from `peers_sim_record`, on the device, and is not used any more.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_event_drop(number: i64, on: *mut c_void) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that the event is live, of this device and not used again (see `# Safety`).
        unsafe { device(number)?.backend().release_event(event(on)?) };
        Ok(())
    })
}
