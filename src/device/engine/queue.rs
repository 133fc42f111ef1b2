//! [`EngineQueue`]: a queue over a stream of a runtime.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::event::EngineEvent;
use super::health::Guarded;
use super::runtime::Runtime;
use super::shared::{End, Entry, Shared};
use crate::device::backend::{CopyOp, DevicePtr, EventPtr, RawQueue};
use crate::error::{Error, Result};

/// A queue of an [`Engine`](super::Engine).
pub(super) struct EngineQueue<R: Runtime> {
    shared: Arc<Shared<R>>,
    pub(super) entry: Arc<Entry<R>>,
    /// Last.
    _end: Arc<End<R>>,
}

impl<R: Runtime> EngineQueue<R> {
    pub(super) fn new(end: &Arc<End<R>>, stream: Arc<R::Stream>, is_adopted: bool) -> Self {
        let shared = &end.0;
        Self {
            entry: shared.entry(stream, is_adopted),
            shared: shared.clone(),
            _end: end.clone(),
        }
    }

    /// The stream is about to get work.
    fn stream(&self) -> &R::Stream {
        self.entry.is_used.store(true, Ordering::Release);
        &self.entry.stream
    }

    /// Makes the stream wait for an event behind a gate, as the runtime itself cannot.
    fn wait_behind_gate(&self, event: Arc<EngineEvent<R>>) -> Result<bool> {
        let shared = &self.shared;
        let Some(gate) = shared.runtime.gate(self.stream())? else {
            return Ok(false);
        };
        let (gate, waiting) = (Guarded::new(gate, &shared.health), shared.clone());
        let has_ended = move || {
            let Some(_inside) = waiting.health.enter_to_drop() else {
                return false;
            };
            match event.is_done(&waiting) {
                Ok(is_done) => is_done,
                Err(e) => {
                    // The device has failed before the work behind the gate runs.
                    waiting.health.fail(e);
                    true
                }
            }
        };
        shared.worker.watch(has_ended, move || drop(gate));
        Ok(true)
    }
}

// SAFETY: what `Runtime` promises, and:
// - memory is used again only by the stream that gave it back, or after an event that stands for its last use;
// - an event is that of the runtime.
unsafe impl<R: Runtime> RawQueue for EngineQueue<R> {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        match bytes {
            0 => Err(Error::argument("allocation of 0 bytes")),
            _ => self.shared.allocate(&self.entry, bytes),
        }
    }

    unsafe fn free(&self, base: DevicePtr, _bytes: usize) -> Result<()> {
        self.shared.free(&self.entry, base)
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        let is_bad = |copy: &CopyOp| copy.bytes == 0 || copy.src.is_null() || copy.dst.is_null();
        if copies.iter().any(is_bad) {
            return Err(Error::argument("an empty copy, or one from or to null"));
        }
        let (shared, mut under_way) = (&self.shared, false);
        let giving = shared.give()?;
        // SAFETY: the caller guarantees what `RawQueue::copy` asks for.
        let copied = unsafe { shared.runtime.copy(self.stream(), copies, &mut under_way) };
        drop(giving);
        if copied.is_err() && under_way {
            // The caller may free what the others use.
            shared.settle();
        }
        copied
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        let shared = &self.shared;
        let _giving = shared.give()?;
        // SAFETY: the caller guarantees what `RawQueue::fill` asks for.
        unsafe { shared.runtime.fill(self.stream(), dst, byte, bytes) }
    }

    fn record(&self) -> Result<EventPtr> {
        let _inside = self.shared.health.enter()?;
        let event = self.shared.runtime.record(&self.entry.stream)?;
        EngineEvent::publish(&self.shared, event)
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<bool> {
        let shared = &self.shared;
        let _inside = shared.health.enter()?;
        // SAFETY: the caller guarantees a live event of the device's type (contract of `RawQueue::wait`).
        let event = unsafe { EngineEvent::of(shared, event) }?;
        // Of another device, perhaps: its work would be waited for in vain.
        event.check(shared)?;
        let stream = match self.entry.is_adopted {
            true => &self.entry.stream,
            false => self.stream(),
        };
        match shared
            .runtime
            .wait(stream, &event.event, event.is_of(shared))?
        {
            true => Ok(true),
            false => self.wait_behind_gate(event),
        }
    }

    fn stream_handle(&self) -> Option<usize> {
        self.shared.runtime.stream_handle(&self.entry.stream)
    }
}

impl<R: Runtime> Drop for EngineQueue<R> {
    fn drop(&mut self) {
        if let Some(_inside) = self.shared.health.enter_to_drop() {
            if !self.entry.is_adopted {
                // A program may have given it work by the stream's handle.
                self.entry.is_used.store(true, Ordering::Release);
            }
            self.shared.leave(&self.entry);
        }
    }
}

impl<R: Runtime> fmt::Debug for EngineQueue<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let handle = self.stream_handle().unwrap_or(self.entry.number as usize);
        write!(f, "Queue({} {handle:#x})", self.shared.health.id())
    }
}
