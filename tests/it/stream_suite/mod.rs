//! Streams in and out on any device: every type, nothing copied, every failure.

use crate::support::{Nulls, all_types, assert_same_batch, batch, wide_batch};
use arrow_array::{RecordBatch, RecordBatchIterator, RecordBatchReader};
use arrow_device::{
    Device, DeviceRecordBatchReader, DeviceRecordBatchStreamReader, DeviceRecordBatches, Devices,
    Error, ExportOptions, FFI_ArrowDeviceArrayStream, ImportOptions, SyncPolicy, Validation,
    export_reader, upload_reader,
};

// What the program that includes this tests on.
use crate::rigs::rigs;

const EVENT: ExportOptions = ExportOptions::new(SyncPolicy::Event);

/// A device on which streams are tested, and what the tests must be able to do with it.
pub(crate) struct Rig {
    pub(crate) device: Device,
    /// They find the device.
    pub(crate) options: ImportOptions,
    /// What was not given back, or done wrong; `None` if nothing. Runs what is queued.
    pub(crate) unclean: Box<dyn Fn() -> Option<String>>,
    /// Lets the nth operation from now fail, once.
    pub(crate) fail_nth: Box<dyn Fn(u64)>,
    /// Takes that back; whether it has failed.
    pub(crate) failed: Box<dyn Fn() -> bool>,
}

impl Rig {
    #[track_caller]
    fn assert_clean(&self) {
        let mut last = None;
        for _ in 0..500 {
            // What was freed is counted when the queues have run, what copies held when the release thread has.
            self.device.synchronize().unwrap();
            self.device.trim();
            last = (self.unclean)();
            if last.is_none() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("{:?}: {}", self.device, last.unwrap_or_default());
    }
}

fn reader(batches: &[RecordBatch]) -> impl RecordBatchReader + Send + 'static {
    let batches: Vec<_> = batches.to_vec();
    let schema = batches[0].schema();
    RecordBatchIterator::new(batches.into_iter().map(Ok), schema)
}

fn open(
    stream: FFI_ArrowDeviceArrayStream,
    options: &ImportOptions,
) -> DeviceRecordBatchStreamReader {
    // SAFETY: the tests' streams keep to the interface.
    unsafe { DeviceRecordBatchStreamReader::new(stream, options.clone()) }.unwrap()
}

#[test]
fn record_batches_of_every_type() {
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    let batches: Vec<_> = [0, 1, 100]
        .into_iter()
        .map(|rows| batch(&types, rows, Nulls::Some, rows as u64))
        .collect();
    let mut devices = vec![(Devices::cpu(), ImportOptions::default())];
    let rigs = rigs();
    devices.extend(
        rigs.iter()
            .map(|rig| (rig.device.clone(), rig.options.clone())),
    );
    for (device, options) in devices {
        let stream = export_reader(reader(&batches), &device).unwrap();
        // In again, out again without a copy, and in.
        let reader = open(stream, &options);
        assert_eq!(reader.device_type(), device.id().device_type);
        let stream = FFI_ArrowDeviceArrayStream::new(reader, EVENT).unwrap();
        let full = ImportOptions {
            validation: Validation::Full,
            ..options
        };
        let host = open(stream, &full).into_host_reader();
        assert!(host.schema() == batches[0].schema());
        let mut n = 0;
        for (back, batch) in host.zip(&batches) {
            assert_same_batch(batch, &back.unwrap(), device.to_string());
            n += 1;
        }
        assert_eq!(n, batches.len());
    }
    for rig in rigs {
        rig.assert_clean();
    }
}

#[test]
fn device_batches_are_not_copied() {
    for rig in rigs() {
        let (device, options) = (&rig.device, &rig.options);
        let batch = wide_batch(20, 50);
        let up = device.upload(&batch).unwrap();
        device.synchronize().unwrap();
        let before = device.stats();
        let batches = vec![Ok(up.clone()), Ok(up.slice(3, 9).unwrap()), Ok(up)];
        let device_type = device.id().device_type;
        let batches = DeviceRecordBatches::new(batches, batch.schema(), device_type);
        let options_out = ExportOptions {
            counts_nulls: false,
            ..EVENT
        };
        let stream = FFI_ArrowDeviceArrayStream::new(batches, options_out).unwrap();
        let all: Vec<_> = open(stream, options).map(|b| b.unwrap()).collect();
        let cost = device.stats().since(&before);
        assert_eq!((cost.copies, cost.host_waits, cost.allocations), (0, 0, 0));
        // Batches outlive their stream.
        assert_same_batch(&batch.slice(3, 9), &all[1].to_host().unwrap(), "slice");
        drop(all);
        rig.assert_clean();
    }
}

#[test]
fn every_failure_in_a_stream_is_an_error_and_leaks_nothing() {
    for rig in rigs() {
        let (device, options) = (&rig.device, &rig.options);
        let batches = [wide_batch(8, 40), wide_batch(8, 40)];
        for n in 1.. {
            (rig.fail_nth)(n);
            let run = || -> Result<usize, Error> {
                let reader = upload_reader(reader(&batches), device);
                let stream = FFI_ArrowDeviceArrayStream::new(reader, EVENT)?;
                // SAFETY: this crate exported the stream, and this is its only owner.
                let reader =
                    unsafe { DeviceRecordBatchStreamReader::new(stream, options.clone()) }?;
                let mut rows = 0;
                for (batch, sent) in reader.into_host_reader().zip(&batches) {
                    let batch = batch?;
                    assert_same_batch(sent, &batch, "after a failure");
                    rows += batch.num_rows();
                }
                Ok(rows)
            };
            let result = run();
            let failed = (rig.failed)();
            rig.assert_clean();
            if result.is_ok() && !failed {
                assert!(n > 5, "{n} failures only");
                break;
            }
        }
    }
}
