//! Many batches in a row: both directions together, and a producer that takes its time.

use std::hint::spin_loop;
use std::thread::scope;
use std::time::Instant;

use arrow_array::{RecordBatch, RecordBatchIterator};
use arrow_buffer::Buffer;
use arrow_device::cuda::cudarc::driver::result::stream::{self, StreamKind};
use arrow_device::{DeviceRecordBatch, Download, Queue, upload_reader_ahead};

use crate::Probe;
use crate::data::{fill, ordinary, over};
use crate::raw::{Locked, OnDevice, Span, Stream};
use crate::stats::{LEGEND, Res, Sample, compare, since, size, time, whole};
use crate::transfers::upload;

pub(crate) fn run(probe: &Probe) -> Res<()> {
    println!("{LEGEND}");
    both_ways(probe)?;
    producer(probe)
}

/// Waits for the last; dropping the one before frees it in the queue's order.
fn all(
    batches: impl Iterator<Item = arrow_device::Result<DeviceRecordBatch>>,
) -> arrow_device::Result<()> {
    let mut last = None;
    for batch in batches {
        last = Some(batch?);
    }
    last.map_or(Ok(()), |last| last.wait())
}

/// Uploads all, with what comes before each.
fn upload_all(
    batches: &[RecordBatch],
    queue: &Queue,
    before: &dyn Fn(),
) -> arrow_device::Result<()> {
    all(batches.iter().map(|batch| {
        before();
        queue.device().upload_on(batch, queue)
    }))
}

/// The next download is queued before the last one is waited for.
fn download_all(batch: &DeviceRecordBatch, count: usize) -> arrow_device::Result<()> {
    let mut before: Option<Download<RecordBatch>> = None;
    for _ in 0..count {
        if let Some(before) = before.replace(batch.start_to_host(None)?) {
            drop(before.wait()?);
        }
    }
    before.map_or(Ok(()), |last| last.wait().map(drop))
}

fn both_ways(probe: &Probe) -> Res<()> {
    let (each, count) = (probe.bytes(16 << 20, 64 << 10), probe.bytes(16, 4));
    let mut host = probe.device.host_buffer(each * count)?;
    fill(&mut host, 11);
    let source = Buffer::from(host);
    let part = |i| source.slice_with_length(i * each, each);
    let batches = (0..count)
        .map(|i| over(&part(i), 1))
        .collect::<Res<Vec<_>>>()?;
    let up = probe.device.upload(&batches[0])?;
    up.wait()?;
    let queue = probe.device.new_queue()?;
    let (there, back, sink) = (
        OnDevice::new(each)?,
        OnDevice::new(each)?,
        Locked::new(each)?,
    );
    // SAFETY: nothing destroys the stream.
    let down = unsafe { Stream::borrowed(stream::create(StreamKind::NonBlocking)?) }?;
    // Copies into a block are in order.
    let raw = |with_up: bool, with_down: bool| -> Res<()> {
        for i in 0..count {
            if with_up {
                // SAFETY: blocks of `each` bytes, which live until the wait.
                unsafe {
                    probe
                        .stream
                        .copy(there.span().address(), Span::of(&part(i)).address(), each)
                }?;
            }
            if with_down {
                // SAFETY: blocks of `each` bytes, which live until the wait.
                unsafe { down.copy(sink.span().address(), back.span().address(), each) }?;
            }
        }
        let start = Instant::now();
        probe.stream.finish(start)?;
        down.finish(start).map(drop)
    };
    println!(
        "S2 {count} batches of {}, 1 column, page-locked memory. Downloads are queued one ahead, and dropped one by one;",
        size(each)
    );
    println!(
        "where both go together, uploads are on a thread of their own, and the rate counts both.\n"
    );
    let crates = |with_up: bool, with_down: bool| -> Res<()> {
        scope(|scope| {
            let up_there =
                scope.spawn(|| upload_all(if with_up { &batches } else { &[] }, &queue, &|| ()));
            download_all(&up, if with_down { count } else { 0 })?;
            Ok(up_there
                .join()
                .map_err(|_| "the uploading thread panicked")??)
        })
    };
    for (title, up, down) in [
        ("S2 up alone", true, false),
        ("S2 down alone", false, true),
        ("S2 both together", true, true),
    ] {
        let bytes = each * count * (usize::from(up) + usize::from(down));
        let ways = vec![
            whole("this crate", || crates(up, down)),
            whole("raw", || raw(up, down)),
        ];
        let took = compare(probe, title, bytes, 0.5, ways)?;
        if up && down {
            let rate = 1.0 / took.over(&[1]);
            probe.row(
                "S2",
                "rate of both directions at once / that of raw copies",
                rate,
                ">=",
                0.9,
            );
        }
    }
    Ok(())
}

/// Keeps this thread busy.
fn produce(seconds: f64) {
    let start = Instant::now();
    while since(start) < seconds {
        spin_loop();
    }
}

fn producer(probe: &Probe) -> Res<()> {
    let each = probe.bytes(8 << 20, 64 << 10);
    let (parts, count) = (probe.bytes(32, 2), probe.bytes(50, 4));
    // More than caches hold: the batches take turns.
    let source = ordinary(parts * each, 12);
    let part = |i: usize| over(&source.slice_with_length(i % parts * each, each), 1);
    let batches = (0..count).map(part).collect::<Res<Vec<_>>>()?;
    let queue = probe.device.default_queue();
    let one_by_one = |delay: f64| -> Res<Vec<f64>> {
        let each = batches.iter().map(|batch| {
            produce(delay);
            Ok(upload(probe, batch)?[1])
        });
        each.collect()
    };
    one_by_one(0.0)?;
    let copy = Sample::new(one_by_one(0.0)?).median();
    println!(
        "S1 {count} batches of {}, 1 column, ordinary memory. One upload with its wait took {} (median); the producer",
        size(each),
        time(copy)
    );
    println!("keeps a thread busy for nothing, half of that, or as long, before each batch.\n");
    for (name, what, delay) in [
        (
            "no",
            "stream of 8 MiB batches, producer takes no time / slower of both, and one batch",
            0.0,
        ),
        (
            "half a copy's",
            "the same, producer takes half an upload",
            copy / 2.0,
        ),
        ("a copy's", "the same, producer takes an upload", copy),
    ] {
        let ways = vec![
            // The producer has a thread of its own, and a third one packs.
            whole("this crate, read ahead", || {
                let produced = batches.clone().into_iter().map(move |batch| {
                    produce(delay);
                    Ok(batch)
                });
                let reader = RecordBatchIterator::new(produced, batches[0].schema());
                Ok(all(upload_reader_ahead(reader, queue.device(), 4)?)?)
            }),
            whole("this crate, on one thread, 1 wait at the end", || {
                Ok(upload_all(&batches, &queue, &|| produce(delay))?)
            }),
            whole("producer alone", || {
                (0..count).for_each(|_| produce(delay));
                Ok(())
            }),
            whole("uploads alone, a wait each", || one_by_one(0.0).map(drop)),
        ];
        let title = format!("S1 with {name} delay ({} a batch)", time(delay));
        let took = compare(probe, &title, each * count, 0.5, ways)?;
        let over = took.ratio(|times, i| times[2][i].max(times[3][i]) + times[3][i] / count as f64);
        probe.row("S1", what, over, "<=", 1.15);
    }
    Ok(())
}
