//! When SYCL may be called: not while the process ends, since a thread that is in SYCL while the library's own destructors run
//! crashes the process, and not in a child of the process, which has none of SYCL's threads.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use arrow_device::device::parts::Process;

static ENDS: AtomicBool = AtomicBool::new(false);
/// How many threads are in SYCL.
static INSIDE: AtomicUsize = AtomicUsize::new(0);

/// How long the end of the process waits for threads that are in SYCL. Only a free waits there, for work of the program's.
const PATIENCE: Duration = Duration::from_secs(2);

/// A thread's time in SYCL.
pub(crate) struct Inside(());

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The process in which SYCL was loaded.
static PROCESS: OnceLock<Process> = OnceLock::new();

/// Lets this thread into SYCL, or says why not.
pub(crate) fn enter() -> Result<Inside, &'static str> {
    // Counted before it is asked whether the process ends, as its end says so before it reads the count.
    INSIDE.fetch_add(1, Ordering::SeqCst);
    let inside = Inside(());
    if ENDS.load(Ordering::SeqCst) {
        return Err("the process is ending");
    }
    match PROCESS.get() {
        Some(process) if !process.is_this() => Err("the process was forked after SYCL was loaded"),
        _ => Ok(inside),
    }
}

/// Watches for the end of the process, once SYCL is loaded: what is registered later runs earlier than SYCL's destructors.
pub(crate) fn watch() {
    PROCESS.get_or_init(|| {
        // SAFETY: the function may run while the process ends: it uses two atomic numbers and the clock. If the system has no
        // room for it, the end goes unnoticed.
        unsafe { libc::atexit(ending) };
        Process::this()
    });
}

extern "C" fn ending() {
    ENDS.store(true, Ordering::SeqCst);
    let start = Instant::now();
    while INSIDE.load(Ordering::SeqCst) > 0 && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_micros(100));
    }
}
