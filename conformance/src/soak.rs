//! Many small batches through streams: what a process has stays level.

use std::fs::{read_dir, read_link, read_to_string};
use std::sync::{Arc, Mutex, PoisonError};

use arrow_device::arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow_device::{Device, DeviceRecordBatch, DeviceRecordBatchReader, export_reader};

use super::Subject;
use super::exports::{is_refused, options};
use super::help::assert_even;
use super::streams::{open, reader};

const ROUNDS: usize = 10;
/// By how many bytes memory may grow: what the allocator keeps differs.
const MARGIN: u64 = 6 << 20;

/// What the process has.
#[derive(Clone, Copy, Debug)]
struct Level {
    memory: u64,
    files: u64,
    threads: u64,
}

impl Level {
    fn now() -> Self {
        let status = read_to_string("/proc/self/status").expect("/proc");
        let number = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next());
            number.expect("a number").parse().expect("a number")
        };
        let files = read_dir("/proc/self/fd").expect("/proc").flatten();
        let paths = files.filter_map(|file| read_link(file.path()).ok());
        // NVIDIA's driver opens and closes some as it likes.
        let others = paths.filter(|to| !to.to_string_lossy().starts_with("/dev/nvidia"));
        Self {
            memory: number("VmRSS:") << 10,
            files: others.count() as u64,
            threads: number("Threads:"),
        }
    }
}

pub(super) fn soak(subject: &Subject) {
    let device = &subject.device;
    let asked = std::env::var("ARROW_DEVICE_SOAK_BATCHES");
    let batches = asked.map_or(5_000, |number| number.parse().expect("a number"));
    let kept = Mutex::default();
    let mut levels = Vec::new();
    for round in 0..ROUNDS {
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let kept = &kept;
                scope.spawn(move || {
                    let (mut done, mut kind) = (0, round + thread);
                    while done < batches / ROUNDS / 2 {
                        done += stream(device, kind, kept);
                        kind += 1;
                    }
                });
            }
        });
        device.synchronize().expect("synchronize");
        levels.push(Level::now());
    }
    // The first rounds fill pools. What is there for a moment only has not grown: threads that end when they are idle may meet by chance.
    let early = |of: fn(&Level) -> u64| levels[2..5].iter().map(of).max();
    let late = |of: fn(&Level) -> u64| levels[7..].iter().map(of).min();
    for (what, of, margin) in [
        ("files", (|level| level.files) as fn(&Level) -> u64, 2),
        ("threads", |level| level.threads, 2),
        ("memory", |level| level.memory, MARGIN),
    ] {
        let (before, after) = (early(of).unwrap_or(0), late(of).unwrap_or(0));
        // A sanitizer keeps what was freed.
        let counts = what != "memory" || std::env::var_os("ASAN_OPTIONS").is_none();
        let is_level = after <= before + margin + before / 20 || !counts;
        assert!(is_level, "{what} grew from {before} to {after}: {levels:?}");
    }
    println!("{batches} batches: {:?} at the end", levels.last());
    drop(kept);
    assert_even(subject);
}

/// A few batches, of which some have no rows.
fn sent() -> Vec<RecordBatch> {
    let batch = |rows: i64| {
        let numbers = (0..rows).map(|i| (i % 7 != 3).then_some(i));
        let texts = (0..rows).map(|i| (i % 5 != 3).then(|| "x".repeat(i as usize % 40)));
        let columns: [(&str, ArrayRef, bool); 2] = [
            ("number", Arc::new(Int64Array::from_iter(numbers)), true),
            ("text", Arc::new(StringArray::from_iter(texts)), true),
        ];
        RecordBatch::try_from_iter_with_nullable(columns).expect("a batch")
    };
    [0, 1, 7, 64, 1000, 7, 64, 5000, 1, 64].map(batch).to_vec()
}

/// Streams once, in one of several ways. Returns how many batches came.
fn stream(device: &Device, kind: usize, kept: &Mutex<Vec<DeviceRecordBatch>>) -> usize {
    let sent = sent();
    if is_refused(device) {
        let same = |sent: &RecordBatch| {
            let back = device.upload(sent).and_then(|up| up.to_host());
            assert!(
                back.expect("there and back") == *sent,
                "other values came back"
            );
        };
        sent.iter().for_each(same);
        return sent.len();
    }
    let fails = (kind % 5 == 3).then_some("this stream is to fail here");
    let stream = export_reader(reader(&sent, fails), device).expect("export_reader");
    if kind % 5 == 1 {
        // Released by its drop, as C would.
        return 1;
    }
    let mut reader = open(stream, &options(device));
    if kind % 5 == 2 {
        // Batches outlive their stream, which is closed early, and are dropped by another thread.
        let first = reader.next().expect("a batch").expect("a batch");
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push(first);
        if kept.len() > 32 {
            kept.clear();
        }
        return 1;
    }
    let mut host = reader.into_host_reader().with_prefetch(kind % 3);
    for sent in &sent {
        let back = host.next().expect("a batch").expect("a batch");
        assert!(back == *sent, "other values came back");
    }
    let last = host.next();
    assert_eq!(last.is_some_and(|last| last.is_err()), fails.is_some());
    sent.len()
}
