//! This crate's uploads and downloads beside plain driver calls that move as many bytes.

use std::time::Instant;

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_device::cuda::cudarc::driver::sys;
use arrow_device::{DeviceRecordBatch, Devices};

use crate::Probe;
use crate::data::{buffers, fill, mixed, ordinary, over, single};
use crate::host::copy_once;
use crate::links::copy;
use crate::peer::Peer;
use crate::raw::{Copies, Event, Locked, OnDevice, Pool, check};
use crate::rows;
use crate::stats::{LEGEND, Res, compare, side, since, size, time, total_only};

/// The seconds until the call returned, and until the batch was there.
fn upload(probe: &Probe, batch: &RecordBatch) -> Res<[f64; 2]> {
    let start = Instant::now();
    let there = probe.device.upload(batch)?;
    let submitted = since(start);
    there.wait()?;
    let seconds = [submitted, since(start)];
    drop(there);
    // The free must not count for what comes next.
    probe.stream.wait()?;
    Ok(seconds)
}

/// The call waits itself.
fn download(batch: &DeviceRecordBatch) -> Res<[f64; 2]> {
    let start = Instant::now();
    let here = batch.to_host()?;
    let seconds = since(start);
    drop(here);
    Ok(total_only(seconds))
}

/// Prints what the first run after `trim` takes, what a later one does, and that nothing is lost.
/// Answers the bytes that went to the device.
pub(crate) fn describe(probe: &Probe, batch: &RecordBatch) -> Res<usize> {
    let device = &probe.device;
    device.trim();
    device.synchronize()?;
    let start = Instant::now();
    let there = device.upload(batch)?;
    let submitted = since(start);
    there.wait()?;
    let up = since(start);
    let start = Instant::now();
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
    let before = device.stats();
    drop(there.to_host()?);
    let came = device.stats().since(&before);
    println!(
        "first upload after trim(): submit {}, total {}; first download: {}; the same values came back",
        time(submitted),
        time(up),
        time(down)
    );
    println!(
        "a later upload: {} allocations, {} copies, {}, {} copied by the host, {} host slabs made",
        went.allocations,
        went.copies,
        size(went.bytes_to_device as usize),
        size(went.host_copied_bytes as usize),
        went.host_allocations
    );
    println!(
        "a later download: {} copies, {}, {} host waits, {} host slabs made\n",
        came.copies,
        size(came.bytes_to_host as usize),
        came.host_waits,
        came.host_allocations
    );
    Ok(went.bytes_to_device as usize)
}

fn at(buffer: &Buffer) -> u64 {
    buffer.as_ptr().expose_provenance() as u64
}

pub(crate) fn large(probe: &Probe) -> Res<()> {
    let each = probe.bytes(64 << 20, 64 << 10);
    let all = 8 * each;
    println!("{LEGEND}\n");
    let mut slab = probe.device.host_slab(all)?;
    fill(&mut slab, 6);
    let locked = slab.into_buffer();
    let (there, event) = (OnDevice::new(all)?, Event::new()?);
    // SAFETY: both blocks have `all` bytes, and one copy at a time uses them; `copy` waits for it.
    let raw_up = || unsafe { copy(&probe.stream, &event, there.address(), at(&locked), all) };

    let peer = Peer::new(probe)?;
    let mut block = peer.block(all)?;

    let batch = over(&locked, 8)?;
    println!("8 columns of {} in page-locked memory", size(each));
    describe(probe, &batch)?;
    compare(
        "U1 upload from page-locked memory",
        all,
        probe.rounds(30, 1.0),
        vec![
            side("this crate", || upload(probe, &batch)),
            side("raw(n)", raw_up),
            side("cudarc", || peer.up(&locked, &mut block)),
        ],
    )?;

    let memory = ordinary(all, 9);
    let batch = over(&memory, 8)?;
    println!("8 columns of {} in ordinary memory", size(each));
    describe(probe, &batch)?;
    let other = Locked::new(all)?;
    // What the rows copy into: its pages exist.
    // SAFETY: both blocks have `all` bytes, and one copy at a time uses them.
    unsafe { copy(&probe.stream, &event, other.address(), there.address(), all) }?;
    // As many as this crate packs with.
    let threads = probe.device.packing_threads();
    // SAFETY: `other` has `all` bytes, which nothing else uses meanwhile.
    let memcpy = |threads: usize| unsafe { copy_once(threads, other.address(), &memory) };
    compare(
        "U2, U3 upload from ordinary memory (memcpy: by the host alone, into page-locked memory)",
        all,
        probe.rounds(10, 3.0),
        vec![
            side("this crate", || upload(probe, &batch)),
            side("raw(n)", raw_up),
            side("memcpy, 1 thread", || memcpy(1)),
            side(format!("{}: {threads}", rows::BY_THREADS), || {
                memcpy(threads)
            }),
            side("memcpy, 8 threads", || memcpy(8)),
            // SAFETY: `memory` and the device block have `all` bytes, and one copy at a time uses
            // them.
            side(rows::PAGEABLE, || unsafe {
                copy(&probe.stream, &event, there.address(), at(&memory), all)
            }),
            side("cudarc, from ordinary", || peer.up(&memory, &mut block)),
        ],
    )?;

    // SAFETY: both blocks have `all` bytes, and one copy at a time uses them.
    let raw_down = || unsafe { copy(&probe.stream, &event, other.address(), there.address(), all) };
    let mut sink = peer.locked(all)?;
    let up = probe.device.upload(&batch)?;
    up.wait()?;
    compare(
        "D1 download of one batch, into page-locked buffers, dropped after each run",
        all,
        probe.rounds(10, 2.0),
        vec![
            side("this crate", || download(&up)),
            side("raw(n)", raw_down),
            side("cudarc", || peer.down(&block, &mut sink)),
        ],
    )?;
    drop(sink);
    into_fresh(probe, &up, all, &peer)?;
    drop((up, block));
    let ups: Vec<_> = (0..8)
        .map(|i| -> Res<_> {
            let part = over(&memory.slice_with_length(i * each, each), 1)?;
            Ok(probe.device.upload(&part)?)
        })
        .collect::<Res<_>>()?;
    probe.device.synchronize()?;
    compare(
        "D1 download of 8 batches of one column, into page-locked buffers, each dropped before the next",
        all,
        probe.rounds(30, 1.0),
        vec![
            side("this crate", || {
                let mut sum = 0.0;
                for up in &ups {
                    let [_, total] = download(up)?;
                    sum += total;
                }
                Ok(total_only(sum))
            }),
            side("raw(n)", raw_down),
        ],
    )?;
    drop(ups);
    probe.stream.wait()
}

/// Downloads into memory that no pool keeps.
fn into_fresh(probe: &Probe, up: &DeviceRecordBatch, all: usize, peer: &Peer) -> Res<()> {
    let (cpu, event) = (Devices::cpu(), Event::new()?);
    let from = addresses(up)?;
    let blocks = from.iter().map(|(_, bytes)| peer.block(*bytes));
    let blocks = blocks.collect::<Res<Vec<_>>>()?;
    compare(
        "D2 download into fresh ordinary memory (this crate: to the CPU device)",
        all,
        probe.rounds(10, 2.0),
        vec![
            side("this crate", || {
                let start = Instant::now();
                let here = up.to_device(&cpu)?;
                here.wait()?;
                let seconds = since(start);
                drop(here);
                Ok(total_only(seconds))
            }),
            side(rows::LOOP, || {
                let start = Instant::now();
                let here = read_each(probe, &from)?;
                event.record(&probe.stream)?;
                event.wait()?;
                let seconds = since(start);
                drop(here);
                Ok(total_only(seconds))
            }),
            side("cudarc, a copy for each", || peer.down_each(&blocks)),
        ],
    )
}

/// Queues a copy of each block of a batch into fresh memory, which must be kept until the copies are done.
fn read_each(probe: &Probe, blocks: &[(u64, usize)]) -> Res<Vec<Vec<u8>>> {
    let mut here = Vec::with_capacity(blocks.len());
    for (address, bytes) in blocks {
        let mut memory = Vec::<u8>::with_capacity(*bytes);
        let to = memory.as_mut_ptr().expose_provenance() as u64;
        here.push(memory);
        // SAFETY: the block is the batch's, and callers keep the memory until they have waited.
        unsafe { probe.stream.copy(to, *address, *bytes) }?;
    }
    Ok(here)
}

pub(crate) fn small(probe: &Probe) -> Res<()> {
    let columns = probe.bytes(1000, 20);
    println!("{LEGEND}\n");
    println!(
        "Columns in turn: Int64 with nulls, Float64, text with nulls, Int32 with nulls; ordinary memory."
    );
    println!(
        "raw(n): as many bytes as the crate sent, 1 copy. packed by hand: memcpy of each buffer to page-locked"
    );
    println!(
        "memory, 1 copy. loop: a block from a warm pool and a copy from ordinary memory for each buffer, 1 wait."
    );
    println!(
        "blocking loop: the same with cuMemAlloc and cuMemcpyHtoD. Frees are not timed, on any side.\n"
    );
    for (name, batch) in [
        ("U4", mixed(columns, 10)?),
        ("U5", mixed(columns, probe.bytes(1000, 100))?),
        ("U6", single()?),
    ] {
        Small::new(probe, &batch)?.run(name)?;
    }
    Ok(())
}

/// A batch and its plain counterparts.
struct Small<'a> {
    probe: &'a Probe,
    batch: &'a RecordBatch,
    buffers: Vec<Buffer>,
    /// Of the buffers, 64-byte aligned, in `locked` and on the device alike.
    offsets: Vec<usize>,
    packed: usize,
    event: Event,
}

impl<'a> Small<'a> {
    fn new(probe: &'a Probe, batch: &'a RecordBatch) -> Res<Self> {
        let buffers = buffers(batch);
        let mut packed = 0;
        let mut offsets = Vec::new();
        for buffer in &buffers {
            offsets.push(packed);
            packed += buffer.len().next_multiple_of(64);
        }
        Ok(Self {
            probe,
            batch,
            buffers,
            offsets,
            packed,
            event: Event::new()?,
        })
    }

    fn run(&self, name: &str) -> Res<()> {
        let probe = self.probe;
        let (columns, rows) = (self.batch.num_columns(), self.batch.num_rows());
        println!(
            "{columns} columns x {rows} rows, {} buffers of {} together",
            self.buffers.len(),
            size(self.buffers.iter().map(Buffer::len).sum())
        );
        let sent = describe(probe, self.batch)?;
        let most = sent.max(self.packed);
        let there = OnDevice::new(most)?;
        let mut packed = Locked::new(most)?;
        fill(packed.bytes_mut(), 10);
        let pool = Pool::new(probe.ordinal, u64::MAX)?;
        let mut pieces = Copies::default();
        for (buffer, offset) in self.buffers.iter().zip(&self.offsets) {
            let offset = *offset as u64;
            let (dst, src) = (there.address() + offset, packed.address() + offset);
            pieces.add(dst, src, buffer.len());
        }
        let (stream, event) = (&probe.stream, &self.event);
        let peer = Peer::new(probe)?;
        let locked = packed.address();
        let mut ways = vec![
            side("this crate", || upload(probe, self.batch)),
            // SAFETY: source and destination have at least as many bytes, and one copy at a time
            // uses them; `copy` waits for it.
            side(format!("raw({})", size(sent)), || unsafe {
                copy(stream, event, there.address(), locked, sent)
            }),
            side(rows::PACKED, || {
                let start = Instant::now();
                for (buffer, offset) in self.buffers.iter().zip(&self.offsets) {
                    packed.bytes_mut()[*offset..][..buffer.len()].copy_from_slice(buffer);
                }
                // SAFETY: both blocks have at least as many bytes, and one copy at a time uses
                // them.
                unsafe { stream.copy(there.address(), locked, self.packed) }?;
                self.finish(start)
            }),
            side(rows::LOOP, || self.pooled(&pool)),
            side("blocking loop", || self.blocking()),
            side("cudarc, a block for each", || peer.up_each(&self.buffers)),
        ];
        if let Some(batch) = &probe.batch {
            ways.push(side(rows::LIST, || {
                let start = Instant::now();
                let block = pool.allocate(self.packed, stream)?;
                // The list's places are in another block, of the same size.
                // SAFETY: the pieces lie in blocks of at least as many bytes, and one copy at a
                // time uses them.
                unsafe { batch.copy(&pieces, stream) }?;
                let seconds = self.finish(start)?;
                // SAFETY: the block was allocated from this pool above, and is freed once, after
                // its uses in the stream's order.
                unsafe { pool.free(block, stream) }?;
                stream.wait()?;
                Ok(seconds)
            }));
        }
        compare(&format!("{name} upload"), sent, probe.rounds(30, 1.0), ways)?;

        let up = probe.device.upload(self.batch)?;
        up.wait()?;
        let blocks = addresses(&up)?;
        compare(
            &format!("{name} download (loop: into fresh ordinary memory)"),
            sent,
            probe.rounds(30, 0.5),
            vec![
                side("this crate", || download(&up)),
                // SAFETY: both blocks have at least `sent` bytes, and one copy at a time uses them.
                side(format!("raw({})", size(sent)), || unsafe {
                    copy(stream, event, locked, there.address(), sent)
                }),
                side("loop", || {
                    let start = Instant::now();
                    let here = read_each(probe, &blocks)?;
                    let seconds = self.finish(start)?;
                    drop(here);
                    Ok(seconds)
                }),
            ],
        )
    }

    fn finish(&self, start: Instant) -> Res<[f64; 2]> {
        let submitted = since(start);
        self.event.record(&self.probe.stream)?;
        self.event.wait()?;
        Ok([submitted, since(start)])
    }

    fn pooled(&self, pool: &Pool) -> Res<[f64; 2]> {
        let stream = &self.probe.stream;
        let start = Instant::now();
        let mut blocks = Vec::with_capacity(self.buffers.len());
        for buffer in &self.buffers {
            let block = pool.allocate(buffer.len(), stream)?;
            blocks.push(block);
            // SAFETY: the block was allocated in this stream's order with as many bytes; the buffer
            // lives until the wait.
            unsafe { stream.copy(block, at(buffer), buffer.len()) }?;
        }
        let seconds = self.finish(start)?;
        for block in blocks {
            // SAFETY: the block was allocated from this pool above, and is freed once, after its
            // uses in the stream's order.
            unsafe { pool.free(block, stream) }?;
        }
        stream.wait()?;
        Ok(seconds)
    }

    fn blocking(&self) -> Res<[f64; 2]> {
        let start = Instant::now();
        let mut blocks = Vec::with_capacity(self.buffers.len());
        for buffer in &self.buffers {
            let block = OnDevice::new(buffer.len())?;
            // SAFETY: the block has as many bytes, and the call reads the buffer before it returns.
            let code = unsafe {
                sys::cuMemcpyHtoD_v2(block.address(), buffer.as_ptr().cast(), buffer.len())
            };
            check("cuMemcpyHtoD", code)?;
            blocks.push(block);
        }
        self.finish(start)
    }
}

/// Where the buffers of a batch are, and their bytes.
pub(crate) fn addresses(batch: &DeviceRecordBatch) -> Res<Vec<(u64, usize)>> {
    let mut all = Vec::new();
    for column in batch.columns() {
        for i in 0..column.num_buffers() {
            if let Some(buffer) = column.buffer(i).filter(|buffer| !buffer.is_empty()) {
                all.push((buffer.address().address() as u64, buffer.len()));
            }
        }
    }
    Ok(all)
}
