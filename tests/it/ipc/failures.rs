//! What is malformed, cut off or failing ends a reader with an error.

use std::io::{Cursor, Read, Seek, SeekFrom};

use arrow_array::RecordBatch;
use arrow_device::device::sim::{FaultOp, SimMode};
use arrow_device::ipc::{IpcFileReader, IpcOptions, IpcStreamReader};
use arrow_device::{Device, DeviceRecordBatch, Devices, Result};
use arrow_ipc::CompressionType;

use crate::ipc::{FORMATS, Format, aligned, assert_batches, dictionary, mixed};
use crate::simkit::Sim;

/// Returns few bytes at a time, and an error in place of those from `fails` on.
struct Slow<'a> {
    bytes: Cursor<&'a [u8]>,
    fails: u64,
}

impl Read for Slow<'_> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        if self.bytes.position() >= self.fails {
            return Err(std::io::Error::other("the disk is gone"));
        }
        let most = to.len().min(7);
        self.bytes.read(&mut to[..most])
    }
}

impl Seek for Slow<'_> {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        self.bytes.seek(to)
    }
}

#[test]
fn readers_that_are_slow_or_fail() {
    let batches = [mixed(3), mixed(2)];
    for format in FORMATS {
        let bytes = format.write(&batches, aligned(64));
        let read = |fails: u64| -> Result<Vec<DeviceRecordBatch>> {
            let slow = Slow {
                bytes: Cursor::new(&bytes),
                fails,
            };
            match format {
                Format::File => IpcFileReader::try_new(slow, &Devices::cpu())?.collect(),
                Format::Stream => IpcStreamReader::try_new(slow, &Devices::cpu())?.collect(),
            }
        };
        assert_batches(&batches, &read(u64::MAX).unwrap(), "slow");
        for fails in [0, 3, 9, 100, 1000] {
            let e = read(fails).unwrap_err();
            assert!(e.to_string().contains("the disk is gone"), "{fails}: {e}");
        }
    }
}

/// An error ends the reader.
#[test]
fn errors_come_once() {
    let bytes = Format::Stream.write(&[mixed(30), mixed(30)], aligned(64));
    let cut = &bytes[..bytes.len() - 100];
    let mut reader = IpcStreamReader::try_new(cut, &Devices::cpu()).unwrap();
    assert!(reader.next().unwrap().is_ok());
    assert!(reader.next().unwrap().is_err());
    assert!(reader.next().is_none());
    let bytes = Format::File.write(&[mixed(30), mixed(30)], aligned(64));
    let options = IpcOptions::default();
    let queue = Devices::cpu().default_queue();
    let mut reader = IpcFileReader::try_new_on(Cursor::new(&bytes), queue, options).unwrap();
    assert!(reader.by_ref().all(|batch| batch.is_ok()));
    assert!(reader.next().is_none());
}

/// Whatever is cut off or changed, there is an answer: batches or an error.
#[test]
fn malformed_input_is_an_error() {
    let words = RecordBatch::try_from_iter([("d", dictionary(6, &["a", "bc"]))]).unwrap();
    let lz4 = aligned(8)
        .try_with_compression(Some(CompressionType::LZ4_FRAME))
        .unwrap();
    let inputs = [
        (mixed(4), aligned(8)),
        (words, aligned(64)),
        (mixed(4), lz4),
    ];
    let options = || IpcOptions::default().with_max_message_bytes(1 << 20);
    let (sim, cpu) = (Sim::new(SimMode::Async), Devices::cpu());
    let (mut refused, mut total) = (0, 0);
    for (batch, write) in inputs {
        for format in FORMATS {
            let bytes = format.write(&[batch.clone(), batch.clone()], write.clone());
            let mut all = |bytes: &[u8], device: &Device| {
                total += 1;
                let read = format.read_with(bytes, device, options());
                refused += usize::from(read.is_err());
                if let Ok(read) = read {
                    read.iter().for_each(|batch| drop(batch.to_host()));
                }
            };
            for length in (0..bytes.len()).step_by(61) {
                all(&bytes[..length], &cpu);
            }
            let mut changed = bytes.clone();
            for i in (0..bytes.len()).step_by(7) {
                changed[i] = [bytes[i] ^ 0x80, 0xFF, bytes[i].wrapping_add(1)][i % 3];
                all(&changed, if i % 14 == 0 { &sim } else { &cpu });
                changed[i] = bytes[i];
            }
        }
    }
    assert!(refused * 5 > total, "{refused} of {total} were refused");
    sim.synchronize().unwrap();
    sim.assert_done();
}

/// Numbers that would be too much memory, or memory outside of what was read.
#[test]
fn announced_sizes() {
    let refused = |format: Format, bytes: &[u8]| {
        let options = IpcOptions::default().with_max_message_bytes(1 << 20);
        format
            .read_with(bytes, &Devices::cpu(), options)
            .unwrap_err()
            .to_string()
    };
    let stream = Format::Stream.write(&[mixed(4)], aligned(8));
    for (length, text) in [
        (u32::MAX - 1, "a negative length"),
        (i32::MAX as u32, "2147483647 bytes are announced"),
    ] {
        let mut bytes = stream.clone();
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        let error = refused(Format::Stream, &bytes);
        assert!(error.contains(text), "{error}");
    }
    let file = Format::File.write(&[mixed(4)], aligned(8));
    let (end, mut bytes) = (file.len() - 10, file.clone());
    bytes[end..end + 4].copy_from_slice(&i32::MAX.to_le_bytes());
    let error = refused(Format::File, &bytes);
    assert!(error.contains("2147483647 bytes in a file"), "{error}");
    assert!(refused(Format::File, &[1; 9]).contains("9 bytes"));
    assert!(refused(Format::Stream, &[]).contains("schema"));
    let options = IpcOptions::default().with_max_message_bytes(100);
    let error = Format::Stream
        .read_with(&stream, &Devices::cpu(), options)
        .unwrap_err();
    assert!(
        error.to_string().contains("with_max_message_bytes"),
        "{error}"
    );
}

/// Whatever fails on the device, the reader ends with an error and nothing is left.
#[test]
fn failures_of_the_device() {
    let words = RecordBatch::try_from_iter([("d", dictionary(6, &["a", "bc"]))]).unwrap();
    for (alignment, batch) in [(64, mixed(50)), (8, mixed(50)), (64, words)] {
        let bytes = Format::Stream.write(&[batch.clone(), batch], aligned(alignment));
        for op in [
            FaultOp::Allocate,
            FaultOp::Copy,
            FaultOp::Record,
            FaultOp::Fill,
        ] {
            for n in 1..5 {
                let sim = Sim::new(SimMode::Async);
                sim.sim.faults().fail_nth(op, n);
                let read = Format::Stream.read(&bytes, &sim);
                let reached = sim.sim.faults().seen(op) >= n;
                assert_eq!(read.is_err(), reached, "{op:?} {n}");
                drop(read);
                sim.synchronize().unwrap();
                sim.assert_done();
            }
        }
    }
}
