//! A simulated device for a peer to build its own device on: memory, queues and events, through C functions.
//!
//! Addresses are those that a struct's `buffers` hold: the host cannot touch them. Events are what `sync_event` points
//! to. Functions answer with 0 or an errno; `peers_cpp_last_error` has the text. None of what is done here stands in
//! the counts of [`peers_sim_stats`], which are those of this crate's own work.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_device::device::sim::{SimConfig, SimDevice, SimMode};
use arrow_device::device::{Backend, CopyKind, CopyOp, DevicePtr, EventPtr, RawQueue};
use arrow_device::{Device, Devices};

use crate::cpp::answer::{Failure, answer};

/// A device, and the set that imports find it in.
pub(crate) struct PeersSim {
    sim: Arc<SimDevice>,
    pub device: Device,
    pub devices: Devices,
}

/// A queue of a device's.
pub(crate) struct PeersQueue {
    sim: Arc<SimDevice>,
    queue: Arc<dyn RawQueue>,
}

/// What this crate did on a device, and what is live there.
#[repr(C)]
#[derive(Default)]
pub(crate) struct PeersStats {
    pub copies: u64,
    pub bytes_to_device: u64,
    pub bytes_to_host: u64,
    pub bytes_on_device: u64,
    pub events: u64,
    pub queue_waits: u64,
    pub host_waits: u64,
    pub live_allocations: u64,
    pub live_events: u64,
    pub pending_operations: u64,
    pub violations: u64,
}

fn event(event: *mut c_void) -> Result<EventPtr, Failure> {
    EventPtr::new(event).ok_or_else(|| "the event is null".into())
}

/// A new device. `lazy`: queued work runs only when it is waited for. Starts with one holder; null if there is none.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn peers_sim_new(lazy: bool) -> *const PeersSim {
    let mode = if lazy {
        SimMode::Deferred
    } else {
        SimMode::Async
    };
    let mut made = std::ptr::null();
    answer(|| {
        let sim = SimDevice::new(SimConfig::default().with_mode(mode))?;
        let device = Device::new(sim.clone())?;
        let devices = Devices::new();
        devices.add(device.clone())?;
        made = Arc::into_raw(Arc::new(PeersSim {
            sim,
            device,
            devices,
        }));
        Ok(())
    });
    made
}

/// One holder more.
///
/// # Safety
/// `sim` is live.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_hold(sim: *const PeersSim) {
    // SAFETY: the pointer came from `peers_sim_new`, and the caller holds a share of it.
    unsafe { Arc::increment_strong_count(sim) }
}

/// One holder less.
///
/// # Safety
/// The caller is one of the holders, and is none any more.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_drop(sim: *const PeersSim) {
    answer(|| {
        // SAFETY: the pointer came from `peers_sim_new`, and this is the caller's share, given up
        // once.
        drop(unsafe { Arc::from_raw(sim) });
        Ok(())
    });
}

/// The id for `ArrowDeviceArray.device_id`; its type is ARROW_DEVICE_EXT_DEV.
///
/// # Safety
/// `sim` is live.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_id(sim: &PeersSim) -> i64 {
    sim.sim.id().id
}

/// # Safety
/// `sim` is live; `out` is valid for writes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_stats(sim: &PeersSim, out: &mut PeersStats) {
    let (stats, report) = (sim.device.stats(), sim.sim.report());
    *out = PeersStats {
        copies: stats.copies,
        bytes_to_device: stats.bytes_to_device,
        bytes_to_host: stats.bytes_to_host,
        bytes_on_device: stats.bytes_on_device,
        events: stats.events,
        queue_waits: stats.queue_waits,
        host_waits: stats.host_waits,
        live_allocations: report.live_allocations as u64,
        live_events: report.live_events as u64,
        pending_operations: report.pending_operations as u64,
        violations: report.violations.len() as u64,
    };
}

/// Runs all work, and fails unless everything is freed and nothing was done wrong.
///
/// # Safety
/// `sim` is live.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_check(sim: &PeersSim) -> c_int {
    answer(|| {
        let until = Instant::now() + Duration::from_secs(5);
        loop {
            sim.device.synchronize()?;
            sim.device.trim();
            let report = sim.sim.report();
            if report.is_clean() {
                break;
            }
            if Instant::now() > until {
                return Err(Failure::differs(format!("{report:#?}")));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        match sim.device.take_drop_error() {
            Some(e) => Err(e.into()),
            None => Ok(()),
        }
    })
}

/// # Safety
/// `sim` is live; `out` is valid for writes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_queue_new(
    sim: &PeersSim,
    out: &mut *mut PeersQueue,
) -> c_int {
    answer(|| {
        let queue = sim.sim.new_queue()?;
        let sim = sim.sim.clone();
        *out = Box::into_raw(Box::new(PeersQueue { sim, queue }));
        Ok(())
    })
}

/// # Safety
/// `queue` came from `peers_sim_queue_new`, and is not used any more.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_queue_drop(queue: *mut PeersQueue) {
    answer(|| {
        // SAFETY: the pointer came from `Box::into_raw`, and the box is taken back once.
        drop(unsafe { Box::from_raw(queue) });
        Ok(())
    });
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

/// Copies later, in the queue's order: `how` is 1 to the device, 2 to the host, 3 on the device.
///
/// # Safety
/// `queue` is live; the memory is valid for `bytes` bytes and lives, unchanged, until the copy has completed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_copy(
    queue: &PeersQueue,
    dst: *mut c_void,
    src: *const c_void,
    bytes: usize,
    how: c_int,
) -> c_int {
    answer(|| {
        let kind = match how {
            1 => CopyKind::HostToDevice,
            2 => CopyKind::DeviceToHost,
            3 => CopyKind::DeviceToDevice,
            _ => return Err("no such kind of copy".into()),
        };
        let copy = CopyOp {
            src: DevicePtr::new(src.cast_mut()),
            dst: DevicePtr::new(dst),
            bytes,
            kind,
        };
        // SAFETY: the caller guarantees both ranges until the copy completes (see `# Safety`).
        Ok(unsafe { queue.queue.copy(&[copy]) }?)
    })
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
    // SAFETY: the caller guarantees that the event is live and of this device, which is what the
    // simulated device requires.
    answer(|| Ok(unsafe { queue.queue.wait(event(on)?) }?))
}

/// Makes this thread wait for the queue's work so far.
///
/// # Safety
/// `queue` is live.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_queue_finish(queue: &PeersQueue) -> c_int {
    answer(|| {
        let event = queue.queue.record()?;
        // SAFETY: the event was just recorded on this device, and nothing else uses it.
        let waited = unsafe { queue.sim.wait_event(event) };
        // SAFETY: the event was recorded above, and this is its last use.
        unsafe { queue.sim.release_event(event) };
        Ok(waited?)
    })
}

/// Makes this thread wait.
///
/// # Safety
/// `sim` is live; the event is one of its own.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_wait(sim: &PeersSim, on: *mut c_void) -> c_int {
    // SAFETY: the caller guarantees that the event is live and of this device, which is what the
    // simulated device requires.
    answer(|| Ok(unsafe { sim.sim.wait_event(event(on)?) }?))
}

/// # Safety
/// `sim` is live; the event came from `peers_sim_record`, and is not used any more.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_sim_event_drop(sim: &PeersSim, on: *mut c_void) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that the event is live and of this device, which is what
        // the simulated device requires.
        unsafe { sim.sim.release_event(event(on)?) };
        Ok(())
    })
}
