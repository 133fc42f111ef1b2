//! The calls that CUDA and HIP have alike, made while a context is current.

use std::ffi::c_uint;
use std::ops::Range;

use super::api::{
    Answer, Failed, NOT_CAPTURED, PoolProps, RELEASE_THRESHOLD, RawEvent, RawPool, RawStream, code,
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

/// All streams, events and pools are of the current context's library.
impl Current<'_> {
    /// Waits for all work.
    pub(super) fn synchronize(&self) -> Answer {
        let call = &self.api().synchronize;
        // SAFETY: the call has no arguments, and a context is current.
        call.check(unsafe { call() })
    }

    /// Creates a stream that does not wait for the legacy default stream.
    pub(super) fn create_stream(&self) -> Answer<RawStream> {
        const NON_BLOCKING: c_uint = 1;
        let call = &self.api().create_stream;
        let mut stream = RawStream::LEGACY;
        // SAFETY: `stream` is valid for the write of a handle.
        call.check(unsafe { call(&raw mut stream, NON_BLOCKING) })?;
        Ok(stream)
    }

    /// Destroys a stream. Its work runs on, or is waited for.
    ///
    /// # Safety
    /// The stream is from [`create_stream`](Self::create_stream), and is used no more.
    pub(super) unsafe fn destroy_stream(&self, stream: RawStream) {
        // SAFETY: the caller guarantees a live stream that nothing uses any more (see `# Safety`).
        unsafe { (self.api().destroy_stream)(stream) };
    }

    /// Waits for a stream's work.
    ///
    /// # Safety
    /// The stream is live, or stands for a default stream.
    pub(super) unsafe fn synchronize_stream(&self, stream: RawStream) -> Answer {
        let call = &self.api().synchronize_stream;
        // SAFETY: the caller guarantees a live or default stream (see `# Safety`).
        call.check(unsafe { call(stream) })
    }

    /// Whether a stream has no work.
    ///
    /// # Safety
    /// The stream is live, or stands for a default stream.
    pub(super) unsafe fn is_idle(&self, stream: RawStream) -> Answer<bool> {
        let call = &self.api().query_stream;
        // SAFETY: the caller guarantees a live or default stream (see `# Safety`).
        call.check_done(unsafe { call(stream) })
    }

    /// Whether a stream is being captured.
    ///
    /// # Safety
    /// The stream is live, and no default stream.
    pub(super) unsafe fn is_captured(&self, stream: RawStream) -> Answer<bool> {
        let call = &self.api().is_capturing;
        let mut status = NOT_CAPTURED;
        // SAFETY: the caller guarantees a live stream (see `# Safety`); `status` is valid for the
        // write of an int.
        call.check(unsafe { call(stream, &raw mut status) })?;
        Ok(status != NOT_CAPTURED)
    }

    /// Makes later work of a stream wait for an event, which may be of another context.
    ///
    /// # Safety
    /// The stream is live, or stands for a default stream; the event is live.
    pub(super) unsafe fn wait(&self, stream: RawStream, event: RawEvent) -> Answer {
        let call = &self.api().wait;
        // SAFETY: the caller guarantees a live or default stream and a live event (see `# Safety`).
        call.check(unsafe { call(stream, event, 0) })
    }

    /// Creates an event without timing.
    pub(super) fn create_event(&self) -> Answer<RawEvent> {
        let call = &self.api().create_event;
        let mut event = RawEvent(std::ptr::null_mut());
        // SAFETY: `event` is valid for the write of a handle.
        call.check(unsafe { call(&raw mut event, self.api().event_flags) })?;
        Ok(event)
    }

    /// Destroys an event. Waits for it that are queued stay.
    ///
    /// # Safety
    /// The event is from [`create_event`](Self::create_event), and is used no more.
    pub(super) unsafe fn destroy_event(&self, event: RawEvent) {
        // SAFETY: the caller guarantees a live event that nothing uses any more (see `# Safety`).
        unsafe { (self.api().destroy_event)(event) };
    }

    /// Records an event after the work that a stream has so far.
    ///
    /// # Safety
    /// Event and stream are live and this context's; the stream may stand for a default stream.
    pub(super) unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Answer {
        let call = &self.api().record;
        // SAFETY: the caller guarantees a live event, and a live or default stream, of this context
        // (see `# Safety`).
        call.check(unsafe { call(event, stream) })
    }

    /// Whether an event has completed.
    ///
    /// # Safety
    /// The event is live.
    pub(super) unsafe fn query(&self, event: RawEvent) -> Answer<bool> {
        let call = &self.api().query;
        // SAFETY: the caller guarantees a live event (see `# Safety`).
        call.check_done(unsafe { call(event) })
    }

    /// Waits for an event.
    ///
    /// # Safety
    /// The event is live.
    pub(super) unsafe fn wait_event(&self, event: RawEvent) -> Answer {
        let call = &self.api().wait_event;
        // SAFETY: the caller guarantees a live event (see `# Safety`).
        call.check(unsafe { call(event) })
    }

    /// Creates a pool that keeps freed memory until it is trimmed. The device's default pool is
    /// shared with other libraries, and CUDA's frees its idle memory at every synchronisation.
    pub(super) fn create_pool(&self) -> Answer<RawPool> {
        let api = self.api();
        let mut pool = RawPool(std::ptr::null_mut());
        let props = PoolProps::of_device(self.ordinal());
        // SAFETY: `pool` is valid for the write of a handle, and `props` has the layout that the
        // vendor's bindings were compared with.
        let code = unsafe { (api.create_pool)(&raw mut pool, &raw const props) };
        api.create_pool.check(code)?;
        let mut keep = u64::MAX;
        // SAFETY: the pool was just made; this attribute is a 64-bit number of bytes.
        let code = unsafe { (api.set_pool)(pool, RELEASE_THRESHOLD, (&raw mut keep).cast()) };
        api.set_pool.check(code).inspect_err(|_| {
            // SAFETY: the pool was just made, and nothing has its handle.
            unsafe { self.destroy_pool(pool) };
        })?;
        Ok(pool)
    }

    /// Destroys a pool. Memory that is still being freed in the order of streams stays until then.
    ///
    /// # Safety
    /// The pool is from [`create_pool`](Self::create_pool), and is used no more.
    pub(super) unsafe fn destroy_pool(&self, pool: RawPool) {
        // SAFETY: the caller guarantees a live pool that nothing uses any more (see `# Safety`).
        unsafe { (self.api().destroy_pool)(pool) };
    }

    /// Gives idle memory of a pool back.
    ///
    /// # Safety
    /// The pool is live.
    pub(super) unsafe fn trim(&self, pool: RawPool) -> Answer {
        let call = &self.api().trim;
        // SAFETY: the caller guarantees a live pool (see `# Safety`).
        call.check(unsafe { call(pool, 0) })
    }

    /// Allocates from a pool in a stream's order.
    ///
    /// # Safety
    /// The pool is live; the stream is live, or stands for a default stream.
    pub(super) unsafe fn allocate_in_order(
        &self,
        bytes: usize,
        pool: RawPool,
        stream: RawStream,
    ) -> Answer<DevicePtr> {
        let call = &self.api().allocate_in_order;
        let mut address = 0;
        // SAFETY: `address` is valid for the write of an address; the caller guarantees a live
        // pool, and a live or default stream (see `# Safety`).
        call.check(unsafe { call(&raw mut address, bytes, pool, stream) })?;
        if address == 0 {
            // HIP 5.2 reports success for a pool that is full.
            call.check(code::OUT_OF_MEMORY)?;
        }
        Ok(to_ptr(address))
    }

    /// Frees memory in a stream's order.
    ///
    /// # Safety
    /// The memory was allocated in a stream's order, here or by others, and is freed once, after
    /// its uses in the stream's order; the stream is live, or stands for a default stream.
    pub(super) unsafe fn free_in_order(&self, ptr: DevicePtr, stream: RawStream) -> Answer {
        let call = &self.api().free_in_order;
        // SAFETY: the caller guarantees memory of a pool that is freed once, and a live or default
        // stream (see `# Safety`).
        call.check(unsafe { call(ptr.as_ptr(), stream) })
    }

    /// Returns the name of the call that allocates memory, in no stream's order.
    pub(super) fn allocation_call(&self, memory: Memory) -> &'static str {
        let api = self.api();
        match memory {
            Memory::Device => api.allocate_device.name,
            Memory::Host => api.allocate_host.name,
            Memory::Managed => api
                .allocate_managed
                .map_or("managed memory", |call| call.name),
        }
    }

    /// Allocates memory, in no stream's order. Host memory serves all devices.
    pub(super) fn allocate(&self, memory: Memory, bytes: usize) -> Answer<DevicePtr> {
        const ATTACH_GLOBAL: c_uint = 1;
        let api = self.api();
        let mut address = 0;
        let at = &raw mut address;
        // SAFETY: `at` is valid for the write of an address.
        let code = unsafe {
            match memory {
                Memory::Device => (api.allocate_device)(at, bytes),
                Memory::Host => (api.allocate_host)(at, bytes, api.host_flags),
                Memory::Managed => match api.allocate_managed {
                    Some(call) => call(at, bytes, ATTACH_GLOBAL),
                    None => code::NOT_SUPPORTED,
                },
            }
        };
        match code {
            0 => Ok(to_ptr(address)),
            code => Err(Failed {
                call: self.allocation_call(memory),
                code,
            }),
        }
    }

    /// Frees memory; may wait for the device. An error has no place to go: a failed device keeps its
    /// memory until its context is released.
    ///
    /// # Safety
    /// The memory is of this kind, allocated here or by others, is used no more, and is freed once.
    pub(super) unsafe fn free(&self, memory: Memory, ptr: DevicePtr) {
        let call = match memory {
            Memory::Host => &self.api().free_host,
            Memory::Device | Memory::Managed => &self.api().free_device,
        };
        // SAFETY: the caller guarantees memory of this kind that nothing uses any more, freed once
        // (see `# Safety`).
        unsafe { call(ptr.as_ptr()) };
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

    /// Fills memory with a byte.
    ///
    /// # Safety
    /// As [`RawQueue::fill`](crate::device::RawQueue::fill); the stream is live, or stands for a
    /// default stream.
    pub(super) unsafe fn fill(
        &self,
        dst: DevicePtr,
        byte: u8,
        bytes: usize,
        stream: RawStream,
    ) -> Answer {
        let call = &self.api().fill;
        // SAFETY: the caller guarantees `bytes` valid bytes at `dst`, and a live or default stream
        // (see `# Safety`).
        call.check(unsafe { call(dst.as_ptr(), byte, bytes, stream) })
    }
}
