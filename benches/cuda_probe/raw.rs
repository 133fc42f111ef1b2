//! The driver, without this crate: what the figures of the crate stand beside.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

use arrow_device::cuda::cudarc::driver::sys::{
    self, CUevent, CUmemAllocationType, CUmemLocationType, CUmemPool_attribute, CUmemPoolProps,
    CUmemoryPool, CUresult, CUstream,
};
use libloading::Library;

use crate::stats::Res;

/// The driver's answer as a result that names the call.
pub(crate) fn check(call: &str, code: CUresult) -> Res<()> {
    code.result().map_err(|e| format!("{call}: {e}").into())
}

/// Page-locked memory, made as the crate makes it.
pub(crate) struct Locked {
    ptr: *mut c_void,
    bytes: usize,
}

impl Locked {
    /// Of arbitrary content.
    pub(crate) fn new(bytes: usize) -> Res<Self> {
        const PORTABLE: c_uint = 1;
        let mut ptr = null_mut();
        // SAFETY: `ptr` is valid for the write of a pointer, and a context is current.
        let code = unsafe { sys::cuMemHostAlloc(&raw mut ptr, bytes, PORTABLE) };
        check("cuMemHostAlloc", code)?;
        Ok(Self { ptr, bytes })
    }

    /// Freed here, so that the free can be timed.
    pub(crate) fn free(self) -> Res<()> {
        let ptr = self.ptr;
        std::mem::forget(self);
        // SAFETY: the memory came from `cuMemHostAlloc` and is freed once; callers wait for what
        // uses it.
        check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(ptr) })
    }

    pub(crate) fn address(&self) -> u64 {
        self.ptr.expose_provenance() as u64
    }

    /// The bytes, while nothing on the device uses them.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the memory is the driver's own, of this size; callers wait for what uses it. The
        // kernel has zeroed it.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.cast(), self.bytes) }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // SAFETY: the memory came from the driver's allocation in `new` and is freed once: `free`
        // forgets the value. Users wait for what uses it.
        unsafe { sys::cuMemFreeHost(self.ptr) };
    }
}

/// Memory of the device.
pub(crate) struct OnDevice {
    address: u64,
}

impl OnDevice {
    pub(crate) fn new(bytes: usize) -> Res<Self> {
        let mut address = 0;
        // SAFETY: `address` is valid for the write of an address, and a context is current.
        let code = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) };
        check("cuMemAlloc", code)?;
        Ok(Self { address })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Freed here, so that the free can be timed.
    pub(crate) fn free(self) -> Res<()> {
        let address = self.address;
        std::mem::forget(self);
        // SAFETY: the memory came from `cuMemAlloc` and is freed once; callers wait for what uses
        // it.
        check("cuMemFree", unsafe { sys::cuMemFree_v2(address) })
    }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        // SAFETY: the memory came from the driver's allocation in `new` and is freed once: `free`
        // forgets the value. Users wait for what uses it.
        unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// An event without timing, as the crate's.
pub(crate) struct Event(CUevent);

impl Event {
    pub(crate) fn new() -> Res<Self> {
        const DISABLE_TIMING: c_uint = 2;
        let mut event = null_mut();
        // SAFETY: `event` is valid for the write of a handle, and a context is current.
        let code = unsafe { sys::cuEventCreate(&raw mut event, DISABLE_TIMING) };
        check("cuEventCreate", code)?;
        Ok(Self(event))
    }

    pub(crate) fn record(&self, stream: &Stream) -> Res<()> {
        // SAFETY: stream and event are live: their owners are borrowed.
        let code = unsafe { sys::cuEventRecord(self.0, stream.raw) };
        check("cuEventRecord", code)
    }

    /// Makes this thread wait.
    pub(crate) fn wait(&self) -> Res<()> {
        // SAFETY: the event is live: `self` owns it.
        check("cuEventSynchronize", unsafe {
            sys::cuEventSynchronize(self.0)
        })
    }

    /// Asks whether it has completed; an event that has not is an error here.
    pub(crate) fn query(&self) -> Res<()> {
        // SAFETY: the event is live: `self` owns it.
        check("cuEventQuery", unsafe { sys::cuEventQuery(self.0) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the handle was created in `new`, and only this drop destroys it.
        unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// A stream: an own one, or that of a queue of the crate.
pub(crate) struct Stream {
    raw: CUstream,
    own: bool,
}

impl Stream {
    /// One that does not wait for the legacy default stream, as the crate's.
    pub(crate) fn new() -> Res<Self> {
        const NON_BLOCKING: c_uint = 1;
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for the write of a handle, and a context is current.
        let code = unsafe { sys::cuStreamCreate(&raw mut raw, NON_BLOCKING) };
        check("cuStreamCreate", code)?;
        Ok(Self { raw, own: true })
    }

    /// # Safety
    /// The stream outlives the answer.
    pub(crate) unsafe fn borrowed(raw: CUstream) -> Self {
        Self { raw, own: false }
    }

    /// Makes this thread wait for all of it.
    pub(crate) fn wait(&self) -> Res<()> {
        // SAFETY: the stream is live: `self` owns it, or a queue that lives as long lent it.
        check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(self.raw)
        })
    }

    pub(crate) fn wait_for(&self, event: &Event) -> Res<()> {
        // SAFETY: stream and event are live: their owners are borrowed.
        let code = unsafe { sys::cuStreamWaitEvent(self.raw, event.0, 0) };
        check("cuStreamWaitEvent", code)
    }

    /// One copy, in whichever direction the addresses say.
    ///
    /// # Safety
    /// Both ranges are valid until the stream has run the copy, and nothing else uses them.
    pub(crate) unsafe fn copy(&self, dst: u64, src: u64, bytes: usize) -> Res<()> {
        // SAFETY: the caller guarantees that both ranges are valid until the stream has run the
        // copy (see `# Safety`).
        let code = unsafe { sys::cuMemcpyAsync(dst, src, bytes, self.raw) };
        check("cuMemcpyAsync", code)
    }

    /// # Safety
    /// As [`copy`](Self::copy).
    pub(crate) unsafe fn fill(&self, dst: u64, byte: u8, bytes: usize) -> Res<()> {
        // SAFETY: the caller guarantees that the range is valid until the stream has filled it (see
        // `# Safety`).
        let code = unsafe { sys::cuMemsetD8Async(dst, byte, bytes, self.raw) };
        check("cuMemsetD8Async", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.own {
            // SAFETY: the handle was created in `new`, and only this drop destroys it.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A pool of device memory.
pub(crate) struct Pool(CUmemoryPool);

impl Pool {
    /// Keeps `threshold` bytes when the host waits.
    pub(crate) fn new(ordinal: usize, mut threshold: u64) -> Res<Self> {
        // SAFETY: all members are integers or pointers, for which zero is a value.
        let mut props: CUmemPoolProps = unsafe { std::mem::zeroed() };
        props.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        props.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        // The second member: its name depends on the version of the bindings.
        let location = (&raw mut props.location).cast::<c_int>();
        // SAFETY: `CUmemLocation` is a C struct of two ints, of which the second one is the device.
        unsafe { location.add(1).write(c_int::try_from(ordinal)?) };
        let mut pool = null_mut();
        // SAFETY: `pool` is valid for the write of a handle, and `props` is initialized.
        let code = unsafe { sys::cuMemPoolCreate(&raw mut pool, &raw const props) };
        check("cuMemPoolCreate", code)?;
        let pool = Self(pool);
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let value = (&raw mut threshold).cast();
        // SAFETY: the pool was just created, and `value` points to the 64 bits of this attribute.
        let code = unsafe { sys::cuMemPoolSetAttribute(pool.0, attribute, value) };
        check("cuMemPoolSetAttribute", code)?;
        Ok(pool)
    }

    pub(crate) fn allocate(&self, bytes: usize, stream: &Stream) -> Res<u64> {
        let mut address = 0;
        // SAFETY: `address` is valid for the write of an address; `self` owns the pool, and the
        // stream is borrowed.
        let code =
            unsafe { sys::cuMemAllocFromPoolAsync(&raw mut address, bytes, self.0, stream.raw) };
        check("cuMemAllocFromPoolAsync", code)?;
        Ok(address)
    }

    /// # Safety
    /// From `allocate`, freed once.
    pub(crate) unsafe fn free(&self, address: u64, stream: &Stream) -> Res<()> {
        // SAFETY: the caller guarantees that the address was allocated by this pool and is freed
        // once (see `# Safety`).
        check("cuMemFreeAsync", unsafe {
            sys::cuMemFreeAsync(address, stream.raw)
        })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the pool was created in `new`, and what was allocated from it was freed.
        unsafe { sys::cuMemPoolDestroy(self.0) };
    }
}

/// The driver's call that runs a list of copies. By name: its parameters depend on the driver, and
/// the bindings may lack it.
pub(crate) struct Batch {
    call: BatchCall,
    _library: Library,
}

type Plain = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *const Attributes,
    *const usize,
    usize,
    CUstream,
) -> c_int;
type WithIndex = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *const Attributes,
    *const usize,
    usize,
    *mut usize,
    CUstream,
) -> c_int;

enum BatchCall {
    /// CUDA 13.
    Plain(Plain),
    /// CUDA 12.8: it also says which copy it refused.
    WithIndex(WithIndex),
}

/// `CUmemcpyAttributes`.
#[repr(C)]
struct Attributes {
    order: c_uint,
    hints: [c_int; 4],
    flags: c_uint,
}

/// A list of copies.
#[derive(Default)]
pub(crate) struct Copies {
    pub(crate) dst: Vec<u64>,
    pub(crate) src: Vec<u64>,
    pub(crate) bytes: Vec<usize>,
}

impl Copies {
    pub(crate) fn add(&mut self, dst: u64, src: u64, bytes: usize) {
        self.dst.push(dst);
        self.src.push(src);
        self.bytes.push(bytes);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64, usize)> + '_ {
        let pairs = self.dst.iter().zip(&self.src).zip(&self.bytes);
        pairs.map(|((dst, src), bytes)| (*dst, *src, *bytes))
    }
}

impl Batch {
    /// `None` if the driver has no such call.
    pub(crate) fn load() -> Option<Self> {
        let load = |name: &str| {
            // SAFETY: the library is the driver, whose initialisers have run: it is loaded already.
            unsafe { Library::new(name) }.ok()
        };
        let library = load("libcuda.so.1").or_else(|| load("libcuda.so"))?;
        // SAFETY: the type is that of the function in CUDA's header.
        let plain = unsafe { library.get::<Plain>(b"cuMemcpyBatchAsync_v2\0") };
        let call = match plain.map(|call| *call) {
            Ok(call) => BatchCall::Plain(call),
            Err(_) => {
                // SAFETY: the type is that of the function in CUDA's header.
                let call = unsafe { library.get::<WithIndex>(b"cuMemcpyBatchAsync\0") };
                BatchCall::WithIndex(*call.ok()?)
            }
        };
        Some(Self {
            call,
            _library: library,
        })
    }

    pub(crate) fn name(&self) -> &'static str {
        match self.call {
            BatchCall::Plain(_) => "cuMemcpyBatchAsync_v2",
            BatchCall::WithIndex(_) => "cuMemcpyBatchAsync",
        }
    }

    /// Sources are read in the stream's order.
    ///
    /// # Safety
    /// As [`Stream::copy`].
    pub(crate) unsafe fn copy(&self, copies: &Copies, stream: &Stream) -> Res<()> {
        let attributes = Attributes {
            order: 1,
            hints: [0; 4],
            flags: 0,
        };
        let (mut refused, first) = (usize::MAX, 0usize);
        let (dst, src) = (copies.dst.as_ptr(), copies.src.as_ptr());
        let (sizes, n) = (copies.bytes.as_ptr(), copies.bytes.len());
        let (set, first) = (&raw const attributes, &raw const first);
        // SAFETY: the lists have `n` members, and there is one set of attributes; the caller
        // guarantees that the ranges are valid until the stream has run the copies (see `#
        // Safety`).
        let code = unsafe {
            match self.call {
                BatchCall::Plain(call) => call(dst, src, sizes, n, set, first, 1, stream.raw),
                BatchCall::WithIndex(call) => {
                    let refused = &raw mut refused;
                    call(dst, src, sizes, n, set, first, 1, refused, stream.raw)
                }
            }
        };
        match code {
            0 => Ok(()),
            code => Err(format!("{}: code {code}", self.name()).into()),
        }
    }
}
