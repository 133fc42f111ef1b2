//! The end of the process, when Vulkan must not be called any more: libraries of drivers and layers run their destructors then, and a
//! thread that is in one of them crashes.
//!
//! The thread that ends the process is told so. Any other one stays where it is until the process has ended: what it asked for, such
//! as whether memory may be freed, can neither be found out nor matters then.

use std::cell::Cell;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use arrow_device::device::parts::Process;

/// The thread that ends the process; 0 until then.
static ENDER: AtomicUsize = AtomicUsize::new(0);
/// How many threads are in Vulkan.
static INSIDE: AtomicUsize = AtomicUsize::new(0);

/// How long the end of the process waits for threads that are in Vulkan. It then goes on all the same.
const PATIENCE: Duration = Duration::from_secs(2);

thread_local! {
    /// How many values of [`Inside`] this thread has.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// A thread's time in Vulkan, which should be short. A thread may have several, and drops the last one first. It stays on its thread.
pub(crate) struct Inside(PhantomData<*const ()>);

impl Drop for Inside {
    fn drop(&mut self) {
        let outer = DEPTH.get() - 1;
        DEPTH.set(outer);
        if outer == 0 {
            INSIDE.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Lets this thread into Vulkan; `None` if it is the one that ends the process. If another one does, this does not return.
pub(crate) fn enter() -> Option<Inside> {
    let outer = DEPTH.get();
    if outer == 0 {
        // Counted before it is asked whether the process ends, as its end says so before it reads the count.
        INSIDE.fetch_add(1, Ordering::SeqCst);
        let ender = ENDER.load(Ordering::SeqCst);
        if ender != 0 {
            INSIDE.fetch_sub(1, Ordering::SeqCst);
            if ender == this_thread() {
                return None;
            }
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        }
    }
    DEPTH.set(outer + 1);
    Some(Inside(PhantomData))
}

/// The address of a thread's own variable: each has its own as long as it lives.
fn this_thread() -> usize {
    DEPTH.with(|depth| std::ptr::from_ref(depth).addr())
}

/// The process whose end is watched for.
static PROCESS: OnceLock<Process> = OnceLock::new();

/// Watches for the end of the process. Called whenever a device was made, since the functions that are registered last run first:
/// before the destructors of the libraries that were loaded for it.
pub(crate) fn watch() {
    unsafe extern "C" {
        /// Of the C library, on every system.
        fn atexit(function: extern "C" fn()) -> c_int;
    }
    PROCESS.get_or_init(Process::this);
    // SAFETY: the function may run while the process ends, and more than once: it uses atomic numbers, the clock, and the address of
    // a thread's own variable without a destructor. If the system has no room for it, the end goes unnoticed.
    unsafe { atexit(ending) };
}

extern "C" fn ending() {
    // The parent's threads that were in Vulkan are not here.
    if PROCESS.get().is_none_or(|process| !process.is_this()) {
        return;
    }
    ENDER.store(this_thread(), Ordering::SeqCst);
    // Those of this thread never end.
    let own = usize::from(DEPTH.get() > 0);
    let start = Instant::now();
    while INSIDE.load(Ordering::SeqCst) > own && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_micros(100));
    }
}
