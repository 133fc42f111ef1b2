//! Other processes that hand over batches, or take them, and do not keep to the protocol.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use arrow_device::DeviceRecordBatch;
use arrow_device_share::{Publisher, PublisherOptions, Subscriber, shared_cpu};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::check;
use crate::input::Input;
use crate::raw::{Packet, Raw};
use crate::support::cases::batch;
use crate::support::r#gen::Nulls;
use crate::support::types::all_types;

/// So many types are the columns of each batch.
const COLUMNS: usize = 6;
/// The most bytes of memory that an input changes.
const MEMORY: usize = 1 << 16;

/// Batches of all types, some in each.
fn batches() -> &'static [RecordBatch] {
    static BATCHES: OnceLock<Vec<RecordBatch>> = OnceLock::new();
    BATCHES.get_or_init(|| {
        let types: Vec<_> = all_types()
            .into_iter()
            .map(|(_, data_type)| data_type)
            .collect();
        let batch = |types: &[_]| batch(types, 5, Nulls::Some, 1);
        types.chunks(COLUMNS).map(batch).collect()
    })
}

/// What a publisher sends for a batch, and the bytes of its memory.
fn packets(batch: &RecordBatch) -> (Vec<Packet>, Vec<u8>) {
    let (raw, there) = Raw::pair();
    let publisher = Publisher::over(there).expect("a pair of sockets");
    raw.subscribe();
    let shared = shared_cpu().upload(batch).expect("memory");
    publisher.send(&shared).expect("a subscriber");
    publisher.finish().expect("a subscriber");
    let packets: Vec<_> = std::iter::from_fn(|| raw.receive()).collect();
    let file = packets.iter().find_map(|packet| packet.memory.as_ref());
    let mut bytes = vec![0; MEMORY];
    let read = file.map_or(Ok(0), |file| rustix::io::pread(file, &mut bytes, 0));
    bytes.truncate(read.expect("a memory file"));
    (packets, bytes)
}

fn frozen(bytes: &[u8]) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("fuzz", flags).expect("memory");
    rustix::io::pwrite(&file, bytes, 0).expect("memory");
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::WRITE).expect("seals");
    file
}

/// Reads to the end what a publisher has sent that is gone. An error is the last item, and there is none after the end.
fn read(mut subscriber: Subscriber) {
    let mut kept: Vec<DeviceRecordBatch> = Vec::new();
    while let Some(next) = subscriber.next() {
        match next {
            Ok(batch) => {
                check::read_batch(&batch);
                kept.push(batch);
            }
            Err(_) => assert!(subscriber.next().is_none(), "a batch after an error"),
        }
    }
    drop(subscriber);
    kept.iter().for_each(check::read_batch);
}

/// | bytes | what |
/// | --- | --- |
/// | 1 | which batch |
/// | 1 + ... | bytes of the memory that change: 2 where, 1 to what |
/// | rest | bytes of the packets that change: 1 of which, 2 where, 1 to what |
pub(crate) fn manifests(input: &mut Input<'_>) {
    let which = input.choice(batches().len());
    let (mut packets, mut memory) = packets(&batches()[which]);
    let mut changes = Input::new(input.text());
    while !changes.is_empty() && !memory.is_empty() {
        let at = usize::from(changes.u16()) % memory.len();
        memory[at] = changes.u8();
    }
    while !input.is_empty() {
        let n = packets.len();
        let body = &mut packets[input.choice(n)].body;
        let (at, new) = (usize::from(input.u16()), input.u8());
        if let Some(byte) = at.checked_rem(body.len()).and_then(|at| body.get_mut(at)) {
            *byte = new;
        }
    }
    let memory = frozen(&memory);
    let (raw, there) = Raw::pair();
    let subscriber = Subscriber::over(there).expect("a pair of sockets");
    raw.welcome();
    for mut packet in packets {
        if packet.memory.is_some() {
            packet.memory = memory.try_clone().ok();
        }
        raw.pass(&packet);
    }
    drop(raw);
    read(subscriber);
}

/// | bytes | what |
/// | --- | --- |
/// | 1 | whom the packets are for: the rest is of a publisher, or of a subscriber |
/// | 1 | which batch |
/// | 1 | whether the publisher has said its version |
/// | rest | packets: 1 which, of a real publisher or a number as its kind; then 1 its number, 1 + ... its body |
pub(crate) fn protocol(input: &mut Input<'_>) {
    let (raw, there) = Raw::pair();
    if input.bool() {
        return to_a_publisher(input, raw, there);
    }
    let which = input.choice(batches().len());
    let (packets, _) = packets(&batches()[which]);
    let subscriber = Subscriber::over(there).expect("a pair of sockets");
    if input.bool() {
        raw.welcome();
    }
    while !input.is_empty() {
        let choice = usize::from(input.u8());
        match packets.get(choice) {
            Some(packet) => raw.pass(packet),
            None => {
                let memory = packets.iter().find_map(|packet| packet.memory.as_ref());
                let memory = memory
                    .filter(|_| choice & 0x40 != 0)
                    .map(|file| file.as_fd());
                let number = input.u8().into();
                raw.send((choice & 0xf) as u8, number, input.text(), memory);
            }
        }
    }
    drop(raw);
    read(subscriber);
}

/// The publisher ends the connection at the first packet that is wrong, and keeps nothing for it.
fn to_a_publisher(input: &mut Input<'_>, raw: Raw, there: OwnedFd) {
    let options = PublisherOptions {
        patience: Duration::ZERO,
        ..Default::default()
    };
    let publisher = Publisher::over_with(there, options).expect("a pair of sockets");
    let shared = shared_cpu().upload(&batches()[0]).expect("memory");
    while !input.is_empty() {
        match input.u8() {
            0xff => _ = publisher.send(&shared),
            kind => {
                let number = input.u8().into();
                let body = input.text();
                let body = if kind & 0x80 != 0 {
                    crate::raw::VERSION
                } else {
                    body
                };
                raw.send(kind & 0x7f, number, body, None);
            }
        }
    }
    drop(raw);
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let stats = publisher.stats();
        if (stats.subscribers, stats.leases) == (0, 0) {
            return;
        }
        assert!(Instant::now() < end, "kept for nobody: {stats:?}");
        std::thread::yield_now();
    }
}
