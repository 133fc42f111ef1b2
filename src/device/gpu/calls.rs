//! The calls that CUDA and HIP have alike, made while a context is current.

use std::ffi::{c_uint, c_void};
use std::ops::Range;

use super::api::{
    Answer, Failed, LaunchHost, NOT_CAPTURED, PoolProps, RELEASE_THRESHOLD, RawEvent, RawPool,
    RawStream, code,
};
use super::entry::Current;
use super::jobs;
use super::runtime::{Found, MANAGED, Meaning, Memory, PointerKind, to_ptr};
use crate::device::backend::{CopyOp, DevicePtr};

/// What is known about some bytes.
#[derive(Debug)]
pub(super) struct Allocation {
    pub(super) kind: PointerKind,
    /// The addresses of that kind: the allocation's, or only those of the bytes, of which the first
    /// and the last one were asked about.
    pub(super) range: Range<usize>,
    /// Whether the library has not reported that the bytes lie in several allocations.
    pub(super) is_one: bool,
}

/// All streams, events and pools are of the current context's library.
impl Current<'_> {
    /// Waits for all work.
    pub(super) fn synchronize(&self) -> Answer {
        // SAFETY: the event is of this context.
        self.sleep_until(|event| unsafe { self.record_all(event) });
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
        // SAFETY: the event is of this context; the caller guarantees a live or default stream (see
        // `# Safety`).
        self.sleep_until(|event| Some(unsafe { self.record(event, stream) }));
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
    /// The stream is live, or stands for a default stream.
    pub(super) unsafe fn is_captured(&self, stream: RawStream) -> Answer<bool> {
        let call = &self.api().is_capturing;
        let mut status = NOT_CAPTURED;
        // SAFETY: the caller guarantees a live or default stream (see `# Safety`); `status` is
        // valid for the write of an int.
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

    /// Where waits are to sleep, sleeps until an event has completed that `record` records: the
    /// calls that wait for streams and contexts spin, unless the context's owner has decided
    /// otherwise. They still follow, and return its errors.
    fn sleep_until(&self, record: impl FnOnce(RawEvent) -> Option<Answer>) {
        if !self.blocks_waits() {
            return;
        }
        let Ok(event) = self.create_event() else {
            return;
        };
        if let Some(Ok(())) = record(event) {
            // SAFETY: the event was made above.
            let _ = unsafe { self.wait_event(event) };
        }
        // SAFETY: the event was made above, and nothing else has its handle.
        unsafe { self.destroy_event(event) };
    }

    /// Creates an event without timing. Whoever waits for it sleeps, if waits are to sleep.
    pub(super) fn create_event(&self) -> Answer<RawEvent> {
        const BLOCKING_SYNC: c_uint = 1;
        let (call, mut flags) = (&self.api().create_event, self.api().event_flags);
        if self.blocks_waits() {
            flags |= BLOCKING_SYNC;
        }
        let mut event = RawEvent(std::ptr::null_mut());
        // SAFETY: `event` is valid for the write of a handle.
        call.check(unsafe { call(&raw mut event, flags) })?;
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

    /// Allocates memory, in no stream's order. Host memory serves all devices.
    pub(super) fn allocate(&self, memory: Memory, bytes: usize) -> Answer<DevicePtr> {
        const ATTACH_GLOBAL: c_uint = 1;
        let api = self.api();
        let mut address = 0;
        let at = &raw mut address;
        // SAFETY: `at` is valid for the write of an address.
        unsafe {
            match memory {
                Memory::Device => api.allocate_device.check((api.allocate_device)(at, bytes)),
                Memory::Host => {
                    let code = (api.allocate_host)(at, bytes, api.host_flags);
                    api.allocate_host.check(code)
                }
                Memory::Managed => match &api.allocate_managed {
                    Some(call) => call.check(call(at, bytes, ATTACH_GLOBAL)),
                    None => Err(not_supported(MANAGED)),
                },
            }
        }?;
        Ok(to_ptr(address))
    }

    /// Frees memory; may wait for the device.
    ///
    /// # Safety
    /// The memory is from [`allocate`](Self::allocate) with this kind, is used no more, and is
    /// freed once.
    pub(super) unsafe fn free(&self, memory: Memory, ptr: DevicePtr) -> Answer {
        let call = match memory {
            Memory::Host => &self.api().free_host,
            Memory::Device | Memory::Managed => &self.api().free_device,
        };
        // SAFETY: the caller guarantees memory of this kind that nothing uses any more, freed once
        // (see `# Safety`).
        call.check(unsafe { call(ptr.as_ptr()) })
    }

    /// As [`free`](Self::free); may also wait for host functions. Returns false if the library
    /// refuses for now.
    ///
    /// # Safety
    /// As [`free`](Self::free).
    pub(super) unsafe fn try_free(&self, memory: Memory, ptr: DevicePtr) -> bool {
        // A failed device keeps its memory until its context is released; the error has no place to
        // go.
        // SAFETY: the caller guarantees what `free` asks for (see `# Safety`).
        let freed = unsafe { self.free(memory, ptr) };
        !freed.is_err_and(|failed| self.meaning(failed.code) == Meaning::Passing)
    }

    /// Returns what `bytes` bytes at `address` are; `None` if first and last byte are not the same,
    /// or there is no such range.
    ///
    /// # Errors
    /// The library cannot tell, so nothing may be assumed.
    pub(super) fn kind_of(&self, address: DevicePtr, bytes: usize) -> Answer<Option<PointerKind>> {
        let found = self.find(address, bytes, |_| None)?;
        Ok(found.map(|found| found.kind))
    }

    /// As [`kind_of`](Self::kind_of), with the addresses around the bytes that are of that kind.
    pub(super) fn allocation_of(
        &self,
        address: DevicePtr,
        bytes: usize,
    ) -> Answer<Option<Allocation>> {
        self.find(address, bytes, |first| self.range_of(first))
    }

    /// `range_of` is called if the library knows the first byte but has not reported a range.
    fn find(
        &self,
        address: DevicePtr,
        bytes: usize,
        range_of: impl FnOnce(usize) -> Option<Range<usize>>,
    ) -> Answer<Option<Allocation>> {
        let first = address.address();
        let Some(last) = first.checked_add(bytes.saturating_sub(1)) else {
            return Ok(None);
        };
        if first == 0 {
            return Ok(None);
        }
        let Found {
            kind,
            range,
            is_exact,
        } = self.look_up(first)?;
        let range = match kind {
            PointerKind::Unknown => None,
            _ => range.or_else(|| range_of(first)),
        };
        // A range that does not hold the first byte says nothing.
        let range = range.filter(|range| range.contains(&first));
        let is_one = range.as_ref().is_none_or(|range| range.contains(&last));
        if let Some(range) = range.filter(|_| is_one) {
            // Where the library cannot tell mapped memory apart, it may have reported more than is
            // memory.
            if is_exact || kind == self.kind_of_byte(range.end - 1)? {
                return Ok(Some(Allocation {
                    kind,
                    range,
                    is_one,
                }));
            }
        }
        let same = bytes <= 1 || kind == self.kind_of_byte(last)?;
        Ok(same.then_some(Allocation {
            kind,
            range: address.range(bytes),
            is_one,
        }))
    }

    /// Runs a list of copies in one call; `None` if the library has none. Sources are read in the
    /// stream's order.
    ///
    /// # Safety
    /// As [`RawQueue::copy`](crate::device::RawQueue::copy); the stream is live, and not the legacy
    /// default one.
    pub(super) unsafe fn copy_list(&self, copies: &[CopyOp], stream: RawStream) -> Option<Answer> {
        let call = self.api().copy_list.as_ref()?;
        // SAFETY: the caller guarantees that memory and stream are live (see `# Safety`).
        Some(call.check(unsafe { call.function.call(copies, stream) }))
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

    /// Makes the library run a job in a stream's order.
    ///
    /// # Safety
    /// The stream is live, or stands for a default stream; `number` is a job's, and it may be run
    /// on any thread until the stream has run it.
    pub(super) unsafe fn launch_host(&self, stream: RawStream, number: *mut c_void) -> Answer {
        let Some(call) = &self.api().launch_host else {
            // Devices that need it are not opened without it.
            return Err(not_supported("a host function"));
        };
        // SAFETY: the caller guarantees a live or default stream, and a job that may be run (see
        // `# Safety`). Neither function unwinds.
        call.check(unsafe {
            match call.function {
                LaunchHost::Function(launch) => launch(stream, Some(jobs::run), number),
                LaunchHost::Callback(add) => add(stream, Some(jobs::run_after), number, 0),
            }
        })
    }
}

/// Returns the failure of a call that the library does not have.
fn not_supported(call: &'static str) -> Failed {
    Failed {
        call,
        out_of_memory: call,
        code: code::NOT_SUPPORTED,
    }
}
