//! The end of a process that uses a device: while libraries of drivers run their destructors, no thread is in wgpu.

use std::mem::forget;
use std::sync::Arc;

use arrow_array::{Int64Array, RecordBatch};
use arrow_device::Device;

use crate::fork_kit::{alone, is_alone};
use crate::rigs::try_open;

/// How many processes end, for each test.
const ROUNDS: usize = 10;

fn batch() -> RecordBatch {
    let column = Arc::new(Int64Array::from_iter_values(0..300_000)) as _;
    RecordBatch::try_from_iter([("a", column)]).unwrap()
}

/// Runs `work` in processes that end while what it has begun is pending.
fn ends_well(test: &str, work: fn(Device)) {
    let rounds = if is_alone() { 1 } else { ROUNDS };
    for _ in 0..rounds {
        alone(test, || {
            if let Some(device) = try_open() {
                work(device);
            }
        });
    }
}

/// The device's thread has to land them.
#[test]
fn while_downloads_run() {
    ends_well("exit::while_downloads_run", |device| {
        let up = device.upload(&batch()).unwrap();
        forget(up.start_to_host().unwrap());
        drop(up);
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

#[test]
fn while_threads_use_the_device() {
    ends_well("exit::while_threads_use_the_device", |device| {
        let (begun, sees) = std::sync::mpsc::channel();
        for _ in 0..3 {
            let (device, begun) = (device.clone(), begun.clone());
            std::thread::spawn(move || {
                loop {
                    let up = device.upload(&batch()).unwrap();
                    drop(up.to_host().unwrap());
                    let _ = begun.send(());
                }
            });
        }
        sees.recv().unwrap();
    });
}

/// The thread that ends the process drops what it has left: the device is left to the system.
#[test]
fn after_the_end_has_begun() {
    ends_well("exit::after_the_end_has_begun", |device| {
        static LEFT: std::sync::Mutex<Option<Device>> = std::sync::Mutex::new(None);
        extern "C" fn last() {
            let device = LEFT.lock().unwrap().take().unwrap();
            let refused = device.synchronize().unwrap_err().to_string();
            if !refused.contains("the process is ending") {
                // SAFETY: it has no requirement.
                unsafe { libc::_exit(9) };
            }
            drop(device);
        }
        *LEFT.lock().unwrap() = Some(device);
        // SAFETY: the function uses the device, which has to be ready for that.
        assert_eq!(unsafe { libc::atexit(last) }, 0);
        arrow_device::device::parts::exit::watch();
    });
}
