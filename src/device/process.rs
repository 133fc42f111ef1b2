//! Which process something was made in. A `fork` copies memory, but neither threads nor what a
//! GPU's library knows.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// Counts the forks between the process that loaded this crate and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process in which something was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process(u32);

impl Process {
    pub(crate) fn this() -> Self {
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

    /// Whether this is the process in which the code runs now, and not a child of it.
    pub(crate) fn is_this(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
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
#[cfg(any(feature = "cuda", feature = "rocm", feature = "sim"))]
pub(crate) const FORKED: &str = "the process was forked after the device was opened, and a device cannot be used after fork; \
     use it in the parent only, or start the child with exec (Python's multiprocessing: the start \
     method \"spawn\")";
