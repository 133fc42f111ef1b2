//! Third-party backends that pass everything on to a simulated device, except one thing.

use std::sync::{Arc, Mutex, Weak};

use arrow_device::device::sim::{SimDevice, SimQueue};
use arrow_device::device::{
    Backend, Capabilities, CopyOp, DevicePtr, EventPtr, ExportSync, PointerInfo, RawQueue,
};
use arrow_device::{Error, Result};

/// What is different.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Twist {
    // These keep the contract.
    HandsOverByWaiting,
    HasOneOrder,
    RefusesExports,
    // These break it.
    NoFlush,
    FlushesWhenQueried,
    ForgetsDroppedQueues,
    NewQueueIsTheDefault,
    QueuesShareAStream,
    DroppingQueuesWaits,
    CopyWaits,
    FillWaits,
    DirectFromNull,
    ClaimsOneOrder,
    WaitDoesNothing,
    QueueWaitDoesNothing,
    CompletesEarly,
    QueryWaits,
    CopyDropsLastByte,
    CopiesRunLastListFirst,
    FillGoesTooFar,
    FreesAtOnce,
    FreeWaits,
    Misaligned,
    ClassifiesTooMuch,
    AllocationsTooLong,
    RefusesOwnEvents,
    EventsLeak,
    SynchronizesOneQueue,
    NewDefaultQueues,
}

#[derive(Debug)]
pub(crate) struct Wrapped {
    sim: Arc<SimDevice>,
    queue: Arc<WrappedQueue>,
    /// All queues; those that were dropped are gone.
    queues: Mutex<Vec<Weak<WrappedQueue>>>,
    twist: Twist,
}

#[derive(Debug)]
pub(crate) struct WrappedQueue {
    sim: Arc<SimDevice>,
    queue: Arc<dyn RawQueue>,
    /// Where frees go that do not wait for the queue.
    side: Arc<dyn RawQueue>,
    twist: Twist,
}

impl Wrapped {
    pub(crate) fn new(sim: Arc<SimDevice>, twist: Twist) -> Arc<Self> {
        let default = sim.default_queue().unwrap();
        let queue = Self::wrap(&sim, default, twist);
        let queues = Mutex::new(vec![Arc::downgrade(&queue)]);
        Arc::new(Self {
            sim,
            queue,
            queues,
            twist,
        })
    }

    /// Waits for the work of the queues that are not dropped.
    fn synchronize_live(&self) -> Result<()> {
        let queues = self.queues.lock().unwrap().clone();
        for queue in queues.iter().filter_map(Weak::upgrade) {
            let event = queue.queue.record()?;
            // SAFETY: the event was just recorded on this device, and is released once.
            unsafe {
                let waited = self.sim.wait_event(event);
                self.sim.release_event(event);
                waited?;
            }
        }
        Ok(())
    }

    fn wrap(sim: &Arc<SimDevice>, queue: Arc<dyn RawQueue>, twist: Twist) -> Arc<WrappedQueue> {
        Arc::new(WrappedQueue {
            sim: sim.clone(),
            queue,
            side: sim.new_queue().unwrap(),
            twist,
        })
    }
}

impl WrappedQueue {
    pub(crate) fn sim(&self) -> &SimQueue {
        self.queue.downcast_ref().unwrap()
    }
}

// SAFETY: everything is the simulated device's, which checks every access when it runs; a twist may
// break the contract, which is what is tested.
unsafe impl Backend for Wrapped {
    fn capabilities(&self) -> Capabilities {
        let mut this = self.sim.capabilities();
        this.exports = match self.twist {
            Twist::HasOneOrder | Twist::ClaimsOneOrder => ExportSync::QueueOrder,
            Twist::HandsOverByWaiting => ExportSync::Wait,
            Twist::RefusesExports => ExportSync::Refused("its addresses mean nothing elsewhere"),
            _ => ExportSync::Event,
        };
        this
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        if self.twist == Twist::NewDefaultQueues {
            return self.new_queue();
        }
        Ok(self.queue.clone())
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        let queue = match self.twist {
            Twist::NewQueueIsTheDefault => return Ok(self.queue.clone()),
            Twist::HasOneOrder => self.queue.queue.clone(),
            _ => self.sim.new_queue()?,
        };
        let queue = Self::wrap(&self.sim, queue, self.twist);
        self.queues.lock().unwrap().push(Arc::downgrade(&queue));
        Ok(queue)
    }

    unsafe fn check_event(&self, event: EventPtr) -> Result<()> {
        if self.twist == Twist::RefusesOwnEvents {
            return Err(Error::InvalidArgument("no".into()));
        }
        // SAFETY: the caller guarantees what `Backend::check_event` requires, which is the same for
        // the simulated device.
        unsafe { self.sim.check_event(event) }
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        match self.twist {
            Twist::CompletesEarly => Ok(true),
            Twist::QueryWaits => {
                // SAFETY: the caller guarantees that the event is live and of this device, which is
                // what the simulated device requires.
                unsafe { self.sim.wait_event(event) }?;
                Ok(true)
            }
            Twist::FlushesWhenQueried => {
                // SAFETY: the caller guarantees that the event is live and of this device.
                unsafe {
                    let done = self.sim.query_event(event)?;
                    self.sim.wait_event(event)?;
                    Ok(done)
                }
            }
            // SAFETY: the caller guarantees that the event is live and of this device, which is
            // what the simulated device requires.
            _ => unsafe { self.sim.query_event(event) },
        }
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        if self.twist == Twist::WaitDoesNothing {
            return Ok(());
        }
        // SAFETY: the caller guarantees that the event is live and of this device, which is what
        // the simulated device requires.
        unsafe { self.sim.wait_event(event) }
    }

    unsafe fn release_event(&self, event: EventPtr) {
        if self.twist != Twist::EventsLeak {
            // SAFETY: the caller guarantees that the event is live and of this device, which is
            // what the simulated device requires.
            unsafe { self.sim.release_event(event) }
        }
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        let mut found = self.sim.classify(address, bytes);
        match self.twist {
            Twist::AllocationsTooLong => found.range.end = found.range.end.saturating_add(1 << 30),
            // As if the length did not matter.
            Twist::ClassifiesTooMuch => found.class = self.sim.classify(address, 1).class,
            _ => {}
        }
        found
    }

    fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        self.sim.allocate_host(bytes)
    }

    unsafe fn free_host(&self, address: DevicePtr, bytes: usize) {
        // SAFETY: the caller guarantees that the block came from `allocate_host` and is freed once,
        // which is what the simulated device requires.
        unsafe { self.sim.free_host(address, bytes) }
    }

    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        if self.twist == Twist::DirectFromNull && address.is_null() {
            return true;
        }
        self.sim.copies_directly_from(address, bytes)
    }

    fn synchronize(&self) -> Result<()> {
        match self.twist {
            Twist::SynchronizesOneQueue => {}
            Twist::ForgetsDroppedQueues => return self.synchronize_live(),
            _ => return self.sim.synchronize(),
        }
        let event = self.queue.queue.record()?;
        // SAFETY: the event was just recorded on this device, and is released once.
        unsafe {
            self.sim.wait_event(event)?;
            self.sim.release_event(event);
        }
        Ok(())
    }
}

impl Drop for WrappedQueue {
    fn drop(&mut self) {
        if self.twist == Twist::DroppingQueuesWaits {
            self.sim.synchronize().unwrap();
        }
    }
}

// SAFETY: every call goes to a queue of the simulated device; some break one rule, which the suite must notice.
unsafe impl RawQueue for WrappedQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        if self.twist == Twist::Misaligned {
            let bytes = bytes.saturating_add(64);
            return Ok(self.queue.allocate(bytes)?.offset(8));
        }
        self.queue.allocate(bytes)
    }

    unsafe fn free(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        // SAFETY: the caller guarantees what `RawQueue::free` requires; where a twist passes on
        // something else, the simulated device refuses it and records a violation.
        unsafe {
            match self.twist {
                Twist::Misaligned => {
                    let base = DevicePtr::new(base.as_ptr().wrapping_byte_sub(8));
                    self.queue.free(base, bytes.saturating_add(64))
                }
                Twist::FreesAtOnce => {
                    self.side.free(base, bytes)?;
                    let event = self.side.record()?;
                    let waited = self.sim.wait_event(event);
                    self.sim.release_event(event);
                    waited
                }
                Twist::FreeWaits => {
                    self.queue.free(base, bytes)?;
                    self.sim.synchronize()
                }
                _ => self.queue.free(base, bytes),
            }
        }
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        let mut copies = copies.to_vec();
        let queue = match self.twist {
            Twist::CopyDropsLastByte => {
                for copy in copies.iter_mut().filter(|copy| copy.bytes > 1) {
                    copy.bytes -= 1;
                }
                &self.queue
            }
            // Uploads overtake other work.
            Twist::CopiesRunLastListFirst
                if copies[0].kind == arrow_device::device::CopyKind::HostToDevice =>
            {
                &self.side
            }
            _ => &self.queue,
        };
        // SAFETY: the caller guarantees both ranges until the copy completes; the simulated device checks it.
        unsafe { queue.copy(&copies) }?;
        if self.twist == Twist::CopyWaits {
            self.sim.synchronize()?;
        }
        if Arc::ptr_eq(queue, &self.side) {
            let event = queue.record()?;
            // SAFETY: the event was just recorded on this device, and is released once.
            unsafe {
                let waited = self.sim.wait_event(event);
                self.sim.release_event(event);
                waited?;
            }
        }
        Ok(())
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller guarantees the range (see `RawQueue::fill`); one that goes too far is what is tested, and the simulated device refuses it.
        unsafe {
            match self.twist {
                Twist::FillGoesTooFar if bytes % 2 == 1 => self.queue.fill(dst, byte, bytes + 1),
                Twist::FillWaits => {
                    self.queue.fill(dst, byte, bytes)?;
                    self.sim.synchronize()
                }
                _ => self.queue.fill(dst, byte, bytes),
            }
        }
    }

    fn stream_handle(&self) -> Option<usize> {
        match self.twist {
            Twist::HasOneOrder | Twist::QueuesShareAStream => Some(1),
            _ => None,
        }
    }

    fn record(&self) -> Result<EventPtr> {
        self.queue.record()
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<bool> {
        if self.twist == Twist::QueueWaitDoesNothing {
            return Ok(true);
        }
        // SAFETY: the caller guarantees that the event is live and of this device, which is what
        // the simulated device requires.
        unsafe { self.queue.wait(event) }
    }
}
