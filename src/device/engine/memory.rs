//! The memory of a device: what is in use, what waits for its next use, and where it is freed.

use std::mem::take;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use super::health::Guarded;
use super::pool::{Block, Pool};
use super::ranges::{Piece, Ranges};
use super::runtime::Runtime;
use super::shared::{Entry, Idle, Shared};
use crate::device::backend::{AddressClass, DevicePtr, PointerInfo, not_supported, out_of_memory};
use crate::device::lock;
use crate::error::{Error, Result};

/// Most bytes of host memory that a device takes for staging and for downloads.
const STAGING_LIMIT: usize = 2 << 30;
/// From this multiple of the pool's limits on, memory is allocated only after a wait for the device.
const FAR: usize = 4;

impl<R: Runtime> Shared<R> {
    pub(super) fn live(&self) -> &Ranges<Piece<R::Memory>> {
        &self.runtime.memories().live
    }

    fn host(&self) -> &Ranges<Piece<R::Memory>> {
        &self.runtime.memories().host
    }

    /// Allocates memory for work in a stream.
    pub(super) fn allocate(&self, entry: &Entry<R>, bytes: usize) -> Result<DevicePtr> {
        let out_of_memory = || out_of_memory(self.health.id(), "allocate", bytes);
        let rounded = Pool::<Idle<R>>::rounded(bytes).ok_or_else(out_of_memory)?;
        let rounded = rounded.min(self.runtime.max_allocation().max(bytes));
        let inside = self.health.enter()?;
        if let Some(block) = self
            .pool
            .take(entry.number, rounded, |idle| self.is_idle(idle))
        {
            let piece = (block.after.memory, block.bytes);
            self.live().insert(block.base, bytes, piece);
            return Ok(block.base);
        }
        self.free_idle(false);
        drop(inside);
        if self.pool.is_over(FAR) {
            // After an error there may be enough all the same.
            let _ = self.synchronize();
        }
        let allocate = || {
            let _inside = self.health.enter()?;
            let mut memory = self.runtime.allocate(rounded, &entry.stream);
            if let Err(Error::OutOfMemory { bytes: missing, .. }) = &mut memory {
                *missing = bytes; // as the caller knows it
            }
            let memory = memory?;
            let base = self.runtime.base(&memory);
            let piece = (Guarded::new(memory, &self.health), rounded);
            self.live().insert(base, bytes, piece);
            Ok(base)
        };
        match allocate() {
            // What is idle, or what pending work frees, may be enough.
            Err(Error::OutOfMemory { .. }) if bytes <= self.runtime.max_allocation() => {
                self.trim();
                allocate()
            }
            done => done,
        }
    }

    /// Frees memory after all work of a stream so far.
    pub(super) fn free(&self, entry: &Entry<R>, base: DevicePtr) -> Result<()> {
        let Some(_inside) = self.health.enter_to_drop() else {
            return Ok(());
        };
        let Some((memory, bytes)) = self.live().remove(base) else {
            let reason = format!("{base:?} is not the beginning of an allocation of this device");
            return Err(not_supported(self.health.id(), "free", reason));
        };
        // SAFETY: the memory is out of the books, so it is freed once; the entry's stream comes after the work of
        // other streams that uses it (contract of `RawQueue::free`).
        let freed = unsafe { self.runtime.free_in_order(&memory, &entry.stream) };
        let after = match freed {
            Ok(true) => return Ok(()),
            Ok(false) => self.runtime.mark(&entry.stream),
            Err(e) => Err(e),
        };
        let after = match after {
            Ok(after) => Guarded::new(after, &self.health),
            Err(e) => {
                // Freed with the next wait for the device.
                lock(&self.given_up).push(memory);
                return match e {
                    // Nothing is wrong with the device.
                    Error::InvalidArgument(_) => Ok(()),
                    e => Err(e),
                };
            }
        };
        self.pool.give(Block {
            base,
            bytes,
            queue: entry.number,
            after: Idle { memory, after },
        });
        self.free_idle(false);
        Ok(())
    }

    fn is_idle(&self, idle: &Idle<R>) -> bool {
        self.health.is_over() || matches!(self.runtime.is_done(&idle.after), Ok(true))
    }

    /// Frees memory that is idle: the oldest, until the rest is within the pool's limits, where a free does not wait.
    fn free_idle(&self, waits: bool) {
        if (waits || !self.runtime.frees_wait()) && self.pool.is_over(1) {
            drop(self.pool.take_done(false, |idle| self.is_idle(idle)));
        }
    }

    /// Allocates host memory for staging. Returns `None` beyond the limit, or if the runtime refuses it for whatever reason: ordinary memory
    /// serves then, which is slower.
    pub(super) fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        drop(self.health.enter()?);
        let is_full = || self.staging.load(Ordering::Relaxed).saturating_add(bytes) > STAGING_LIMIT;
        if is_full() && !lock(&self.idle_staging).is_empty() {
            // It frees what is idle. After an error there is no more than before.
            let _ = self.synchronize();
        }
        if is_full() {
            return Ok(None);
        }
        let _inside = self.health.enter()?;
        let Ok(Some(memory)) = self.runtime.allocate_host(bytes) else {
            return self.health.check().map(|()| None);
        };
        self.staging.fetch_add(bytes, Ordering::Relaxed);
        let base = self.runtime.base(&memory);
        let piece = (Guarded::new(memory, &self.health), bytes);
        self.host().insert(base, bytes, piece);
        Ok(Some(base))
    }

    /// Takes host memory back, which no copy uses any more.
    pub(super) fn free_host(&self, address: DevicePtr) {
        let Some(_inside) = self.health.enter_to_drop() else {
            return;
        };
        if let Some(piece) = self.host().remove(address) {
            lock(&self.idle_staging).push(piece);
        }
    }

    /// Whether all of these bytes lie in host memory of the device's, or the runtime copies from them as fast.
    pub(super) fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        let Ok(_inside) = self.health.enter() else {
            return false;
        };
        let own = || self.host().classify(address, bytes, AddressClass::Host);
        !address.is_null()
            && (own().is_some_and(|own| own.class == AddressClass::Host)
                || self.runtime.copies_directly_from(address, bytes))
    }

    pub(super) fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        let Some(_inside) = self.health.enter_to_drop() else {
            return PointerInfo::new(AddressClass::Inaccessible, address.range(bytes));
        };
        let own = match self.runtime.capabilities().host_readable {
            true => AddressClass::HostAccessible,
            false => AddressClass::Device,
        };
        let live = self.live().classify(address, bytes, own);
        let host = AddressClass::HostAccessible;
        live.or_else(|| self.host().classify(address, bytes, host))
            .unwrap_or_else(|| self.runtime.classify(address, bytes))
    }

    /// Makes this thread wait for all work of the device, even if it has failed, and frees what nothing uses any more and is not kept for
    /// reuse.
    pub(super) fn synchronize(&self) -> Result<()> {
        drop(self.health.enter_even_if_failed()?);
        let had_failed = self.health.check().is_err();
        if had_failed {
            // Those that found no failure yet have given their work after this, and nobody gives any more.
            drop(self.giving.write().unwrap_or_else(PoisonError::into_inner));
        }
        let given_up = take(&mut *lock(&self.given_up));
        let entries = self.streams();
        let streams: Vec<_> = entries.iter().map(|e| (*e.stream).clone()).collect();
        let is_unmarked = |entry: &&Arc<Entry<R>>| entry.is_unmarked.load(Ordering::Acquire);
        let unmarked: Vec<_> = entries.iter().filter(is_unmarked).collect();
        match self.runtime.synchronize(&streams) {
            Ok(()) => {
                for entry in unmarked {
                    entry.is_unmarked.store(false, Ordering::Release);
                }
                // What was given while this waited runs on if the device has failed only since.
                if had_failed {
                    self.health.end();
                }
            }
            Err(e) if !self.health.is_over() => {
                lock(&self.given_up).extend(given_up);
                return Err(e);
            }
            Err(_) => {}
        }
        drop((given_up, streams, entries));
        let Some(_inside) = self.health.enter_to_drop() else {
            return self.health.check();
        };
        self.free_idle(true);
        let idle = take(&mut *lock(&self.idle_staging));
        let bytes = idle.iter().map(|piece| piece.1).sum();
        drop(idle);
        self.staging.fetch_sub(bytes, Ordering::Relaxed);
        self.sweep();
        self.health.check()
    }

    /// As [`synchronize`](Self::synchronize), as long as it takes: nothing of the device runs afterwards.
    pub(super) fn settle(&self) {
        while self.synchronize().is_err() && !self.health.is_over() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Waits for all work, and frees all memory that is idle.
    pub(super) fn trim(&self) {
        // Memory whose event has completed can be freed all the same.
        let _ = self.synchronize();
        if let Some(_inside) = self.health.enter_to_drop() {
            drop(self.pool.take_done(true, |idle| self.is_idle(idle)));
            self.runtime.trim();
        }
    }

    /// Whether nothing is left to be freed that may have to be waited for.
    pub(super) fn is_clear(&self) -> bool {
        self.pool.is_empty()
            && lock(&self.idle_staging).is_empty()
            && lock(&self.given_up).is_empty()
            && self.streams().iter().all(|entry| self.has_ended(entry))
    }
}
