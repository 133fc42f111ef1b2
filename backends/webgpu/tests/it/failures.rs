//! What fails is an error of the operation, and a device that is lost stays so: nothing that it did not do counts as done.

use arrow_device::device::{CopyKind, CopyOp, DevicePtr};
use arrow_device::{Device, DeviceBufferMut, Error};
use arrow_device_conformance::{assert_error, assert_works, numbers};
use arrow_device_wgpu::{Polling, WgpuDevice, wgpu};

use crate::program::own_buffer;
use crate::rigs::{assert_clean, config, hold, open_with, own_device};

const LOST: &str = "the wgpu device was lost or destroyed";

fn destroy(device: &Device) {
    WgpuDevice::of(device).unwrap().device().destroy();
}

/// A copy to all of the host's memory.
fn down(memory: &DeviceBufferMut, host: &mut [u8]) -> CopyOp {
    CopyOp {
        src: memory.address(),
        dst: DevicePtr::new(host.as_mut_ptr().cast()),
        bytes: host.len(),
        kind: CopyKind::DeviceToHost,
    }
}

/// Nothing of the device runs any more.
#[track_caller]
fn assert_over(device: &Device, text: &str) {
    assert_error(device.synchronize(), text);
    assert!(device.backend().is_over());
}

/// Every operation fails after a loss.
#[track_caller]
fn assert_lost(device: &Device) {
    let queue = device.default_queue();
    assert_error(device.upload(&numbers(10)), LOST);
    assert_error(DeviceBufferMut::allocate(&queue, 64), LOST);
    assert_error(queue.record(), LOST);
    assert_error(queue.synchronize(), LOST);
    assert_error(device.synchronize(), LOST);
    assert_error(device.new_queue(), LOST);
    assert_error(WgpuDevice::of(device).unwrap().poll(), LOST);
    assert_over(device, LOST);
}

#[test]
fn destroyed_while_events_are_pending() {
    let Some(device) = open_with(|_| {}) else {
        return;
    };
    let queue = device.default_queue();
    let fresh = || DeviceBufferMut::for_values::<i32>(&queue, 10).unwrap();
    let (memory, frozen) = (fresh(), fresh().freeze().unwrap());
    let buffer = own_buffer(&device, wgpu::BufferUsages::COPY_SRC, &[1, 2]);
    let held = hold(&queue);
    let up = device.upload(&numbers(1000)).unwrap();
    let event = queue.record().unwrap().unwrap();
    destroy(&device);
    assert_error(event.is_complete(), LOST);
    drop(held);
    assert_error(event.wait(), LOST);
    assert_error(event.is_complete(), LOST);
    assert_error(up.wait(), LOST);
    assert_lost(&device);
    let gpu = WgpuDevice::of(&device).unwrap();
    // SAFETY: nothing is submitted.
    unsafe {
        assert_error(gpu.bind(&memory), LOST);
        assert_error(gpu.resolve(memory.address(), 4), LOST);
        assert_error(WgpuDevice::wrap(&device, buffer, ()), LOST);
    }
    let (frozen, error) = gpu.take(frozen).unwrap_err();
    assert!(error.to_string().contains(LOST), "{error}");
    drop((up, event, memory, frozen));
    assert_clean(&device);
}

/// What a download would write to is given back, and not written to any more.
#[test]
fn destroyed_while_downloads_are_pending() {
    let Some(device) = open_with(|_| {}) else {
        return;
    };
    let queue = device.default_queue();
    let memory = DeviceBufferMut::allocate(&queue, 1 << 20).unwrap();
    let mut host = vec![1_u8; 1 << 20];
    let held = hold(&queue);
    let copy = down(&memory, &mut host);
    // SAFETY: both have this many bytes, and live until the device is over.
    unsafe { queue.raw().copy(&[copy]) }.unwrap();
    let event = queue.record().unwrap().unwrap();
    destroy(&device);
    drop(held);
    assert_error(event.wait(), LOST);
    assert_over(&device, LOST);
    host.fill(2);
    let gpu = WgpuDevice::of(&device).unwrap();
    gpu.device()
        .poll(wgpu::PollType::wait_indefinitely())
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(
        host.iter().all(|byte| *byte == 2),
        "written after the device was over"
    );
    drop((memory, event));
    assert_clean(&device);
}

#[test]
fn a_destroyed_device_is_not_adopted() {
    let Some((device, queue)) = own_device(|_| {}) else {
        return;
    };
    device.destroy();
    assert_error(config().adopt(&device, &queue), LOST);
}

/// Foreign code may panic where this crate polls the device: in the program's callbacks.
#[test]
fn a_panic_is_an_error_and_ends_the_device() {
    let Some(device) = open_with(|_| {}) else {
        return;
    };
    let up = device.upload(&numbers(1000)).unwrap();
    let gpu = WgpuDevice::of(&device).unwrap();
    gpu.queue()
        .on_submitted_work_done(|| panic!("a callback of the program"));
    let failed = "wgpu panicked: a callback of the program";
    assert_error(up.wait().and_then(|()| device.synchronize()), failed);
    assert_error(up.to_host(), failed);
    assert_error(device.upload(&numbers(1)), failed);
    assert_over(&device, failed);
    drop(up);
    assert_clean(&device);
}

/// wgpu drops the rest of its callbacks, ours among them, where the program's panics in the program's own poll: nobody waits forever.
#[test]
fn a_panic_in_the_programs_poll() {
    let failed = "the device cannot be used any more";
    for is_download in [false, true] {
        let Some(device) = open_with(|_| {}) else {
            return;
        };
        let gpu = WgpuDevice::of(&device).unwrap();
        let own = gpu.device().clone();
        let up = device.upload(&numbers(1000)).unwrap();
        let mine = own.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 64,
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let held = hold(&device.default_queue());
        let download = is_download.then(|| up.start_to_host(None).unwrap());
        match is_download {
            false => gpu
                .queue()
                .on_submitted_work_done(|| panic!("a callback of the program")),
            // Called before that of the download, which wgpu has to wait for.
            true => mine.map_async(wgpu::MapMode::Read, .., |_| {
                panic!("a callback of the program")
            }),
        }
        let event = device.default_queue().record().unwrap().unwrap();
        let poll = move || drop(own.poll(wgpu::PollType::wait_indefinitely()));
        drop(held);
        assert!(std::thread::spawn(poll).join().is_err(), "no panic");
        match download {
            Some(download) => assert_error(download.wait(), failed),
            None => assert_error(event.wait(), failed),
        }
        assert_error(device.synchronize(), failed);
        assert_over(&device, failed);
        drop((up, event));
        assert_clean(&device);
    }
}

/// A list of downloads fails midway: none of its parts is written to the host after the error.
#[test]
fn a_download_that_fails_midway() {
    /// Panics in the second submission that finds it.
    fn chain(queue: wgpu::Queue, left: u32) {
        let next = queue.clone();
        queue.on_submitted_work_done(move || match left {
            0 => panic!("a callback of the program"),
            _ => chain(next, left - 1),
        });
    }
    const BYTES: usize = 64 << 20;
    let Some((own, own_queue)) = own_device(|_| {}) else {
        return;
    };
    let config = config().with_polling(Polling::Program);
    let device = config.adopt(&own, &own_queue).unwrap();
    let queue = device.default_queue();
    let memory = DeviceBufferMut::allocate(&queue, BYTES).unwrap();
    queue.synchronize().unwrap();
    let mut host = vec![1_u8; BYTES];
    chain(own_queue, 1);
    let copy = down(&memory, &mut host);
    // SAFETY: both have this many bytes. The list fails, after which nothing uses them.
    let failed = unsafe { queue.raw().copy(&[copy]) };
    assert_error(failed, "wgpu panicked: a callback of the program");
    host.fill(2);
    let _ = own.poll(wgpu::PollType::wait_indefinitely());
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(
        host.iter().all(|byte| *byte == 2),
        "written after the error"
    );
    drop(memory);
    assert_clean(&device);
}

/// A validation error is one of the operation: the device goes on.
#[test]
fn a_validation_error_is_an_error_of_the_operation() {
    // The shader for bytes that are not whole words needs a storage buffer.
    let lower = |limits: &mut wgpu::Limits| limits.max_storage_buffers_per_shader_stage = 0;
    let Some(device) = open_with(lower) else {
        return;
    };
    let queue = device.default_queue();
    let memory = DeviceBufferMut::allocate(&queue, 64).unwrap();
    // SAFETY: the bytes lie in the allocation.
    let filled = unsafe { queue.raw().fill(memory.address(), 1, 3) };
    assert!(matches!(&filled, Err(Error::Device { .. })), "{filled:?}");
    assert_works(&device);
    drop(memory);
    assert_clean(&device);
}

/// On wgpu's backend that has no device behind it, whose memory is the host's. The system gives this process little.
#[cfg(target_os = "linux")]
#[test]
fn no_memory_left() {
    arrow_device_conformance::alone("failures::no_memory_left", || {
        let descriptor = wgpu::DeviceDescriptor {
            required_limits: wgpu::Limits {
                max_buffer_size: i32::MAX as u64,
                ..wgpu::Limits::default()
            },
            ..Default::default()
        };
        let (device, queue) = wgpu::Device::noop(&descriptor);
        let device = config().adopt(&device, &queue).unwrap();
        let queue = device.default_queue();
        let sent = numbers(1000);
        let up = device.upload(&sent).unwrap();
        let little = libc::rlimit {
            rlim_cur: 3 << 29,
            rlim_max: 3 << 29,
        };
        // SAFETY: the struct outlives the call.
        let set = unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const little) };
        assert_eq!(set, 0);
        for bytes in [(1 << 31) - 4096, 1 << 46] {
            let refused = DeviceBufferMut::allocate(&queue, bytes);
            assert!(
                matches!(refused, Err(Error::OutOfMemory { bytes: b, .. }) if b == bytes),
                "{refused:?}"
            );
        }
        assert_eq!(up.to_host().unwrap(), sent);
        drop(up);
        assert_clean(&device);
    });
}

/// Addresses that are not the device's are errors, and touch nothing.
#[test]
fn foreign_addresses() {
    let Some(device) = open_with(|_| {}) else {
        return;
    };
    let queue = device.default_queue();
    let memory = DeviceBufferMut::allocate(&queue, 64).unwrap();
    let mut host = [0_u8; 64];
    let foreign = DevicePtr::new(host.as_mut_ptr().cast());
    // What stands before them in the list does not run either, though it is as large as several submissions.
    const BYTES: usize = 5 << 20;
    let large = DeviceBufferMut::allocate(&queue, BYTES).unwrap();
    let mut back = vec![1_u8; BYTES];
    let mut bad = down(&large, &mut host);
    bad.src = foreign;
    let list = [down(&large, &mut back), bad];
    // SAFETY: the memory is there; what is no device memory is refused.
    assert_error(unsafe { queue.raw().copy(&list) }, "is not in memory of");
    queue.synchronize().unwrap();
    assert!(back.iter().all(|byte| *byte == 1), "a part of the list ran");
    drop(large);
    // SAFETY: the host memory is there; as device memory it is refused, as is what does not fit.
    unsafe {
        assert_error(queue.raw().fill(foreign, 0, 64), "is not in memory of");
        assert_error(
            queue.raw().fill(memory.address(), 0, 65),
            "is not in memory of",
        );
        assert_error(
            queue.raw().free(foreign, 64),
            "is not the beginning of an allocation",
        );
    }
    drop(memory);
    assert_clean(&device);
}
