//! The simulated device (`ARROW_DEVICE_EXT_DEV`), for programs and tests without a GPU.
//!
//! ```
//! use arrow_array::record_batch;
//! use arrow_device::{Device, device::sim::{SimConfig, SimDevice}};
//! # fn main() -> arrow_device::Result<()> {
//! # if cfg!(any(miri, not(target_os = "linux"))) { return Ok(()) }
//! let sim = SimDevice::new(SimConfig::default())?;
//! let device = Device::new(sim.clone())?;
//! let batch = record_batch!(("id", Int32, [1, 2, 3]))?;
//! assert_eq!(device.upload(&batch)?.to_host()?, batch);
//! assert!(sim.report().violations.is_empty());
//! # Ok(())
//! # }
//! ```
//!
//! It is as strict as a real device:
//! - **The host cannot touch its memory.** A load or store through a [`DevicePtr`] ends the process
//!   with SIGSEGV; a system call with such an address fails with EFAULT.
//! - **Its queues are asynchronous.** Copies read and write host memory when they run, not when
//!   they are submitted. In [`SimMode::Deferred`] nothing runs until a thread waits for it, so a
//!   missing wait fails every time. Lists of copies run with the last one first.
//! - **Every access is checked when it runs** against the live allocations. Memory is filled with
//!   `0xA5` when fresh and with `0x5A` when freed, surrounded by red zones, and quarantined before
//!   it is used again.
//! - **[Failures](Faults)** can be injected, and [`SimDevice::report`] counts leaks, double frees,
//!   host memory that is freed under a copy, and similar errors.
//!
//! [Kernels](SimQueue::launch) are closures that run on a queue with a view of device memory.
//! [`Queue::as_sim`] returns what launches them.
//!
//! [`Queue::as_sim`]: crate::Queue::as_sim
//!
//! # The event type
//!
//! The specification leaves the event type of `ARROW_DEVICE_EXT_DEV` to the producer. Here
//! `sync_event` points to a [`SimEvent`]. Only the device that recorded the event can use it, in
//! the same process; null means that there is nothing to wait for. Since any producer of test data
//! may use this device type, a simulated device accepts only its own addresses and events.
//!
//! # Errors
//!
//! An [`Error::Device`] of a simulated device has one of these codes:
//!
//! | code | meaning | lasting |
//! |---|---|---|
//! | 1 | an injected failure | no |
//! | 2 | queued work touched memory that it must not touch | yes |
//! | 3 | a kernel failed | yes |
//! | 4 | a call that is wrong in itself: a double free, a released event, a wait inside a kernel | no |
//!
//! A lasting error ends the device, as on a GPU: remaining work is dropped, wakers are called, and
//! every later call returns the same error, except frees and releases.
//!
//! After a `fork`, a simulated device works in the parent only, as a GPU does: in the child it can
//! be dropped with all that is on it, and every other use is an error (code 4). The child can make
//! simulated devices of its own.
//!
//! Simulated devices need Linux. On other systems, and under Miri, [`SimDevice::new`] returns
//! [`Error::DeviceNotAvailable`].

use std::alloc::Layout;
use std::any::Any;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::task::Waker;

use crate::abi::ArrowDeviceType;
use crate::device::{
    AddressClass, Backend, DeviceId, DevicePtr, EventPtr, Notify, RawQueue, device_error, lock,
};
use crate::error::{Error, Result};

mod clock;
mod config;
mod copy;
mod engine;
mod event;
mod fault;
mod kernel;
mod memory;
mod queue;
mod report;
mod state;
#[cfg(test)]
mod tests;

pub use config::{SimConfig, SimMode};
use copy::is_host;
use engine::Handle;
use event::Point;
pub use event::SimEvent;
pub use fault::{FaultOp, Faults};
pub use kernel::SimMemory;
pub use queue::SimQueue;
pub use report::SimReport;
use state::{Core, HostBlock, State};

const INJECTED: i32 = 1;
const INVALID_ACCESS: i32 = 2;
const KERNEL: i32 = 3;
const MISUSE: i32 = 4;

/// Why queued work failed.
#[derive(Debug)]
struct SimError {
    operation: &'static str,
    code: i32,
    message: String,
}

/// The ids of this process's simulated devices, those that are gone included.
static IDS: Mutex<Ids> = Mutex::new(Ids {
    last: 0,
    named: BTreeSet::new(),
});

struct Ids {
    /// All from 1 to this one were given out, or are in `named`.
    last: i64,
    /// Those that were requested by name.
    named: BTreeSet<i64>,
}

impl Ids {
    fn next(&mut self) -> i64 {
        loop {
            self.last += 1;
            if !self.named.contains(&self.last) {
                return self.last;
            }
        }
    }

    fn name(&mut self, device: DeviceId) -> Result<()> {
        let reason = if device.id < 0 {
            "simulated devices are numbered from 0"
        } else if (1..=self.last).contains(&device.id) || !self.named.insert(device.id) {
            "the program has made a simulated device of this number itself; Devices::add adds it"
        } else {
            return Ok(());
        };
        Err(Error::DeviceNotAvailable {
            device,
            reason: reason.into(),
        })
    }
}

/// A simulated device.
///
/// It lives until it and its queues are dropped. Work that is still queued then is finished in
/// [`SimMode::Async`] and dropped in [`SimMode::Deferred`].
///
/// ```
/// use arrow_device::device::sim::{SimConfig, SimDevice, SimMode};
/// use arrow_device::device::{Backend, CopyKind, CopyOp, DevicePtr};
/// # fn main() -> arrow_device::Result<()> {
/// # if cfg!(any(miri, not(target_os = "linux"))) { return Ok(()) }
/// let device = SimDevice::new(SimConfig::default().with_mode(SimMode::Deferred))?;
/// let queue = device.default_queue()?;
/// let memory = queue.allocate(64)?;
/// let mut host = [0u8; 64];
/// let download = CopyOp {
///     src: memory,
///     dst: DevicePtr::new(host.as_mut_ptr().cast()),
///     bytes: 64,
///     kind: CopyKind::DeviceToHost,
/// };
/// // SAFETY: `memory` is live, and `host` stays until the work was waited for.
/// unsafe {
///     queue.fill(memory, 7, 64)?;
///     queue.copy(&[download])?;
///     let event = queue.record()?;
///     assert!(!device.query_event(event)?); // nothing has run yet
///     device.wait_event(event)?;
///     device.release_event(event);
///     queue.free(memory, 64)?;
/// }
/// assert_eq!(host, [7; 64]);
/// device.assert_clean();
/// # Ok(())
/// # }
/// ```
pub struct SimDevice {
    handle: Arc<Handle>,
    queue: Arc<SimQueue>,
}

impl fmt::Debug for SimDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let core = self.core();
        write!(f, "SimDevice({}, {:?})", core.id, core.config.mode)
    }
}

impl SimDevice {
    /// Makes a device with an id that no other has in this process: `sim:1`, `sim:2`, ...
    /// ([`Devices::simulated`](crate::Devices::simulated) makes `sim`.)
    pub fn new(config: SimConfig) -> Result<Arc<Self>> {
        let id = lock(&IDS).next();
        Self::with_id(config, DeviceId::new(ArrowDeviceType::EXT_DEV, id))
    }

    /// Makes the device of an id that no other has, nor had, in this process.
    pub(crate) fn numbered(config: SimConfig, id: DeviceId) -> Result<Arc<Self>> {
        lock(&IDS).name(id)?;
        Self::with_id(config, id).inspect_err(|_| {
            lock(&IDS).named.remove(&id.id);
        })
    }

    fn with_id(config: SimConfig, id: DeviceId) -> Result<Arc<Self>> {
        /// A multiple of any system's page size.
        const PAGE_BYTES: usize = 1 << 16;

        let bytes = config.capacity_bytes.max(1);
        let bytes = bytes
            .checked_next_multiple_of(PAGE_BYTES)
            .ok_or_else(|| Error::argument("capacity of a simulated device is too large"))?;
        let mapping = memory::Mapping::new(bytes).map_err(|why| Error::DeviceNotAvailable {
            device: id,
            reason: why.into(),
        })?;
        let core = Core::new(id, config, mapping);
        copy::register(&core);
        let handle = Arc::new(Handle(core));
        let queue = Arc::new(SimQueue::new(handle.clone()));
        Ok(Arc::new(Self { handle, queue }))
    }

    /// Returns the failures to inject, and counts of operations.
    pub fn faults(&self) -> &Faults {
        &self.core().faults
    }

    /// Frees an allocation at once, in no queue's order and without running queued work, which
    /// fails when it runs if it still uses the memory.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if this is not a live allocation of the device with this length.
    ///
    /// # Safety
    /// As [`RawQueue::free`]; no operation that uses the memory is running.
    pub unsafe fn free_now(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        let core = self.core();
        core.check_process()?;
        let mut state = core.state();
        let offset = core.begin_free(&mut state, base, bytes)?;
        let freed = state.finish_free(&core.mapping, offset);
        drop(state);
        core.retire(freed);
        Ok(())
    }

    fn core(&self) -> &Arc<Core> {
        &self.handle.0
    }
}

impl Core {
    /// Marks an allocation as freed, and returns its byte offset. Anything else is refused, and
    /// becomes a violation.
    fn begin_free(&self, state: &mut State, base: DevicePtr, bytes: usize) -> Result<usize> {
        let freed = match self.mapping.offset(base.address()) {
            Some(offset) => state.memory.begin_free(offset, bytes).map(|()| offset),
            None => Err("not an address of this device".into()),
        };
        freed.map_err(|why| {
            let text = format!("free of {base:?} ({bytes} bytes): {why}");
            state.violations.push(text.clone());
            device_error(self.id, "free", MISUSE, text)
        })
    }

    /// Returns the position of a live event of this device. Anything else is refused, and becomes a
    /// violation.
    fn point_of(
        &self,
        state: &mut State,
        event: EventPtr,
        operation: &'static str,
    ) -> Result<Point> {
        state.events.find(event).ok_or_else(|| {
            let text = format!("{event:?} is not a live event of {}", self.id);
            state.violations.push(format!("{operation}: {text}"));
            device_error(self.id, operation, MISUSE, text)
        })
    }
}

/// Returns the layout of a host allocation.
fn host_layout(bytes: usize) -> Result<Layout> {
    match Layout::from_size_align(bytes, 64) {
        Ok(layout) if bytes > 0 => Ok(layout),
        _ => Err(Error::argument(format!("host allocation of {bytes} bytes"))),
    }
}

// SAFETY: `host_readable` is false; `classify` returns `Device` only inside one allocation that is
// not freed, and never `HostAccessible`; a position counts as reached only when the operations up
// to it have run, and the lock of the state makes them visible; host memory comes from the global
// allocator.
unsafe impl Backend for SimDevice {
    fn id(&self) -> DeviceId {
        self.core().id
    }

    fn host_readable(&self) -> bool {
        false
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.queue.clone())
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        let core = self.core();
        drop(core.alive()?);
        core.faults
            .pass(FaultOp::NewQueue, core.id, "new queue", 0)?;
        Ok(Arc::new(SimQueue::new(self.handle.clone())))
    }

    unsafe fn check_event(&self, event: EventPtr) -> Result<()> {
        let core = self.core();
        core.check_process()?;
        match core.state().events.find(event) {
            Some(_) => Ok(()),
            None => Err(Error::argument(format!(
                "{event:?} is not a live event of {}",
                core.id
            ))),
        }
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        let core = self.core();
        let mut state = core.alive()?;
        let point = core.point_of(&mut state, event, "query event")?;
        core.faults
            .pass(FaultOp::Query, core.id, "query event", 0)?;
        Ok(state.reached(point))
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        let core = self.core();
        let mut state = core.alive()?;
        let point = core.point_of(&mut state, event, "wait event")?;
        core.faults
            .pass(FaultOp::HostWait, core.id, "wait event", 0)?;
        drop(state);
        core.wait(point, "wait event")
    }

    unsafe fn notify_event(&self, event: EventPtr, waker: &Waker) -> Result<Notify> {
        // Cloned and dropped while no lock is held: both run code of the waker's.
        let waker = waker.clone();
        let core = self.core();
        let mut state = core.alive()?;
        let point = core.point_of(&mut state, event, "notify event")?;
        core.faults
            .pass(FaultOp::Query, core.id, "notify event", 0)?;
        if state.reached(point) {
            return Ok(Notify::Completed);
        }
        let queue = state.queues.get_mut(&point.queue);
        let unused = queue.map(|queue| queue.wakers.add(point.position, waker));
        drop(state);
        drop(unused);
        Ok(Notify::Registered)
    }

    unsafe fn release_event(&self, event: EventPtr) {
        if self.core().is_forked() {
            return;
        }
        let mut state = self.core().state();
        if !state.events.release(event) {
            let text = format!("release of {event:?}: not a live event (double release?)");
            state.violations.push(text);
        }
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> AddressClass {
        let core = self.core();
        let offset = core.mapping.offset(address.address());
        if core.is_forked() {
            return AddressClass::Inaccessible;
        }
        match offset {
            Some(offset) if core.state().memory.owned(offset, bytes) => AddressClass::Device,
            // Only the copy engine reads host memory, work on the device does not.
            None if !address.is_null() && self.copies_directly_from(address, bytes) => {
                AddressClass::Host
            }
            _ => AddressClass::Inaccessible,
        }
    }

    fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        let core = self.core();
        drop(core.alive()?);
        let layout = host_layout(bytes)?;
        let operation = "allocate_host";
        core.faults
            .pass(FaultOp::HostAllocate, core.id, operation, bytes)?;
        // SAFETY: the layout is not empty.
        let memory = unsafe { std::alloc::alloc(layout) };
        if memory.is_null() {
            return Err(Error::OutOfMemory {
                device: core.id,
                operation,
                bytes,
            });
        }
        // SAFETY: the memory was just allocated with this length, and nothing else has it.
        core.clock
            .filling(|| unsafe { memory.write_bytes(memory::FRESH, bytes) });
        let block = HostBlock { bytes, copies: 0 };
        core.state().host.0.insert(memory.addr(), block);
        Ok(Some(DevicePtr::new(memory.cast())))
    }

    unsafe fn free_host(&self, address: DevicePtr, bytes: usize) {
        if self.core().is_forked() {
            return;
        }
        let mut state = self.core().state();
        let start = address.address();
        let why = match state.host.0.get(&start) {
            None => "not a live host allocation (double free?)",
            Some(block) if block.bytes != bytes => "allocated with another length",
            // It stays allocated, so that the copy stays harmless.
            Some(block) if block.copies > 0 => "a queued copy uses it",
            Some(_) => {
                state.host.0.remove(&start);
                drop(state);
                if let Ok(layout) = host_layout(bytes) {
                    // SAFETY: `allocate_host` allocated it with this layout, and it is freed once:
                    // it was in `host`.
                    unsafe { std::alloc::dealloc(address.as_ptr().cast(), layout) };
                }
                return;
            }
        };
        let text = format!("host free of {address:?} ({bytes} bytes): {why}");
        state.violations.push(text);
    }

    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        is_host(address, bytes)
    }

    fn reaches(&self, other: &dyn Backend) -> bool {
        let Some(other) = other.as_any().downcast_ref::<Self>() else {
            return false;
        };
        self.core().config.peer_access || other.id() == self.id()
    }

    fn synchronize(&self) -> Result<()> {
        let core = self.core();
        // Nothing is injected here: an error says that the device has failed for good.
        let state = core.alive()?;
        let points = state.queues.iter().map(|(id, queue)| Point {
            queue: *id,
            position: queue.submitted,
        });
        let points: Vec<_> = points.collect();
        drop(state);
        points
            .into_iter()
            .try_for_each(|point| core.wait(point, "synchronize"))
    }

    fn settle(&self) -> Result<()> {
        match self.core().is_forked() {
            // The work is the parent's.
            true => Ok(()),
            false => self.synchronize(),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
