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
//!   `0xA5` when fresh. The addresses of freed memory are in quarantine: they are used again only
//!   after all others.
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
//! `sync_event` is an address that no other event of the process has or had, with nothing behind
//! it. Only the device that recorded the event can use it, in the same process; null means that
//! there is nothing to wait for. Since any producer of test data
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
//! A lasting error ends the device, as on a GPU: remaining work is dropped, and
//! every later call returns the same error, except frees and releases.
//!
//! After a `fork`, a simulated device works in the parent only, as a GPU does: in the child it can
//! be dropped with all that is on it, and every other use is an error (code 4). The child can make
//! simulated devices of its own unless another thread was using one when the process was forked.
//!
//! Simulated devices need Linux. On other systems, and under Miri, [`SimDevice::new`] returns
//! [`Error::DeviceNotAvailable`].

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, MutexGuard};

use crate::abi::ArrowDeviceType;
use crate::device::backend::out_of_memory;
use crate::device::engine::Reserved;
use crate::device::handle::RELEASES;
use crate::device::{
    AddressClass, Backend, Capabilities, DeviceId, DevicePtr, EventPtr, PointerInfo, RawQueue,
    Relation, absent,
};
use crate::error::{Error, Result};

mod control;
mod engine;
mod kernel;
mod memory;
mod queue;
mod state;
#[cfg(test)]
mod tests;

pub use control::{FaultOp, Faults, SimConfig, SimMode, SimReport};
pub use kernel::SimMemory;
pub use memory::SimBacking;
pub use queue::SimQueue;
use state::{Core, Point, State, is_host};

const INJECTED: i32 = 1;
const INVALID_ACCESS: i32 = 2;
const KERNEL: i32 = 3;
const MISUSE: i32 = 4;

/// The ids from this one on are those of devices that programs make.
const MADE: i64 = 1 << 20;

/// A simulated device.
///
/// Work that is still queued when it and its queues are dropped is finished in [`SimMode::Async`],
/// for which nobody waits, and dropped in [`SimMode::Deferred`].
///
/// ```
/// use arrow_device::device::sim::{SimConfig, SimDevice, SimMode};
/// use arrow_device::device::{Backend, CopyKind, CopyOp, DevicePtr};
/// # fn main() -> arrow_device::Result<()> {
/// # if cfg!(any(miri, not(target_os = "linux"))) { return Ok(()) }
/// let device = SimDevice::new(SimConfig { mode: SimMode::Deferred, ..SimConfig::default() })?;
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
    core: Arc<Core>,
    queue: Arc<SimQueue>,
}

impl fmt::Debug for SimDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let core = &self.core;
        write!(f, "SimDevice({}, {:?})", core.id, core.config.mode)
    }
}

impl SimDevice {
    /// Makes a device with an id that no other has in this process: `sim:1048576`, `sim:1048577`, ...
    /// ([`Devices::open`](crate::Devices::open) makes those with lower ones.)
    pub fn new(config: SimConfig) -> Result<Arc<Self>> {
        static NEXT: AtomicI64 = AtomicI64::new(MADE);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self::with_id(config, DeviceId::new(ArrowDeviceType::EXT_DEV, id))
    }

    /// Makes the device of an id that no other has, nor had, in this process.
    pub(crate) fn numbered(config: SimConfig, id: DeviceId) -> Result<Arc<Self>> {
        let reason = "simulated devices are numbered from 0 to 1048575; Devices::add adds others";
        match (0..MADE).contains(&id.id) {
            true => Self::with_id(config, id),
            false => Err(absent(id, reason)),
        }
    }

    fn with_id(config: SimConfig, id: DeviceId) -> Result<Arc<Self>> {
        if cfg!(any(miri, not(target_os = "linux"))) {
            return Err(absent(id, "simulated devices need Linux, and not Miri"));
        }
        let bytes = config.capacity_bytes.max(1);
        let addresses = Reserved::new(id, bytes).map_err(|e| {
            let advice = "SimConfig::capacity_bytes asks for fewer";
            absent(id, format!("{bytes} bytes of addresses: {e}; {advice}"))
        })?;
        let core = Core::new(id, config, addresses);
        let queue = Arc::new(SimQueue::new(core.clone()));
        Ok(Arc::new(Self { core, queue }))
    }

    /// Returns the failures to inject, and counts of operations.
    pub fn faults(&self) -> &Faults {
        &self.core.faults
    }

    /// Makes a program's host memory an allocation of the device, and returns its address. Nothing is copied.
    /// [`free_now`](Self::free_now) ends it.
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`] if the device has not as many addresses or the memory is not aligned to 64 bytes, and the error of a
    /// device that has failed.
    pub fn adopt(&self, backing: SimBacking) -> Result<DevicePtr> {
        let bytes = backing.bytes;
        let mut state = self.core.alive()?;
        self.core.count(FaultOp::Allocate, "adopt", bytes)?;
        let address = state.memory.allocate(bytes, || backing.first(bytes));
        let address = address.ok_or_else(|| out_of_memory(self.core.id, "adopt", bytes))?;
        Ok(DevicePtr::new(std::ptr::without_provenance_mut(address)))
    }

    /// Returns the owner of the program's memory in which these bytes of the device lie, and where in it they begin. Returns `None` if
    /// they are not the device's, or if it allocated the memory itself.
    pub fn backing(
        &self,
        address: DevicePtr,
        bytes: usize,
    ) -> Option<(Arc<dyn Any + Send + Sync>, usize)> {
        let state = self.core.here()?;
        let (allocation, within) = state.memory.find(address.address(), bytes).ok()?;
        Some((allocation.memory.owner.clone()?, within))
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
        let core = &self.core;
        core.check_process()?;
        let mut state = core.state();
        let address = core.begin_free(&mut state, base, bytes)?;
        state.memory.finish_free(address);
        Ok(())
    }
}

// SAFETY: the host does not read the memory; `classify` returns `Device` only inside one allocation that is
// not freed, and never `HostAccessible`; a position counts as reached only when the operations up
// to it have run, and the lock of the state makes them visible; host memory comes from the global
// allocator.
unsafe impl Backend for SimDevice {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(self.core.id)
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.queue.clone())
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        let core = &self.core;
        drop(core.alive()?);
        core.count(FaultOp::NewQueue, "new queue", 0)?;
        Ok(Arc::new(SimQueue::new(self.core.clone())))
    }

    unsafe fn check_event(&self, event: EventPtr) -> Result<()> {
        let core = &self.core;
        core.check_process()?;
        match core.state().events.contains_key(&event.as_ptr().addr()) {
            true => Ok(()),
            false => Err(Error::argument(format!(
                "{event:?} is not a live event of {}",
                core.id
            ))),
        }
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        let core = &self.core;
        let mut state = core.alive()?;
        let point = core.point_of(&mut state, event, "query event")?;
        // The release thread asks at any time and any number of times.
        if std::thread::current().name() != Some(RELEASES) {
            core.count(FaultOp::Query, "query event", 0)?;
        }
        Ok(state.reached(point))
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        let core = &self.core;
        let mut state = core.alive()?;
        let point = core.point_of(&mut state, event, "wait event")?;
        core.count(FaultOp::HostWait, "wait event", 0)?;
        drop(state);
        core.wait(point, "wait event")
    }

    unsafe fn release_event(&self, event: EventPtr) {
        let Some(mut state) = self.core.here() else {
            return;
        };
        if state.events.remove(&event.as_ptr().addr()).is_none() {
            let text = format!("release of {event:?}: not a live event (double release?)");
            state.violations.push(text);
        }
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        let core = &self.core;
        let owned = |state: MutexGuard<'_, State>| {
            let found = state.memory.find(address.address(), bytes);
            found.is_ok_and(|(allocation, _)| !allocation.freeing)
        };
        let class = match core.here().map(owned) {
            Some(true) => AddressClass::Device,
            // Only the copy engine reads host memory, work on the device does not.
            Some(false) if is_host(address, bytes) => AddressClass::Host,
            _ => AddressClass::Inaccessible,
        };
        PointerInfo::new(class, address.range(bytes))
    }

    fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        let core = &self.core;
        drop(core.alive()?);
        if bytes == 0 {
            return Err(Error::argument("host allocation of 0 bytes"));
        }
        let operation = "allocate_host";
        core.count(FaultOp::HostAllocate, operation, bytes)?;
        let memory = SimBacking::allocate(bytes);
        let memory = memory.ok_or_else(|| out_of_memory(core.id, operation, bytes))?;
        let start = memory.start;
        let memory = Arc::new(memory);
        core.state().host.insert(start.addr().get(), memory);
        Ok(Some(DevicePtr::new(start.as_ptr().cast())))
    }

    unsafe fn free_host(&self, address: DevicePtr, bytes: usize) {
        let Some(mut state) = self.core.here() else {
            return;
        };
        let start = address.address();
        let why = match state.host.get(&start) {
            None => "not a live host allocation (double free?)",
            Some(memory) if memory.bytes != bytes => "allocated with another length",
            // It stays allocated, so that the copy stays harmless.
            Some(memory) if Arc::strong_count(memory) > 1 => "a queued copy uses it",
            Some(_) => {
                state.host.remove(&start);
                return;
            }
        };
        let text = format!("host free of {address:?} ({bytes} bytes): {why}");
        state.violations.push(text);
    }

    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        is_host(address, bytes)
    }

    fn relation(&self, other: &dyn Backend) -> Relation {
        let other = other.downcast_ref::<Self>();
        let is_peer = |other: &Self| self.core.config.peer_access || other.core.id == self.core.id;
        Relation {
            copies: other.is_some_and(is_peer),
            waits: false,
        }
    }

    fn synchronize(&self) -> Result<()> {
        let core = &self.core;
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
}
