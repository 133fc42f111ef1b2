//! Lists of copies.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUstream};

use super::CudaMemory;
use super::context::{Context, Current};
use super::driver::{BatchCopy, CopyAttributes};
use super::pointer::{PointerKind, kind_of};
use super::queue::Shared;
use crate::device::backend::{CopyKind, CopyOp, DevicePtr};
use crate::error::{Error, Result};

/// From this many copies on the driver is given the list in one call: about 0.5 us a copy instead of
/// 2.3 us a call, for a few us more (reported for H100 and H20; not yet measured by this project).
const BATCH: usize = 8;

/// Gives a list of copies to a stream. The context is current.
///
/// # Safety
/// As [`RawQueue::copy`](crate::device::RawQueue::copy).
pub(super) unsafe fn run(
    shared: &Shared,
    stream: CUstream,
    copies: &[CopyOp],
    current: &Current<'_>,
) -> Result<()> {
    let context = &*shared.context;
    if copies
        .iter()
        .any(|copy| copy.bytes == 0 || copy.src.is_null() || copy.dst.is_null())
    {
        return Err(Error::argument("an empty copy, or one from or to null"));
    }
    if shared.memory == CudaMemory::Host {
        // Between host memories the driver would copy at once, on this thread, after waiting for
        // the stream.
        let (mut host, mut device) = (Vec::new(), Vec::new());
        for copy in copies {
            match is_between_hosts(context, copy, current)? {
                true => host.push(*copy),
                false => device.push(*copy),
            }
        }
        // SAFETY: the caller's.
        unsafe { one_by_one(context, stream, device.iter().map(|copy| (copy, None))) }?;
        if host.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's.
        let queued = unsafe { on_host(context, stream, Job::Copy(host)) };
        if queued.is_err() && !device.is_empty() {
            wait_for(context, stream);
        }
        return queued;
    }
    // Imported arrays may mix kinds of memory: each copy between devices is asked about.
    let (mut plain, mut named) = (Vec::new(), Vec::new());
    if copies
        .iter()
        .any(|copy| copy.kind == CopyKind::DeviceToDevice)
    {
        for copy in copies {
            let from = match copy.kind {
                CopyKind::DeviceToDevice => other_context(context, copy.src, current)?,
                _ => None,
            };
            match from {
                Some(_) => named.push((copy, from)),
                None => plain.push(*copy),
            }
        }
    }
    let plain = if named.is_empty() { copies } else { &plain };
    // SAFETY: the caller's.
    unsafe { plain_copies(context, stream, plain) }?;
    // SAFETY: the caller's.
    let done = unsafe { one_by_one(context, stream, named.into_iter()) };
    if done.is_err() && !plain.is_empty() {
        wait_for(context, stream);
    }
    done
}

/// Copies whose direction the driver finds by their addresses.
///
/// # Safety
/// As [`run`].
unsafe fn plain_copies(context: &Context, stream: CUstream, copies: &[CopyOp]) -> Result<()> {
    // The legacy default stream takes no lists.
    let takes_lists = !matches!(stream.addr(), 0 | 1) && !context.no_batch.load(Ordering::Relaxed);
    if copies.len() >= BATCH && takes_lists {
        if let Some(batch) = context.driver.batch {
            // SAFETY: the caller's.
            if unsafe { batch_copy(context, stream, batch, copies) }? {
                return Ok(());
            }
        }
    }
    // SAFETY: the caller's.
    unsafe { one_by_one(context, stream, copies.iter().map(|copy| (copy, None))) }
}

/// The context out of whose memory the driver must be told to copy: another one of this device, or
/// another device's, whose pools' memory it does not find by the address.
fn other_context(
    context: &Context,
    ptr: DevicePtr,
    current: &Current<'_>,
) -> Result<Option<CUcontext>> {
    match kind_of(context, ptr.address(), 1, current)? {
        Some(PointerKind::Device(_, Some(of))) => Ok((of != context.raw()).then_some(of)),
        Some(PointerKind::Device(ordinal, None)) if ordinal != context.ordinal => {
            context.primary_of(ordinal).map(Some)
        }
        _ => Ok(None),
    }
}

/// Each by itself, with the context of its source if the driver must be told.
///
/// # Safety
/// As [`run`]; the contexts live as long as the sources.
unsafe fn one_by_one<'a>(
    context: &Context,
    stream: CUstream,
    copies: impl Iterator<Item = (&'a CopyOp, Option<CUcontext>)>,
) -> Result<()> {
    let driver = context.driver;
    for (i, (copy, from)) in copies.enumerate() {
        let dst = copy.dst.address() as CUdeviceptr;
        let src = copy.src.address() as CUdeviceptr;
        // SAFETY: the caller's. All memory is in one address space: the driver finds the direction.
        let (call, code) = unsafe {
            match from {
                None => (
                    "cuMemcpyAsync",
                    (driver.cuMemcpyAsync)(dst, src, copy.bytes, stream),
                ),
                Some(from) => (
                    "cuMemcpyPeerAsync",
                    (driver.cuMemcpyPeerAsync)(dst, context.raw(), src, from, copy.bytes, stream),
                ),
            }
        };
        if let Err(e) = context.check(call, code) {
            if i > 0 {
                wait_for(context, stream);
            }
            return Err(e);
        }
    }
    Ok(())
}

/// After half a list: the caller may free what the copies use, so they must be done.
fn wait_for(context: &Context, stream: CUstream) {
    // SAFETY: the stream is live.
    let code = unsafe { (context.driver.cuStreamSynchronize)(stream) };
    if context.check("cuStreamSynchronize", code).is_err() {
        // Its error is final: nothing runs any more.
        let _ = context.settle();
    }
}

/// Whether the driver took the list. It may not, for reasons of its own: then nothing of it is under way.
///
/// # Safety
/// As [`run`].
unsafe fn batch_copy(
    context: &Context,
    stream: CUstream,
    batch: BatchCopy,
    copies: &[CopyOp],
) -> Result<bool> {
    let list = |of: fn(&CopyOp) -> DevicePtr| -> Vec<CUdeviceptr> {
        copies
            .iter()
            .map(|copy| of(copy).address() as CUdeviceptr)
            .collect()
    };
    let (mut dst, mut src) = (list(|copy| copy.dst), list(|copy| copy.src));
    let mut sizes: Vec<usize> = copies.iter().map(|copy| copy.bytes).collect();
    // One set of attributes, from the first copy on.
    let (mut attributes, mut first) = (CopyAttributes::IN_STREAM_ORDER, 0usize);
    let (dst, src, sizes) = (dst.as_mut_ptr(), src.as_mut_ptr(), sizes.as_mut_ptr());
    let (count, attributes, first) = (copies.len(), &raw mut attributes, &raw mut first);
    let mut refused = usize::MAX;
    // SAFETY: the lists have `count` members; the copies are the caller's.
    let code = unsafe {
        match batch {
            BatchCopy::Plain(function) => {
                function(dst, src, sizes, count, attributes, first, 1, stream)
            }
            BatchCopy::WithIndex(function) => {
                let refused = &raw mut refused;
                function(
                    dst, src, sizes, count, attributes, first, 1, refused, stream,
                )
            }
        }
    };
    if code == 0 {
        return Ok(true);
    }
    if let Err(e) = context.check("cuMemcpyBatchAsync", code) {
        if context.has_failed() {
            return Err(e);
        }
    }
    // It will not take the next one either.
    context.no_batch.store(true, Ordering::Relaxed);
    wait_for(context, stream);
    Ok(false)
}

/// Whether the host does a copy of page-locked memory.
fn is_between_hosts(context: &Context, copy: &CopyOp, current: &Current<'_>) -> Result<bool> {
    if copy.kind != CopyKind::DeviceToDevice {
        return Ok(true);
    }
    let kind = kind_of(context, copy.src.address(), 1, current)?;
    Ok(!matches!(
        kind,
        Some(PointerKind::Device(..) | PointerKind::Managed)
    ))
}

/// Fills page-locked memory in the stream's order.
///
/// # Safety
/// As [`RawQueue::fill`](crate::device::RawQueue::fill).
pub(super) unsafe fn fill_host(
    context: &Context,
    stream: CUstream,
    dst: DevicePtr,
    byte: u8,
    bytes: usize,
) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { on_host(context, stream, Job::Fill { dst, byte, bytes }) }
}

/// Work that the host does in a stream's order.
enum Job {
    Copy(Vec<CopyOp>),
    Fill {
        dst: DevicePtr,
        byte: u8,
        bytes: usize,
    },
}

/// Jobs under way, by number, with the context that they are of; `None` while one runs. After a failure
/// the driver calls none of them.
static JOBS: Mutex<BTreeMap<u64, (usize, Option<Job>)>> = Mutex::new(BTreeMap::new());
/// A job has run.
static RAN: Condvar = Condvar::new();

fn jobs() -> MutexGuard<'static, BTreeMap<u64, (usize, Option<Job>)>> {
    JOBS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Which context a job is of. Several may share one of the driver's.
fn key(context: &Context) -> usize {
    std::ptr::from_ref(context).addr()
}

/// Whether jobs of a context are under way.
pub(super) fn has_jobs(context: &Context) -> bool {
    jobs().values().any(|(of, _)| *of == key(context))
}

/// Ends the jobs of a context that has failed: waits for what runs, and forgets the rest.
pub(super) fn stop_jobs(context: &Context) {
    let key = key(context);
    let mut jobs = jobs();
    jobs.retain(|_, (of, job)| *of != key || job.is_none());
    while jobs.values().any(|(of, _)| *of == key) {
        jobs = RAN.wait(jobs).unwrap_or_else(PoisonError::into_inner);
    }
}

/// # Safety
/// The job's memory is valid until the stream has run it.
unsafe fn on_host(context: &Context, stream: CUstream, job: Job) -> Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    jobs().insert(number, (key(context), Some(job)));
    // A number, not an address: 64 bits on all systems that CUDA runs on.
    let data = std::ptr::without_provenance_mut::<c_void>(number as usize);
    // SAFETY: `run_job` takes a job's number and does not unwind.
    let code = unsafe { (context.driver.cuLaunchHostFunc)(stream, Some(run_job), data) };
    context.check("cuLaunchHostFunc", code).inspect_err(|_| {
        jobs().remove(&number);
    })
}

/// Called by the driver, which must not be called from here.
unsafe extern "C" fn run_job(number: *mut c_void) {
    let number = number.addr() as u64;
    let job = jobs().get_mut(&number).and_then(|(_, job)| job.take());
    match job {
        Some(Job::Copy(copies)) => {
            for copy in copies {
                // SAFETY: the memory is valid until this has run (`on_host`), and is host memory.
                // The ranges do not overlap (contract of `RawQueue::copy`).
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        copy.src.as_ptr().cast::<u8>(),
                        copy.dst.as_ptr().cast::<u8>(),
                        copy.bytes,
                    );
                }
            }
        }
        // SAFETY: as above.
        Some(Job::Fill { dst, byte, bytes }) => unsafe {
            dst.as_ptr().cast::<u8>().write_bytes(byte, bytes);
        },
        // Its device has failed.
        None => return,
    }
    jobs().remove(&number);
    RAN.notify_all();
}
