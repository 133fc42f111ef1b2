//! Large and small batches: this crate, raw copies, by hand, and cudarc.

use std::time::Instant;

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_device::{DeviceRecordBatch, Devices};

use crate::Probe;
use crate::data::{buffers, fill, mixed, ordinary, over, pack};
use crate::peer::Peer;
use crate::raw::{Copies, Locked, OnDevice, Pool, Span, address};
use crate::stats::{Compared, LEGEND, Res, Seconds, compare, since, size, time, way, whole};

/// The seconds until the call returned, and until the batch was there; the free is not timed.
pub(crate) fn upload(probe: &Probe, batch: &RecordBatch) -> Res<Seconds> {
    let start = Instant::now();
    let there = probe.device.upload(batch)?;
    let submitted = since(start);
    there.wait()?;
    let seconds = [submitted, since(start)];
    drop(there);
    probe.stream.finish(start)?;
    Ok(seconds)
}

/// The call waits itself.
pub(crate) fn download(batch: &DeviceRecordBatch) -> Res<Seconds> {
    let start = Instant::now();
    let here = batch.to_host()?;
    let seconds = [f64::NAN, since(start)];
    drop(here);
    Ok(seconds)
}

/// Prints what the first run after `trim` takes, what a later one does, and that nothing is lost. Answers the bytes that went to
/// the device.
fn describe(probe: &Probe, what: &str, batch: &RecordBatch) -> Res<usize> {
    let device = &probe.device;
    println!("{what}");
    device.trim();
    device.synchronize()?;
    let start = Instant::now();
    let there = device.upload(batch)?;
    there.wait()?;
    let (up, start) = (since(start), Instant::now());
    let here = there.to_host()?;
    let down = since(start);
    if here != *batch {
        return Err("what came down is not what went up".into());
    }
    drop((here, there));
    let before = device.stats();
    let there = device.upload(batch)?;
    there.wait()?;
    let went = device.stats().since(&before);
    drop(there.to_host()?);
    let came = device.stats().since(&before);
    println!(
        "first upload after trim(): {}; first download: {}; the same values came back",
        time(up),
        time(down)
    );
    println!(
        "a later upload: {} allocations, {} copies, {}, {} copied by the host, {} host buffers made",
        went.allocations,
        went.copies,
        size(went.bytes_to_device as usize),
        size(went.host_copied_bytes as usize),
        went.host_allocations
    );
    println!(
        "a later download: {} copies, {}, {} host waits, {} host buffers made\n",
        came.copies - went.copies,
        size(came.bytes_to_host as usize),
        came.host_waits - went.host_waits,
        came.host_allocations - went.host_allocations
    );
    Ok(went.bytes_to_device as usize)
}

/// One copy by some threads, each its own part.
fn memcpy(threads: usize, to: &mut [u8], from: &[u8]) {
    let part = from.len().div_ceil(threads).next_multiple_of(4096);
    std::thread::scope(|scope| {
        for (to, from) in to.chunks_mut(part).zip(from.chunks(part)) {
            scope.spawn(move || to.copy_from_slice(from));
        }
    });
}

pub(crate) fn large(probe: &Probe) -> Res<()> {
    let each = probe.bytes(64 << 20, 64 << 10);
    let all = 8 * each;
    println!("{LEGEND}");
    let peer = Peer::new(probe.ordinal)?;
    let (there, mut block) = (OnDevice::new(all)?, peer.block(all)?);

    let mut host = probe.device.host_buffer(all)?;
    fill(&mut host, 6);
    let locked = Buffer::from(host);
    let batch = over(&locked, 8)?;
    describe(probe, "8 columns of 64 MiB in page-locked memory", &batch)?;
    let ways = vec![
        way("this crate", || upload(probe, &batch)),
        way("raw", || probe.copy(there.span(), Span::of(&locked))),
        way("cudarc", || peer.up(&locked, &mut block)),
    ];
    let took = compare(probe, "U1 upload from page-locked memory", all, 1.0, ways)?;
    probe.row(
        "U1",
        "8 x 64 MiB from page-locked memory / one raw copy",
        took.over(&[1]),
        "<=",
        1.05,
    );

    let memory = ordinary(all, 9);
    let batch = over(&memory, 8)?;
    describe(probe, "8 columns of 64 MiB in ordinary memory", &batch)?;
    // Its pages are there.
    let mut other = Locked::new(all)?;
    // As many as this crate packs with.
    let cores = std::thread::available_parallelism()?.get();
    let threads = (cores / 2).clamp(1, 8);
    let ways = vec![
        way("this crate", || upload(probe, &batch)),
        way("raw", || probe.copy(there.span(), Span::of(&locked))),
        whole(format!("memcpy, T threads: {threads}"), || {
            memcpy(threads, other.bytes_mut(), &memory);
            Ok(())
        }),
        way("the driver, from ordinary", || {
            probe.copy(there.span(), Span::of(&memory))
        }),
        way("cudarc, from ordinary", || peer.up(&memory, &mut block)),
    ];
    let title =
        "U2, U3 upload from ordinary memory (memcpy: by the host alone, into page-locked memory)";
    let took = compare(probe, title, all, 3.0, ways)?;
    let what = "8 x 64 MiB from ordinary memory / slower of one raw copy and memcpy by T threads";
    probe.row("U2", what, took.over(&[1, 2]), "<=", 1.15);
    let what = "8 x 64 MiB from ordinary memory / the driver's own copy from it";
    probe.row("U3", what, took.over(&[3]), "<=", 0.5);

    let up = probe.device.upload(&batch)?;
    up.wait()?;
    let mut sink = peer.locked(all)?;
    let ways = vec![
        way("this crate", || download(&up)),
        way("raw", || probe.copy(other.span(), there.span())),
        way("cudarc", || peer.down(&block, &mut sink)),
    ];
    let title = "D1 download of one batch, into page-locked buffers, dropped after each run";
    let took = compare(probe, title, all, 2.0, ways)?;
    let what = "512 MiB down in one batch, into page-locked buffers / one raw copy";
    probe.row("D1", what, took.over(&[1]), "<=", 1.05);
    drop((sink, block));

    let (cpu, from) = (Devices::cpu(), addresses(&up));
    let blocks = from.iter().map(|(_, bytes)| peer.block(*bytes));
    let blocks = blocks.collect::<Res<Vec<_>>>()?;
    let ways = vec![
        way("this crate", || {
            let start = Instant::now();
            let here = up.to_device(&cpu)?;
            here.wait()?;
            Ok([f64::NAN, since(start)])
        }),
        way("loop", || probe.read_each(&from, Instant::now())),
        way("cudarc, a copy for each", || peer.down_each(&blocks, Ok)),
    ];
    let title = "D2 download into fresh ordinary memory (this crate: to the CPU device)";
    let took = compare(probe, title, all, 2.0, ways)?;
    let what = "512 MiB down, into the CPU device's ordinary memory / a copy into fresh memory for each buffer";
    probe.row("D2", what, took.over(&[1]), "<=", 0.6);
    drop((up, blocks));

    let ups = (0..8).map(|i| {
        let part = over(&memory.slice_with_length(i * each, each), 1)?;
        Ok(probe.device.upload(&part)?)
    });
    let ups = ups.collect::<Res<Vec<_>>>()?;
    probe.device.synchronize()?;
    let ways = vec![
        whole("this crate", || {
            ups.iter().try_for_each(|up| download(up).map(drop))
        }),
        way("raw", || probe.copy(other.span(), there.span())),
    ];
    let title = "D1 download of 8 batches of one column, into page-locked buffers, each dropped before the next";
    let took = compare(probe, title, all, 1.0, ways)?;
    probe.row(
        "D1",
        "the same in 8 batches, one after the other",
        took.over(&[1]),
        "<=",
        1.05,
    );
    Ok(())
}

pub(crate) fn small(probe: &Probe) -> Res<()> {
    println!("{LEGEND}");
    println!(
        "Columns in turn: Int64 with nulls, Float64, text with nulls, Int32 with nulls; ordinary memory."
    );
    println!(
        "raw: as many bytes as the crate sent, 1 copy. packed by hand: from the batch; its buffers are listed and copied"
    );
    println!(
        "into page-locked memory that is there, 1 copy. loop: a block from a warm pool and a copy from ordinary memory for"
    );
    println!("each buffer, 1 wait. Frees are not timed, on any side.\n");
    let many = probe.bytes(1000, 20);
    for (id, columns, rows) in [
        ("U4", many, 10),
        ("U5", many, probe.bytes(1000, 100)),
        ("U6", 1, 1),
    ] {
        let batch = mixed(columns, rows)?;
        let sent = describe(
            probe,
            &format!("{id}: {columns} columns x {rows} rows"),
            &batch,
        )?;
        let took = up_small(probe, id, &batch, sent)?;
        match id {
            "U4" => {
                let what = "1,000 columns x 10 rows / packed by hand and one raw copy";
                probe.row(id, what, took.over(&[2]), "<=", 0.7);
            }
            "U5" => {
                let what = "1,000 columns x 1,000 rows / a block and a copy for each buffer";
                probe.row(id, what, took.over(&[3]), "<=", 0.2);
                let what = "1,000 columns x 1,000 rows / the driver's list of page-locked pieces";
                if probe.lists.is_some() {
                    probe.row(id, what, took.over(&[4]), "<=", 0.8);
                }
            }
            _ => probe.row(
                id,
                "1 column x 1 row / one raw copy",
                took.over(&[1]),
                "<=",
                3.0,
            ),
        }
        let up = probe.device.upload(&batch)?;
        up.wait()?;
        let blocks = addresses(&up);
        let ways = vec![
            way("this crate", || download(&up)),
            way("loop, into fresh memory", || {
                probe.read_each(&blocks, Instant::now())
            }),
        ];
        compare(probe, &format!("{id} download"), sent, 0.5, ways)?;
    }
    Ok(())
}

/// A batch of ordinary memory up, and what else there is to do it.
fn up_small(probe: &Probe, id: &str, batch: &RecordBatch, sent: usize) -> Res<Compared> {
    let (stream, all) = (&probe.stream, buffers(batch));
    let padded = |bytes: usize| bytes.next_multiple_of(64);
    let most: usize = all.iter().map(|buffer| padded(buffer.len())).sum();
    let pool = Pool::new(probe.ordinal)?;
    let (there, source) = (OnDevice::new(most.max(sent))?, Locked::new(most.max(sent))?);
    let mut packed = Locked::new(most)?;
    let sizes = || all.iter().map(|buffer| buffer.len());
    let mut pieces = Copies::default();
    sizes().fold(0, |at, bytes| {
        pieces.add(there.span().skip(at), source.span().skip(at).first(bytes));
        at + padded(bytes)
    });
    let mut ways = vec![
        way("this crate", || upload(probe, batch)),
        way("raw", || {
            probe.copy(there.span(), source.span().first(sent))
        }),
        way("packed by hand", || {
            let start = Instant::now();
            pack(packed.bytes_mut(), buffers(batch));
            probe.copy_since(start, there.span(), packed.span())
        }),
        way("loop", || {
            // SAFETY: the block has as many bytes, and the buffer lives until the wait.
            pool.with_blocks(stream, sizes(), |i, block| unsafe {
                stream.copy(block, address(&all[i]), all[i].len())
            })
        }),
    ];
    if let Some(lists) = &probe.lists {
        ways.push(way("list of page-locked pieces", || {
            // SAFETY: the pieces lie in `source` and `there`, which live until the wait. The block stands for the allocation.
            pool.with_blocks(stream, [most].into_iter(), |_, _| unsafe {
                lists.copy(&pieces, stream)
            })
        }));
    }
    compare(probe, &format!("{id} upload"), sent, 1.0, ways)
}

/// Where the buffers of a batch are, and their bytes.
pub(crate) fn addresses(batch: &DeviceRecordBatch) -> Vec<(u64, usize)> {
    let buffers = batch
        .columns()
        .flat_map(|column| (0..column.num_buffers()).filter_map(move |i| column.buffer(i)));
    let buffers = buffers.filter(|buffer| !buffer.is_empty());
    buffers
        .map(|buffer| (buffer.address().address() as u64, buffer.len()))
        .collect()
}
