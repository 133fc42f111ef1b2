//! Values survive the way to a device and back: every type of Arrow, by copies, structs, streams and between devices; and copies
//! and fills of any alignment and length.

use arrow_array::RecordBatchIterator;
use arrow_device::device::{CopyKind, CopyOp, DevicePtr};
use arrow_device::{
    DeviceBufferMut, DeviceRecordBatchReader, DeviceRecordBatchStreamReader, Devices,
    ImportOptions, export_reader,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::rigs::{assert_clean, is_there, open};
use crate::support::assert_same_batch;
use crate::support::round_trips::{self, all_columns};

#[test]
fn every_type() {
    if !is_there() {
        return;
    }
    let device = open();
    round_trips::every_type(&device, 1);
    assert_clean(&device);
}

#[test]
fn batches_whole_and_sliced_on_both_sides() {
    if !is_there() {
        return;
    }
    let device = open();
    round_trips::batches_whole_and_sliced_on_both_sides(&device);
    assert_clean(&device);
}

#[test]
fn structs_out_and_in() {
    if !is_there() {
        return;
    }
    let device = open();
    let devices = Devices::new();
    devices.add(device.clone()).unwrap();
    let options = ImportOptions::default().with_devices(devices);
    round_trips::structs_out_and_in(&device, &options);
    drop(options);
    assert_clean(&device);
}

#[test]
fn between_devices() {
    if !is_there() {
        return;
    }
    let (one, two) = (open(), open());
    round_trips::there_and_back(&one, &two);
    assert_clean(&one);
    assert_clean(&two);
}

/// Batches through a C stream, to the host and on the device.
#[test]
fn streams() {
    if !is_there() {
        return;
    }
    let device = open();
    let devices = Devices::new();
    devices.add(device.clone()).unwrap();
    let options = ImportOptions::default().with_devices(devices);
    let batches: Vec<_> = (0..5).map(|seed| all_columns(100, seed)).collect();
    let stream = || {
        let schema = batches[0].schema();
        let reader = RecordBatchIterator::new(batches.clone().into_iter().map(Ok), schema);
        let stream = export_reader(reader, &device).unwrap();
        // SAFETY: the stream is this crate's.
        unsafe { DeviceRecordBatchStreamReader::new(stream, options.clone()) }.unwrap()
    };
    let back: Vec<_> = stream().into_host_reader().map(Result::unwrap).collect();
    assert_eq!(back.len(), batches.len());
    for (number, (sent, back)) in batches.iter().zip(&back).enumerate() {
        assert_same_batch(sent, back, format_args!("batch {number} on the host"));
    }
    for (sent, there) in batches.iter().zip(stream()) {
        let there = there.unwrap();
        assert_eq!(there.device(), &device);
        let back = there.to_host().unwrap();
        assert_same_batch(sent, &back, "on the device");
    }
    drop(back);
    assert_clean(&device);
}

/// One step of the property test, on memory of `ROOM` bytes each: ordinary, page-locked, and two buffers of the device.
#[derive(Clone, Debug)]
enum Step {
    /// Copies bytes between two of them. The host's two are never both ends.
    Copy {
        from: usize,
        to: usize,
        src: usize,
        dst: usize,
        bytes: usize,
    },
    Fill {
        buffer: usize,
        dst: usize,
        bytes: usize,
        byte: u8,
    },
}

const ROOM: usize = 300;

fn step() -> impl Strategy<Value = Step> {
    let range = (0..ROOM, 0..ROOM, 1..ROOM);
    let copy =
        (0..4usize, 0..4usize, range).prop_filter_map("between hosts", |(from, to, range)| {
            let (src, dst, bytes) = range;
            let bytes = bytes.min(ROOM - src).min(ROOM - dst);
            let hosts = from < 2 && to < 2;
            // Within one buffer, source and destination must not overlap.
            let apart = from != to || src.abs_diff(dst) >= bytes;
            (!hosts && apart).then_some(Step::Copy {
                from,
                to,
                src,
                dst,
                bytes,
            })
        });
    let fill = (2..4usize, 0..ROOM, 1..ROOM, any::<u8>());
    let fill = fill.prop_map(|(buffer, dst, bytes, byte)| Step::Fill {
        buffer,
        dst,
        bytes: bytes.min(ROOM - dst),
        byte,
    });
    prop_oneof![2 => copy, 1 => fill]
}

/// Copies and fills of any alignment and length do on the device what they do in a model.
#[test]
fn copies_and_fills_are_exact() {
    if !is_there() {
        return;
    }
    let device = open();
    let queue = device.new_queue().unwrap();
    let (one, two) = (
        DeviceBufferMut::allocate(&queue, ROOM).unwrap(),
        DeviceBufferMut::allocate(&queue, ROOM).unwrap(),
    );
    let locked = device.host_slab(ROOM).unwrap();
    let mut ordinary = vec![0u8; ROOM];
    let at = |pointer: *mut u8| DevicePtr::new(pointer.cast());
    let places = [
        at(ordinary.as_mut_ptr()),
        locked.as_device_ptr(),
        one.address(),
        two.address(),
    ];
    assert!(device.backend().copies_directly_from(places[1], ROOM));
    assert!(!device.backend().copies_directly_from(places[0], ROOM));
    let raw = queue.raw();
    let copy = |from: usize, to: usize, src: usize, dst: usize, bytes: usize| {
        let op = CopyOp {
            src: places[from].offset(src),
            dst: places[to].offset(dst),
            bytes,
            kind: match (from < 2, to < 2) {
                (true, _) => CopyKind::HostToDevice,
                (_, true) => CopyKind::DeviceToHost,
                _ => CopyKind::DeviceToDevice,
            },
        };
        // SAFETY: all four places have `ROOM` bytes and live until the queue was waited for; the ranges do not overlap.
        unsafe { raw.copy(&[op]) }.unwrap();
    };
    let fill = |buffer: usize, dst: usize, byte: u8, bytes: usize| {
        // SAFETY: the place has `ROOM` bytes, among which these are, and lives until the queue was waited for.
        unsafe { raw.fill(places[buffer].offset(dst), byte, bytes) }.unwrap();
    };
    let read = |place: usize| {
        // SAFETY: the host's two places have `ROOM` bytes; the queue was waited for.
        unsafe { std::slice::from_raw_parts(places[place].as_ptr().cast::<u8>(), ROOM) }.to_vec()
    };
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        ..Config::with_cases(200)
    });
    let steps = proptest::collection::vec(step(), 1..12);
    let outcome = runner.run(&steps, |steps| {
        fill(2, 0, 1, ROOM);
        fill(3, 0, 2, ROOM);
        copy(2, 0, 0, 0, ROOM);
        copy(3, 1, 0, 0, ROOM);
        let mut model = [1, 2, 1, 2].map(|byte| vec![byte; ROOM]);
        for step in &steps {
            match *step {
                Step::Copy {
                    from,
                    to,
                    src,
                    dst,
                    bytes,
                } => {
                    copy(from, to, src, dst, bytes);
                    let part = model[from][src..src + bytes].to_vec();
                    model[to][dst..dst + bytes].copy_from_slice(&part);
                }
                Step::Fill {
                    buffer,
                    dst,
                    bytes,
                    byte,
                } => {
                    fill(buffer, dst, byte, bytes);
                    model[buffer][dst..dst + bytes].fill(byte);
                }
            }
        }
        queue.synchronize().unwrap();
        prop_assert_eq!(read(0), model[0].clone());
        prop_assert_eq!(read(1), model[1].clone());
        copy(2, 0, 0, 0, ROOM);
        copy(3, 1, 0, 0, ROOM);
        queue.synchronize().unwrap();
        prop_assert_eq!(read(0), model[2].clone());
        prop_assert_eq!(read(1), model[3].clone());
        Ok(())
    });
    drop((one, two));
    drop((ordinary, locked));
    outcome.unwrap();
    assert_clean(&device);
}

/// A copy to ordinary memory ends with work of the host, for which the device's waits wait, also if its queue was dropped.
#[test]
fn copies_to_ordinary_memory_are_waited_for() {
    if !is_there() {
        return;
    }
    let device = open();
    let bytes = 1 << 20;
    for round in 0..20u8 {
        let (home, queue) = (device.default_queue(), device.new_queue().unwrap());
        let mut memory = DeviceBufferMut::allocate(&home, bytes).unwrap();
        memory.fill(round + 1).unwrap();
        queue.wait(&home.record().unwrap().unwrap()).unwrap();
        let mut ordinary = vec![0u8; bytes];
        let op = CopyOp {
            src: memory.address(),
            dst: DevicePtr::new(ordinary.as_mut_ptr().cast()),
            bytes,
            kind: CopyKind::DeviceToHost,
        };
        // SAFETY: both have as many bytes and live until the device was waited for.
        unsafe { queue.raw().copy(&[op]) }.unwrap();
        drop(queue);
        match round % 2 {
            0 => device.synchronize().unwrap(),
            _ => device.backend().settle().unwrap(),
        }
        assert!(ordinary.iter().all(|byte| *byte == round + 1), "{round}");
        drop(memory);
    }
    assert_clean(&device);
}
