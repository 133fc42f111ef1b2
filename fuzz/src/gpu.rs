//! What the targets do with the streams of a GPU, once one is there: they make them late, and read memory in their order.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arrow_device::cuda::cudarc::driver::{CudaContext, sys};
use arrow_device::device::DevicePtr;
use arrow_device::{Device, Queue};

/// What the threads have done.
#[derive(Debug, Default)]
pub struct Counts {
    /// Streams that were made late.
    pub delays: AtomicU64,
    /// Buffers that a copy on the device read whole.
    pub reads: AtomicU64,
}

/// Where reads go; a longer one is read in parts.
const SCRATCH: usize = 1 << 20;
/// A stream is late by less than this.
const LATE: Duration = Duration::from_micros(300);

struct Gpu {
    context: Arc<CudaContext>,
    scratch: sys::CUdeviceptr,
    counts: Counts,
}

static GPU: OnceLock<Gpu> = OnceLock::new();

thread_local! {
    static RANDOM: Cell<u64> = const { Cell::new(1) };
}

/// Uses this GPU from now on. Only the first call counts.
pub(crate) fn set(context: Arc<CudaContext>) -> &'static Counts {
    let gpu = GPU.get_or_init(|| {
        context.bind_to_thread().expect("the context is there");
        let mut scratch = 0;
        // SAFETY: `scratch` is valid for the write of an address.
        let code = unsafe { sys::cuMemAlloc_v2(&raw mut scratch, SCRATCH) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS, "cuMemAlloc");
        Gpu {
            context,
            scratch,
            counts: Counts::default(),
        }
    });
    &gpu.counts
}

/// What this thread's next random numbers follow from.
pub(crate) fn seed(seed: u64) {
    RANDOM.set(seed);
}

/// Sebastiano Vigna's SplitMix64.
pub(crate) fn random() -> u64 {
    let state = RANDOM.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
    RANDOM.set(state);
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Makes what is queued next late by a random time, each third time. Not on the CPU.
pub(crate) fn delay(queue: &Queue) {
    unsafe extern "C" fn sleep(nanoseconds: *mut c_void) {
        std::thread::sleep(Duration::from_nanos(nanoseconds.addr() as u64));
    }
    let late = random();
    let (Some(gpu), Some(stream), 0) = (GPU.get(), stream(queue), late % 3) else {
        return;
    };
    gpu.context.bind_to_thread().expect("the context is there");
    let nanoseconds =
        std::ptr::without_provenance_mut((late >> 32) as usize % LATE.as_nanos() as usize);
    // SAFETY: the stream is the queue's, which lives; the function reads the number itself, and may be called on any thread.
    let code = unsafe { sys::cuLaunchHostFunc(stream, Some(sleep), nanoseconds) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS, "cuLaunchHostFunc");
    gpu.counts.delays.fetch_add(1, Relaxed);
}

/// Reads memory on the device, in the order of the queue. Returns false if the queue is no stream of a GPU.
pub(crate) fn touch(queue: &Queue, address: DevicePtr, bytes: usize) -> bool {
    let (Some(gpu), Some(stream)) = (GPU.get(), stream(queue)) else {
        return false;
    };
    gpu.context.bind_to_thread().expect("the context is there");
    for at in (0..bytes).step_by(SCRATCH) {
        let from = (address.address() + at) as sys::CUdeviceptr;
        let part = SCRATCH.min(bytes - at);
        // SAFETY: the loan says that so many bytes may be read on this queue; scratch has as many, and nobody reads it.
        let code = unsafe { sys::cuMemcpyAsync(gpu.scratch, from, part, stream) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS, "cuMemcpyAsync");
    }
    gpu.counts.reads.fetch_add(1, Relaxed);
    true
}

/// Whether the device is a GPU's.
pub(crate) fn is_used(device: &Device) -> bool {
    GPU.get().is_some() && stream(&device.default_queue()).is_some()
}

fn stream(queue: &Queue) -> Option<sys::CUstream> {
    let handle = queue.raw().stream_handle()?;
    Some(std::ptr::with_exposed_provenance_mut(handle))
}
