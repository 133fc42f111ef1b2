//! The round trip itself: every call of the crate is in this file.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_device::{
    Device, DeviceRecordBatch, DeviceRecordBatchReader, DeviceRecordBatchStreamReader, Devices,
    FFI_ArrowDeviceArrayStream, SyncPolicy, TransferStats, export_reader,
};
use arrow_schema::{ArrowError, SchemaRef};

use crate::args::Via;
use crate::compare::{Findings, compare_batches, compare_schemas};
use crate::input::Input;
use crate::measure::batch_bytes;

/// Why there is no result.
#[derive(Debug)]
pub enum Failure {
    /// The device or an input cannot be used.
    Usage(String),
    /// Transfer or interchange failed.
    Job(String),
}

/// What one input, or several, amounted to.
#[derive(Default, Debug)]
pub struct Outcome {
    pub name: String,
    pub batches: u64,
    pub rows: u64,
    /// Of data sent, as it lies in host memory.
    pub bytes: u64,
    pub differences: u64,
    /// Upload and handing over, until the device was done. Not known for streams.
    pub up: Duration,
    /// From then on until the batch was readable on the host. Not known for streams.
    pub down: Duration,
    /// Waiting for the stream: reading the input, upload and download, which may overlap.
    pub stream: Duration,
    pub counters: Counters,
}

/// The crate's counters, named as in the report.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counters {
    pub allocations: u64,
    pub copies: u64,
    pub bytes_up: u64,
    pub bytes_down: u64,
    pub events: u64,
    pub queue_waits: u64,
    pub host_waits: u64,
}

impl From<TransferStats> for Counters {
    fn from(stats: TransferStats) -> Self {
        Self {
            allocations: stats.allocations,
            copies: stats.copies,
            bytes_up: stats.bytes_to_device,
            bytes_down: stats.bytes_to_host,
            events: stats.events,
            queue_waits: stats.queue_waits,
            host_waits: stats.host_waits,
        }
    }
}

/// A device and the way to it.
pub struct Job {
    device: Device,
    via: Via,
}

impl Job {
    /// Opens the device.
    pub fn open(device: &str, via: Via) -> Result<Self, Failure> {
        match Devices::open(device) {
            Ok(device) => Ok(Self { device, via }),
            Err(e) => Err(Failure::Usage(e.to_string())),
        }
    }

    /// Sends all of `input` there and back and compares. Calls `progress` with the rows that are
    /// done.
    pub fn run(
        &self,
        input: Input,
        findings: &mut Findings,
        progress: &mut dyn FnMut(u64),
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
        outcome.counters = self.device.stats().since(&before).into();
        Ok(outcome)
    }

    fn run_arrays(
        &self,
        reader: Box<dyn RecordBatchReader + Send>,
        outcome: &mut Outcome,
        findings: &mut Findings,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Failure> {
        let schema = reader.schema();
        let mut same_schema = true;
        for batch in reader {
            let batch = batch.map_err(|e| unreadable(outcome, e))?;
            let (got, up, down) = self
                .there_and_back(&batch)
                .map_err(|e| failed(outcome, e))?;
            outcome.up += up;
            outcome.down += down;
            // A wrong schema is worth telling once.
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

    /// Upload, export, import, download; and how long it took up and down.
    fn there_and_back(
        &self,
        batch: &RecordBatch,
    ) -> arrow_device::Result<(RecordBatch, Duration, Duration)> {
        let start = Instant::now();
        let on_device = self.device.upload(batch)?;
        let (array, schema) = on_device.export(SyncPolicy::Event)?;
        // From here on the C structs alone keep the memory.
        drop(on_device);
        // SAFETY: both structs come from `export` just now, and `upload` made valid data.
        let again = unsafe { DeviceRecordBatch::import(array, &schema) }?;
        self.device.synchronize()?;
        let up = start.elapsed();
        let start = Instant::now();
        let got = again.to_host()?;
        Ok((got, up, start.elapsed()))
    }

    /// `tee` through a C stream to the device and back.
    fn host_reader(&self, tee: Tee) -> arrow_device::Result<Box<dyn RecordBatchReader>> {
        if self.via == Via::Async {
            return crate::asynchronous::host_reader(tee, &self.device);
        }
        let mut stream: FFI_ArrowDeviceArrayStream = export_reader(Box::new(tee), &self.device)?;
        // SAFETY: the stream comes from `export_reader` just now, which makes valid data.
        let reader = unsafe { DeviceRecordBatchStreamReader::from_raw(&mut stream) }?;
        Ok(Box::new(reader.into_host_reader()))
    }

    fn run_stream(
        &self,
        reader: Box<dyn RecordBatchReader + Send>,
        outcome: &mut Outcome,
        findings: &mut Findings,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Failure> {
        let schema = reader.schema();
        let log = Arc::new(Mutex::new(Log::default()));
        let tee = Tee {
            reader,
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
                    // If it was the input's error, it went through the stream and back.
                    return Err(match lock(&log).error.take() {
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
        self.bytes += batch_bytes(batch);
    }
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
    reader: Box<dyn RecordBatchReader + Send>,
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
        self.reader.schema()
    }
}
