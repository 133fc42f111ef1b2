//! Raw copies between host and device: up, down, both at once.

use std::hint::black_box;
use std::time::Instant;

use crate::Probe;
use crate::data::fill;
use crate::raw::{Event, Locked, OnDevice, Stream};
use crate::stats::{Res, Sample, Table, measure, rate, since, size, time};

/// The seconds until a copy was submitted, and until its event had completed.
///
/// # Safety
/// Both ranges are valid, and nothing else uses them.
pub(crate) unsafe fn copy(
    stream: &Stream,
    event: &Event,
    dst: u64,
    src: u64,
    bytes: usize,
) -> Res<[f64; 2]> {
    let start = Instant::now();
    // SAFETY: the caller guarantees that both ranges are valid and used by nothing else (see `#
    // Safety`); the copy is waited for here.
    unsafe { stream.copy(dst, src, bytes) }?;
    let submitted = since(start);
    event.record(stream)?;
    event.wait()?;
    Ok([submitted, since(start)])
}

pub(crate) fn run(probe: &Probe) -> Res<()> {
    let most = probe.bytes(1 << 30, 1 << 20);
    let mut up = Locked::new(most)?;
    let mut down = Locked::new(most)?;
    fill(up.bytes_mut(), 1);
    down.bytes_mut().fill(0xaa);
    let (there, back) = (OnDevice::new(most)?, OnDevice::new(most)?);
    // SAFETY: the block has `most` bytes, and lives until the wait that follows.
    unsafe { probe.stream.fill(back.address(), 0x55, most) }?;
    probe.stream.wait()?;
    let event = Event::new()?;
    let (host, other) = (up.address(), down.address());
    println!("Page-locked memory (cuMemHostAlloc), 1 copy a time on one stream.");
    println!("submit: the copy's call alone. total: copy, event record, wait for the event.\n");

    print(probe, "host to device", most, 1, |bytes| {
        // SAFETY: all blocks have `most` bytes, and are used by one copy at a time.
        unsafe { copy(&probe.stream, &event, there.address(), host, bytes) }
    })?;
    print(probe, "device to host", most, 1, |bytes| {
        // SAFETY: all blocks have `most` bytes, and are used by one copy at a time.
        unsafe { copy(&probe.stream, &event, other, back.address(), bytes) }
    })?;
    let second = Event::new()?;
    let title = "both at once, on two streams; the rate counts both";
    print(probe, title, most, 2, |bytes| {
        let start = Instant::now();
        // SAFETY: all blocks have `most` bytes, the two copies share nothing, and both are waited
        // for.
        unsafe {
            probe.stream.copy(there.address(), host, bytes)?;
            probe.second.copy(other, back.address(), bytes)?;
        }
        let submitted = since(start);
        event.record(&probe.stream)?;
        second.record(&probe.second)?;
        event.wait()?;
        second.wait()?;
        Ok([submitted, since(start)])
    })?;

    // What went up must come down.
    // SAFETY: all blocks have `most` bytes, and one copy at a time uses them.
    unsafe { copy(&probe.stream, &event, there.address(), host, most)? };
    // SAFETY: all blocks have `most` bytes, and one copy at a time uses them.
    unsafe { copy(&probe.stream, &event, other, there.address(), most)? };
    if up.bytes_mut() != down.bytes_mut() {
        return Err("what came down is not what went up".into());
    }
    drop((up, down));

    let most = probe.bytes(256 << 20, 1 << 18);
    let mut ordinary = vec![0u8; most];
    fill(&mut ordinary, 2);
    let host = ordinary.as_mut_ptr().expose_provenance() as u64;
    println!("Ordinary memory, resident: the driver stages.\n");
    print(probe, "host to device", most, 1, |bytes| {
        // SAFETY: all blocks have `most` bytes, and one copy at a time uses them.
        unsafe { copy(&probe.stream, &event, there.address(), host, bytes) }
    })?;
    print(probe, "device to host", most, 1, |bytes| {
        // SAFETY: all blocks have `most` bytes, and one copy at a time uses them.
        unsafe { copy(&probe.stream, &event, host, back.address(), bytes) }
    })?;
    black_box(&ordinary);
    Ok(())
}

fn print(
    probe: &Probe,
    title: &str,
    most: usize,
    directions: usize,
    mut run: impl FnMut(usize) -> Res<[f64; 2]>,
) -> Res<()> {
    println!("{title}");
    let mut table = Table::new(&[
        "bytes", "submit", "p10", "p90", "total", "p10", "p90", "best", "rate", "rounds",
    ]);
    let mut bytes = 64;
    while bytes <= most {
        let rounds = probe.rounds(30, 0.1);
        let [submit, total] = measure(rounds, || run(bytes))?;
        table.row(row(bytes, directions, &submit, &total));
        bytes *= 4;
    }
    // 64 B times powers of four is never 1 GiB exactly, which must be there.
    if bytes / 4 < most {
        let [submit, total] = measure(probe.rounds(30, 0.1), || run(most))?;
        table.row(row(most, directions, &submit, &total));
    }
    table.print();
    Ok(())
}

fn row(bytes: usize, directions: usize, submit: &Sample, total: &Sample) -> [String; 10] {
    [
        size(bytes),
        time(submit.median()),
        time(submit.low()),
        time(submit.high()),
        time(total.median()),
        time(total.low()),
        time(total.high()),
        time(total.best()),
        rate(bytes * directions, total.median()),
        total.len().to_string(),
    ]
}
