//! The conformance suite, on the best adapter: with its limits, with small buffers, and polled by the program.

use std::time::Duration;

use arrow_device::Device;
use arrow_device_conformance::{Subject, every_call_fails, run};
use arrow_device_wgpu::{Polling, WgpuDevice, devices, register};

use crate::rigs::{config, hold, is_there, open, own_device, with_limits};

fn subject(open: impl Fn() -> Device + Send + Sync + 'static) -> Option<Subject> {
    let subject = is_there().then(|| Subject::of::<WgpuDevice>(open))?;
    let subject = subject
        .with_patience(Duration::from_secs(4))
        .with_hold(hold)
        .with_registration(register, 0);
    Some(subject.with_refused(|queue| {
        let gpu = WgpuDevice::of(queue.device()).unwrap();
        vec![
            gpu.poll().unwrap_err(),
            config().open().unwrap_err(),
            config().adopt(gpu.device(), gpu.queue()).unwrap_err(),
            devices().unwrap_err(),
        ]
    }))
}

#[test]
fn opened() {
    subject(open).as_ref().map(run);
}

/// With work that is held up.
#[test]
fn adopted() {
    let adopted = || with_limits(|_| {});
    subject(adopted).as_ref().map(run);
}

#[test]
fn every_call() {
    if is_there() {
        let open = || config().parts().map(|(device, queue, _)| (device, queue));
        every_call_fails(open, 0);
    }
}

#[test]
fn with_small_buffers() {
    let small = || {
        with_limits(|limits| {
            limits.max_buffer_size = 64 << 10;
            limits.max_storage_buffer_binding_size = 16 << 10;
        })
    };
    subject(small).as_ref().map(run);
}

/// Waits need no polls of the program.
#[test]
fn polled_by_the_program() {
    let polled = || {
        let (device, queue) = own_device(|_| {}).unwrap();
        let config = config().with_polling(Polling::Program);
        config.adopt(&device, &queue).unwrap()
    };
    subject(polled).as_ref().map(run);
}

#[test]
#[cfg(target_os = "linux")]
fn in_processes() {
    arrow_device_conformance::run_in_processes("conformance::in_processes", || {
        subject(|| with_limits(|_| {}))
    });
}
