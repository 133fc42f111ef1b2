//! When SYCL may be called: not while the process ends, since a thread that is in SYCL while the library's own destructors run
//! crashes the process, and not in a child of the process, which has none of SYCL's threads.
//!
//! A thread that has to know that work has ended cannot know it then, and stays where it is until the process has ended, except for the
//! thread that ends it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use arrow_device::device::parts::Process;

static ENDS: AtomicBool = AtomicBool::new(false);
/// The thread that ends the process, once `ENDS` is set.
static ENDER: AtomicUsize = AtomicUsize::new(0);
/// How many threads are in SYCL.
static INSIDE: AtomicUsize = AtomicUsize::new(0);

/// How long the end of the process waits for threads that are in SYCL. What waits there for work is a free, and after a failure also
/// others. The process then ends all the same.
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
    match is_child() {
        true => Err("the process was forked after SYCL was loaded"),
        false => Ok(inside),
    }
}

/// Returns whether this is a child of the process in which SYCL was loaded.
pub(crate) fn is_child() -> bool {
    PROCESS.get().is_some_and(|process| !process.is_this())
}

/// Returns, unless the process is being ended by another thread: then this one sleeps until that has happened. Whoever waits for work
/// would otherwise take the error for its end, and free memory that the work uses.
pub(crate) fn stay_at_end() {
    while ENDS.load(Ordering::SeqCst) && ENDER.load(Ordering::SeqCst) != this_thread() {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// The thread's address: each has its own as long as it lives.
fn this_thread() -> usize {
    thread_local!(static ADDRESS: u8 = const { 0 });
    ADDRESS.with(|address| std::ptr::from_ref(address).addr())
}

/// Watches for the end of the process, once SYCL is loaded: what is registered later runs earlier than SYCL's destructors.
pub(crate) fn watch() {
    PROCESS.get_or_init(|| {
        // SAFETY: the function may run while the process ends: it uses atomic numbers, the clock, and the address of a thread's own
        // variable without a destructor. If the system has no room for it, the end goes unnoticed.
        unsafe { libc::atexit(ending) };
        Process::this()
    });
}

extern "C" fn ending() {
    // The parent's threads that were in SYCL are not here.
    if is_child() {
        return;
    }
    ENDER.store(this_thread(), Ordering::SeqCst);
    ENDS.store(true, Ordering::SeqCst);
    let start = Instant::now();
    while INSIDE.load(Ordering::SeqCst) > 0 && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_micros(100));
    }
}
