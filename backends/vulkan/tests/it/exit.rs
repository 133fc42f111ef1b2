//! The end of a process that uses a device: while libraries of drivers and layers run their destructors, no thread is in Vulkan. Under
//! the validation layer, a thread that is crashes the process.

use std::mem::forget;
use std::sync::Arc;

use arrow_array::{Int64Array, RecordBatch};
use arrow_device::{Device, SyncPolicy};

use crate::fork_kit::alone;
use crate::rigs::{Gate, Timeline, hold_on_device, is_there, open};

const ROUNDS: usize = 5;

fn batch() -> RecordBatch {
    let column = Arc::new(Int64Array::from_iter_values(0..1_000_000)) as _;
    RecordBatch::try_from_iter([("a", column)]).unwrap()
}

/// Runs `work` in processes that end while what it has begun is pending.
fn ends_well(test: &str, work: fn(&Device)) {
    if !is_there() {
        return;
    }
    for _ in 0..ROUNDS {
        alone(test, || {
            let device = open();
            work(&device);
            // As a device of the process-wide set, which is never dropped.
            forget(device);
        });
    }
}

#[test]
fn while_copies_run() {
    ends_well("exit::while_copies_run", |device| {
        let up = device.upload(&batch()).unwrap();
        forget(up.export(SyncPolicy::Event).unwrap());
    });
}

#[test]
fn while_a_thread_uses_the_device() {
    ends_well("exit::while_a_thread_uses_the_device", |device| {
        let device = device.clone();
        let (begun, sees) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            loop {
                let up = device.upload(&batch()).unwrap();
                drop(up.to_host().unwrap());
                let _ = begun.send(());
            }
        });
        sees.recv().unwrap();
    });
}

#[test]
fn while_threads_wait() {
    ends_well("exit::while_threads_wait", |device| {
        let queue = device.new_queue().unwrap();
        forget(hold_on_device(&queue));
        let event = queue.record().unwrap().unwrap();
        std::thread::spawn(move || event.wait().unwrap());
        let gate = Gate::new(device);
        let other = device.new_queue().unwrap();
        // SAFETY: the event lives until the process ends.
        unsafe { other.raw().wait(gate.pointer()) }.unwrap();
        let event = other.record().unwrap().unwrap();
        let waits = std::thread::spawn(move || event.wait().unwrap());
        forget((gate, Timeline::new(device)));
        std::thread::sleep(std::time::Duration::from_millis(5));
        drop(waits);
    });
}
