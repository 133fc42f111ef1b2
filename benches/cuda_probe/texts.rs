//! Text columns that come from elsewhere: their lengths hide on the device.

use std::time::Instant;

use arrow_device::{DeviceRecordBatch, Devices, ImportOptions, SyncPolicy};

use crate::Probe;
use crate::data;
use crate::raw::Span;
use crate::stats::{LEGEND, Res, compare, since, size, way};
use crate::transfers::addresses;

pub(crate) fn run(probe: &Probe) -> Res<()> {
    let batch = data::texts(probe.bytes(300, 10), 1000)?;
    let up = probe.device.upload(&batch)?;
    up.wait()?;
    let devices = Devices::new();
    devices.add(probe.device.clone())?;
    let options = ImportOptions {
        devices: Some(devices),
        ..Default::default()
    };
    // Its own export is not timed.
    let import = || -> Res<(Instant, DeviceRecordBatch)> {
        let (array, schema) = up.export(SyncPolicy::Event)?;
        let start = Instant::now();
        // SAFETY: both structs come from one export of this crate.
        Ok((start, unsafe {
            DeviceRecordBatch::import(array, &schema, &options)
        }?))
    };
    let before = probe.device.stats();
    if import()?.1.to_host()? != batch {
        return Err("what came down is not what went up".into());
    }
    let did = probe.device.stats().since(&before);
    let (sent, blocks) = (did.bytes_to_host as usize, addresses(&up));
    println!("{LEGEND}");
    println!(
        "{} text columns x {} rows, {} to the host",
        batch.num_columns(),
        batch.num_rows(),
        size(sent)
    );
    println!(
        "export, import, download: {} host waits, {} copies, {} allocations on the device\n",
        did.host_waits, did.copies, did.allocations
    );
    println!(
        "The other ways read the last offset of each column (4 bytes, into ordinary memory), then every buffer into fresh"
    );
    println!("ordinary memory, with one wait.\n");

    // Offsets and values of a column follow each other.
    let ends = blocks
        .iter()
        .step_by(2)
        .map(|(start, _)| start + 4 * batch.num_rows() as u64);
    let ends: Vec<u64> = ends.collect();
    let mut lengths = vec![0u8; 4 * ends.len()];
    let each_length = |lengths: &mut [u8], wait_for_each: bool| -> Res<_> {
        let start = Instant::now();
        for (to, from) in lengths.chunks_mut(4).zip(&ends) {
            // SAFETY: the batch and the lengths live until the wait.
            unsafe { probe.stream.copy(Span::of_mut(to).address(), *from, 4) }?;
            if wait_for_each {
                probe.stream.finish(start)?;
            }
        }
        probe.stream.finish(start)?;
        probe.read_each(&blocks, start)
    };
    let mut others = lengths.clone();
    let ways = vec![
        way("this crate", || {
            let (start, again) = import()?;
            let imported = since(start);
            drop(again.to_host()?);
            Ok([imported, since(start)])
        }),
        way("a wait for each length", || each_length(&mut lengths, true)),
        way("one wait for all lengths", || {
            each_length(&mut others, false)
        }),
    ];
    let took = compare(
        probe,
        "D3 import and download (submit: the import)",
        sent,
        1.0,
        ways,
    )?;
    probe.row(
        "D3",
        "300 text columns imported and downloaded: host waits",
        did.host_waits as f64,
        "<=",
        2.0,
    );
    let what =
        "300 text columns imported and downloaded / a wait for each length, a copy for each buffer";
    probe.row("D3", what, took.over(&[1]), "<=", 0.2);
    // Buffers are padded; the lengths are not.
    let read = lengths
        .chunks(4)
        .map(|length| u32::from_ne_bytes([length[0], length[1], length[2], length[3]]));
    let mut values = blocks.iter().skip(1).step_by(2).zip(read);
    if lengths != others
        || values.any(|((_, bytes), length)| length == 0 || length as usize > *bytes)
    {
        return Err("the lengths that were read are not the columns'".into());
    }
    Ok(())
}
