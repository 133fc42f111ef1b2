//! The conformance suite, on the best adapter: with its limits, with small buffers, and polled by the program.

use arrow_device_wgpu::Polling;

use crate::rigs::{config, hold, open_with, own_device, try_open};
use crate::suite::conforms;

#[test]
fn opened() {
    conforms(try_open, hold);
}

#[test]
fn every_call_fails() {
    if try_open().is_some() {
        let open = || {
            let (runtime, stream, _) = config().parts()?;
            Ok((runtime, stream))
        };
        arrow_device_conformance::every_call_fails(open, 0);
    }
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

/// Waits need no polls of the program.
#[test]
fn polled_by_the_program() {
    let open = || {
        let (device, queue) = own_device(|_| {})?;
        let config = config().with_polling(Polling::Program);
        Some(config.adopt(&device, &queue).unwrap())
    };
    conforms(open, hold);
}
