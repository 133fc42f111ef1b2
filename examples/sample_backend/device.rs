//! The device: what it is, and what is asked about its events and addresses.

use std::fmt;
use std::sync::Arc;

use arrow_device::device::parts::{Failure, Process};
use arrow_device::device::{
    AddressClass, Backend, Capabilities, DevicePtr, EventPtr, PointerInfo, RawQueue,
};
use arrow_device::{ArrowDeviceType, DeviceId, Result};

use super::event::Events;
use super::memory::Memory;
use super::queue::{Backlog, SampleQueue, Shared};

/// A device of the type VPI, without VPI: its memory is the heap, and each of its queues is a
/// thread.
pub(crate) struct SampleDevice {
    shared: Arc<Shared>,
    queue: Arc<SampleQueue>,
    host_readable: bool,
}

impl fmt::Debug for SampleDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SampleDevice({})", self.shared.id)
    }
}

impl SampleDevice {
    /// Makes the device `vpi:<id>`. If it is not `host_readable`, programs see it as they see a GPU,
    /// whose memory only copies reach.
    pub(crate) fn new(id: i64, host_readable: bool) -> Result<Arc<Self>> {
        let id = DeviceId::new(ArrowDeviceType::VPI, id);
        let shared = Arc::new(Shared {
            id,
            memory: Memory::new(id),
            events: Events::default(),
            failure: Failure::default(),
            process: Process::this(),
            backlog: Backlog::default(),
        });
        Ok(Arc::new(Self {
            queue: SampleQueue::start(&shared)?,
            shared,
            host_readable,
        }))
    }

    /// Returns an error that says what is not freed or released, for tests.
    pub(crate) fn balance(&self) -> std::result::Result<(), String> {
        match (self.shared.memory.usage(), self.shared.events.len()) {
            ((0, false), 0) => Ok(()),
            ((live, idle), events) => Err(format!(
                "{live} live allocations, idle memory: {idle}, {events} live events"
            )),
        }
    }
}

// SAFETY: all memory is the heap's, which the host may read, and is zeroed when it is first used.
// `classify` returns `Device` only within a live allocation. An event completes in the job behind
// all earlier work of its queue, and its lock makes that work visible. `settle` waits for all jobs.
unsafe impl Backend for SampleDevice {
    fn capabilities(&self) -> Capabilities {
        let mut this = Capabilities::new(self.shared.id);
        this.host_readable = self.host_readable;
        this
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.queue.clone())
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        self.shared.check()?;
        Ok(SampleQueue::start(&self.shared)?)
    }

    unsafe fn check_event(&self, event: EventPtr) -> Result<()> {
        self.shared.event(event).map(drop)
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        self.shared.check()?;
        Ok(self.shared.event(event)?.is_done())
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        self.shared.event(event)?.wait();
        // Work that failed has not done what the event stands for.
        self.shared.failure.check()
    }

    unsafe fn release_event(&self, event: EventPtr) {
        // In a forked child, events and memory stay: they are the parent's.
        if self.shared.process.is_this() {
            self.shared.events.release(event);
        }
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        match self.shared.process.is_this() {
            true => self.shared.memory.classify(address, bytes),
            false => PointerInfo::new(AddressClass::Inaccessible, address.range(bytes)),
        }
    }

    fn copies_directly_from(&self, address: DevicePtr, _: usize) -> bool {
        !address.is_null()
    }

    fn trim(&self) {
        if self.shared.process.is_this() {
            self.shared.memory.free_idle(true);
        }
    }

    fn synchronize(&self) -> Result<()> {
        self.shared.in_this_process()?;
        self.shared.backlog.wait();
        self.shared.failure.check()
    }

    fn settle(&self) -> Result<()> {
        match self.shared.process.is_this() {
            true => self.synchronize(),
            false => Ok(()), // the work is the parent's
        }
    }
}
