//! F2: a Parquet file to a device, beside decoding it and copying its batches alone. Prints a line for each figure of the row,
//! separated by tabs: row, what, median of the ratios, limit, quartiles, ratio of the best times. All sides take turns.
//!
//! Argument: how many rounds, 15 if there is none.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::scope;
use std::time::Instant;

use arrow_array::{RecordBatch, RecordBatchIterator, RecordBatchReader};
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device::{
    Device, DeviceRecordBatch, Devices, ParallelReader, Result as DeviceResult, UploadingReader,
};
use arrow_device_benches::batches::{self, Result};
use arrow_schema::ArrowError;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use parquet::basic::Compression;
use parquet::file::properties::WriterProperties;

const LIMIT: f64 = 1.1;
const THREADS: usize = 2;
const GROUPS: usize = 16;
const COLUMNS: usize = 8;
const GROUP_ROWS: usize = 1 << 17;
const BATCH_ROWS: usize = 1 << 16;

struct Source {
    path: PathBuf,
    metadata: ArrowReaderMetadata,
}

impl Source {
    /// Writes row groups of mixed columns, compressed with Snappy.
    fn write(folder: &Path) -> Result<Self> {
        let path = folder.join("f2.parquet");
        let batch = batches::named("mixed", COLUMNS, GROUP_ROWS)?;
        let properties = WriterProperties::builder()
            .set_compression(Compression::SNAPPY)
            .set_max_row_group_row_count(Some(GROUP_ROWS))
            .build();
        let mut writer =
            ArrowWriter::try_new(File::create(&path)?, batch.schema(), Some(properties))?;
        for _ in 0..GROUPS {
            writer.write(&batch)?;
        }
        writer.close()?;
        let metadata = ArrowReaderMetadata::load(&File::open(&path)?, Default::default())?;
        Ok(Self { path, metadata })
    }

    fn read(&self, groups: Vec<usize>) -> Result<ParquetRecordBatchReader, ArrowError> {
        // Clones of a file share one position.
        let file = File::open(&self.path)?;
        let builder =
            ParquetRecordBatchReaderBuilder::new_with_metadata(file, self.metadata.clone());
        let builder = builder.with_batch_size(BATCH_ROWS).with_row_groups(groups);
        Ok(builder.build()?)
    }

    fn all(&self) -> Result<ParquetRecordBatchReader, ArrowError> {
        self.read((0..GROUPS).collect())
    }

    fn parallel(&self) -> Result<ParallelReader> {
        let this = Self {
            path: self.path.clone(),
            metadata: self.metadata.clone(),
        };
        let schema = self.read(Vec::new())?.schema();
        let open = move |group| this.read(vec![group]);
        Ok(ParallelReader::new(schema, 0..GROUPS, open).with_threads(THREADS))
    }
}

/// Decodes on threads of which none waits for another, and keeps nothing.
fn decode(source: &Source) -> Result<()> {
    let next = AtomicUsize::new(0);
    let decode = || -> Result<()> {
        loop {
            let group = next.fetch_add(1, Ordering::Relaxed);
            if group >= GROUPS {
                return Ok(());
            }
            for batch in source.read(vec![group])? {
                drop(batch?);
            }
        }
    };
    scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(decode)).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| "decoding panicked")?)
    })
}

/// Waits until the device has all.
fn arrived(batches: impl Iterator<Item = DeviceResult<DeviceRecordBatch>>) -> Result<()> {
    let mut last = None;
    for batch in batches {
        last = Some(batch?);
    }
    Ok(last.ok_or("no batches")?.wait()?)
}

/// Uploads batches that are there.
fn copy(batches: &[RecordBatch], device: &Device) -> Result<()> {
    let all = batches.iter().cloned().map(Ok);
    let reader = RecordBatchIterator::new(all, batches[0].schema());
    arrived(UploadingReader::new(reader, device))
}

/// Seconds of all threads of this process, which other work on the machine changes less than those of the clock.
fn processor() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the struct is valid for a write.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Seconds of the clock, and of the processor.
fn seconds(work: impl FnOnce() -> Result<()>) -> Result<[f64; 2]> {
    let (start, busy) = (Instant::now(), processor());
    work()?;
    Ok([start.elapsed().as_secs_f64(), processor() - busy])
}

/// Seconds of each side in each round, of the clock and of the processor: decoding, copying, ours, ours with a thread that packs, and one plain reader.
type Times = [[Vec<f64>; 2]; 5];

fn measure(source: &Source, device: &Device, rounds: usize) -> Result<Times> {
    let batches = source.all()?.collect::<Result<Vec<_>, _>>()?;
    let mut times = Times::default();
    for round in 0..=rounds {
        let took = [
            seconds(|| decode(source))?,
            seconds(|| copy(&batches, device))?,
            seconds(|| arrived(UploadingReader::new(source.parallel()?, device)))?,
            seconds(|| arrived(UploadingReader::new(source.parallel()?, device).read_ahead(2)))?,
            seconds(|| arrived(UploadingReader::new(source.all()?, device)))?,
        ];
        // The first warms up.
        if round > 0 {
            for (all, took) in times.iter_mut().flatten().zip(took.into_iter().flatten()) {
                all.push(took);
            }
        }
    }
    Ok(times)
}

fn at(sorted: &[f64], part: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * part).round() as usize]
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

fn figure(what: &str, over: &[f64], under: &[f64], limit: f64) {
    let ratios = over.iter().zip(under).map(|(over, under)| over / under);
    let ratios = sorted(ratios.collect());
    let best = at(&sorted(over.to_vec()), 0.0) / at(&sorted(under.to_vec()), 0.0);
    let [first, median, third] = [0.25, 0.5, 0.75].map(|part| at(&ratios, part));
    println!("F2\t{what}\t{median}\t{limit}\t{first}\t{third}\t{best}");
}

fn report(name: &str, times: &Times) {
    let [decode, copy, ours, ahead, plain] = times;
    let alone = decode[0].iter().zip(&copy[0]);
    let slower: Vec<_> = alone.map(|(decode, copy)| decode.max(*copy)).collect();
    let both = decode[1].iter().zip(&copy[1]);
    let both: Vec<_> = both.map(|(decode, copy)| decode + copy).collect();
    let sides = [
        ("ParallelReader + UploadingReader", ours, LIMIT),
        ("the same with read_ahead", ahead, f64::INFINITY),
        ("one reader + UploadingReader", plain, f64::INFINITY),
    ];
    for (side, times, limit) in sides {
        figure(&format!("{name}, {side}"), &times[0], &slower, limit);
        let what = format!("{name}, {side}: processor time / that of decoding and copying");
        figure(&what, &times[1], &both, f64::INFINITY);
    }
    let medians = times
        .iter()
        .map(|[wall, _]| at(&sorted(wall.clone()), 0.5) * 1e3);
    let medians: Vec<_> = medians.collect();
    eprintln!("{name}, ms: decoding, copying, ours, with read_ahead, one reader: {medians:.0?}");
}

fn main() -> Result<()> {
    let rounds = std::env::args().nth(1).map_or(Ok(15), |n| n.parse())?;
    let folder = std::env::temp_dir().join(format!("arrow-device-f2-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let source = Source::write(&folder);
    let measured = source.and_then(|source| {
        let times = measure(&source, &Devices::cpu(), rounds)?;
        report("CPU device", &times);
        // A device that copies as fast as two threads decode: nothing may wait for anything.
        let bytes: usize = source
            .all()?
            .map(|batch| Ok(batch?.get_array_memory_size()))
            .sum::<Result<_, ArrowError>>()?;
        let decode = at(&sorted(times[0][0].clone()), 0.5);
        let config = SimConfig::default().with_bytes_per_second((bytes as f64 / decode) as u64);
        let device = Device::new(SimDevice::new(config)?)?;
        report(
            "simulated device as fast as decoding",
            &measure(&source, &device, rounds)?,
        );
        Ok(())
    });
    std::fs::remove_dir_all(&folder)?;
    measured
}
