//! Copies and fills of any offset and length, beside the same on host memory: in one buffer, over many, and within one allocation.

use arrow_device::device::{CopyKind, CopyOp, DevicePtr, RawQueue};
use arrow_device::{Device, DeviceBufferMut};
use arrow_device_wgpu::wgpu;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::rigs::{assert_clean, open_with};

/// The bytes of each of two allocations.
const BYTES: usize = 5000;

#[derive(Clone, Debug)]
enum Step {
    /// From the host to an allocation.
    Up {
        to: usize,
        at: usize,
        bytes: Vec<u8>,
    },
    Down {
        from: usize,
        at: usize,
        bytes: usize,
    },
    Fill {
        to: usize,
        at: usize,
        bytes: usize,
        byte: u8,
    },
    /// Between the allocations, or within one if the ranges do not overlap.
    Across {
        from: usize,
        to: usize,
        src: usize,
        dst: usize,
        bytes: usize,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let length = prop_oneof![1..9_usize, 1..600_usize, 1..BYTES];
    let place = move || (0..2_usize, 0..BYTES, length.clone());
    let fit = |(which, at, bytes): (usize, usize, usize)| (which, at, bytes.min(BYTES - at));
    let up = (place(), any::<u8>()).prop_map(move |(place, seed)| {
        let (to, at, bytes) = fit(place);
        let bytes = (0..bytes)
            .map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed))
            .collect();
        Step::Up { to, at, bytes }
    });
    let down = place().prop_map(move |place| {
        let (from, at, bytes) = fit(place);
        Step::Down { from, at, bytes }
    });
    let byte = prop_oneof![Just(0), any::<u8>()];
    let fill = (place(), byte).prop_map(move |(place, byte)| {
        let (to, at, bytes) = fit(place);
        Step::Fill {
            to,
            at,
            bytes,
            byte,
        }
    });
    let across = (place(), place()).prop_map(move |(one, other)| {
        let ((from, src, left), (to, dst, right)) = (fit(one), fit(other));
        let mut bytes = left.min(right);
        if from == to {
            bytes = bytes.min(src.abs_diff(dst));
        }
        Step::Across {
            from,
            to,
            src,
            dst,
            bytes,
        }
    });
    vec(prop_oneof![up, down, fill, across], 1..24)
}

fn host(bytes: &[u8]) -> DevicePtr {
    DevicePtr::new(bytes.as_ptr().cast_mut().cast())
}

fn same_as_on_the_host(device: &Device, steps: &[Step]) {
    let queue = device.default_queue();
    let raw: &dyn RawQueue = &**queue.raw();
    let memory = [0; 2].map(|_| DeviceBufferMut::allocate(&queue, BYTES).unwrap());
    let mut model = [vec![0xAA; BYTES], vec![0xAA; BYTES]];
    let place = |which: usize, at| memory[which].address().offset(at);
    let mut reads = Vec::new();
    // SAFETY: in all calls: the places are in the allocations and the host memory, which live until `synchronize` below.
    unsafe {
        for which in 0..2 {
            raw.fill(place(which, 0), 0xAA, BYTES).unwrap();
        }
        let copy = |src, dst, bytes, kind| {
            raw.copy(&[CopyOp {
                src,
                dst,
                bytes,
                kind,
            }])
            .unwrap()
        };
        for step in steps {
            match step {
                Step::Up { to, at, bytes } => {
                    copy(
                        host(bytes),
                        place(*to, *at),
                        bytes.len(),
                        CopyKind::HostToDevice,
                    );
                    model[*to][*at..at + bytes.len()].copy_from_slice(bytes);
                }
                Step::Down { from, at, bytes } => {
                    let mut back = vec![0x55_u8; bytes + 2];
                    let dst = DevicePtr::new(back.as_mut_ptr().cast()).offset(1);
                    copy(place(*from, *at), dst, *bytes, CopyKind::DeviceToHost);
                    reads.push((back, model[*from][*at..at + bytes].to_vec(), step));
                }
                Step::Fill {
                    to,
                    at,
                    bytes,
                    byte,
                } => {
                    raw.fill(place(*to, *at), *byte, *bytes).unwrap();
                    model[*to][*at..at + bytes].fill(*byte);
                }
                Step::Across { bytes: 0, .. } => {}
                Step::Across {
                    from,
                    to,
                    src,
                    dst,
                    bytes,
                } => {
                    copy(
                        place(*from, *src),
                        place(*to, *dst),
                        *bytes,
                        CopyKind::DeviceToDevice,
                    );
                    let moved = model[*from][*src..src + bytes].to_vec();
                    model[*to][*dst..dst + bytes].copy_from_slice(&moved);
                }
            }
        }
        let mut all = [vec![0_u8; BYTES], vec![0_u8; BYTES]];
        for (which, all) in all.iter_mut().enumerate() {
            let dst = DevicePtr::new(all.as_mut_ptr().cast());
            copy(place(which, 0), dst, BYTES, CopyKind::DeviceToHost);
        }
        queue.synchronize().unwrap();
        for (back, expected, step) in reads {
            let (first, last) = (back[0], back[back.len() - 1]);
            assert_eq!(&back[1..back.len() - 1], &expected[..], "{step:?}");
            assert_eq!((first, last), (0x55, 0x55), "beside what {step:?} reads");
        }
        assert!(all == model, "after {steps:?}");
    }
}

fn check(device: &Device, cases: u32) {
    let mut runner = TestRunner::new(Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    });
    let checked = runner.run(&steps(), |steps| {
        same_as_on_the_host(device, &steps);
        Ok(())
    });
    checked.unwrap();
    assert_clean(device);
}

#[test]
fn in_one_buffer() {
    let Some(device) = open_with(|_| {}) else {
        return;
    };
    check(&device, 64);
}

#[test]
fn over_many_buffers() {
    // Allocations have five buffers, and a shader sees 512 bytes at once.
    let lower = |limits: &mut wgpu::Limits| {
        limits.max_buffer_size = 1024;
        limits.max_storage_buffer_binding_size = 512;
    };
    let Some(device) = open_with(lower) else {
        return;
    };
    check(&device, 64);
}

/// The last downloads are still running when their destination is read for the next upload.
#[test]
fn an_upload_reads_what_a_download_writes() {
    let Some(device) = open_with(|_| {}) else {
        return;
    };
    let queue = device.default_queue();
    let memory = DeviceBufferMut::allocate(&queue, 1 << 20).unwrap();
    let mut host = vec![0_u8; 1 << 19];
    let there = DevicePtr::new(host.as_mut_ptr().cast());
    for byte in 1..20 {
        // SAFETY: the places are in the allocation and the host memory, which live until the queue is done.
        unsafe {
            queue.raw().fill(memory.address(), byte, 1 << 19).unwrap();
            let other = memory.address().offset(1 << 19);
            let copy = |src, dst, kind| {
                queue
                    .raw()
                    .copy(&[CopyOp {
                        src,
                        dst,
                        bytes: 1 << 19,
                        kind,
                    }])
                    .unwrap()
            };
            copy(memory.address(), there, CopyKind::DeviceToHost);
            copy(there, other, CopyKind::HostToDevice);
            queue.raw().fill(memory.address(), 0, 1 << 19).unwrap();
            copy(other, there, CopyKind::DeviceToHost);
        }
        queue.synchronize().unwrap();
        assert!(host.iter().all(|b| *b == byte), "{byte}");
    }
    drop(memory);
    assert_clean(&device);
}
