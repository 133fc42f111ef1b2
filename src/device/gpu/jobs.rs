//! Work that the host does in a stream's order.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::api::{Code, RawStream};
use crate::device::backend::{CopyOp, DevicePtr};
use crate::device::cpu::copy_on_host;
use crate::device::lock;

pub(super) enum Job {
    Copy(Vec<CopyOp>),
    Fill {
        dst: DevicePtr,
        byte: u8,
        bytes: usize,
    },
}

/// The code of the failure after which nothing of a context works any more; 0 before. It also names
/// the context, as long as a job of it is under way.
#[derive(Clone, Default)]
pub(super) struct FailureCode(Arc<AtomicI32>);

impl FailureCode {
    /// Remembers a failure, unless there is one already.
    pub(super) fn set(&self, code: Code) {
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        let _ = self.0.compare_exchange(0, code, success, failure);
    }

    pub(super) fn code(&self) -> Code {
        self.0.load(Ordering::Acquire)
    }

    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Jobs under way, by number, with their context; `None` while one runs. After a failure the library
/// calls none of them.
static JOBS: Mutex<BTreeMap<u64, (FailureCode, Option<Job>)>> = Mutex::new(BTreeMap::new());
/// Signalled when a job has run.
static RAN: Condvar = Condvar::new();

fn jobs() -> MutexGuard<'static, BTreeMap<u64, (FailureCode, Option<Job>)>> {
    lock(&JOBS)
}

/// Whether jobs of a context are under way.
pub(super) fn are_under_way(context: &FailureCode) -> bool {
    jobs().values().any(|(of, _)| of.is(context))
}

/// Ends the jobs of a context that has failed: waits for those that run, and forgets the others.
pub(super) fn stop(context: &FailureCode) {
    let mut jobs = jobs();
    jobs.retain(|_, (of, job)| !of.is(context) || job.is_none());
    while jobs.values().any(|(of, _)| of.is(context)) {
        jobs = RAN.wait(jobs).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Adds a job of a context, and returns its number, with which [`run`] is to be called.
pub(super) fn add(context: &FailureCode, job: Job) -> *mut c_void {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    jobs().insert(number, (context.clone(), Some(job)));
    // A number, not an address: 64 bits on all systems that have these libraries.
    std::ptr::without_provenance_mut(number as usize)
}

/// Forgets a job that was not given to a stream.
pub(super) fn forget(number: *mut c_void) {
    jobs().remove(&(number.addr() as u64));
}

/// Runs a job. The library calls this, and must not be called from here.
///
/// # Safety
/// `number` is from [`add`], and the job's memory is host memory that is valid now; a copy's ranges
/// do not overlap.
pub(super) unsafe extern "C" fn run(number: *mut c_void) {
    let number = number.addr() as u64;
    let job = jobs().get_mut(&number).and_then(|(_, job)| job.take());
    match job {
        // SAFETY: the memory is valid host memory until this has run, and the ranges do not overlap
        // (see `# Safety`).
        Some(Job::Copy(copies)) => unsafe { copy_on_host(&copies) },
        // SAFETY: the memory is valid host memory until this has run (see `# Safety`).
        Some(Job::Fill { dst, byte, bytes }) => unsafe {
            dst.as_ptr().cast::<u8>().write_bytes(byte, bytes);
        },
        // `stop` has forgotten the job: its device has failed.
        None => return,
    }
    jobs().remove(&number);
    RAN.notify_all();
}

/// As [`run`], as a callback, which the library also calls after a failure: the job is then not
/// run, and its context has failed.
///
/// # Safety
/// As [`run`].
pub(super) unsafe extern "C" fn run_after(_: RawStream, status: Code, number: *mut c_void) {
    if status == 0 {
        // SAFETY: the caller guarantees a number from `add`, and memory that is valid now (see
        // `# Safety`).
        return unsafe { run(number) };
    }
    let job = jobs().remove(&(number.addr() as u64));
    if let Some((context, _)) = job {
        context.set(status);
    }
    RAN.notify_all();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A callback that comes with an error leaves the memory alone, and the context has failed.
    #[test]
    fn a_callback_after_a_failure_runs_nothing() {
        let (context, other) = (FailureCode::default(), FailureCode::default());
        let mut byte = 1u8;
        let dst = DevicePtr::new((&raw mut byte).cast());
        let fill = Job::Fill {
            dst,
            byte: 7,
            bytes: 1,
        };
        let number = add(&context, fill);
        // SAFETY: the number is from `add`, and `byte` lives until the end of the test.
        unsafe { run_after(RawStream::LEGACY, 719, number) };
        assert_eq!(byte, 1);
        assert!(!are_under_way(&context));
        assert_eq!((context.code(), other.code()), (719, 0));
        // SAFETY: the number is from `add`, and `byte` lives until the end of the test.
        unsafe { run_after(RawStream::LEGACY, 0, number) };
        assert_eq!(byte, 1);
    }
}
