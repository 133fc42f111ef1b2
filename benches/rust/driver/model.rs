//! Rows K1 to K5: times that the stand-in keeps as a clock. Its copies move nothing, so that a
//! machine without copy engines is as fast as the clock says.

use std::hint::black_box;
use std::time::{Duration, Instant};

use arrow_array::{Array, RecordBatch, RecordBatchIterator};
use arrow_device::{
    ArrowDeviceType, Device, DeviceRecordBatch, DeviceRecordBatchIterator, DeviceRecordBatchReader,
    UploadingReader,
};
use arrow_device_benches::batches;
use arrow_device_benches::cases::Result;

use crate::calls::OPTIONS;
use crate::fake::{Fake, HOLLOW};

/// Bytes per second each way; nanoseconds of a call, and of a query.
const RATE: f64 = 25e9;
const CALL: u64 = 1000;
const QUERY: u64 = 300;

const MIB: usize = 1 << 20;
const COLUMNS: usize = 8;
/// Batches of a stream, and their bytes.
const STREAM: usize = 64;
const STREAM_BYTES: usize = 8 * MIB;

/// How many threads pack an upload.
const THREADS: [usize; 2] = [1, 2];

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// What a copy of these bytes takes.
fn copy(bytes: usize) -> f64 {
    bytes as f64 / RATE * 1e3
}

/// Integers of this many bytes, all columns together.
fn integers(bytes: usize) -> Result<RecordBatch> {
    Ok(batches::named("integers", COLUMNS, bytes / COLUMNS / 8)?)
}

fn line(row: &str, what: &str, measured: f64, ideal: Option<(f64, &str)>, calls: Option<u64>) {
    let (ideal, of) = ideal.map_or((String::new(), ""), |(ideal, of)| (ideal.to_string(), of));
    let calls = calls.map_or(String::new(), |calls| calls.to_string());
    println!("{row}\t{what}\t{measured}\t{ideal}\t{of}\t{calls}");
}

/// The median of the times, and the fewest driver calls of any time.
fn median(fake: &Fake, mut work: impl FnMut() -> Result<Duration>) -> Result<(f64, u64)> {
    work()?;
    let (mut times, mut fewest) = (Vec::new(), u64::MAX);
    for _ in 0..9 {
        // Staging memory comes back in the background.
        std::thread::sleep(Duration::from_millis(20));
        let before = fake.calls()?;
        times.push(work()?);
        fewest = fewest.min(fake.calls()? - before);
    }
    times.sort_unstable();
    Ok((milliseconds(times[times.len() / 2]), fewest))
}

/// Milliseconds that one thread takes to copy the values of a batch into memory that it has
/// touched.
fn memcpy(batch: &RecordBatch) -> f64 {
    let columns = batch.columns().iter();
    let sources: Vec<_> = columns.map(|c| c.to_data().buffers()[0].clone()).collect();
    let mut target = vec![1u8; sources.iter().map(|source| source.len()).sum()];
    let mut times: Vec<Duration> = (0..9)
        .map(|_| {
            let begin = Instant::now();
            let mut rest = target.as_mut_slice();
            for source in &sources {
                let (part, more) = std::mem::take(&mut rest).split_at_mut(source.len());
                part.copy_from_slice(source);
                rest = more;
            }
            black_box(&mut target);
            begin.elapsed()
        })
        .collect();
    times.sort_unstable();
    milliseconds(times[times.len() / 2])
}

/// K1: a pageable batch up.
fn uploads(fake: &Fake) -> Result<()> {
    for bytes in [8, 32, 64, 256].map(|mib| mib * MIB) {
        let batch = integers(bytes)?;
        let one = memcpy(&batch);
        // Fewer bytes are packed by one thread.
        for threads in THREADS.into_iter().filter(|&n| n == 1 || bytes >= 16 * MIB) {
            fake.device.set_packing_threads(threads);
            let (time, calls) = median(fake, || {
                let begin = Instant::now();
                let up = fake.device.upload(&batch)?;
                up.wait()?;
                Ok(begin.elapsed())
            })?;
            let packing = one / threads as f64;
            let (ideal, of) = match copy(bytes) {
                copy if copy > packing => (copy, "the copy"),
                _ if threads == 1 => (packing, "a memcpy"),
                _ => (packing, "a memcpy shared by the threads"),
            };
            let what = format!("{} MiB, packing threads: {threads}", bytes / MIB);
            line("K1", &what, time, Some((ideal, of)), Some(calls));
        }
    }
    fake.device.set_packing_threads(0);
    Ok(())
}

/// Reads a stream of uploads, and waits for the last.
fn stream_up(device: &Device, batch: &RecordBatch) -> Result<()> {
    let batches = (0..STREAM).map(|_| Ok(batch.clone()));
    let reader = RecordBatchIterator::new(batches, batch.schema());
    let mut last = None;
    for up in UploadingReader::new(reader, device) {
        last = Some(up?);
    }
    Ok(last.ok_or("no batches")?.wait()?)
}

/// Reads a stream of downloads.
fn stream_down(batch: &DeviceRecordBatch) -> Result<()> {
    let batches = (0..STREAM).map(|_| Ok(batch.clone()));
    let reader = DeviceRecordBatchIterator::new(batches, batch.schema(), ArrowDeviceType::CUDA);
    for down in reader.into_host_reader() {
        black_box(down?);
    }
    Ok(())
}

/// K2 to K4: streams of batches up, down, and both at once.
fn streams(fake: &Fake) -> Result<()> {
    let batch = integers(STREAM_BYTES)?;
    let there = fake.device.upload(&batch)?;
    there.wait()?;
    let packing = memcpy(&batch) * STREAM as f64;
    let copies = copy(STREAM * STREAM_BYTES);
    let up = match copies > packing {
        true => (copies, "the copies"),
        false => (packing, "memcpys, one thread"),
    };
    let what = format!("{STREAM} x {} MiB", STREAM_BYTES / MIB);

    let timed = |work: &dyn Fn() -> Result<()>| {
        let begin = Instant::now();
        work()?;
        Ok(begin.elapsed())
    };
    let (time, calls) = median(fake, || timed(&|| stream_up(&fake.device, &batch)))?;
    line("K2", &what, time, Some(up), Some(calls));
    let (time, calls) = median(fake, || timed(&|| stream_down(&there)))?;
    line("K3", &what, time, Some((copies, "the copies")), Some(calls));
    let both = || {
        std::thread::scope(|scope| {
            let up = scope.spawn(|| stream_up(&fake.device, &batch).map_err(|e| e.to_string()));
            stream_down(&there)?;
            let up = up.join().map_err(|_| "the uploading thread panicked")?;
            Ok(up?)
        })
    };
    let (time, calls) = median(fake, || timed(&both))?;
    line("K4", &what, time, Some(up), Some(calls));
    Ok(())
}

/// K5: out and in.
fn interchange(fake: &Fake) -> Result<()> {
    let batch = fake.device.upload(&batches::named("mixed", 1000, 1000)?)?;
    batch.wait()?;
    let (time, calls) = median(fake, || {
        let begin = Instant::now();
        let array = batch.export_array(&OPTIONS)?;
        let time = begin.elapsed();
        drop(array);
        Ok(time)
    })?;
    line("K5", "export, 1000 columns", time, None, Some(calls));
    let mut import = || {
        let array = batch.export_array(&OPTIONS)?;
        let begin = Instant::now();
        // SAFETY: this crate has just exported the struct from a batch of this schema.
        let imported =
            unsafe { DeviceRecordBatch::import_as(array, batch.schema(), &fake.options) }?;
        let time = begin.elapsed();
        drop(imported);
        Ok(time)
    };
    let (time, calls) = median(fake, &mut import)?;
    let what = "import, 1000 columns (calls: with the export)";
    line("K5", what, time, None, Some(calls));
    Ok(())
}

pub(crate) fn print() -> Result<()> {
    let fake = Fake::open(HOLLOW, 4 << 30)?;
    fake.set_clock(RATE, CALL, QUERY)?;
    uploads(&fake)?;
    streams(&fake)?;
    interchange(&fake)
}
