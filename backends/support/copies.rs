//! Copies and fills of any place and length do on a device what they do in a model.

use arrow_device::device::{CopyKind, CopyOp, DevicePtr};
use arrow_device::{Device, DeviceBufferMut};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::assert_clean;
use crate::rigs::all;

/// The bytes of each place: ordinary memory of the host, page-locked memory, and two allocations of the device.
const ROOM: usize = 5000;

#[derive(Clone, Debug)]
enum Step {
    /// Never between both of the host's, nor between ranges that overlap.
    Copy {
        from: (usize, usize),
        to: (usize, usize),
        bytes: usize,
    },
    Fill {
        to: (usize, usize),
        bytes: usize,
        byte: u8,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let length = prop_oneof![1..9_usize, 1..600_usize, 1..ROOM];
    let copy = (0..4_usize, 0..4_usize, 0..ROOM, 0..ROOM, length.clone());
    let copy = copy.prop_filter_map("of the host, or overlapping", |(from, to, src, dst, n)| {
        let bytes = n.min(ROOM - src).min(ROOM - dst);
        let is_apart = from != to || src.abs_diff(dst) >= bytes;
        let (from, to) = ((from, src), (to, dst));
        ((from.0 > 1 || to.0 > 1) && is_apart).then_some(Step::Copy { from, to, bytes })
    });
    let byte = prop_oneof![Just(0), any::<u8>()];
    let fill = (2..4_usize, 0..ROOM, length, byte);
    let fill = fill.prop_map(|(place, at, n, byte)| Step::Fill {
        to: (place, at),
        bytes: n.min(ROOM - at),
        byte,
    });
    prop_oneof![3 => copy, 1 => fill]
}

fn check(device: &Device) {
    let queue = device.new_queue().unwrap();
    let memory = [(); 2].map(|()| DeviceBufferMut::allocate(&queue, ROOM).unwrap());
    let locked = device.host_buffer(ROOM).unwrap();
    let mut ordinary = vec![0_u8; ROOM];
    let places = [
        DevicePtr::new(ordinary.as_mut_ptr().cast()),
        locked.as_device_ptr(),
        memory[0].address(),
        memory[1].address(),
    ];
    let copy = |from: (usize, usize), to: (usize, usize), bytes| {
        let op = CopyOp {
            src: places[from.0].offset(from.1),
            dst: places[to.0].offset(to.1),
            bytes,
            kind: match (from.0 < 2, to.0 < 2) {
                (true, _) => CopyKind::HostToDevice,
                (_, true) => CopyKind::DeviceToHost,
                _ => CopyKind::DeviceToDevice,
            },
        };
        // SAFETY: the places have `ROOM` bytes and live until the queue was waited for; the ranges do not overlap.
        unsafe { queue.raw().copy(&[op]) }.unwrap();
    };
    let fill = |to: (usize, usize), byte, bytes| {
        // SAFETY: the place has `ROOM` bytes, among which these are, and lives until the queue was waited for.
        unsafe { queue.raw().fill(places[to.0].offset(to.1), byte, bytes) }.unwrap();
    };
    let read = |place: usize| {
        // SAFETY: the host's two places have `ROOM` bytes, and the queue was waited for.
        unsafe { std::slice::from_raw_parts(places[place].as_ptr().cast::<u8>(), ROOM) }.to_vec()
    };
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        ..Config::with_cases(100)
    });
    let steps = proptest::collection::vec(step(), 1..16);
    let outcome = runner.run(&steps, |steps| {
        for (host, device) in [(0, 2), (1, 3)] {
            fill((device, 0), device as u8, ROOM);
            copy((device, 0), (host, 0), ROOM);
        }
        let mut model = [2, 3, 2, 3].map(|byte| vec![byte; ROOM]);
        // A runtime may read the host's memory as soon as a copy from it is queued, so what writes there is waited for first.
        let mut is_written = [true; 2];
        for step in &steps {
            match *step {
                Step::Copy { from, to, bytes } => {
                    if from.0 < 2 && is_written[from.0] {
                        queue.synchronize().unwrap();
                        is_written = [false; 2];
                    }
                    copy(from, to, bytes);
                    if to.0 < 2 {
                        is_written[to.0] = true;
                    }
                    let part = model[from.0][from.1..from.1 + bytes].to_vec();
                    model[to.0][to.1..to.1 + bytes].copy_from_slice(&part);
                }
                Step::Fill { to, bytes, byte } => {
                    fill(to, byte, bytes);
                    model[to.0][to.1..to.1 + bytes].fill(byte);
                }
            }
        }
        queue.synchronize().unwrap();
        let hosts = [read(0), read(1)];
        copy((2, 0), (0, 0), ROOM);
        copy((3, 0), (1, 0), ROOM);
        queue.synchronize().unwrap();
        let [ordinary, locked] = hosts;
        prop_assert!([ordinary, locked, read(0), read(1)] == model);
        Ok(())
    });
    queue.synchronize().unwrap();
    drop((memory, ordinary, locked, queue));
    outcome.unwrap();
    assert_clean(device);
}

#[test]
fn of_any_place_and_length() {
    all().iter().for_each(check);
}
