//! The end of a process that uses a device: while libraries of drivers and layers run their destructors, no thread is in the runtime.

use std::mem::forget;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::{Int64Array, RecordBatch};
use arrow_device::{Device, SyncPolicy};

use crate::fork_kit::{alone, is_alone};
use crate::rigs::all;

pub(crate) fn batch() -> RecordBatch {
    let column = Arc::new(Int64Array::from_iter_values(0..500_000)) as _;
    RecordBatch::try_from_iter([("a", column)]).unwrap()
}

/// Runs `work` in processes that end, soon and without an error, while what it has begun is pending.
pub(crate) fn ends_well(test: &str, work: fn(Device)) {
    for round in 0..if is_alone() { 1 } else { 5 } {
        let start = Instant::now();
        alone(test, || {
            // SAFETY: the function only sleeps.
            assert_eq!(unsafe { libc::atexit(linger) }, 0);
            if let Some(device) = all().into_iter().next() {
                work(device);
            }
        });
        let took = start.elapsed();
        assert!(took < Duration::from_secs(20), "round {round}: {took:?}");
    }
}

/// Gives threads time while the process ends, after the end of the runtime that was loaded later.
extern "C" fn linger() {
    std::thread::sleep(Duration::from_millis(50));
}

/// The device is kept, as one of the process-wide set is.
#[test]
fn while_copies_run() {
    ends_well("exit::while_copies_run", |device| {
        let up = device.upload(&batch()).unwrap();
        forget(up.start_to_host(None).unwrap());
        forget(up.export(SyncPolicy::Event).unwrap());
        forget((device.new_queue().unwrap(), device));
    });
}

#[test]
fn while_threads_use_the_device() {
    ends_well("exit::while_threads_use_the_device", |device| {
        let (begun, sees) = std::sync::mpsc::channel();
        for _ in 0..3 {
            let (device, begun) = (device.clone(), begun.clone());
            std::thread::spawn(move || {
                loop {
                    // Once the process ends it stays in here: an error could be taken for the end of work.
                    let up = device.upload(&batch());
                    if let Err(e) = up.and_then(|up| up.to_host()) {
                        eprintln!("{e}");
                        std::process::abort();
                    }
                    let _ = begun.send(());
                }
            });
        }
        sees.recv().unwrap();
    });
}

/// Another thread drops the last handle of the device.
#[test]
fn while_the_device_is_dropped() {
    ends_well("exit::while_the_device_is_dropped", |device| {
        let up = device.upload(&batch()).unwrap();
        let (begun, sees) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let _ = begun.send(());
            drop((up, device));
        });
        sees.recv().unwrap();
    });
}
