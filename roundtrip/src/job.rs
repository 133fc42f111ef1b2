//! The round trip itself. This file and `asynchronous.rs` hold every call of arrow-device.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_device::{
    ArrowDeviceType, Device, DeviceRecordBatch, DeviceRecordBatchReader,
    DeviceRecordBatchStreamReader, Devices, ExportOptions, FFI_ArrowDeviceArrayStream, SyncPolicy,
    TransferStats, upload_reader_ahead,
};
use arrow_schema::{ArrowError, SchemaRef};

use crate::args::Via;
use crate::compare::{Findings, compare_batches, compare_schemas};
use crate::input::Input;
use crate::simulation;

/// Why there is no result.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The device or an input cannot be used.
    Usage(String),
    /// Transfer or interchange failed.
    Job(String),
}

/// An input is read into memory before it is streamed, up to this many bytes: reading or generating
/// it must not count as transfer.
const READ_AHEAD: usize = 1 << 30;

/// How many batches of a stream are uploaded before they are asked for.
const READ_AHEAD_BATCHES: usize = 2;

/// What one input, or several, amounted to.
#[derive(Default, Debug)]
pub(crate) struct Outcome {
    pub name: String,
    pub batches: u64,
    pub rows: u64,
    pub differences: u64,
    /// Upload, export and import, until the device had finished. Zero for streams.
    pub up: Duration,
    /// From then on until the batch was readable on the host. Zero for streams.
    pub down: Duration,
    /// Waiting for the stream. Zero for single arrays.
    pub stream: Duration,
    pub stats: TransferStats,
}

/// A device and the way to it.
pub(crate) struct Job {
    device: Device,
    via: Via,
    /// 10^9 bytes per second of a memcpy on this machine, if the device is simulated.
    memcpy: Option<f64>,
}

impl Job {
    /// Opens the device. A memcpy is measured to judge a simulated one by.
    pub(crate) fn open(device: &str, via: Via) -> Result<Self, Failure> {
        #[cfg(feature = "oneapi")]
        arrow_device_oneapi::register(Devices::global());
        #[cfg(feature = "opencl")]
        arrow_device_opencl::register(Devices::global());
        #[cfg(feature = "vulkan")]
        arrow_device_vulkan::register(Devices::global());
        #[cfg(feature = "webgpu")]
        arrow_device_wgpu::register(Devices::global());
        let opened = Devices::open(device);
        let device = opened.map_err(|e| Failure::Usage(format!("{e} (see --help)")))?;
        let is_simulated = device.id().device_type == ArrowDeviceType::EXT_DEV;
        let memcpy = is_simulated.then(simulation::memcpy);
        Ok(Self {
            device,
            via,
            memcpy,
        })
    }

    /// 10^9 bytes per second of a memcpy on this machine, if the device is simulated in host memory.
    pub(crate) fn memcpy(&self) -> Option<f64> {
        self.memcpy
    }

    /// Sends all of `input` to the device and back, and compares. Calls `progress` with the number
    /// of rows that came back.
    pub(crate) fn run(
        &self,
        input: Input,
        findings: &mut Findings,
        progress: &dyn Fn(u64),
    ) -> Result<Outcome, Failure> {
        let before = self.device.stats();
        let found = findings.total;
        let mut outcome = Outcome {
            name: input.name,
            ..Outcome::default()
        };
        match self.via {
            Via::Array => self.run_arrays(input.reader, &mut outcome, findings, progress)?,
            Via::Stream | Via::Async => {
                self.run_stream(input.reader, &mut outcome, findings, progress)?
            }
        }
        outcome.differences = findings.total - found;
        outcome.stats = self.device.stats().since(&before);
        Ok(outcome)
    }

    fn run_arrays(
        &self,
        reader: Box<dyn RecordBatchReader + Send>,
        outcome: &mut Outcome,
        findings: &mut Findings,
        progress: &dyn Fn(u64),
    ) -> Result<(), Failure> {
        let schema = reader.schema();
        let mut same_schema = true;
        for batch in reader {
            let batch = batch.map_err(|e| unreadable(outcome, e))?;
            let (got, up, down) = self
                .there_and_back(&batch)
                .map_err(|e| failed(outcome, e))?;
            // Without what it does while the batches are compared.
            outcome.up += up;
            outcome.down += down;
            // A wrong schema is reported once.
            if same_schema {
                let before = findings.total;
                compare_schemas(
                    &place(outcome),
                    batch.schema_ref(),
                    got.schema_ref(),
                    findings,
                );
                same_schema = findings.total == before;
            }
            compare_batches(&place(outcome), &batch, &got, findings);
            outcome.add(&batch);
            progress(outcome.rows);
        }
        if outcome.batches == 0 {
            let batch = RecordBatch::new_empty(schema);
            let (got, ..) = self
                .there_and_back(&batch)
                .map_err(|e| failed(outcome, e))?;
            compare_schemas(
                &outcome.name,
                batch.schema_ref(),
                got.schema_ref(),
                findings,
            );
            compare_batches(&outcome.name, &batch, &got, findings);
        }
        Ok(())
    }

    /// Uploads, exports, imports and downloads a batch. Returns also how long it took until the
    /// device had it, and from then on.
    fn there_and_back(
        &self,
        batch: &RecordBatch,
    ) -> arrow_device::Result<(RecordBatch, Duration, Duration)> {
        let start = Instant::now();
        let on_device = self.device.upload(batch)?;
        let (array, schema) = on_device.export(SyncPolicy::Event)?;
        // From here on the C structs alone keep the memory alive.
        drop(on_device);
        // SAFETY: `import` requires live structs that follow the specification and hold valid data.
        // `export` just made both from an uploaded batch.
        let again = unsafe { DeviceRecordBatch::import(array, &schema, None) }?;
        self.device.synchronize()?;
        let up = start.elapsed();
        let start = Instant::now();
        let got = again.to_host()?;
        Ok((got, up, start.elapsed()))
    }

    /// Sends `tee` through a C stream to the device and back. Threads of their own read and upload it ahead.
    fn host_reader(&self, tee: Tee) -> arrow_device::Result<Box<dyn RecordBatchReader>> {
        if self.via == Via::Async {
            return crate::asynchronous::host_reader(tee, &self.device);
        }
        let uploads = upload_reader_ahead(tee, &self.device, READ_AHEAD_BATCHES)?;
        let options = ExportOptions::new(SyncPolicy::Event);
        let mut stream = FFI_ArrowDeviceArrayStream::new(uploads, options)?;
        // SAFETY: `from_raw` requires a live stream that follows the specification and yields valid
        // data. It was just made of a reader that uploads record batches.
        let reader = unsafe { DeviceRecordBatchStreamReader::from_raw(&mut stream) }?;
        Ok(Box::new(reader.into_host_reader()))
    }

    fn run_stream(
        &self,
        reader: Box<dyn RecordBatchReader + Send>,
        outcome: &mut Outcome,
        findings: &mut Findings,
        progress: &dyn Fn(u64),
    ) -> Result<(), Failure> {
        let schema = reader.schema();
        let log = Arc::new(Mutex::new(Log::default()));
        let tee = Tee {
            reader: read_ahead(reader),
            schema: schema.clone(),
            log: log.clone(),
        };
        let mut reader = self.host_reader(tee).map_err(|e| failed(outcome, e))?;
        compare_schemas(&outcome.name, &schema, &reader.schema(), findings);

        loop {
            let start = Instant::now();
            let next = reader.next();
            outcome.stream += start.elapsed();
            let got = match next {
                None => break,
                Some(Ok(got)) => got,
                Some(Err(e)) => {
                    // An error of the input goes through the stream and back. It may have been read ahead of a batch with which
                    // the device failed.
                    let input = lock(&log).error.take();
                    return Err(match input.filter(|text| e.to_string().contains(text)) {
                        Some(text) => Failure::Usage(format!("{}: {text}", place(outcome))),
                        None => failed(outcome, e.into()),
                    });
                }
            };
            let Some(sent) = lock(&log).sent.pop_front() else {
                findings.add(|| format!("{}: never sent, but came back", place(outcome)));
                break;
            };
            let expected = reader.schema();
            if *got.schema_ref() != expected {
                compare_schemas(&place(outcome), &expected, got.schema_ref(), findings);
            }
            compare_batches(&place(outcome), &sent, &got, findings);
            outcome.add(&sent);
            progress(outcome.rows);
        }
        drop(reader);
        let mut log = lock(&log);
        if let Some(text) = log.error.take() {
            let what = "the input's error was lost in the stream";
            return Err(Failure::Job(format!("{}: {what}: {text}", place(outcome))));
        }
        if !log.sent.is_empty() || !log.ended {
            findings.add(|| format!("{}: the stream ended before the input", place(outcome)));
        }
        Ok(())
    }
}

impl Outcome {
    fn add(&mut self, batch: &RecordBatch) {
        self.batches += 1;
        self.rows += batch.num_rows() as u64;
    }
}

/// Reads the next [`READ_AHEAD`] bytes.
fn read_ahead(mut reader: Box<dyn RecordBatchReader + Send>) -> Batches {
    let (mut ahead, mut bytes) = (Vec::new(), 0);
    while bytes < READ_AHEAD
        && let Some(batch) = reader.next()
    {
        bytes += batch.as_ref().map_or(0, RecordBatch::get_array_memory_size);
        ahead.push(batch);
    }
    Box::new(ahead.into_iter().chain(reader))
}

/// The input and the batch at hand, counted from 0.
fn place(outcome: &Outcome) -> String {
    format!("{}: batch {}", outcome.name, outcome.batches)
}

fn unreadable(outcome: &Outcome, e: ArrowError) -> Failure {
    Failure::Usage(format!("{}: {e}", place(outcome)))
}

fn failed(outcome: &Outcome, e: arrow_device::Error) -> Failure {
    Failure::Job(format!("{}: {e}", place(outcome)))
}

type Batches = Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + Send>;

/// What went into the stream and did not come back yet.
#[derive(Default)]
struct Log {
    sent: VecDeque<RecordBatch>,
    error: Option<String>,
    ended: bool,
}

fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A reader that keeps a clone of every batch for comparison. Clones share their buffers.
struct Tee {
    reader: Batches,
    schema: SchemaRef,
    log: Arc<Mutex<Log>>,
}

impl Iterator for Tee {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.reader.next();
        let mut log = lock(&self.log);
        match &next {
            Some(Ok(batch)) => log.sent.push_back(batch.clone()),
            Some(Err(e)) => log.error = Some(e.to_string()),
            None => log.ended = true,
        }
        next
    }
}

impl RecordBatchReader for Tee {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }
}
