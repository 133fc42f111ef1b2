//! The conformance suite, on the best adapter: with its limits, with small buffers, and polled by the program.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arrow_device_wgpu::{Polling, adopt, wgpu};

use crate::rigs::{config, hold, open_with, own_device, try_open};
use crate::suite::conforms;

#[test]
fn opened() {
    conforms(try_open, hold);
}

#[test]
fn with_small_buffers() {
    conforms(
        || {
            open_with(|limits| {
                limits.max_buffer_size = 64 << 10;
                limits.max_storage_buffer_binding_size = 16 << 10;
            })
        },
        hold,
    );
}

#[test]
fn polled_by_the_program() {
    let over = Arc::new(AtomicBool::new(false));
    let threads = Arc::new(Mutex::new(Vec::new()));
    let (ends, started) = (over.clone(), threads.clone());
    conforms(
        move || {
            let (device, queue) = own_device(|_| {})?;
            let made = adopt(&device, &queue, &config().with_polling(Polling::Program)).unwrap();
            let ends = ends.clone();
            // Stands for the frames of a program.
            let frames = move || {
                while !ends.load(Ordering::Relaxed) {
                    device.poll(wgpu::PollType::Poll).unwrap();
                    std::thread::sleep(Duration::from_millis(5));
                }
            };
            started.lock().unwrap().push(std::thread::spawn(frames));
            Some(made)
        },
        hold,
    );
    over.store(true, Ordering::Relaxed);
    let threads: Vec<_> = std::mem::take(&mut *threads.lock().unwrap());
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
}
