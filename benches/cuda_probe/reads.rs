//! Small reads, as a batch with many text columns needs them: the lengths that hide in its offsets.

use std::time::Instant;

use crate::Probe;
use crate::raw::{Copies, Event, Locked, OnDevice};
use crate::stats::{Res, Table, measure, since, time};

/// Bytes of one read.
const EACH: usize = 8;
/// Bytes between what is read.
const APART: usize = 4096;

pub(crate) fn run(probe: &Probe) -> Res<()> {
    let count = probe.bytes(300, 10);
    println!(
        "{count} reads of {EACH} bytes, {APART} bytes apart on the device, until the host has all of them.\n"
    );
    let device = OnDevice::new(count * APART)?;
    // SAFETY: the block has as many bytes, and lives until the wait that follows.
    unsafe { probe.stream.fill(device.address(), 1, count * APART) }?;
    probe.stream.wait()?;
    let mut locked = Locked::new(count * EACH)?;
    let mut ordinary = vec![0u8; count * EACH];
    let event = Event::new()?;
    let list = |host: u64| {
        let mut copies = Copies::default();
        for i in 0..count {
            let at = device.address() + (i * APART) as u64;
            copies.add(host + (i * EACH) as u64, at, EACH);
        }
        copies
    };
    let into_locked = list(locked.address());
    let into_ordinary = list(ordinary.as_mut_ptr().expose_provenance() as u64);

    let mut table = Table::new(&["way", "total", "p10", "p90", "best", "per read", "rounds"]);
    let mut add = |name: &str, run: &mut dyn FnMut() -> Res<()>| -> Res<()> {
        let [sample] = measure(probe.rounds(30, 0.3), || {
            let start = Instant::now();
            run()?;
            Ok([since(start)])
        })?;
        table.row([
            name.to_owned(),
            time(sample.median()),
            time(sample.low()),
            time(sample.high()),
            time(sample.best()),
            time(sample.median() / count as f64),
            sample.len().to_string(),
        ]);
        Ok(())
    };
    let end = |event: &Event| {
        event.record(&probe.stream)?;
        event.wait()
    };
    for (memory, copies) in [("page-locked", &into_locked), ("ordinary", &into_ordinary)] {
        add(&format!("one by one, a wait each, {memory}"), &mut || {
            for (dst, src, bytes) in copies.iter() {
                // SAFETY: both blocks live until the wait.
                unsafe { probe.stream.copy(dst, src, bytes) }?;
                end(&event)?;
            }
            Ok(())
        })?;
        add(&format!("one list, one wait, {memory}"), &mut || {
            for (dst, src, bytes) in copies.iter() {
                // SAFETY: both blocks live until the wait.
                unsafe { probe.stream.copy(dst, src, bytes) }?;
            }
            end(&event)
        })?;
    }
    match &probe.batch {
        Some(batch) => add(&format!("{}, page-locked", batch.name()), &mut || {
            // SAFETY: both blocks live until the wait.
            unsafe { batch.copy(&into_locked, &probe.stream) }?;
            end(&event)
        })?,
        None => println!("The driver has no call for lists of copies."),
    }
    table.print();
    let read = locked.bytes_mut().iter().chain(&ordinary);
    if read.clone().any(|byte| *byte != 1) {
        return Err("what was read is not what is there".into());
    }
    Ok(())
}
