//! The streams of a soak.

use std::collections::VecDeque;
use std::fmt;
use std::ops::AddAssign;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use arrow_array::{
    ArrayRef, BooleanArray, Int64Array, ListArray, RecordBatch, RecordBatchIterator, StringArray,
    types::Int32Type,
};
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device::{
    Device, DeviceRecordBatch, DeviceRecordBatchReader, DeviceRecordBatchStreamReader, Devices,
    ExportOptions, FFI_ArrowDeviceArrayStream, ImportOptions, ReleasePolicy, SyncPolicy,
    upload_reader,
};
use arrow_schema::ArrowError;

pub(crate) type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// What the producer's error says.
const PLANNED: &str = "this stream is to fail here";
/// Most batches of a stream.
const LONGEST: u64 = 200;
/// Device batches that outlive their streams.
const KEPT: usize = 32;

/// Device batches of all threads, so that a batch is dropped by another thread than the one that read it.
#[derive(Default)]
pub(crate) struct Kept(Mutex<VecDeque<DeviceRecordBatch>>);

impl Kept {
    fn swap(&self, batch: DeviceRecordBatch) -> Option<DeviceRecordBatch> {
        let mut kept = self.0.lock().unwrap_or_else(|e| e.into_inner());
        kept.push_back(batch);
        if kept.len() > KEPT {
            return kept.pop_front();
        }
        None
    }
}

/// How many streams of each kind there were.
#[derive(Clone, Copy, Default)]
pub(crate) struct Totals {
    whole: u64,
    closed: u64,
    failed: u64,
    unread: u64,
    devices: u64,
    injected: u64,
}

impl AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.whole += other.whole;
        self.closed += other.closed;
        self.failed += other.failed;
        self.unread += other.unread;
        self.devices += other.devices;
        self.injected += other.injected;
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} streams were read to their end, {} closed early, {} failed as planned, and {} were never read",
            self.whole, self.closed, self.failed, self.unread
        )?;
        if self.devices > 0 {
            write!(
                f,
                "; {} simulated devices came and went, of which {} streams met an injected failure",
                self.devices, self.injected
            )?;
        }
        Ok(())
    }
}

/// One thread's.
pub(crate) struct Worker<'a> {
    device: &'a Device,
    release: ReleasePolicy,
    kept: &'a Kept,
    random: u64,
    batches: Vec<RecordBatch>,
    pub totals: Totals,
}

impl<'a> Worker<'a> {
    pub(crate) fn new(
        device: &'a Device,
        release: ReleasePolicy,
        seed: u64,
        kept: &'a Kept,
    ) -> Result<Self> {
        let rows = [0, 1, 7, 64, 1000, 20_000];
        Ok(Self {
            device,
            release,
            kept,
            random: seed + 1,
            batches: rows.map(batch).into_iter().collect::<Result<_>>()?,
            totals: Totals::default(),
        })
    }

    /// A number below `n`.
    fn below(&mut self, n: u64) -> u64 {
        // Knuth's generator; its low bits are poor.
        self.random = self.random.wrapping_mul(6364136223846793005);
        self.random = self.random.wrapping_add(1442695040888963407);
        (self.random >> 33) % n
    }

    /// The `i`-th batch of a stream: large ones are rare.
    fn pick(&self, i: u64) -> &RecordBatch {
        &self.batches[if i % 50 == 49 { 5 } else { (i % 5) as usize }]
    }

    /// Streams once; how many batches came back.
    pub(crate) fn stream(&mut self) -> Result<u64> {
        let sim = self.device.backend().downcast_ref::<SimDevice>().is_some();
        match self.below(100) {
            0..60 => self.whole(),
            60..75 => self.closed(),
            75..90 => self.failed(),
            90..95 => {
                let (_, stream) = self.export(self.device, None)?;
                // Released by its drop, as C would.
                drop(stream);
                self.totals.unread += 1;
                Ok(0)
            }
            _ if sim => self.own_device(),
            _ => self.whole(),
        }
    }

    /// How many batches a stream has, and the stream; after an error at `fails_at` it has no more.
    fn export(
        &mut self,
        device: &Device,
        fails_at: Option<u64>,
    ) -> Result<(u64, FFI_ArrowDeviceArrayStream)> {
        let n = self.below(LONGEST) + 1;
        let mut batches: Vec<Result<RecordBatch, ArrowError>> =
            (0..n).map(|i| Ok(self.pick(i).clone())).collect();
        if let Some(at) = fails_at {
            batches.truncate(at as usize);
            batches.push(Err(ArrowError::ComputeError(PLANNED.into())));
        }
        let reader = RecordBatchIterator::new(batches, self.batches[0].schema());
        let options = ExportOptions {
            release: self.release,
            ..ExportOptions::new(SyncPolicy::Event)
        };
        let stream = FFI_ArrowDeviceArrayStream::new(upload_reader(reader, device), options)?;
        Ok((n, stream))
    }

    fn whole(&mut self) -> Result<u64> {
        let (n, stream) = self.export(self.device, None)?;
        let reader = open(stream, ImportOptions::default())?;
        let mut i = 0;
        for batch in reader.into_host_reader() {
            self.compare(i, &batch?)?;
            i += 1;
        }
        if i != n {
            return Err(format!("{i} batches of {n} came back").into());
        }
        self.totals.whole += 1;
        Ok(n)
    }

    /// Takes some batches, on the device or on the host, and closes the stream while others are on their way.
    fn closed(&mut self) -> Result<u64> {
        let (n, stream) = self.export(self.device, None)?;
        let taken = self.below(n);
        let reader = open(stream, ImportOptions::default())?;
        if self.below(2) == 0 {
            let mut reader = reader.into_host_reader().with_prefetch(3);
            for i in 0..taken {
                let batch = reader.next().ok_or("the stream ended early")?;
                self.compare(i, &batch?)?;
            }
        } else {
            let batches: Vec<DeviceRecordBatch> =
                reader.take(taken as usize).collect::<Result<_, _>>()?;
            // The stream is closed; its batches live.
            for (i, batch) in (0..).zip(batches) {
                self.compare(i, &batch.to_host()?)?;
                drop(self.kept.swap(batch));
            }
        }
        self.totals.closed += 1;
        Ok(taken)
    }

    /// The producer fails: the batches before come, then the error, then the end.
    fn failed(&mut self) -> Result<u64> {
        let at = self.below(20);
        let (n, stream) = self.export(self.device, Some(at))?;
        let at = at.min(n);
        let mut reader = open(stream, ImportOptions::default())?.into_host_reader();
        for i in 0..at {
            let batch = reader.next().ok_or("the stream ended early")?;
            self.compare(i, &batch?)?;
        }
        match reader.next() {
            Some(Err(e)) if e.to_string().contains(PLANNED) => {}
            other => return Err(format!("instead of its error a stream gave {other:?}").into()),
        }
        if reader.next().is_some() {
            return Err("a stream went on after its error".into());
        }
        self.totals.failed += 1;
        Ok(at)
    }

    /// A device for one stream, some operation of which fails.
    fn own_device(&mut self) -> Result<u64> {
        let sim = SimDevice::new(SimConfig {
            capacity_bytes: 1 << 28,
            ..SimConfig::default()
        })?;
        let device = Device::new(sim.clone())?;
        let devices = Devices::new();
        devices.add(device.clone())?;
        let (n, stream) = self.export(&device, None)?;
        sim.faults().fail_nth(None, 1 + self.below(20 * n));
        let options = ImportOptions {
            devices: Some(devices),
            ..Default::default()
        };
        let mut i = 0;
        let read = || -> Result<()> {
            for batch in open(stream, options)?.into_host_reader() {
                self.compare(i, &batch?)?;
                i += 1;
            }
            Ok(())
        };
        let streamed = read();
        let fired = sim.faults().fired();
        sim.faults().clear();
        match streamed {
            Err(e) if fired == 0 || !is_injected(e.as_ref()) => return Err(e),
            Ok(()) if i != n => return Err(format!("{i} batches of {n} came back").into()),
            _ => {}
        }
        check_clean(&device)?;
        self.totals.devices += 1;
        self.totals.injected += fired;
        Ok(i)
    }

    fn compare(&self, i: u64, batch: &RecordBatch) -> Result<()> {
        if batch != self.pick(i) {
            return Err(format!("batch {i} of a stream came back with other values").into());
        }
        Ok(())
    }
}

/// Whether an error is what the simulated device answers instead of an operation: allocations are out of memory.
fn is_injected(e: &dyn std::error::Error) -> bool {
    let text = e.to_string();
    text.contains("injected failure") || text.contains("out of memory")
}

fn open(
    stream: FFI_ArrowDeviceArrayStream,
    options: ImportOptions,
) -> Result<DeviceRecordBatchStreamReader, arrow_device::Error> {
    // SAFETY: `new` requires a live stream that follows the specification and yields valid data. The callers just exported
    // it with this crate.
    unsafe { DeviceRecordBatchStreamReader::new(stream, options) }
}

/// A batch of a few types, with nulls.
fn batch(rows: usize) -> Result<RecordBatch> {
    let nulls = |i: usize| i % 7 != 3;
    let numbers: Int64Array = (0..rows).map(|i| nulls(i).then_some(i as i64)).collect();
    let texts: StringArray = (0..rows)
        .map(|i| nulls(i + 1).then(|| "x".repeat(i % 40)))
        .collect();
    let flags: BooleanArray = (0..rows)
        .map(|i| nulls(i + 2).then_some(i % 3 == 0))
        .collect();
    let lists = ListArray::from_iter_primitive::<Int32Type, _, _>(
        (0..rows).map(|i| nulls(i + 3).then(move || (0..i % 5).map(move |j| Some((i + j) as i32)))),
    );
    let columns: [(&str, ArrayRef, bool); 4] = [
        ("number", Arc::new(numbers), true),
        ("text", Arc::new(texts), true),
        ("flag", Arc::new(flags), true),
        ("list", Arc::new(lists), true),
    ];
    Ok(RecordBatch::try_from_iter_with_nullable(columns)?)
}

/// Waits until the device has nothing left to do, and checks that nothing of it is in use.
pub(crate) fn check_clean(device: &Device) -> Result<()> {
    let drop_errors = device.stats().drop_errors;
    if drop_errors > 0 {
        let last = device.take_drop_error().map(|e| e.to_string());
        let last = last.unwrap_or_default();
        return Err(format!("{drop_errors} releases failed; the last said: {last}").into());
    }
    let Some(sim) = device.backend().downcast_ref::<SimDevice>() else {
        device.synchronize()?;
        return Ok(());
    };
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        device.synchronize()?;
        // Staging memory that the device keeps for reuse.
        device.trim();
        let report = sim.report();
        if report.is_clean() {
            return Ok(());
        }
        if Instant::now() > end || !report.violations.is_empty() {
            return Err(format!("not everything was released: {report:?}").into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
