//! [`Runtime`]: what a device's runtime provides to the [`Engine`](super::Engine).

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::device::backend::no_handles;
use crate::device::engine::{Health, Memories};
use crate::device::{
    AddressClass, Capabilities, CopyOp, DevicePtr, EventPtr, PointerInfo, Relation,
};
use crate::error::Result;

/// The shortest and the longest pause between two questions of a thread that waits for an event.
const PAUSE: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// The runtime of a device: its streams, events and memory, and the calls for them. The [`Engine`](super::Engine) makes a device of it.
///
/// Methods may be called on any thread. The engine calls them while it [is in the runtime](Health::enter), after it has
/// checked the process, the end of the process and earlier failures; only [`wait_host`](Self::wait_host) and
/// [`synchronize`](Self::synchronize), which may take long, enter by themselves. The engine drops streams, events and memory where the
/// runtime may be called, and leaks them where it may not.
///
/// An error is the device's answer to one call. An error after which the device cannot be used goes through [`Health::fail`] or
/// [`Health::lose`] first.
///
/// # Safety
///
/// Safe code relies on the following:
/// - Methods do not panic.
/// - [`allocate`](Self::allocate) and [`allocate_host`](Self::allocate_host) return at least as many bytes as they are asked for, aligned to
///   64 bytes, that nothing else uses; host memory may be read and written by the host. Memory that the host may read
///   ([`Capabilities::host_readable`]) is initialised.
/// - A stream runs its work in order, and what it waits for comes before its later work. An event completes once all work that its stream was
///   given before it was recorded has completed, and is then visible to the host.
/// - [`synchronize`](Self::synchronize) returns `Ok` once all work that these streams were given has ended, and [`Health::lose`] is called
///   only when none of it runs any more.
/// - [`capabilities`](Self::capabilities) keep what they promise, and [`classify`](Self::classify) answers as
///   [`Backend::classify`](crate::device::Backend::classify) must.
#[allow(unused_variables)] // of defaults
pub unsafe trait Runtime: fmt::Debug + Send + Sync + Sized + 'static {
    /// A stream, in which work runs in order. Its drop releases it; all of its work has ended then, unless the device is lost.
    type Stream: Send + Sync + 'static;
    /// A point in the work of a stream. Its drop releases it.
    type Event: Send + Sync + 'static;
    /// Memory of the device, or of the host. The drop of the last clone frees it; nothing uses it any more.
    type Memory: Clone + Send + Sync + 'static;

    /// How many words (of the size of a pointer) of what `sync_event` points to are never 0. With 0 words, only events of this crate are
    /// accepted.
    const EVENT_WORDS: usize = 1;

    /// Returns the health of the device: the same one at each call.
    fn health(&self) -> &Health;

    /// Returns the memory of the device that is in use, of which the engine keeps the books: the same one at each call.
    fn memories(&self) -> &Memories<Self::Memory>;

    /// Returns what is always true of the device.
    fn capabilities(&self) -> Capabilities;

    /// Returns a stream for a new queue. Queues whose work runs in one order may share one.
    fn new_stream(&self) -> Result<Arc<Self::Stream>>;

    /// Makes a stream of the runtime's own handle, as a number. Unless it takes a share of the runtime's stream, only events may be asked
    /// about, and [`synchronize`](Self::synchronize) called, after the queue was dropped.
    ///
    /// # Safety
    /// The handle is that of a live stream of this runtime, or stands for a default stream, as long as the queue lives that is made of it.
    unsafe fn adopt_stream(&self, handle: usize) -> Result<Arc<Self::Stream>> {
        Err(no_handles(self.health().id()))
    }

    /// Returns the runtime's handle of a stream as a number, if there is one.
    fn stream_handle(&self, stream: &Self::Stream) -> Option<usize> {
        None
    }

    /// Allocates `bytes` bytes (more than 0) of device memory, for work of this stream at once, and of others after an event. After
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) the engine waits for the device, frees what is idle, and asks once more.
    fn allocate(&self, bytes: usize, stream: &Self::Stream) -> Result<Self::Memory>;

    /// Allocates host memory from which the device copies fastest. Returns `None` if there is none.
    fn allocate_host(&self, bytes: usize) -> Result<Option<Self::Memory>> {
        Ok(None)
    }

    /// Returns the first address of memory.
    fn base(&self, memory: &Self::Memory) -> DevicePtr;

    /// Returns the most bytes of one allocation. The engine never asks for more because it rounds up.
    fn max_allocation(&self) -> usize {
        usize::MAX
    }

    /// Frees memory after all work of the stream so far, where the runtime itself can do that: the drop of the memory then does nothing.
    /// Returns `false` otherwise, and the engine keeps the memory for its next use.
    ///
    /// # Safety
    /// Work of other streams that uses the memory comes before what this stream is waiting for, and nobody uses it afterwards.
    unsafe fn free_in_order(&self, memory: &Self::Memory, stream: &Self::Stream) -> Result<bool> {
        Ok(false)
    }

    /// Whether a drop of memory may wait for the device. The engine then frees only where the device is waited for anyway.
    fn frees_wait(&self) -> bool {
        false
    }

    /// Frees what the runtime itself keeps for reuse. All work has ended.
    fn trim(&self) {}

    /// Queues copies. As soon as one of them is under way, `under_way` is set: after an error the engine then waits. Where the runtime takes
    /// all of the copies or none, an error leaves none under way, and `under_way` can stay as it is.
    ///
    /// # Safety
    /// As [`RawQueue::copy`](crate::device::RawQueue::copy).
    unsafe fn copy(
        &self,
        stream: &Self::Stream,
        copies: &[CopyOp],
        under_way: &mut bool,
    ) -> Result<()>;

    /// Queues setting bytes.
    ///
    /// # Safety
    /// As [`RawQueue::fill`](crate::device::RawQueue::fill).
    unsafe fn fill(
        &self,
        stream: &Self::Stream,
        dst: DevicePtr,
        byte: u8,
        bytes: usize,
    ) -> Result<()>;

    /// Records an event that others may wait for. The work before it makes progress from then on, even if nobody waits.
    fn record(&self, stream: &Self::Stream) -> Result<Self::Event>;

    /// As [`record`](Self::record), for an event that nobody but the engine asks about. It asks under locks: [`is_done`](Self::is_done) runs no
    /// code of a program for this one.
    fn mark(&self, stream: &Self::Stream) -> Result<Self::Event> {
        self.record(stream)
    }

    /// Returns the address of the runtime's own event in `event`, for `sync_event`. The engine does not move the event after this call, and
    /// no other live event has the same address.
    fn pointer(&self, event: &Self::Event) -> *mut c_void;

    /// Makes an event of a foreign producer's, which lives during this call. If queues can be given [gates](Self::gate), it takes a share of
    /// it.
    ///
    /// # Safety
    /// `event` points to a live event of the device's type.
    unsafe fn foreign_event(&self, event: EventPtr) -> Result<Self::Event>;

    /// Returns whether an event has completed. Never waits. If the work before it has failed, that is an error.
    fn is_done(&self, event: &Self::Event) -> Result<bool>;

    /// Makes this thread wait until an event has completed.
    fn wait_host(&self, event: &Self::Event) -> Result<()> {
        poll(|| {
            let _inside = self.health().enter()?;
            self.is_done(event)
        })
    }

    /// Makes later work of a stream wait for an event, which may be released after the call. Returns `false`, and does nothing, if the stream
    /// cannot wait for it. `is_own` says that it was recorded by this device, and not by another one or a foreign producer.
    ///
    /// An event that has failed already is an error of this call, and the device goes on: nothing waits for it. If a foreign event fails later,
    /// for which the stream waits by itself, call [`Health::fail`] before the stream's later work counts as complete.
    fn wait(&self, stream: &Self::Stream, event: &Self::Event, is_own: bool) -> Result<bool>;

    /// Closes a gate in a stream: its later work does not run until the result is dropped, on whichever thread. The engine opens it when an
    /// event has completed for which the stream itself cannot [wait](Self::wait). If [`is_done`](Self::is_done) answers with an error until
    /// then, the device has failed, before the gate is opened. Returns `None` if there are no gates: a host thread waits then.
    fn gate(&self, stream: &Self::Stream) -> Result<Option<Box<dyn Send>>> {
        Ok(None)
    }

    /// Makes this thread wait for all work of the device, and at least for that of `streams`, whether the device has failed or not. Failed work
    /// that has ended is no error here: after an error the engine takes it that something still runs, frees nothing, and asks again.
    ///
    /// By default, a mark of each stream is waited for. That is right where [`is_done`](Self::is_done) answers with an error only as long as
    /// work before the event runs, and streams that were [adopted](Self::adopt_stream) are shared. Provide it where events of failed work stay
    /// errors.
    fn synchronize(&self, streams: &[Arc<Self::Stream>]) -> Result<()> {
        let wait = |stream: &Arc<Self::Stream>| {
            let inside = self.health().enter_even_if_failed()?;
            let last = self.mark(stream)?;
            drop(inside);
            poll(|| {
                let _inside = self.health().enter_even_if_failed()?;
                self.is_done(&last)
            })
        };
        // Each of them, whatever becomes of the others.
        let waited: Vec<_> = streams.iter().map(wait).collect();
        waited.into_iter().collect()
    }

    /// Returns whose memory `bytes` bytes at an address are, which are not in memory of the engine's.
    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        PointerInfo::new(AddressClass::Unknown, address.range(bytes))
    }

    /// As [`Backend::copies_directly_from`](crate::device::Backend::copies_directly_from), for memory that is not of
    /// [`allocate_host`](Self::allocate_host). The address is not null.
    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        false
    }

    /// Returns whether an array of this device may carry an event that another device of this runtime has recorded. Otherwise its memory
    /// is taken to be that device's too, and an import refuses the array.
    fn accepts_events_of(&self, other: &Self) -> bool {
        false
    }

    /// Returns what this device can do with memory and events of another one of this runtime. By default nothing: copies between them go
    /// through the host, and a thread that tells a queue to wait for the other device's event waits for it itself.
    fn relation(&self, other: &Self) -> Relation {
        Relation::default()
    }
}

/// Asks again and again, with growing pauses.
fn poll(mut is_done: impl FnMut() -> Result<bool>) -> Result<()> {
    let mut pause = PAUSE.0;
    while !is_done()? {
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSE.1);
    }
    Ok(())
}
