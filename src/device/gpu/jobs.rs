//! Work that the host does in a stream's order.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::context::{Context, Current};
use super::runtime::RawStream;
use crate::device::backend::{CopyOp, DevicePtr};
use crate::error::Result;

pub(super) enum Job {
    Copy(Vec<CopyOp>),
    Fill {
        dst: DevicePtr,
        byte: u8,
        bytes: usize,
    },
}

/// Jobs under way, by number, with the context that they are of; `None` while one runs. After a failure
/// the runtime calls none of them.
static JOBS: Mutex<BTreeMap<u64, (usize, Option<Job>)>> = Mutex::new(BTreeMap::new());
/// A job has run.
static RAN: Condvar = Condvar::new();

fn jobs() -> MutexGuard<'static, BTreeMap<u64, (usize, Option<Job>)>> {
    JOBS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Which context a job is of. Several may share one of the runtime's.
fn key(context: &Context) -> usize {
    std::ptr::from_ref(context).addr()
}

/// Whether jobs of a context are under way.
pub(super) fn are_under_way(context: &Context) -> bool {
    jobs().values().any(|(of, _)| *of == key(context))
}

/// Ends the jobs of a context that has failed: waits for what runs, and forgets the rest.
pub(super) fn stop(context: &Context) {
    let key = key(context);
    let mut jobs = jobs();
    jobs.retain(|_, (of, job)| *of != key || job.is_none());
    while jobs.values().any(|(of, _)| *of == key) {
        jobs = RAN.wait(jobs).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Gives a job to a stream.
///
/// # Safety
/// The job's memory is host memory, and valid until the stream has run it; a copy's ranges do not overlap.
pub(super) unsafe fn queue(
    context: &Context,
    current: &Current<'_>,
    stream: RawStream,
    job: Job,
) -> Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    jobs().insert(number, (key(context), Some(job)));
    // A number, not an address: 64 bits on all systems that these runtimes run on.
    let data = std::ptr::without_provenance_mut::<c_void>(number as usize);
    // SAFETY: `run` takes a job's number and does not unwind; the stream is the caller's.
    let launched = unsafe { current.launch_host(stream, run, data) };
    context.check(launched).inspect_err(|_| {
        jobs().remove(&number);
    })
}

/// Called by the runtime, which must not be called from here.
unsafe extern "C" fn run(number: *mut c_void) {
    let number = number.addr() as u64;
    let job = jobs().get_mut(&number).and_then(|(_, job)| job.take());
    match job {
        Some(Job::Copy(copies)) => {
            for copy in copies {
                // SAFETY: the memory is valid host memory until this has run, and the ranges do not
                // overlap (contract of `queue`).
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
