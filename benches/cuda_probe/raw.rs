//! The driver, without this crate: what the figures of the crate stand beside.

use std::ffi::{c_int, c_uint};
use std::marker::PhantomData;
use std::ptr::{NonNull, with_exposed_provenance_mut};
use std::sync::Arc;
use std::time::Instant;

use arrow_buffer::Buffer;
use arrow_device::cuda::cudarc::driver::{result, sys};
use libloading::Library;

use crate::Probe;
use crate::stats::{Res, Seconds, since};

/// Bytes of the host or the device, which are there as long as they are borrowed.
#[derive(Clone, Copy)]
pub(crate) struct Span<'a>(u64, usize, PhantomData<&'a ()>);

impl<'a> Span<'a> {
    /// To be read.
    pub(crate) fn of(bytes: &'a [u8]) -> Self {
        Self(address(bytes), bytes.len(), PhantomData)
    }

    /// To be written.
    pub(crate) fn of_mut(bytes: &'a mut [u8]) -> Self {
        Self(
            bytes.as_mut_ptr().expose_provenance() as u64,
            bytes.len(),
            PhantomData,
        )
    }

    pub(crate) fn address(self) -> u64 {
        self.0
    }

    /// The first `bytes` of it.
    pub(crate) fn first(self, bytes: usize) -> Self {
        Self(self.0, bytes.min(self.1), PhantomData)
    }

    /// Without the first `bytes` of it.
    pub(crate) fn skip(self, bytes: usize) -> Self {
        Self(
            self.0 + bytes.min(self.1) as u64,
            self.1.saturating_sub(bytes),
            PhantomData,
        )
    }
}

pub(crate) fn address(bytes: &[u8]) -> u64 {
    bytes.as_ptr().expose_provenance() as u64
}

/// Page-locked memory, made as the crate makes it.
pub(crate) struct Locked(usize, usize);

impl Locked {
    /// The pages are there.
    pub(crate) fn new(bytes: usize) -> Res<Self> {
        const PORTABLE: c_uint = 1;
        // SAFETY: a context is current.
        let memory = unsafe { result::malloc_host(bytes, PORTABLE) }?;
        Ok(Self(memory.expose_provenance(), bytes))
    }

    pub(crate) fn span(&self) -> Span<'_> {
        Span(self.0 as u64, self.1, PhantomData)
    }

    /// The bytes, while nothing on the device uses them.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the memory is the driver's own, of this size, zeroed by the kernel; all copies here are waited for.
        unsafe { std::slice::from_raw_parts_mut(with_exposed_provenance_mut(self.0), self.1) }
    }

    /// The first `bytes` bytes, which nobody reads while a copy writes them.
    pub(crate) fn buffer(self: &Arc<Self>, bytes: usize) -> Buffer {
        assert!(bytes <= self.1, "too many bytes");
        let memory = NonNull::new(with_exposed_provenance_mut(self.0));
        let memory = memory.expect("the driver's memory is not at 0");
        // SAFETY: the memory is the driver's own, of this size, zeroed by the kernel; the buffer keeps it. The probe drops what it has
        // made of the buffer before the next copy.
        unsafe { Buffer::from_custom_allocation(memory, bytes, self.clone()) }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // SAFETY: from `malloc_host`, freed once; all copies here are waited for.
        let _ = unsafe { result::free_host(with_exposed_provenance_mut(self.0)) };
    }
}

/// Memory of the device.
pub(crate) struct OnDevice(u64, usize);

impl OnDevice {
    pub(crate) fn new(bytes: usize) -> Res<Self> {
        // SAFETY: a context is current. What the memory holds is not looked at before it is written.
        Ok(Self(unsafe { result::malloc_sync(bytes) }?, bytes))
    }

    pub(crate) fn span(&self) -> Span<'_> {
        Span(self.0, self.1, PhantomData)
    }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        // SAFETY: from `malloc_sync`, freed once; all copies here are waited for.
        let _ = unsafe { result::free_sync(self.0) };
    }
}

/// A stream, with an event without timing for its end.
pub(crate) struct Stream {
    pub(crate) raw: sys::CUstream,
    event: sys::CUevent,
}

impl Stream {
    /// # Safety
    /// The stream outlives the answer.
    pub(crate) unsafe fn borrowed(raw: sys::CUstream) -> Res<Self> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        Ok(Self { raw, event })
    }

    /// One copy, in whichever direction the addresses say.
    ///
    /// # Safety
    /// Both are there until the stream has run the copy, and nothing else uses them.
    pub(crate) unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Res<()> {
        // SAFETY: the caller guarantees both ranges (see `# Safety`).
        Ok(unsafe { sys::cuMemcpyAsync(to, from, bytes, self.raw) }.result()?)
    }

    pub(crate) fn record(&self) -> Res<()> {
        // SAFETY: event and stream live as long as `self`.
        Ok(unsafe { result::event::record(self.event, self.raw) }?)
    }

    /// Waits until the event that was recorded last has completed.
    pub(crate) fn wait(&self) -> Res<()> {
        // SAFETY: the event lives as long as `self`.
        Ok(unsafe { result::event::synchronize(self.event) }?)
    }

    /// The seconds from `start` until now, and until the stream has done all.
    pub(crate) fn finish(&self, start: Instant) -> Res<Seconds> {
        let submitted = since(start);
        self.record()?;
        self.wait()?;
        Ok([submitted, since(start)])
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made in `borrowed`, destroyed once.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

impl Probe {
    /// One copy of all that `from` has.
    pub(crate) fn copy(&self, to: Span<'_>, from: Span<'_>) -> Res<Seconds> {
        self.copy_since(Instant::now(), to, from)
    }

    /// The same, timed from `start` on.
    pub(crate) fn copy_since(&self, start: Instant, to: Span<'_>, from: Span<'_>) -> Res<Seconds> {
        assert!(from.1 <= to.1, "too many bytes");
        // SAFETY: both are borrowed until the wait that follows, and the probe uses its memory for one copy at a time.
        unsafe { self.stream.copy(to.0, from.0, from.1) }?;
        self.stream.finish(start)
    }

    /// Copies each of a batch's buffers into fresh memory of its own.
    pub(crate) fn read_each(&self, buffers: &[(u64, usize)], start: Instant) -> Res<Seconds> {
        let mut here = Vec::with_capacity(buffers.len());
        for (address, bytes) in buffers {
            let mut memory = Vec::<u8>::with_capacity(*bytes);
            let to = memory.as_mut_ptr().expose_provenance() as u64;
            here.push(memory);
            // SAFETY: the caller's batch has the buffers, and `here` lives until the wait.
            unsafe { self.stream.copy(to, *address, *bytes) }?;
        }
        let seconds = self.stream.finish(start)?;
        drop(here);
        Ok(seconds)
    }
}

/// A pool of device memory that keeps all that is freed.
pub(crate) struct Pool(sys::CUmemoryPool);

impl Pool {
    pub(crate) fn new(ordinal: usize) -> Res<Self> {
        // SAFETY: all members are integers or pointers, for which zero is a value.
        let mut props: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        props.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        props.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        // The second member: its name depends on the version of the bindings.
        let location = (&raw mut props.location).cast::<c_int>();
        // SAFETY: `CUmemLocation` is a C struct of two ints, of which the second one is the device.
        unsafe { location.add(1).write(c_int::try_from(ordinal)?) };
        // SAFETY: `props` is initialized.
        let pool = Self(unsafe { result::mem_pool::create(&raw const props) }?);
        let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let mut most = u64::MAX;
        // SAFETY: the pool was just created, and this attribute has 64 bits.
        unsafe { result::mem_pool::set_attribute(pool.0, threshold, (&raw mut most).cast()) }?;
        Ok(pool)
    }

    /// Times `work` with a block for each size; the frees are not timed.
    pub(crate) fn with_blocks(
        &self,
        stream: &Stream,
        sizes: impl Iterator<Item = usize>,
        mut work: impl FnMut(usize, u64) -> Res<()>,
    ) -> Res<Seconds> {
        let (start, mut blocks) = (Instant::now(), Vec::new());
        for (i, bytes) in sizes.enumerate() {
            // SAFETY: pool and stream are live.
            blocks.push(unsafe { result::mem_pool::alloc_async(self.0, bytes, stream.raw) }?);
            work(i, blocks[i])?;
        }
        let seconds = stream.finish(start)?;
        for block in blocks {
            // SAFETY: allocated above, freed once, after all its uses.
            unsafe { result::free_async(block, stream.raw) }?;
        }
        stream.finish(start)?;
        Ok(seconds)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: created in `new`; what was allocated from it was freed.
        let _ = unsafe { result::mem_pool::destroy(self.0) };
    }
}

/// The call of CUDA 13 that runs a list of copies, by name: the bindings may be for an older version.
pub(crate) struct Lists {
    call: Call,
    _library: Library,
}

type Call = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *const [c_int; 6],
    *const usize,
    usize,
    sys::CUstream,
) -> c_int;

/// A list of copies: where to, where from, how many bytes.
#[derive(Default)]
pub(crate) struct Copies(Vec<u64>, Vec<u64>, Vec<usize>);

impl Copies {
    pub(crate) fn add(&mut self, to: Span<'_>, from: Span<'_>) {
        assert!(from.1 <= to.1, "too many bytes");
        self.0.push(to.0);
        self.1.push(from.0);
        self.2.push(from.1);
    }
}

impl Lists {
    pub(crate) const NAME: &str = "cuMemcpyBatchAsync_v2";

    /// `None` if the driver has no such call.
    pub(crate) fn load() -> Option<Self> {
        // SAFETY: the library is the driver, whose initialisers have run: it is loaded already.
        let library = unsafe { Library::new("libcuda.so.1") }.ok()?;
        // SAFETY: the type is that of the function in CUDA's header.
        let call = *unsafe { library.get::<Call>(Self::NAME) }.ok()?;
        Some(Self {
            call,
            _library: library,
        })
    }

    /// # Safety
    /// As [`Stream::copy`], for each copy.
    pub(crate) unsafe fn copy(&self, copies: &Copies, stream: &Stream) -> Res<()> {
        let Copies(to, from, bytes) = copies;
        let (to, from, sizes) = (to.as_ptr(), from.as_ptr(), bytes.as_ptr());
        // One `CUmemcpyAttributes`, from the first copy on: sources are read in the stream's order.
        let (attributes, first) = ([1, 0, 0, 0, 0, 0], 0);
        // SAFETY: the lists are of one length; the caller guarantees the ranges (see `# Safety`).
        match unsafe {
            (self.call)(
                to,
                from,
                sizes,
                bytes.len(),
                &attributes,
                &first,
                1,
                stream.raw,
            )
        } {
            0 => Ok(()),
            code => Err(format!("{}: code {code}", Self::NAME).into()),
        }
    }
}
