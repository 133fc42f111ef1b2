//! The conformance suite, on the best adapter: with its limits, with small buffers, and polled by the program.
#![cfg(not(miri))]

#[path = "support/webgpu.rs"]
mod webgpu;

use std::sync::{Arc, Mutex};

use arrow_device::Device;
use arrow_device_conformance::{Subject, run};
use arrow_device_wgpu::{Polling, adopt};

use webgpu::{config, hold, open_with, own_device, try_open, unclean};

fn conforms(open: impl Fn() -> Option<Device> + Clone + Send + Sync + 'static) {
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
        .with_balance(move || {
            let all = all.lock().unwrap();
            all.iter().find_map(unclean).map_or(Ok(()), Err)
        })
        .strict();
    run(&subject);
}

#[test]
fn opened() {
    conforms(try_open);
}

#[test]
fn with_small_buffers() {
    conforms(|| {
        open_with(|limits| {
            limits.max_buffer_size = 64 << 10;
            limits.max_storage_buffer_binding_size = 16 << 10;
        })
    });
}

#[test]
fn polled_by_the_program() {
    conforms(|| {
        let (device, queue) = own_device(|_| {})?;
        let polls = device.clone();
        let made = adopt(&device, &queue, &config().with_polling(Polling::Program)).unwrap();
        // Stands for the frames of a program.
        std::thread::spawn(move || {
            for _ in 0..60_000 {
                let _ = polls.poll(wgpu::PollType::Poll);
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        });
        Some(made)
    });
}
