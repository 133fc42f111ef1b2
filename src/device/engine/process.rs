//! The process of a device: [`Process`], since a `fork` copies memory, but neither threads nor what the runtime of a device knows; and the end
//! of the process, when the runtime must not be called any more.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::device::DeviceId;
use crate::device::backend::device_error;
use crate::error::Result;

/// Counts the forks between the process that loaded this crate and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process in which a device was opened: a child of it has neither its threads nor a runtime that may be called, and a lock that another
/// thread held is held for ever there.
///
/// In a child of that process no lock is taken that is held while the runtime is called, and nothing is freed. Where `fork` does not exist,
/// every process is that one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process(u32);

impl Process {
    /// Returns the process in which this is called.
    pub(crate) fn this() -> Self {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(|| {
            #[cfg(all(
                any(target_os = "linux", target_os = "android", target_vendor = "apple"),
                not(miri)
            ))]
            {
                extern "C" fn forked() {
                    FORKS.fetch_add(1, Ordering::Relaxed);
                    // The child has neither the parent's other threads nor its end.
                    INSIDE.store(usize::from(DEPTH.get() > 0), Ordering::SeqCst);
                    ENDER.store(0, Ordering::SeqCst);
                }
                // SAFETY: the handler may run in any child: it changes atomic numbers, and reads a thread's own variable without a
                // destructor. If the system has no room for it, forks go unnoticed.
                unsafe { libc::pthread_atfork(None, None, Some(forked)) };
            }
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Returns whether this is the process in which the code runs now, and not a child of it. Takes no lock.
    pub(crate) fn is_this(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    /// Returns an error if this is not the process in which the code runs now. `code` is what the runtime would return where it
    /// was not initialised.
    pub(crate) fn check(self, device: DeviceId, code: i32) -> Result<()> {
        match self.is_this() {
            true => Ok(()),
            false => Err(device_error(device, "fork", code, FORKED)),
        }
    }
}

/// Why a device of the parent process cannot be used.
pub(crate) const FORKED: &str = "the process was forked after the device was opened, and a device cannot be used after fork; \
     use it in the parent only, or start the child with exec (Python's multiprocessing: the start \
     method \"spawn\")";

/// The thread that ends the process; 0 until then.
static ENDER: AtomicUsize = AtomicUsize::new(0);
/// How many threads are in a runtime.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
/// How often threads have left one.
static LEFT: AtomicU64 = AtomicU64::new(0);

/// How long the end of the process waits for threads that are in a runtime. It then goes on all the same.
const PATIENCE: Duration = Duration::from_secs(2);

/// How often [`watch`] registers each time.
const OFTEN: u64 = 256;

thread_local! {
    /// How many values of [`Inside`] this thread has.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// Whether the end of the process has kept this thread.
    static KEPT: Cell<bool> = const { Cell::new(false) };
}

/// A thread's time in the runtime of a device, from [`Health::enter`](super::Health::enter) to the drop. It stays on its thread.
#[derive(Debug)]
#[must_use = "the runtime may be called only while it lives"]
pub struct Inside(PhantomData<*const ()>);

impl Drop for Inside {
    fn drop(&mut self) {
        let outer = DEPTH.get() - 1;
        DEPTH.set(outer);
        if outer == 0 {
            INSIDE.fetch_sub(1, Ordering::SeqCst);
            // What a function of a driver makes at its first call is destroyed before what was registered earlier.
            if (LEFT.fetch_add(1, Ordering::Relaxed) + 1).is_power_of_two() {
                register();
            }
        }
    }
}

/// Lets this thread into the runtime of a device. Returns `None` on the thread that ends the process, once it does: the runtime must then
/// be left alone, and what it would free is left to the system. Any other thread is kept here for ten seconds once, in which the process ends
/// as a rule, and gets `None` then too: what ends the process may be waiting for it.
///
/// Costs a few atomic operations.
pub(super) fn enter() -> Option<Inside> {
    let outer = DEPTH.get();
    if outer == 0 {
        // Counted before it is asked whether the process ends, as its end says so before it reads the count.
        INSIDE.fetch_add(1, Ordering::SeqCst);
        let ender = ENDER.load(Ordering::SeqCst);
        if ender != 0 {
            INSIDE.fetch_sub(1, Ordering::SeqCst);
            if ender != this_thread() && !KEPT.replace(true) {
                // Longer than `ending` waits, so that an error is not taken for a failure meanwhile.
                std::thread::sleep(5 * PATIENCE);
            }
            return None;
        }
    }
    DEPTH.set(outer + 1);
    Some(Inside(PhantomData))
}

/// Watches for the end of the process, when libraries of drivers run their destructors: a thread that is in one of them crashes. What is
/// registered last runs first, so this is called when libraries may have been loaded; a thread that leaves a runtime registers again now and
/// then, for what those libraries make later. Each entry stays, so that this registers ever more seldom once it has often.
///
/// All devices share what is known of the end. On systems without `atexit`, and under Miri, this does nothing.
pub(super) fn watch() {
    static TIMES: AtomicU64 = AtomicU64::new(0);
    // Forks are noticed from now on.
    let _ = Process::this();
    if registers(TIMES.fetch_add(1, Ordering::Relaxed) + 1) {
        register();
    }
}

/// Whether the call of [`watch`] with this number registers.
const fn registers(call: u64) -> bool {
    call <= OFTEN || call.is_power_of_two()
}

fn register() {
    #[cfg(all(any(unix, windows), not(miri)))]
    {
        unsafe extern "C" {
            /// Of the C library.
            fn atexit(function: extern "C" fn()) -> std::ffi::c_int;
        }
        // SAFETY: the function may run while the process ends, and more than once: it uses atomic numbers, the clock, and a thread's own
        // variable without a destructor. If the system has no room for it, the end goes unnoticed.
        unsafe { atexit(ending) };
    }
}

/// The address of a thread's own variable: each has its own as long as it lives.
fn this_thread() -> usize {
    DEPTH.with(|depth| std::ptr::from_ref(depth).addr())
}

#[cfg_attr(not(all(any(unix, windows), not(miri))), allow(dead_code))] // nobody calls it there
extern "C" fn ending() {
    // It was registered several times; after the first call nobody gets in.
    if ENDER.swap(this_thread(), Ordering::SeqCst) != 0 {
        return;
    }
    // Those of this thread never end.
    let own = usize::from(DEPTH.get() > 0);
    let start = Instant::now();
    while INSIDE.load(Ordering::SeqCst) > own && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use std::process::{Command, ExitStatus};
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// Runs a test's body in a process of its own, which it ends. Returns how it ended, and how long it took.
    fn ends(test: &str, body: fn()) -> (Option<i32>, Duration) {
        const ALONE: &str = "ARROW_DEVICE_TEST_ENDS";
        if std::env::var_os(ALONE).is_some() {
            body();
            unreachable!("the body ends the process");
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = format!("{}::{test}", module_path!().split_once("::").unwrap().1);
        command.args([&name, "--exact", "--test-threads=1"]);
        let start = Instant::now();
        let status: ExitStatus = command.env(ALONE, "1").output().unwrap().status;
        (status.code(), start.elapsed())
    }

    /// What the destructors of a driver's library would find.
    static USED: AtomicBool = AtomicBool::new(false);

    /// Stands for a destructor that was registered when the driver was loaded. The process fails if a thread is in the driver then.
    extern "C" fn unload() {
        std::thread::sleep(Duration::from_millis(50));
        if USED.load(Ordering::SeqCst) {
            // SAFETY: it has no requirement.
            unsafe { libc::_exit(9) };
        }
    }

    fn load() {
        // SAFETY: the function uses an atomic number and the clock.
        assert_eq!(unsafe { libc::atexit(unload) }, 0);
        watch();
    }

    fn use_driver(time: Duration) {
        let _inside = enter();
        USED.store(true, Ordering::SeqCst);
        std::thread::sleep(time);
        USED.store(false, Ordering::SeqCst);
    }

    /// An entry of `atexit` is never given back: a program that opens devices for ever has few of them.
    #[test]
    fn many_devices_register_seldom() {
        let often = (1..=1 << 20).filter(|call| registers(*call)).count();
        assert_eq!(often, 256 + 12);
    }

    /// A driver may make what it destroys only when it is first used.
    #[test]
    fn what_a_driver_makes_late_is_destroyed_late() {
        let (code, _) = ends("what_a_driver_makes_late_is_destroyed_late", || {
            watch();
            let (sender, is_used) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                for time in 0.. {
                    use_driver(Duration::from_millis(3));
                    match time {
                        // SAFETY: the function uses an atomic number and the clock.
                        0 => assert_eq!(unsafe { libc::atexit(unload) }, 0),
                        3 => sender.send(()).unwrap(),
                        _ => {}
                    }
                }
            });
            is_used.recv().unwrap();
            std::process::exit(7);
        });
        assert_eq!(code, Some(7));
    }

    /// Threads that are in the driver again and again are outside while it is unloaded.
    #[test]
    fn the_end_waits_for_threads_and_keeps_them_out() {
        let (code, _) = ends("the_end_waits_for_threads_and_keeps_them_out", || {
            load();
            for _ in 0..3 {
                std::thread::spawn(|| {
                    loop {
                        use_driver(Duration::from_millis(3));
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(20));
            std::process::exit(7);
        });
        assert_eq!(code, Some(7));
    }

    #[test]
    fn the_thread_that_ends_the_process_is_told() {
        let (code, _) = ends("the_thread_that_ends_the_process_is_told", || {
            extern "C" fn later() {
                let is_told = enter().is_none();
                // SAFETY: it has no requirement.
                unsafe { libc::_exit(if is_told { 7 } else { 8 }) };
            }
            assert!(enter().is_some());
            // SAFETY: the function uses what `enter` may use.
            assert_eq!(unsafe { libc::atexit(later) }, 0);
            watch();
            std::process::exit(0);
        });
        assert_eq!(code, Some(7));
    }

    #[test]
    fn a_thread_does_not_wait_for_itself() {
        let (code, took) = ends("a_thread_does_not_wait_for_itself", || {
            watch();
            watch();
            let _outer = enter();
            let _inner = enter();
            std::process::exit(7);
        });
        assert_eq!(code, Some(7));
        assert!(took < PATIENCE, "waited for itself: {took:?}");
    }

    /// One that does not come back is waited for a while.
    #[test]
    fn a_thread_that_stays_is_left() {
        let (code, took) = ends("a_thread_that_stays_is_left", || {
            for _ in 0..3 {
                watch();
            }
            let (sender, is_in) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let _inside = enter();
                sender.send(()).unwrap();
                std::thread::sleep(Duration::from_secs(60));
            });
            is_in.recv().unwrap();
            std::process::exit(7);
        });
        assert_eq!(code, Some(7));
        assert!((PATIENCE..2 * PATIENCE).contains(&took), "{took:?}");
    }

    /// The parent's threads are not in the child, which waits for none of them.
    #[test]
    fn a_forked_child_ends_at_once() {
        let (code, _) = ends("a_forked_child_ends_at_once", || {
            watch();
            let (sender, is_in) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let _inside = enter();
                sender.send(()).unwrap();
                std::thread::sleep(4 * PATIENCE);
            });
            is_in.recv().unwrap();
            let start = Instant::now();
            // SAFETY: the child ends without a lock that another thread may hold.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let is_in = enter().is_some();
                ending();
                let is_told = enter().is_none();
                // SAFETY: it has no requirement.
                unsafe { libc::_exit(i32::from(!is_in || !is_told)) };
            }
            let mut status = 0;
            // SAFETY: `status` is valid for the write of an int.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0);
            assert!(start.elapsed() < PATIENCE, "waited for the parent's thread");
            std::process::exit(7);
        });
        assert_eq!(code, Some(7));
    }
}
