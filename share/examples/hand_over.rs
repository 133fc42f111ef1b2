//! What a batch costs from one process to another, through this crate and through Arrow IPC:
//! `cargo run --release -p arrow-device-share --example hand_over`. All take turns in one run. With `--lines` it prints row H1 of
//! `benches/report`.

use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow_buffer::Buffer;
use arrow_device::{DeviceRecordBatch, Devices};
use arrow_device_share::{
    Publisher, PublisherOptions, Subscriber, SubscriberOptions, shared_cpu, socket_pair,
};
use arrow_ipc::reader::{StreamDecoder, StreamReader};
use arrow_ipc::writer::StreamWriter;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use rustix::time::{ClockId, clock_gettime};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// What takes a batch over.
const WAYS: [&str; 5] = [
    "this crate, trusting",
    "this crate, validating",
    "this crate, from ordinary memory",
    "Arrow IPC over a Unix socket",
    "Arrow IPC in a memory file",
];

/// Bytes of a batch; rounds one by one; batches in a row.
const CASES: [(usize, usize, usize); 4] = [
    (16 << 10, 1000, 1000),
    (1 << 20, 60, 100),
    (8 << 20, 30, 40),
    (64 << 20, 10, 10),
];

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        None => here(false),
        Some("--lines") => here(true),
        Some(folder) => there(folder.as_ref()),
    }
}

/// Numbers, and a quarter of text.
fn batch(bytes: usize) -> Result<RecordBatch> {
    let rows = bytes / 32;
    let numbers = |k: i64| Arc::new((0..rows as i64).map(|i| i * k).collect::<Int64Array>());
    let text = (0..rows).map(|i| Some(["eight", "word"][i % 2]));
    let columns: [(_, ArrayRef); 4] = [
        ("a", numbers(1)),
        ("b", numbers(3)),
        ("c", numbers(7)),
        ("text", Arc::new(text.collect::<StringArray>())),
    ];
    Ok(RecordBatch::try_from_iter(columns)?)
}

/// Reads all of it.
fn sum(batch: &RecordBatch) -> i64 {
    let numbers = batch.columns()[..3].iter().map(|column| {
        let values = column.as_primitive::<Int64Type>().values();
        values
            .iter()
            .fold(0, |sum: i64, value| sum.wrapping_add(*value))
    });
    let text = batch.column(3).as_string::<i32>().value_data();
    numbers.sum::<i64>() + text.iter().map(|byte| i64::from(*byte)).sum::<i64>()
}

fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The process that has the batches.
struct Sender {
    publishers: Vec<Publisher>,
    socket: UnixStream,
    files: OwnedFd,
}

impl Sender {
    fn send(&mut self, way: usize, batch: &RecordBatch, shared: &DeviceRecordBatch) -> Result<()> {
        match way {
            0 | 1 => _ = self.publishers[way].send(shared)?,
            2 => _ = self.publishers[2].send(&Devices::cpu().upload(batch)?)?,
            3 => {
                // One stream for each batch, so that a reader need not wait for the next.
                let mut socket = &self.socket;
                let mut writer = StreamWriter::try_new_buffered(&mut socket, batch.schema_ref())?;
                writer.write(batch)?;
                writer.flush()?;
            }
            _ => {
                let file = rustix::fs::memfd_create("batch", MemfdFlags::CLOEXEC)?;
                let mut file = std::fs::File::from(file);
                let mut writer = StreamWriter::try_new(&mut file, batch.schema_ref())?;
                writer.write(batch)?;
                writer.finish()?;
                drop(writer);
                let files = [file.as_fd()];
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                control.push(SendAncillaryMessage::ScmRights(&files));
                let parts = [std::io::IoSlice::new(b"x")];
                rustix::net::sendmsg(&self.files, &parts, &mut control, SendFlags::empty())?;
            }
        }
        Ok(())
    }
}

/// The process that gets them.
struct Receiver {
    subscribers: Vec<Subscriber>,
    socket: UnixStream,
    files: OwnedFd,
}

impl Receiver {
    fn receive(&mut self, way: usize) -> Result<RecordBatch> {
        let none = "the other process has gone";
        match way {
            0..3 => Ok(self.subscribers[way].next().ok_or(none)??.to_host()?),
            3 => {
                let mut reader = StreamReader::try_new(&mut self.socket, None)?;
                Ok(reader.next().ok_or(none)??)
            }
            _ => {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = RecvAncillaryBuffer::new(&mut space);
                let mut byte = [0];
                let mut parts = [std::io::IoSliceMut::new(&mut byte)];
                rustix::net::recvmsg(&self.files, &mut parts, &mut control, RecvFlags::empty())?;
                let file = control.drain().find_map(|part| match part {
                    RecvAncillaryMessage::ScmRights(mut files) => files.next(),
                    _ => None,
                });
                let mut buffer = mapped(&file.ok_or(none)?)?;
                let mut decoder = StreamDecoder::new();
                Ok(decoder.decode(&mut buffer)?.ok_or("no batch in the file")?)
            }
        }
    }
}

/// A memory file as a buffer, without a copy.
fn mapped(file: &OwnedFd) -> Result<Buffer> {
    struct Mapped(*mut std::ffi::c_void, usize);
    // SAFETY: the addresses are the mapping's own, which any thread may unmap.
    unsafe impl Send for Mapped {}
    // SAFETY: a shared reference does nothing.
    unsafe impl Sync for Mapped {}
    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: mapped below, and used by the buffer only, which has gone.
            let _ = unsafe { rustix::mm::munmap(self.0, self.1) };
        }
    }
    let bytes = rustix::fs::fstat(file)?.st_size as usize;
    // SAFETY: a new mapping; the sender, which is this program, has written the file and closed it.
    unsafe {
        let flags = MapFlags::SHARED;
        let at = rustix::mm::mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, flags, file, 0)?;
        let start = NonNull::new(at.cast()).ok_or("an address")?;
        Ok(Buffer::from_custom_allocation(
            start,
            bytes,
            Arc::new(Mapped(at, bytes)),
        ))
    }
}

fn here(lines: bool) -> Result<()> {
    let folder = std::env::temp_dir().join(format!("hand_over-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let measured = measure(&folder);
    std::fs::remove_dir_all(&folder)?;
    match lines {
        true => print_lines(&measured?),
        false => print_table(&measured?),
    }
    Ok(())
}

/// What was measured of batches of one size, for each of [`WAYS`].
struct Measured {
    /// Nanoseconds from `send` until a batch is readable, and until all of it has been read, one by one.
    one: Vec<Vec<[u64; 2]>>,
    /// GB/s of batches in a row, handed over and read.
    rates: Vec<[f64; 2]>,
    /// Nanoseconds until a batch of the first way is readable, in ascending order, while no other way has the caches and nobody reads.
    alone: Vec<u64>,
}

fn print_table(measured: &[Measured]) {
    println!(
        "GB/s counts the bytes of batches in a row, of which 'read' reads every byte and 'handed over' none."
    );
    for ((bytes, rounds, row), measured) in CASES.iter().zip(measured) {
        println!("\n{} KiB, {rounds} one by one, {row} in a row", bytes >> 10);
        println!(
            "{:34} {:>22} {:>12} {:>12}",
            "", "readable us (best)", "read us", "GB/s: handed over, read"
        );
        let micros = |nanos: u64| nanos as f64 / 1e3;
        let ways = WAYS.iter().zip(&measured.one).zip(&measured.rates);
        for ((way, took), [over, read]) in ways {
            let [readable, whole] = [0, 1].map(|i| {
                let mut of: Vec<_> = took.iter().map(|took| took[i]).collect();
                of.sort_unstable();
                (micros(of[of.len() / 2]), micros(of[0]))
            });
            println!(
                "{way:34} {:>13.1} {:>8} {:>12.1} {over:>12.2} {read:>11.2}",
                readable.0,
                format!("({:.1})", readable.1),
                whole.0
            );
        }
        let alone = &measured.alone;
        println!(
            "{:34} {:>13.1} {:>8}",
            "this crate, trusting, by itself",
            micros(alone[alone.len() / 2]),
            format!("({:.1})", micros(alone[0]))
        );
    }
}

/// Row H1: what, the value, its limit, and of times the quartiles and the best.
fn print_lines(measured: &[Measured]) {
    let alone = |case: usize, part: usize| {
        let alone = &measured[case].alone;
        alone[(alone.len() - 1) * part / 4] as f64 / 1e3
    };
    for (case, (bytes, ..)) in CASES.iter().enumerate() {
        let [best, first, median, third] = [0, 1, 2, 3].map(|part| alone(case, part));
        println!(
            "H1\t{} KiB, us until readable\t{median}\t60\t{first}\t{third}\t{best}",
            bytes >> 10
        );
    }
    let (small, large) = (1, CASES.len() - 1);
    let same = alone(large, 2) / alone(small, 2);
    println!("H1\t64 MiB / 1 MiB, time until readable\t{same}\t2");
    for (way, limit) in [(3, 0.05), (4, f64::INFINITY)] {
        for (case, limit) in [(large, limit), (0, f64::INFINITY)] {
            let rates = &measured[case].rates;
            let (ratio, what) = (rates[way][0] / rates[0][0], WAYS[way]);
            let kib = CASES[case].0 >> 10;
            println!("H1\t{kib} KiB in a row, time / {what}\t{ratio}\t{limit}");
        }
    }
}

fn measure(folder: &Path) -> Result<Vec<Measured>> {
    let options = PublisherOptions {
        leases: 8,
        ..Default::default()
    };
    let bind = |i: usize| Publisher::bind_with(folder.join(i.to_string()), options.clone());
    let listeners = ["control", "socket"].map(|name| UnixListener::bind(folder.join(name)));
    let [control, socket] = listeners;
    let (files, theirs) = socket_pair()?;
    let mut child = Command::new(std::env::current_exe()?)
        .arg(folder)
        .stdin(theirs)
        .spawn()?;
    let mut control = control?.accept()?.0;
    let socket = socket?.accept()?.0;
    let mut measured = Vec::new();
    for (case, (bytes, rounds, row)) in CASES.into_iter().enumerate() {
        // A stream has one schema and one publisher; new ones for each size.
        let publishers = (0..3)
            .map(|i| bind(case * 3 + i))
            .collect::<Result<Vec<_>, _>>()?;
        let mut sender = Sender {
            publishers,
            socket: socket.try_clone()?,
            files: files.try_clone()?,
        };
        control.write_all(&[1])?;
        for publisher in &sender.publishers {
            publisher.wait_for_subscribers(1, Duration::from_secs(60))?;
        }
        let batch = batch(bytes)?;
        let shared = shared_cpu().upload(&batch)?;
        let expected = sum(&batch);
        let mut one = vec![Vec::new(); WAYS.len()];
        for _ in 0..rounds {
            for (way, took) in one.iter_mut().enumerate() {
                let start = now();
                sender.send(way, &batch, &shared)?;
                let [readable, read, sum] = reply(&mut control)?;
                assert_eq!(sum as i64, expected, "{}", WAYS[way]);
                took.push([readable - start, read - start]);
            }
        }
        // Nothing else has the caches meanwhile, and nobody reads.
        let mut alone = Vec::new();
        for _ in 0..rounds.max(100) {
            let start = now();
            sender.send(0, &batch, &shared)?;
            alone.push(reply(&mut control)?[0] - start);
        }
        alone.sort_unstable();
        let mut rates = vec![[0.0; 2]; WAYS.len()];
        for reads in [0, 1] {
            for (way, rates) in rates.iter_mut().enumerate() {
                let start = now();
                for _ in 0..row {
                    sender.send(way, &batch, &shared)?;
                }
                let [end, ..] = reply(&mut control)?;
                rates[reads] = (bytes * row) as f64 / (end - start) as f64;
            }
        }
        measured.push(Measured { one, rates, alone });
    }
    drop(control);
    let status = child.wait()?;
    if !status.success() {
        return Err(format!("the other process: {status}").into());
    }
    Ok(measured)
}

fn reply(control: &mut UnixStream) -> Result<[u64; 3]> {
    let mut bytes = [0; 24];
    control.read_exact(&mut bytes)?;
    let number = |i: usize| Result::<u64>::Ok(u64::from_ne_bytes(bytes[i * 8..][..8].try_into()?));
    Ok([number(0)?, number(1)?, number(2)?])
}

/// Does what `measure` expects, in the same order.
fn there(folder: &Path) -> Result<()> {
    let mut control = UnixStream::connect(folder.join("control"))?;
    let socket = UnixStream::connect(folder.join("socket"))?;
    let files = std::io::stdin().as_fd().try_clone_to_owned()?;
    for (case, (_, rounds, row)) in CASES.into_iter().enumerate() {
        control.read_exact(&mut [0])?;
        let subscribers = (0..3).map(|i| {
            // SAFETY: the publisher is this program.
            let trusting = || unsafe { SubscriberOptions::trusting() };
            let options = if i == 1 {
                SubscriberOptions::default()
            } else {
                trusting()
            };
            Subscriber::connect_with(folder.join((case * 3 + i).to_string()), options)
        });
        let mut receiver = Receiver {
            subscribers: subscribers.collect::<Result<_, _>>()?,
            socket: socket.try_clone()?,
            files: files.try_clone()?,
        };
        let mut answer =
            |numbers: [u64; 3]| control.write_all(&numbers.map(u64::to_ne_bytes).concat());
        for _ in 0..rounds {
            for way in 0..WAYS.len() {
                let batch = receiver.receive(way)?;
                let readable = now();
                let sum = sum(&batch);
                let read = now();
                drop(batch);
                answer([readable, read, sum as u64])?;
            }
        }
        for _ in 0..rounds.max(100) {
            let batch = receiver.receive(0)?;
            let readable = now();
            drop(batch);
            answer([readable, 0, 0])?;
        }
        for reads in [false, true] {
            for way in 0..WAYS.len() {
                let mut sums = 0i64;
                for _ in 0..row {
                    let batch = receiver.receive(way)?;
                    sums = sums.wrapping_add(if reads { sum(&batch) } else { 0 });
                }
                answer([now(), 0, sums as u64])?;
            }
        }
    }
    Ok(())
}
