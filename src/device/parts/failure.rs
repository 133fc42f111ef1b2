//! What a device cannot be used after: a failure, and a fork. A `fork` copies memory, but neither threads nor what a GPU's library
//! knows.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Once, OnceLock};

use crate::device::DeviceId;
use crate::device::backend::device_error;
use crate::error::{Error, Result};

/// What every error after a failure ends with.
const FINAL: &str = "; the device cannot be used any more in this process";

/// The failure after which a device cannot be used: the first one is remembered, and reported by every operation from then on,
/// as by a CUDA context.
///
/// Runtimes differ in what follows failed work: some let later work run, on wrong data, and some end the process. A backend
/// that finds failed work thus sets the failure, checks it wherever work is queued or waited for, and gives the runtime no
/// more work.
///
/// ```
/// use arrow_device::device::{DeviceId, device_error, parts::Failure};
/// use arrow_device::abi::ArrowDeviceType;
///
/// let device = DeviceId::new(ArrowDeviceType::OPENCL, 0);
/// let failure = Failure::default();
/// failure.check()?; // first in every operation
/// # Ok::<(), arrow_device::Error>(())?;
///
/// failure.set(device_error(device, "clWaitForEvents", -14, "a kernel failed"));
/// failure.set(device_error(device, "clFlush", -36, "a later failure, which follows from the first one"));
/// let text = failure.check().unwrap_err().to_string();
/// assert!(text.contains("a kernel failed; the device cannot be used any more in this process"));
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Failure(OnceLock<Error>);

impl Failure {
    /// Remembers a failure, unless there is one already. The message of an [`Error::Device`] gets a note that the device cannot
    /// be used any more.
    pub fn set(&self, mut error: Error) {
        if let Error::Device { message, .. } = &mut error {
            message.to_mut().push_str(FINAL);
        }
        let _ = self.0.set(error);
    }

    /// Returns the failure as an error, if there is one. Costs an atomic load while there is none.
    pub fn check(&self) -> Result<()> {
        self.0.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Returns whether there is a failure.
    pub fn is_set(&self) -> bool {
        self.0.get().is_some()
    }
}

/// Counts the forks between the process that loaded this crate and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process in which a device was opened. A `fork` copies memory, but neither threads nor what the runtime of a device knows,
/// and a lock that another thread held is held for ever in the child.
///
/// A backend keeps the process in which it was made. In a child of that process it returns the error of
/// [`check`](Self::check) instead of calling the runtime, takes no lock that is held while the runtime is called, and frees
/// nothing. Where `fork` does not exist, every process is that one.
///
/// ```
/// use arrow_device::abi::ArrowDeviceType;
/// use arrow_device::device::{DeviceId, parts::Process};
///
/// let process = Process::this();
/// // Later, in each method that calls the runtime:
/// process.check(DeviceId::new(ArrowDeviceType::OPENCL, 0), -1)?;
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Process(u32);

impl Process {
    /// Returns the process in which this is called.
    pub fn this() -> Self {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(|| {
            #[cfg(all(
                any(target_os = "linux", target_os = "android", target_vendor = "apple"),
                not(miri)
            ))]
            // SAFETY: the handler may run in any child: it changes one atomic number. If the system
            // has no room for it, forks go unnoticed.
            unsafe {
                libc::pthread_atfork(None, None, Some(forked));
            }
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Returns whether this is the process in which the code runs now, and not a child of it. Takes no lock.
    pub fn is_this(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    /// Returns what tells processes apart: how often they and their parents were forked.
    pub(super) fn number(self) -> u32 {
        self.0
    }

    /// Returns an error if this is not the process in which the code runs now. `code` is what the runtime would return where it
    /// was not initialised.
    pub fn check(self, device: DeviceId, code: i32) -> Result<()> {
        match self.is_this() {
            true => Ok(()),
            false => Err(device_error(device, "fork", code, FORKED)),
        }
    }
}

#[cfg(all(
    any(target_os = "linux", target_os = "android", target_vendor = "apple"),
    not(miri)
))]
extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Why a device of the parent process cannot be used.
pub(crate) const FORKED: &str = "the process was forked after the device was opened, and a device cannot be used after fork; \
     use it in the parent only, or start the child with exec (Python's multiprocessing: the start \
     method \"spawn\")";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_kept_by_all_threads() {
        let failure = Failure::default();
        assert!(failure.check().is_ok() && !failure.is_set());
        let failed = std::thread::scope(|scope| {
            let set = |i: usize| {
                let failure = &failure;
                scope.spawn(move || {
                    failure.set(Error::argument(format!("failure {i}")));
                    failure.check().unwrap_err().to_string()
                })
            };
            let threads: Vec<_> = (0..4).map(set).collect();
            threads
                .into_iter()
                .map(|t| t.join().unwrap())
                .collect::<Vec<_>>()
        });
        assert!(failure.is_set());
        assert!(failed.iter().all(|text| *text == failed[0]), "{failed:?}");
    }
}
