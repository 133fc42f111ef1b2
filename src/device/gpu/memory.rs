//! Memory that a library allocates in no stream's order, and where memory is freed: where the device
//! is waited for.

use std::ffi::c_uint;
use std::mem::take;
use std::ops::{Range, RangeInclusive};
use std::time::{Duration, Instant};

use super::api::{Answer, Code};
use super::context::{Context, Current};
use super::kept::{After, Staging};
use super::runtime::{Found, Library, Memory, PointerKind, Runtime, to_ptr};
use crate::device::backend::DevicePtr;
use crate::device::lock;
use crate::device::parts::Pool;
use crate::error::{Error, Result};

/// Most bytes of page-locked memory that a device takes for staging and for downloads.
const STAGING_LIMIT: usize = 2 << 30;
/// A context whose calls fail for this long is taken for lost.
const LOST: Duration = Duration::from_secs(5);
/// What calls answer that a stream capture forbids.
const CAPTURE: RangeInclusive<Code> = 900..=908;
/// From this multiple of the pool's limits on, a new block is allocated only after a wait for the
/// device.
const FAR: usize = 4;

impl<R: Runtime> Context<R> {
    /// Allocates page-locked memory for staging. Returns `None` beyond the limit, or if the library
    /// refuses it, which drivers do for many reasons that are none of the device's: ordinary memory
    /// serves then, which is slower.
    pub(super) fn allocate_staging(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        let current = self.enter()?;
        let is_full = |staging: &Staging| staging.bytes.saturating_add(bytes) > STAGING_LIMIT;
        let mut staging = lock(&self.heap.staging);
        if let Some(i) = staging.idle.iter().position(|(_, idle)| *idle == bytes) {
            return Ok(Some(staging.idle.swap_remove(i).0));
        }
        if is_full(&staging) && !staging.idle.is_empty() {
            drop(staging);
            // It frees what is idle. After an error there is no more than before.
            let _ = self.synchronize();
            staging = lock(&self.heap.staging);
        }
        if is_full(&staging) {
            return Ok(None);
        }
        staging.bytes += bytes;
        drop(staging);
        let base = self.check(current.allocate(Memory::Host, bytes));
        if base.is_err() {
            lock(&self.heap.staging).bytes -= bytes;
        }
        match base {
            Err(e) if self.has_failed() => Err(e),
            base => Ok(base.ok()),
        }
    }

    /// Makes this thread wait for all work of the context, even if it has failed, and frees what
    /// nothing uses any more and is not kept for reuse.
    pub(super) fn synchronize(&self) -> Result<()> {
        let current = self.enter_even_if_failed()?;
        let given_up = take(&mut *lock(&self.heap.given_up));
        // SAFETY: the call has no arguments, and the context is current.
        let done = self.check(unsafe { self.calls().synchronize() });
        let done = done.and_then(|()| self.failure.check());
        if done.is_err() && !self.has_failed() {
            lock(&self.heap.given_up).extend(given_up);
            return done;
        }
        for base in given_up {
            // SAFETY: the memory is of the device's kind, its owner has given it up, and all work
            // that could use it has ended since.
            unsafe { current.free(self.memory, base) };
        }
        current.free_idle(false);
        self.sweep(false);
        done
    }

    /// As [`synchronize`](Self::synchronize), again and again until it succeeds or the context is
    /// lost: then nothing of it runs any more.
    pub(super) fn settle(&self) -> Result<()> {
        let start = Instant::now();
        loop {
            let done = self.synchronize();
            if done.is_ok() || self.is_gone() {
                return Ok(());
            }
            let e = match done {
                Err(e) if !self.has_failed() => e,
                done => return done,
            };
            // What another library's stream capture forbids now can be done later. That a context is
            // lost whose calls fail otherwise for so long is an assumption: no library says so.
            let is_forbidden = matches!(&e, Error::Device { code, .. } if CAPTURE.contains(code));
            if !is_forbidden && start.elapsed() > LOST {
                return Err(self.fail(e));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for all work, and frees all memory that is idle.
    pub(super) fn trim(&self) {
        // Memory whose event has completed can be freed all the same.
        let _ = self.synchronize();
        let Ok(current) = self.enter_even_if_failed() else {
            return;
        };
        current.free_idle(true);
        if let Some(pool) = self.pool {
            // SAFETY: the pool was created in `new`, and is destroyed in `drop`.
            let _ = self.check(unsafe { self.calls().trim(pool, 0) });
        }
    }
}

impl<R: Runtime> Current<'_, R> {
    /// Returns memory of the device's of at least `bytes` bytes, for work on `queue` from now on.
    pub(super) fn allocate_block(&self, queue: u64, bytes: usize) -> Result<DevicePtr> {
        let (context, heap) = (self.context, &self.context.heap);
        let rounded = Pool::<After>::rounded(bytes);
        let rounded = rounded.ok_or_else(|| context.out_of_memory("allocate", bytes))?;
        let is_done = |after: &After| context.has_completed(after);
        if let Some(block) = heap.idle.take(queue, rounded, is_done) {
            heap.live.insert(block.base, block.bytes, ());
            context.recycle(block.after);
            return Ok(block.base);
        }
        if heap.idle.is_over(FAR) {
            // An error, as while another library captures, frees nothing; there may be enough all the same.
            let _ = context.synchronize();
        }
        let base = context.check_memory(self.allocate(context.memory, rounded), bytes)?;
        heap.live.insert(base, rounded, ());
        Ok(base)
    }

    /// Frees staging memory that nobody uses, and idle memory whose last use has completed: the
    /// oldest, until the rest is within the pool's limits; or all.
    pub(super) fn free_idle(&self, all: bool) {
        let (context, heap) = (self.context, &self.context.heap);
        // Of a failed device nothing runs any more.
        let failed = context.has_failed();
        let is_done = |after: &After| failed || context.has_completed(after);
        for block in heap.idle.take_done(all, is_done) {
            // SAFETY: the block is of the device's memory, was taken out of the pool, and its event
            // has completed.
            unsafe { self.free(context.memory, block.base) };
            context.recycle(block.after);
        }
        let idle = take(&mut lock(&heap.staging).idle);
        let bytes: usize = idle.iter().map(|(_, bytes)| bytes).sum();
        for (base, _) in idle {
            // SAFETY: the memory is page-locked, and its owner has given it back.
            unsafe { self.free(Memory::Host, base) };
        }
        lock(&heap.staging).bytes -= bytes;
    }

    /// Allocates memory, in no stream's order. Host memory serves all devices.
    fn allocate(&self, memory: Memory, bytes: usize) -> Answer<DevicePtr> {
        const ATTACH_GLOBAL: c_uint = 1;
        let (calls, mut address) = (self.calls(), 0);
        let at = &raw mut address;
        // SAFETY: `at` is valid for the write of an address.
        unsafe {
            match memory {
                Memory::Device => calls.allocate_device(at, bytes),
                Memory::Host => calls.allocate_host(at, bytes, R::Library::HOST_FLAGS),
                Memory::Managed => calls.allocate_managed(at, bytes, ATTACH_GLOBAL),
            }
        }?;
        Ok(to_ptr(address))
    }

    /// Frees memory; may wait for the device. An error has no place to go: a failed device keeps its
    /// memory until its context is released.
    ///
    /// # Safety
    /// The memory is of this kind, allocated here or by others, is used no more, and is freed once.
    pub(super) unsafe fn free(&self, memory: Memory, ptr: DevicePtr) {
        // SAFETY: the caller guarantees memory of this kind that nothing uses any more, freed once
        // (see `# Safety`).
        let _ = unsafe {
            match memory {
                Memory::Host => self.calls().free_host(ptr.as_ptr()),
                Memory::Device | Memory::Managed => self.calls().free_device(ptr.as_ptr()),
            }
        };
    }

    /// Returns what `bytes` bytes at `address` are, and the addresses of that kind: those of the
    /// allocation, or only those of the bytes, of which the first and the last one were asked about.
    /// `None` if these are not the same, or there is no such range.
    ///
    /// # Errors
    /// The library cannot tell, so nothing may be assumed.
    pub(super) fn allocation_of(
        &self,
        address: DevicePtr,
        bytes: usize,
    ) -> Answer<Option<(PointerKind, Range<usize>)>> {
        let first = address.address();
        let last = first.checked_add(bytes.saturating_sub(1));
        let Some(last) = last.filter(|_| first != 0) else {
            return Ok(None);
        };
        let Found { kind, range } = self.look_up(first)?;
        // A range that does not hold all bytes says nothing.
        let whole = range.filter(|range| range.contains(&first) && range.contains(&last));
        if whole.is_none() && bytes > 1 && kind != self.look_up(last)?.kind {
            return Ok(None);
        }
        Ok(Some((kind, whole.unwrap_or(address.range(bytes)))))
    }
}
