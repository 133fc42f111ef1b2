//! The memories of one GPU as a world that threads share: streams are late at random, so that a missing wait shows in the rows, and
//! loans are read by copies on the device.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arrow_device::cuda::cudarc::driver::{CudaContext, sys};
use arrow_device::device::DevicePtr;
use arrow_device::{Devices, Queue};

use crate::input::Input;
use crate::operations;
use crate::panics::watched;
use crate::world::World;

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
    world: World,
    context: Arc<CudaContext>,
    scratch: sys::CUdeviceptr,
    counts: Counts,
}

static GPU: OnceLock<Gpu> = OnceLock::new();

thread_local! {
    static RANDOM: Cell<u64> = const { Cell::new(1) };
}

/// Sebastiano Vigna's SplitMix64.
fn random() -> u64 {
    let state = RANDOM.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
    RANDOM.set(state);
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Opens `cuda:0`, its page-locked and its managed memory.
///
/// # Errors
/// Returns why they cannot be opened.
pub fn open() -> Result<&'static Counts, arrow_device::Error> {
    crate::init();
    let names = ["cuda:0", "cuda-host:0", "cuda-managed:0"];
    let devices = names.map(Devices::open).into_iter();
    let devices = devices.collect::<Result<Vec<_>, _>>()?;
    let context = devices[0].cuda_context()?;
    let all = std::iter::once(Devices::cpu()).chain(devices);
    let world = World::of(all.map(|device| (device, None)).collect());
    let gpu = GPU.get_or_init(|| {
        context.bind_to_thread().expect("the context is there");
        let mut scratch = 0;
        // SAFETY: `scratch` is valid for the write of an address.
        let code = unsafe { sys::cuMemAlloc_v2(&raw mut scratch, SCRATCH) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS, "cuMemAlloc");
        Gpu {
            world,
            context,
            scratch,
            counts: Counts::default(),
        }
    });
    Ok(&gpu.counts)
}

/// The bytes of the operations that follow from a seed: those of the target `operations`, of an array that is generated.
pub fn input(seed: u64) -> Vec<u8> {
    RANDOM.set(seed);
    let mut bytes = vec![random() as u8 & !4];
    let mut some = |least: u64, most: u64, counted: bool| {
        let n = least + random() % (most - least);
        bytes.extend(counted.then_some(n as u8));
        bytes.extend((0..n).map(|_| random() as u8));
    };
    some(8, 80, true);
    some(10, 70, false);
    bytes
}

/// Runs an input, with streams that are late by other times each time.
///
/// # Panics
/// If rows are not those of arrow-rs, if a release failed, and before `open`.
pub fn run(data: &[u8]) {
    let gpu = GPU.get().expect("open it first");
    watched(|| operations::on(&gpu.world, &mut Input::new(data)));
    for place in &gpu.world.places {
        let failed = place.device.take_drop_error();
        assert!(failed.is_none(), "a release failed: {failed:?}");
    }
}

/// Waits for everything, and says what is not freed: nothing should be.
///
/// # Panics
/// If the device failed.
pub fn left() -> Vec<String> {
    let gpu = GPU.get().expect("open it first");
    let end = std::time::Instant::now() + Duration::from_secs(20);
    loop {
        let left = gpu.world.places.iter().filter_map(|place| {
            place.device.synchronize().expect("the device is alive");
            place.device.trim();
            let stats = place.device.stats();
            let left = stats.allocations - stats.frees;
            (left > 0).then(|| format!("{left} allocations of {}", place.device))
        });
        let left: Vec<_> = left.collect();
        if left.is_empty() || std::time::Instant::now() > end {
            return left;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
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

fn stream(queue: &Queue) -> Option<sys::CUstream> {
    let handle = queue.raw().stream_handle()?;
    Some(std::ptr::with_exposed_provenance_mut(handle))
}
