//! Keeping a queue's stream busy.

use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex};

use arrow_device::Queue;
use arrow_device_conformance::Hold;

use crate::vendor::launch_host;

/// Something that a stream's work waits at until it is opened.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The work is waiting, or has waited.
    reached: bool,
    open: bool,
}

impl Gate {
    /// Waits for the work to wait here.
    #[allow(dead_code)] // the tests on hardware break no device
    pub(crate) fn wait_until_reached(&self) {
        self.wait_until(|state| state.reached);
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
    }

    fn wait_until(&self, reached: impl Fn(&State) -> bool) {
        let state = self.state.lock().unwrap();
        drop(
            self.changed
                .wait_while(state, |state| !reached(state))
                .unwrap(),
        );
    }
}

/// Keeps it busy with a host function.
pub(crate) fn hold(queue: &Queue) -> Hold {
    held(queue).1
}

/// As [`hold`]; also returns what the function waits at.
pub(crate) fn held(queue: &Queue) -> (Arc<Gate>, Hold) {
    unsafe extern "C" fn pass(gate: *mut c_void) {
        // SAFETY: this is the reference that `held` gave away, taken back once.
        let gate = unsafe { Arc::from_raw(gate.cast_const().cast::<Gate>()) };
        gate.change(|state| state.reached = true);
        gate.wait_until(|state| state.open);
    }
    let gate = Arc::new(Gate::default());
    let data = Arc::into_raw(gate.clone()).cast_mut().cast();
    launch_host(queue, pass, data);
    let opened = gate.clone();
    (
        gate,
        Hold::new(move || opened.change(|state| state.open = true)),
    )
}
