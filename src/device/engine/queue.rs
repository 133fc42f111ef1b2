//! [`EngineQueue`]: a queue over a stream of a runtime.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::event::EngineEvent;
use super::health::Guarded;
use super::pool::{Block, Pool};
use super::runtime::Runtime;
use super::shared::{End, Entry, Idle, Shared};
use crate::device::backend::{CopyOp, DevicePtr, EventPtr, RawQueue, not_supported, out_of_memory};
use crate::device::lock;
use crate::error::{Error, Result};

/// From this multiple of the pool's limits on, memory is allocated only after a wait for the device.
const FAR: usize = 4;

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
            let Ok(_inside) = waiting.health.enter_even_if_failed() else {
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
        if bytes == 0 {
            return Err(Error::argument("allocation of 0 bytes"));
        }
        let shared = &self.shared;
        let out_of_memory = || out_of_memory(shared.health.id(), "allocate", bytes);
        let rounded = Pool::<Idle<R>>::rounded(bytes).ok_or_else(out_of_memory)?;
        let rounded = rounded.min(shared.runtime.max_allocation().max(bytes));
        let inside = shared.health.enter()?;
        let is_idle = |idle: &Idle<R>| shared.is_idle(idle);
        if let Some(block) = shared.pool.take(self.entry.number, rounded, is_idle) {
            let piece = (block.after.memory, block.bytes);
            shared.live().insert(block.base, bytes, piece);
            return Ok(block.base);
        }
        shared.free_idle(false);
        drop(inside);
        if shared.pool.is_over(FAR) {
            // After an error there may be enough all the same.
            let _ = shared.synchronize();
        }
        let allocate = || {
            let _inside = shared.health.enter()?;
            let mut memory = shared.runtime.allocate(rounded, &self.entry.stream);
            if let Err(Error::OutOfMemory { bytes: missing, .. }) = &mut memory {
                *missing = bytes; // as the caller knows it
            }
            let memory = memory?;
            let base = shared.runtime.base(&memory);
            let piece = (Guarded::new(memory, &shared.health), rounded);
            shared.live().insert(base, bytes, piece);
            Ok(base)
        };
        match allocate() {
            // What is idle, or what pending work frees, may be enough.
            Err(Error::OutOfMemory { .. }) if bytes <= shared.runtime.max_allocation() => {
                shared.trim();
                allocate()
            }
            done => done,
        }
    }

    unsafe fn free(&self, base: DevicePtr, _bytes: usize) -> Result<()> {
        let (shared, stream) = (&self.shared, &self.entry.stream);
        let Ok(_inside) = shared.health.enter_even_if_failed() else {
            return Ok(());
        };
        let Some((memory, bytes)) = shared.live().remove(base) else {
            let reason = format!("{base:?} is not the beginning of an allocation of this device");
            return Err(not_supported(shared.health.id(), "free", reason));
        };
        // SAFETY: the memory is out of the books, so it is freed once; the entry's stream comes after the work of
        // other streams that uses it (contract of `RawQueue::free`).
        let freed = unsafe { shared.runtime.free_in_order(&memory, stream) };
        let after = match freed {
            Ok(true) => return Ok(()),
            Ok(false) => shared.runtime.mark(stream),
            Err(e) => Err(e),
        };
        let after = match after {
            Ok(after) => Guarded::new(after, &shared.health),
            Err(e) => {
                // Freed with the next wait for the device.
                lock(&shared.given_up).push(memory);
                return match e {
                    // Nothing is wrong with the device.
                    Error::InvalidArgument(_) => Ok(()),
                    e => Err(e),
                };
            }
        };
        shared.pool.give(Block {
            base,
            bytes,
            queue: self.entry.number,
            after: Idle { memory, after },
        });
        shared.free_idle(false);
        Ok(())
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
        if let Ok(_inside) = self.shared.health.enter_even_if_failed() {
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
