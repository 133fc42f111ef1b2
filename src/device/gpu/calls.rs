//! What is made of the calls that CUDA and HIP have alike, while a context is current. Streams, events
//! and pools are of that context's library.

use std::ffi::c_uint;
use std::ops::Range;

use super::api::{
    Answer, NOT_CAPTURED, PoolProps, RELEASE_THRESHOLD, RawEvent, RawPool, RawStream, code,
};
use super::entry::Current;
use super::runtime::{Found, Memory, PointerKind, to_ptr};
use crate::device::backend::DevicePtr;

/// What is known about some bytes.
#[derive(Debug)]
pub(super) struct Allocation {
    pub(super) kind: PointerKind,
    /// The addresses of that kind: the allocation's, or only those of the bytes, of which the first
    /// and the last one were asked about.
    pub(super) range: Range<usize>,
}

impl Current<'_> {
    /// Creates a stream that does not wait for the legacy default stream.
    pub(super) fn new_stream(&self) -> Answer<RawStream> {
        const NON_BLOCKING: c_uint = 1;
        let mut stream = RawStream::LEGACY;
        // SAFETY: `stream` is valid for the write of a handle.
        unsafe { self.api().create_stream(&raw mut stream, NON_BLOCKING) }?;
        Ok(stream)
    }

    /// Whether a stream is being captured.
    ///
    /// # Safety
    /// The stream is live, and no default stream.
    pub(super) unsafe fn is_captured(&self, stream: RawStream) -> Answer<bool> {
        let mut status = NOT_CAPTURED;
        // SAFETY: the caller guarantees a live stream (see `# Safety`); `status` is valid for the
        // write of an int.
        unsafe { self.api().is_capturing(stream, &raw mut status) }?;
        Ok(status != NOT_CAPTURED)
    }

    /// Creates an event without timing.
    pub(super) fn new_event(&self) -> Answer<RawEvent> {
        let mut event = RawEvent(0);
        // SAFETY: `event` is valid for the write of a handle.
        unsafe {
            self.api()
                .create_event(&raw mut event, self.api().event_flags)
        }?;
        Ok(event)
    }

    /// Creates a pool that keeps freed memory until it is trimmed. The device's default pool is
    /// shared with other libraries, and CUDA's frees its idle memory at every synchronisation.
    pub(super) fn new_pool(&self) -> Answer<RawPool> {
        let (api, mut pool, mut keep) = (self.api(), RawPool(0), u64::MAX);
        let props = PoolProps::of_device(self.ordinal());
        // SAFETY: `pool` is valid for the write of a handle, and `props` has the layout of both
        // libraries' headers; the attribute is a 64-bit number of bytes. A pool without it is
        // destroyed before anything else has its handle.
        unsafe {
            api.create_pool(&raw mut pool, &raw const props)?;
            let set = api.set_pool(pool, RELEASE_THRESHOLD, (&raw mut keep).cast());
            if set.is_err() {
                let _ = api.destroy_pool(pool);
            }
            set?;
        }
        Ok(pool)
    }

    /// Allocates from a pool in a stream's order.
    ///
    /// # Safety
    /// The pool is live; the stream is live, or stands for a default stream.
    pub(super) unsafe fn allocate_from(
        &self,
        pool: RawPool,
        bytes: usize,
        stream: RawStream,
    ) -> Answer<DevicePtr> {
        let (api, mut address) = (self.api(), 0);
        // SAFETY: `address` is valid for the write of an address; the caller guarantees a live
        // pool, and a live or default stream (see `# Safety`).
        unsafe { api.allocate_in_order(&raw mut address, bytes, pool, stream) }?;
        if address == 0 {
            // HIP 5.2 reports success for a pool that is full.
            api.allocate_in_order.check(code::OUT_OF_MEMORY)?;
        }
        Ok(to_ptr(address))
    }

    /// Returns the name of the call that allocates memory, in no stream's order.
    pub(super) fn allocation_call(&self, memory: Memory) -> &'static str {
        let api = self.api();
        match memory {
            Memory::Device => api.allocate_device.name,
            Memory::Host => api.allocate_host.name,
            Memory::Managed => api.allocate_managed.name,
        }
    }

    /// Allocates memory, in no stream's order. Host memory serves all devices.
    pub(super) fn allocate(&self, memory: Memory, bytes: usize) -> Answer<DevicePtr> {
        const ATTACH_GLOBAL: c_uint = 1;
        let (api, mut address) = (self.api(), 0);
        let at = &raw mut address;
        // SAFETY: `at` is valid for the write of an address.
        unsafe {
            match memory {
                Memory::Device => api.allocate_device(at, bytes),
                Memory::Host => api.allocate_host(at, bytes, api.host_flags),
                Memory::Managed => api.allocate_managed(at, bytes, ATTACH_GLOBAL),
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
                Memory::Host => self.api().free_host(ptr.as_ptr()),
                Memory::Device | Memory::Managed => self.api().free_device(ptr.as_ptr()),
            }
        };
    }

    /// Returns what `bytes` bytes at `address` are; `None` if first and last byte are not the same,
    /// or there is no such range.
    ///
    /// # Errors
    /// The library cannot tell, so nothing may be assumed.
    pub(super) fn allocation_of(
        &self,
        address: DevicePtr,
        bytes: usize,
    ) -> Answer<Option<Allocation>> {
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
        let range = whole.unwrap_or(address.range(bytes));
        Ok(Some(Allocation { kind, range }))
    }
}
