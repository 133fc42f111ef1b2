//! The provider: SYCL's streams, events and memory for the engine.
//!
//! SYCL itself is asked about states, and waits only for an event that has ended, or after a failure: its own waits hold locks that other
//! threads need while work is behind a host task, and crash when two threads wait across contexts (SYCL 2026.2).

use std::ffi::c_void;
use std::fmt;
use std::ptr::with_exposed_provenance_mut;
use std::sync::Arc;
use std::time::Duration;

use arrow_device::device::engine::{Health, Memories, Runtime};
use arrow_device::device::{
    AddressClass, Capabilities, CopyOp, DeviceId, DevicePtr, EventPtr, PointerInfo, Relation,
};
use arrow_device::{Error, Result};

use crate::memory::Block;
use crate::sys::{Found, OneApiMemory, Owned, Properties, Sycl, absent, raw};

/// A oneAPI device: the provider of an arrow-device device.
///
/// [`OneApiConfig`](crate::OneApiConfig) opens one.
pub struct OneApiDevice {
    pub(crate) health: Health,
    pub(crate) memories: Memories<Arc<Block>>,
    pub(crate) sycl: Sycl,
    /// The device and its context.
    pub(crate) device: Arc<Owned<raw::Device>>,
    pub(crate) properties: Properties,
    pub(crate) memory: OneApiMemory,
    pub(crate) name: String,
}

impl OneApiDevice {
    pub(crate) fn new(
        sycl: Sycl,
        id: DeviceId,
        memory: OneApiMemory,
        (device, properties): Found,
    ) -> Result<Self> {
        let name = properties.name();
        if !properties.has(memory) {
            let kind = memory.name();
            let reason = format!(
                "\"{name}\" has no unified shared memory (USM) of the kind {kind}, which arrow-device needs"
            );
            return Err(absent(id, reason));
        }
        Ok(Self {
            health: Health::new(id),
            memories: Memories::default(),
            sycl,
            device: Arc::new(device),
            properties,
            memory,
            name,
        })
    }
}

/// A queue of a oneAPI device: a `sycl::queue`, in order.
#[derive(Debug)]
pub struct OneApiQueue(pub(crate) Owned<raw::Queue>);

/// A `sycl::event`.
#[derive(Debug)]
pub struct Event {
    event: Owned<raw::Event>,
    /// Of the device whose queue has recorded it; `None` for an event of a program's.
    pub(crate) recorder: Option<Health>,
}

impl Event {
    /// Returns whether the work before the event has completed. If it is work of a device that has failed, so has the device: for SYCL, a host
    /// task that throws completes.
    fn is_complete(&self) -> Result<bool> {
        self.event.is_complete().map_err(|e| match &self.recorder {
            Some(device) => device.fail(e),
            None => e,
        })
    }
}

impl OneApiDevice {
    /// Waits until no work that a queue was given before an event runs any more.
    pub(crate) fn outlast(&self, stream: &OneApiQueue, last: Result<Event>) -> Result<()> {
        let Ok(last) = last else {
            return self.finish(stream);
        };
        loop {
            let inside = self.health.enter_even_if_failed()?;
            match last.is_complete() {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                // It may have ended before the work that it stands for.
                Err(_) => return self.finish(stream),
            }
            drop(inside);
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn finish(&self, stream: &OneApiQueue) -> Result<()> {
        let _inside = self.health.enter_even_if_failed()?;
        stream.0.finish().map_err(|e| self.health.fail(e))
    }
}

// SAFETY:
// - memory is of SYCL's aligned allocation, with the length that was asked for; what the host can read is initialised when it is allocated;
// - queues are in order, and what they wait for are barriers in them; an event of `record` is SYCL's event after all earlier work, and one
//   that SYCL reports complete has been waited for once more, which makes its work visible to the host;
// - `synchronize` waits for an event behind the work of each queue, and for the queue itself where that fails; no device is ever lost;
// - shared and host memory can be read by the host; on a device that the host reads `classify` refuses what SYCL does not know as such.
unsafe impl Runtime for OneApiDevice {
    type Stream = OneApiQueue;
    type Event = Event;
    type Memory = Arc<Block>;

    /// A `sycl::event` is a `std::shared_ptr`.
    const EVENT_WORDS: usize = 2;

    fn health(&self) -> &Health {
        &self.health
    }

    fn memories(&self) -> &Memories<Arc<Block>> {
        &self.memories
    }

    fn capabilities(&self) -> Capabilities {
        let mut this = Capabilities::new(self.health.id());
        this.host_readable = self.memory != OneApiMemory::Device;
        this
    }

    fn new_stream(&self) -> Result<Arc<OneApiQueue>> {
        Ok(Arc::new(OneApiQueue(self.device.queue()?)))
    }

    unsafe fn adopt_stream(&self, handle: usize) -> Result<Arc<OneApiQueue>> {
        let queue: *mut c_void = with_exposed_provenance_mut(handle);
        // SAFETY: the caller guarantees that a pointer that is not null is that of a live queue (contract of `adopt_stream`).
        let queue = unsafe { self.device.adopt(queue) }?;
        Ok(Arc::new(OneApiQueue(queue)))
    }

    fn stream_handle(&self, stream: &OneApiQueue) -> Option<usize> {
        Some(stream.sycl_queue().expose_provenance())
    }

    fn allocate(&self, bytes: usize, _: &OneApiQueue) -> Result<Arc<Block>> {
        let out_of_memory = || Error::OutOfMemory {
            device: self.health.id(),
            operation: "sycl::aligned_alloc",
            bytes,
        };
        if bytes > self.max_allocation() {
            return Err(out_of_memory());
        }
        Block::new(&self.device, self.memory, bytes)?.ok_or_else(out_of_memory)
    }

    fn allocate_host(&self, bytes: usize) -> Result<Option<Arc<Block>>> {
        match self.properties.has(OneApiMemory::Host) && bytes <= self.max_allocation() {
            true => Block::new(&self.device, OneApiMemory::Host, bytes),
            false => Ok(None),
        }
    }

    fn base(&self, memory: &Arc<Block>) -> DevicePtr {
        memory.base()
    }

    fn max_allocation(&self) -> usize {
        isize::MAX as usize
    }

    fn frees_wait(&self) -> bool {
        true
    }

    unsafe fn copy(
        &self,
        stream: &OneApiQueue,
        copies: &[CopyOp],
        under_way: &mut bool,
    ) -> Result<()> {
        for copy in copies {
            // SAFETY: the caller guarantees the memory until the copies have completed (contract of `copy`).
            unsafe { stream.0.copy(copy) }?;
            *under_way = true;
        }
        Ok(())
    }

    unsafe fn fill(
        &self,
        stream: &OneApiQueue,
        dst: DevicePtr,
        byte: u8,
        bytes: usize,
    ) -> Result<()> {
        // SAFETY: the caller guarantees the memory until the fill has completed (contract of `fill`).
        unsafe { stream.0.fill(dst, byte, bytes) }
    }

    fn record(&self, stream: &OneApiQueue) -> Result<Event> {
        Ok(Event {
            event: stream.0.record()?,
            recorder: Some(self.health.clone()),
        })
    }

    fn pointer(&self, event: &Event) -> *mut c_void {
        event.event.sycl_event()
    }

    unsafe fn foreign_event(&self, event: EventPtr) -> Result<Event> {
        Ok(Event {
            // SAFETY: the caller guarantees a live event (contract of `foreign_event`).
            event: unsafe { self.sycl.share_event(event) }?,
            recorder: None,
        })
    }

    fn is_done(&self, event: &Event) -> Result<bool> {
        event.is_complete()
    }

    fn wait(&self, stream: &OneApiQueue, event: &Event, is_own: bool) -> Result<bool> {
        if event.is_complete()? {
            return Ok(true);
        }
        if is_own {
            stream.0.wait(&event.event)?;
        }
        // Another context's, perhaps: SYCL must not be told to wait for it. And if its work fails, SYCL runs what comes after.
        Ok(is_own)
    }

    fn gate(&self, stream: &OneApiQueue) -> Result<Option<Box<dyn Send>>> {
        Ok(stream.0.gate()?.map(|gate| Box::new(gate) as _))
    }

    fn synchronize(&self, streams: &[Arc<OneApiQueue>]) -> Result<()> {
        let mut outcome = Ok(());
        for stream in streams {
            let inside = self.health.enter_even_if_failed()?;
            let last = self.record(stream);
            drop(inside);
            outcome = outcome.and(self.outlast(stream, last));
        }
        outcome
    }

    /// SYCL knows the kind of another's memory, but not its length. The host will read what a device of shared or host memory imports, so that
    /// must be known to be of these kinds.
    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        let other = |class| PointerInfo::new(class, address.range(bytes));
        let refused = |class, what: &str| {
            other(class).with_reason(format!(
                "{what}, and the host reads what this device imports; open the device with OneApiMemory::Device"
            ))
        };
        if self.memory == OneApiMemory::Device {
            return other(AddressClass::Unknown);
        }
        match self.device.kind(address) {
            Ok(Some(OneApiMemory::Shared | OneApiMemory::Host)) => other(AddressClass::Unknown),
            // SYCL cannot tell ordinary memory from that of another context.
            Ok(None) => refused(
                AddressClass::Host,
                "SYCL does not know it as shared or host memory of this device's context",
            ),
            Ok(Some(OneApiMemory::Device)) => refused(
                AddressClass::Inaccessible,
                "it is memory of the kind device",
            ),
            Err(_) => other(AddressClass::Inaccessible),
        }
    }

    fn copies_directly_from(&self, _: DevicePtr, _: usize) -> bool {
        self.properties.is_cpu()
    }

    fn relation(&self, other: &Self) -> Relation {
        Relation {
            copies: self.device.is_beside(&other.device),
            waits: true,
        }
    }
}

impl fmt::Debug for OneApiDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (id, kind) = (self.health.id(), self.memory.name());
        write!(f, "oneAPI({id}: {}, {kind})", self.name)
    }
}
