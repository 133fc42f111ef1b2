//! Something that work waits for until a test has seen that nothing else does.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use arrow_device::device::Queue;
use arrow_device_oneapi::OneApiQueue;

use super::programs::{Shared, programs};

type Open = Box<dyn FnOnce() + Send>;

/// Opens once. If nobody has opened it after 20 seconds, something waits that must not: it then opens by itself, and the test fails.
pub(crate) struct Gate(Arc<(Mutex<Option<Open>>, Condvar)>);

impl Gate {
    pub(crate) fn new(open: impl FnOnce() + Send + 'static) -> Self {
        let shared = Arc::new((Mutex::new(Some(Box::new(open) as Open)), Condvar::new()));
        let watched = shared.clone();
        std::thread::spawn(move || {
            let (open, opened) = &*watched;
            let open = open.lock().unwrap_or_else(PoisonError::into_inner);
            let waited =
                opened.wait_timeout_while(open, Duration::from_secs(20), |open| open.is_some());
            let late = waited.unwrap_or_else(PoisonError::into_inner).0.take();
            if let Some(open) = late {
                open();
            }
        });
        Self(shared)
    }

    fn take(&self) -> Option<Open> {
        let taken = self
            .0
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        self.0.1.notify_all();
        taken
    }

    pub(crate) fn open(self) {
        let open = self.take();
        open.expect("something has waited for the gate")();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        if let Some(open) = self.take() {
            open();
        }
    }
}

pub(crate) fn sycl_queue(queue: &Queue) -> *mut std::ffi::c_void {
    let queue: &OneApiQueue = queue.raw().downcast_ref().unwrap();
    queue.sycl_queue()
}

/// Work in SYCL's own hands: what comes after it is not given to OpenCL yet. It throws at its end if `fails`.
pub(crate) fn hold_by_host_task(queue: &Queue, fails: bool) -> Gate {
    // SAFETY: the queue is live, and the gate opened once.
    unsafe {
        let gate = Shared((programs().gate_new)());
        let held = (programs().hold_by_host_task)(sycl_queue(queue), gate.get(), fails.into());
        assert_eq!(held, 0);
        Gate::new(move || (programs().gate_open)(gate.get()))
    }
}

/// Work that OpenCL runs.
///
/// # Safety
/// `queue` points to a live `sycl::queue`.
pub(crate) unsafe fn hold_by_kernel(queue: *mut std::ffi::c_void) -> Gate {
    // SAFETY: the caller guarantees a live queue (see `# Safety`), and the gate is opened once.
    unsafe {
        let gate = Shared((programs().gate_new)());
        assert_eq!((programs().hold_by_kernel)(queue, gate.get()), 0);
        Gate::new(move || (programs().gate_open)(gate.get()))
    }
}

/// Work in OpenCL's hands.
pub(crate) fn hold_by_event(queue: &Queue) -> Gate {
    // SAFETY: the queue is live, and the event ended once.
    unsafe {
        let held = Shared((programs().hold_by_event)(sycl_queue(queue)));
        assert!(!held.get().is_null());
        Gate::new(move || (programs().end_event)(held.get(), 0))
    }
}
