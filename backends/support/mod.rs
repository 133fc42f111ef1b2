//! What the tests of all backends share. In each program, the module `rigs` has the devices: `all` of them, `rigs` for those whose
//! memory is exported, what of one is in use (`unclean`), what keeps a queue busy (`hold`), and what a forked child is refused
//! (`refused`).
#![allow(dead_code)] // the programs use what they need

mod copies;
#[cfg(target_os = "linux")]
mod fork;
mod transfer;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock};
use std::task::Wake;
use std::time::{Duration, Instant};

use arrow_device::{Device, Devices, Error, ImportOptions, Queue};
use arrow_device_conformance::{Hold, Subject, run};

use crate::rigs::unclean;
use crate::stream_suite::Rig;

/// Whether a missing runtime is an error: in CI.
pub(crate) fn is_required(backend: &str) -> bool {
    let name = format!("ARROW_DEVICE_{backend}_REQUIRED");
    std::env::var_os(name).is_some_and(|value| value != "0")
}

/// Ends the process if its tests hang.
pub(crate) fn limit() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_secs(600));
            eprintln!("the tests have hung: ten minutes are over");
            std::process::abort();
        });
    });
}

/// Returns whether `done` becomes true within a minute. (Vulkan's validation layer may hold a thread up for ten seconds at a time.)
pub(crate) fn soon(mut done: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(60) {
        if done() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

/// Waits until a device has given everything back, which a thread of its own does.
#[track_caller]
pub(crate) fn assert_clean(device: &Device) {
    assert!(soon(|| unclean(device).is_none()), "{:?}", unclean(device));
}

/// Asserts an error that says this.
#[track_caller]
pub(crate) fn assert_error<T: std::fmt::Debug>(result: Result<T, Error>, text: &str) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(text), "{error}");
}

/// A waker that counts its calls.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicUsize);

impl Count {
    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// The conformance suite on what `open` opens.
pub(crate) fn conforms(
    open: impl Fn() -> Option<Device> + Send + Sync + 'static,
    hold: fn(&Queue) -> Hold,
) {
    let Some(device) = open() else { return };
    let all = Arc::new(Mutex::new(vec![device.clone()]));
    let others = all.clone();
    let subject = Subject::new(device)
        .with_another(move || {
            let device = open().unwrap();
            others.lock().unwrap().push(device.clone());
            device
        })
        .with_hold(hold)
        .with_patience(Duration::from_secs(60))
        .with_balance(move || {
            let all = all.lock().unwrap();
            all.iter().find_map(unclean).map_or(Ok(()), Err)
        })
        .strict();
    run(&subject);
}

/// How calls of the runtime are made to fail.
#[derive(Clone, Copy)]
pub(crate) struct Faults {
    /// Runs a test in a process of its own, in which calls can fail. True there.
    pub(crate) interposed: fn(&str) -> bool,
    pub(crate) fail_nth: fn(u64),
    /// Takes that back; whether a call has failed.
    pub(crate) clear: fn() -> bool,
    /// What was given back that was not owned.
    pub(crate) misused: fn() -> Option<String>,
}

/// A device for the suite of streams.
pub(crate) fn rig(device: Device, faults: Option<Faults>) -> Rig {
    const TEST: &str = "stream_suite::every_failure_in_a_stream_is_an_error_and_leaks_nothing";
    static HERE: OnceLock<bool> = OnceLock::new();
    let here = |faults: Option<Faults>| faults.filter(|_| HERE.get() == Some(&true));
    let devices = Devices::new();
    devices.add(device.clone()).unwrap();
    let (subject, nth) = (device.clone(), Rc::new(Cell::new(0)));
    let asked = nth.clone();
    Rig {
        device,
        options: ImportOptions::default().with_devices(devices),
        unclean: Box::new(move || {
            unclean(&subject).or_else(|| here(faults).and_then(|faults| (faults.misused)()))
        }),
        fail_nth: Box::new(move |n| {
            nth.set(n);
            if let Some(faults) = faults
                && *HERE.get_or_init(|| (faults.interposed)(TEST))
            {
                (faults.fail_nth)(n);
            }
        }),
        // Where nothing can fail: the suite wants to see a few failures.
        failed: Box::new(move || here(faults).map_or(asked.get() <= 5, |faults| (faults.clear)())),
    }
}
