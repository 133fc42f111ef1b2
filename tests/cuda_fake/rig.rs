//! CUDA devices on the stand-in driver.

use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use arrow_device::conformance::Hold;
use arrow_device::cuda::{CudaConfig, CudaMemory, CudaQueue};
use arrow_device::{Device, Devices, ImportOptions, Queue};
use cudarc::driver::sys;

use crate::fake::{Group, LAZY};

/// The ways in which the driver runs work.
pub const MODES: [u32; 2] = [0, LAZY];

/// A device, with import options that find it.
pub struct Rig {
    pub group: Group,
    pub device: Device,
    pub options: ImportOptions,
}

impl std::ops::Deref for Rig {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

impl Rig {
    /// Memory of the device itself.
    pub fn new(flags: u32) -> Self {
        Self::with(flags, CudaMemory::Device)
    }

    pub fn with(flags: u32, memory: CudaMemory) -> Self {
        let group = Group::open(1, flags);
        Self::of(group, &CudaConfig::new(group.ordinal()).with_memory(memory))
    }

    pub fn of(group: Group, config: &CudaConfig) -> Self {
        let device = config.open().unwrap();
        let devices = Devices::new();
        devices.add(device.clone()).unwrap();
        Self {
            group,
            device,
            options: ImportOptions::default().with_devices(devices),
        }
    }

    /// What the device still has, or did wrong. The device itself may be there.
    pub fn unclean(&self) -> Option<String> {
        let _ = self.device.synchronize();
        self.device.trim();
        unclean(self.group)
    }

    /// Everything was dropped: waits until all of it has gone.
    #[track_caller]
    pub fn assert_done(&self) {
        let mut last = None;
        let done = soon(|| {
            last = self.unclean();
            last.is_none()
        });
        assert!(done, "{:?}: {}", self.device, last.unwrap_or_default());
        assert_eq!(self.device.take_drop_error().map(|e| e.to_string()), None);
    }

    /// Drops the device, and checks that nothing of it is left.
    #[track_caller]
    pub fn end(self) {
        let group = self.group;
        drop(self);
        assert_gone(group);
    }
}

/// Nothing of a group is left, once the threads that free have done so.
#[track_caller]
pub fn assert_gone(group: Group) {
    soon(|| {
        group.drain();
        group.report().is_empty()
    });
    group.assert_clean();
}

/// What a group has that a device does not keep, or did wrong, when all is done that was queued.
pub fn unclean(group: Group) -> Option<String> {
    group.drain();
    let live = ["device", "pinned", "managed", "pending"].map(|what| (what, group.live(what)));
    let mut text: String = live
        .iter()
        .filter(|(_, n)| *n > 0)
        .map(|(what, n)| format!("{n} live {what}\n"))
        .collect();
    for line in group.report().lines() {
        if line.starts_with("violation") {
            text.push_str(line);
        }
    }
    (!text.is_empty()).then_some(text)
}

/// Whether something becomes true within a while.
pub fn soon(mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(10);
    while !done() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Something that a stream's work waits at until it is opened.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

/// Keeps a queue's stream busy with a host function.
pub fn hold(queue: &Queue) -> Hold {
    unsafe extern "C" fn pass(gate: *mut c_void) {
        // SAFETY: the reference that `hold` gave away.
        let gate = unsafe { Arc::from_raw(gate.cast_const().cast::<Gate>()) };
        let open = gate.open.lock().unwrap();
        drop(gate.opened.wait_while(open, |open| !*open).unwrap());
    }
    let gate = Arc::new(Gate::default());
    let data = Arc::into_raw(gate.clone()).cast_mut().cast();
    launch_host(queue, pass, data);
    Hold::new(move || {
        *gate.open.lock().unwrap() = true;
        gate.opened.notify_all();
    })
}

/// Queues a host function.
pub fn launch_host(queue: &Queue, f: unsafe extern "C" fn(*mut c_void), data: *mut c_void) {
    let stream = queue.raw().as_any().downcast_ref::<CudaQueue>().unwrap();
    let context = queue.device().as_cuda().unwrap().cu_context();
    let mut popped = std::ptr::null_mut();
    // SAFETY: context and stream live; the callers' functions take their data once.
    unsafe {
        assert_eq!(sys::cuCtxPushCurrent_v2(context) as i32, 0);
        let launched = sys::cuLaunchHostFunc(stream.cu_stream(), Some(f), data);
        assert_eq!(sys::cuCtxPopCurrent_v2(&raw mut popped) as i32, 0);
        assert_eq!(launched as i32, 0);
    }
}
