//! Text columns that come from elsewhere: their lengths hide on the device.

use std::time::Instant;

use arrow_device::{DeviceRecordBatch, Devices, ImportOptions, SyncPolicy};

use crate::Probe;
use crate::data;
use crate::links::copy;
use crate::ours::addresses;
use crate::raw::{Copies, Event, Locked, OnDevice};
use crate::rows;
use crate::stats::{LEGEND, Res, compare, side, since, size};

pub(crate) fn texts(probe: &Probe) -> Res<()> {
    let columns = probe.bytes(300, 10);
    let batch = data::texts(columns, 1000)?;
    let up = probe.device.upload(&batch)?;
    up.wait()?;
    let devices = Devices::new();
    devices.add(probe.device.clone())?;
    let options = ImportOptions::default().with_devices(devices);
    let import = || -> Res<DeviceRecordBatch> {
        let (array, schema) = up.export(SyncPolicy::Event)?;
        // SAFETY: both structs come from one export of this crate.
        Ok(unsafe { DeviceRecordBatch::import_with(array, &schema, &options) }?)
    };
    let before = probe.device.stats();
    if import()?.to_host()? != batch {
        return Err("what came down is not what went up".into());
    }
    let did = probe.device.stats().since(&before);
    rows::count(rows::WAITS, usize::try_from(did.host_waits)?);
    let sent = did.bytes_to_host as usize;
    let blocks = addresses(&up)?;
    println!("{LEGEND}\n");
    println!(
        "{columns} text columns x {} rows, {} buffers, {} to the host",
        batch.num_rows(),
        blocks.len(),
        size(sent)
    );
    println!(
        "export, import, download: {} host waits, {} copies, {} allocations on the device\n",
        did.host_waits, did.copies, did.allocations
    );
    println!(
        "this crate: export is not timed; submit is the import. The other ways read the last offset of each"
    );
    println!(
        "column (4 bytes, into ordinary memory), then every buffer into fresh ordinary memory, with one wait.\n"
    );

    // Offsets and values of a column follow each other.
    let ends: Vec<u64> = blocks
        .chunks_exact(2)
        .map(|pair| pair[0].0 + 4 * batch.num_rows() as u64)
        .collect();
    let (stream, event) = (&probe.stream, Event::new()?);
    let mut lengths = vec![0u32; ends.len()];
    let to = lengths.as_mut_ptr().expose_provenance() as u64;
    let mut reads = Copies::default();
    for (i, end) in ends.iter().enumerate() {
        reads.add(to + 4 * i as u64, *end, 4);
    }
    let rest = |start: Instant| -> Res<[f64; 2]> {
        let mut here = Vec::with_capacity(blocks.len());
        for (address, bytes) in &blocks {
            let mut memory = Vec::<u8>::with_capacity(*bytes);
            let to = memory.as_mut_ptr().expose_provenance() as u64;
            here.push(memory);
            // SAFETY: the block is the batch's, and the memory is kept until the wait.
            unsafe { stream.copy(to, *address, *bytes) }?;
        }
        let submitted = since(start);
        event.record(stream)?;
        event.wait()?;
        Ok([submitted, since(start)])
    };
    let (there, locked) = (OnDevice::new(sent)?, Locked::new(sent)?);
    compare(
        "D3 import and download",
        sent,
        probe.rounds(30, 1.0),
        vec![
            side("this crate", || {
                let (array, schema) = up.export(SyncPolicy::Event)?;
                let start = Instant::now();
                // SAFETY: both structs come from one export of this crate.
                let again = unsafe { DeviceRecordBatch::import_with(array, &schema, &options) }?;
                let imported = since(start);
                let here = again.to_host()?;
                let seconds = [imported, since(start)];
                drop((here, again));
                Ok(seconds)
            }),
            side(rows::EACH_LENGTH, || {
                let start = Instant::now();
                for (dst, src, bytes) in reads.iter() {
                    // SAFETY: the batch and `lengths` live until the wait.
                    unsafe { stream.copy(dst, src, bytes) }?;
                    stream.wait()?;
                }
                rest(start)
            }),
            side("one wait for all lengths", || {
                let start = Instant::now();
                for (dst, src, bytes) in reads.iter() {
                    // SAFETY: the batch and `lengths` live until the wait.
                    unsafe { stream.copy(dst, src, bytes) }?;
                }
                stream.wait()?;
                rest(start)
            }),
            // SAFETY: both blocks have `sent` bytes, and one copy at a time uses them; `copy` waits
            // for it.
            side(format!("raw({})", size(sent)), || unsafe {
                copy(stream, &event, locked.address(), there.address(), sent)
            }),
        ],
    )?;
    let same = lengths.iter().zip(blocks.chunks_exact(2));
    // Buffers are padded; the lengths are not.
    if same
        .clone()
        .any(|(length, pair)| *length as usize > pair[1].1)
    {
        return Err("the lengths that were read are not the columns'".into());
    }
    Ok(())
}
