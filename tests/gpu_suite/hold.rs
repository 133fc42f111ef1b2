//! Keeping a queue's stream busy.

use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex};

use arrow_device::Queue;
use arrow_device_conformance::Hold;

use crate::vendor::launch_host;

/// Something that a stream's work waits at until it is opened.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

/// Keeps it busy with a host function.
pub(crate) fn hold(queue: &Queue) -> Hold {
    unsafe extern "C" fn pass(gate: *mut c_void) {
        // SAFETY: this is the reference that `hold` gave away, taken back once.
        let gate = unsafe { Arc::from_raw(gate.cast_const().cast::<Gate>()) };
        let open = gate.open.lock().unwrap();
        drop(gate.opened.wait_while(open, |open| !*open).unwrap());
    }
    let gate = Arc::new(Gate::default());
    let data = Arc::into_raw(gate.clone()).cast_mut().cast();
    launch_host(queue, pass, data);
    Hold::new(move || {
        *gate.open.lock().unwrap() = true;
        gate.opened.notify_all();
    })
}
