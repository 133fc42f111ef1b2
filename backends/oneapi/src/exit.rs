//! When SYCL may be called: not while the process ends, since a thread that is in SYCL while the library's own destructors run
//! crashes the process, and not in a child of the process, which has none of SYCL's threads.

use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const OPEN: usize = 0;
const ENDING: usize = 1;
const FORKED: usize = 2;

static STATE: AtomicUsize = AtomicUsize::new(OPEN);
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

/// Lets this thread into SYCL, or says why not.
pub(crate) fn enter() -> Result<Inside, &'static str> {
    // Counted before the state is read, as the end of the process sets the state before it reads the count.
    INSIDE.fetch_add(1, Ordering::SeqCst);
    let inside = Inside(());
    match STATE.load(Ordering::SeqCst) {
        OPEN => Ok(inside),
        ENDING => Err("the process is ending"),
        _ => Err("the process was forked after SYCL was loaded, and a device cannot be used after fork; use it in the parent only, \
                  or start the child with exec (Python's multiprocessing: the start method \"spawn\")"),
    }
}

/// Watches for the end of the process, once SYCL is loaded: what is registered later runs earlier than SYCL's destructors.
pub(crate) fn watch() {
    static WATCHED: Once = Once::new();
    // SAFETY: both functions may run at any time in their places: they use two atomic numbers and the clock. If the system has
    // no room for them, the end of the process or a fork goes unnoticed.
    WATCHED.call_once(|| unsafe {
        libc::atexit(ending);
        #[cfg(unix)]
        libc::pthread_atfork(None, None, Some(forked));
    });
}

extern "C" fn ending() {
    STATE.store(ENDING, Ordering::SeqCst);
    let start = Instant::now();
    while INSIDE.load(Ordering::SeqCst) > 0 && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[cfg(unix)]
extern "C" fn forked() {
    STATE.store(FORKED, Ordering::SeqCst);
}
