//! Many batches in a row: both directions together, and a producer that takes its time.

use std::hint::spin_loop;
use std::time::Instant;

use arrow_array::{RecordBatch, RecordBatchIterator};
use arrow_device::{DeviceRecordBatch, Download, Queue, UploadingReader};

use crate::Probe;
use crate::data::{fill, ordinary, over};
use crate::raw::{Event, Locked, OnDevice};
use crate::rows;
use crate::stats::{LEGEND, Res, Sample, compare, side, since, size, time, total_only};

pub(crate) fn run(probe: &Probe) -> Res<()> {
    println!("{LEGEND}\n");
    both_ways(probe)?;
    producer(probe)
}

/// Uploads all, one wait at the end.
fn upload_all(
    batches: &[RecordBatch],
    queue: &Queue,
    before: &mut dyn FnMut(),
) -> arrow_device::Result<()> {
    let mut last: Option<DeviceRecordBatch> = None;
    for batch in batches {
        before();
        // Dropping the one before frees it in the queue's order.
        last = Some(queue.device().upload_on(batch, queue)?);
    }
    last.map_or(Ok(()), |last| last.wait())
}

fn both_ways(probe: &Probe) -> Res<()> {
    let each = probe.bytes(16 << 20, 64 << 10);
    let count = probe.bytes(16, 4);
    let all = each * count;
    let mut slab = probe.device.host_slab(all)?;
    fill(&mut slab, 11);
    let source = slab.into_buffer();
    let batches: Vec<_> = (0..count)
        .map(|i| over(&source.slice_with_length(i * each, each), 1))
        .collect::<Res<_>>()?;
    let up = probe.device.upload(&batches[0])?;
    up.wait()?;
    let queue = probe.device.new_queue()?;
    let (there, back, sink) = (
        OnDevice::new(each)?,
        OnDevice::new(each)?,
        Locked::new(each)?,
    );
    let from = source.as_ptr().expose_provenance() as u64;
    let (event, second) = (Event::new()?, Event::new()?);
    println!(
        "S2 {count} batches of {}, 1 column, page-locked memory. Downloads are queued one ahead, and dropped one by one.\n",
        size(each)
    );
    let raw_up = |event: &Event| -> Res<()> {
        for i in 0..count {
            let at = from + (i * each) as u64;
            // SAFETY: blocks of `each` bytes; `run` waits, and copies into a block are in order.
            unsafe { probe.stream.copy(there.address(), at, each) }?;
        }
        event.record(&probe.stream)
    };
    let raw_down = |event: &Event| -> Res<()> {
        for _ in 0..count {
            // SAFETY: blocks of `each` bytes; `run` waits, and copies into a block are in order.
            unsafe { probe.second.copy(sink.address(), back.address(), each) }?;
        }
        event.record(&probe.second)
    };
    // The next download is queued before the last one is waited for.
    let download_all = || -> arrow_device::Result<()> {
        let mut before: Option<Download<RecordBatch>> = None;
        for _ in 0..count {
            if let Some(before) = before.replace(up.start_to_host()?) {
                drop(before.wait()?);
            }
        }
        before.map_or(Ok(()), |last| last.wait().map(drop))
    };
    let rounds = probe.rounds(20, 0.5);
    let timed = |work: &dyn Fn() -> Res<()>| -> Res<[f64; 2]> {
        let start = Instant::now();
        work()?;
        let seconds = since(start);
        probe.device.synchronize()?;
        Ok(total_only(seconds))
    };
    compare(
        "S2 up alone",
        all,
        rounds,
        vec![
            side("this crate", || {
                timed(&|| Ok(upload_all(&batches, &queue, &mut || ())?))
            }),
            side("raw", || {
                timed(&|| {
                    raw_up(&event)?;
                    event.wait()
                })
            }),
        ],
    )?;
    compare(
        "S2 down alone",
        all,
        rounds,
        vec![
            side("this crate", || timed(&|| Ok(download_all()?))),
            side("raw", || {
                timed(&|| {
                    raw_down(&second)?;
                    second.wait()
                })
            }),
        ],
    )?;
    compare(
        "S2 both together; the rate counts both (this crate: uploads on a thread of their own)",
        2 * all,
        rounds,
        vec![
            side("this crate", || {
                timed(&|| {
                    let done = std::thread::scope(|scope| {
                        let up = scope.spawn(|| upload_all(&batches, &queue, &mut || ()));
                        (download_all(), up.join())
                    });
                    done.0?;
                    Ok(done.1.map_err(|_| "the uploading thread panicked")??)
                })
            }),
            side("raw", || {
                timed(&|| {
                    raw_up(&event)?;
                    raw_down(&second)?;
                    event.wait()?;
                    second.wait()
                })
            }),
        ],
    )
}

/// Uploads what a thread of its own produces, one wait at the end: a third thread packs.
fn read_ahead(batches: &[RecordBatch], delay: f64, queue: &Queue) -> arrow_device::Result<()> {
    let Some(first) = batches.first() else {
        return Ok(());
    };
    let schema = first.schema();
    let batches = Vec::from(batches).into_iter().map(move |batch| {
        produce(delay);
        Ok(batch)
    });
    let reader = RecordBatchIterator::new(batches, schema);
    let mut last: Option<DeviceRecordBatch> = None;
    for up in UploadingReader::new(reader, queue.device()).read_ahead(4) {
        last = Some(up?);
    }
    last.map_or(Ok(()), |last| last.wait())
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
    rows::count(rows::BATCHES, count);
    // More than caches hold: the batches take turns.
    let source = ordinary(parts * each, 12);
    let batches: Vec<_> = (0..count)
        .map(|i| over(&source.slice_with_length(i % parts * each, each), 1))
        .collect::<Res<_>>()?;
    let queue = probe.device.default_queue();
    let one_by_one = |delay: f64| -> Res<Vec<f64>> {
        let mut copies = Vec::with_capacity(count);
        for batch in &batches {
            produce(delay);
            let start = Instant::now();
            probe.device.upload(batch)?.wait()?;
            copies.push(since(start));
        }
        Ok(copies)
    };
    one_by_one(0.0)?;
    let copy = Sample::new(one_by_one(0.0)?).median();
    println!(
        "S1 {count} batches of {}, 1 column, ordinary memory. One upload with its wait took {} (median); the producer",
        size(each),
        time(copy)
    );
    println!("keeps this thread busy for nothing, half of that, or as long, before each batch.\n");
    for (name, delay) in [
        ("no", 0.0),
        ("half a copy's", copy / 2.0),
        ("a copy's", copy),
    ] {
        let timed = |work: &dyn Fn() -> Res<()>| -> Res<[f64; 2]> {
            let start = Instant::now();
            work()?;
            let seconds = since(start);
            probe.device.synchronize()?;
            Ok(total_only(seconds))
        };
        compare(
            &format!("S1 with {name} delay ({} a batch)", time(delay)),
            each * count,
            probe.rounds(5, 0.5),
            vec![
                side("this crate, read ahead", || {
                    timed(&|| Ok(read_ahead(&batches, delay, &queue)?))
                }),
                side("this crate, on one thread, 1 wait at the end", || {
                    timed(&|| Ok(upload_all(&batches, &queue, &mut || produce(delay))?))
                }),
                side("this crate, a wait each", || {
                    timed(&|| one_by_one(delay).map(drop))
                }),
                side("producer alone", || {
                    timed(&|| {
                        (0..count).for_each(|_| produce(delay));
                        Ok(())
                    })
                })
                .without_bytes(),
                side("uploads alone, a wait each", || {
                    timed(&|| one_by_one(0.0).map(drop))
                }),
            ],
        )?;
    }
    Ok(())
}
