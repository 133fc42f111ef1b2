//! Which process something was made in. A `fork` copies memory, but neither threads nor what a
//! GPU's library knows.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::device::DeviceId;
use crate::device::backend::device_error;
use crate::error::Result;

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
