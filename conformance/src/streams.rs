//! Rules about streams.

use arrow_device::arrow_array::{RecordBatch, RecordBatchIterator, RecordBatchReader};
use arrow_device::arrow_schema::{ArrowError, SchemaRef};

use super::arrays::{assert_batch, batch};
use super::exports::{is_refused, options};
use super::samples::ROWS;
use super::{Subject, Verdict};
use arrow_device::{
    DeviceRecordBatchReader, DeviceRecordBatchStreamReader, DeviceRecordBatches, ExportOptions,
    FFI_ArrowDeviceArrayStream, ImportOptions, SyncPolicy, Validation, export_reader,
};

const EVENT: ExportOptions = ExportOptions::new(SyncPolicy::Event);
const REFUSED: Verdict = Verdict::Skipped("arrays of the device are not exported");

/// A stream of batches, which has an error at its end if it `fails`.
pub(super) fn reader(
    batches: &[RecordBatch],
    fails: Option<&str>,
) -> impl RecordBatchReader + Send + 'static {
    let schema: SchemaRef = batches[0].schema();
    let error = fails.map(|text| Err(ArrowError::ComputeError(text.into())));
    let all: Vec<_> = batches.iter().cloned().map(Ok).chain(error).collect();
    RecordBatchIterator::new(all, schema)
}

pub(super) fn open(
    stream: FFI_ArrowDeviceArrayStream,
    options: &ImportOptions,
) -> DeviceRecordBatchStreamReader {
    // SAFETY: the suite's streams are exports of `arrow-device`, each of which is opened once.
    let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, options.clone()) };
    reader.expect("a stream")
}

pub(super) fn types(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if is_refused(device) {
        return REFUSED;
    }
    let (all, options) = (batch(), options(device));
    let batches = [(0, ROWS), (3, 0), (5, 1)].map(|(offset, rows)| all.slice(offset, rows));
    for fails in [None, Some("this stream is to fail here")] {
        let stream = export_reader(reader(&batches, fails), device).expect("export_reader");
        // In, out again without a copy, and in again.
        let reader = open(stream, &options);
        assert_eq!(reader.device_type(), device.id().device_type);
        let stream = FFI_ArrowDeviceArrayStream::new(reader, EVENT).expect("export");
        let checked = ImportOptions {
            validation: Validation::Full,
            ..options.clone()
        };
        let mut host = open(stream, &checked).into_host_reader();
        assert_eq!(host.schema(), all.schema());
        for (i, sent) in batches.iter().enumerate() {
            let back = host.next().expect("a batch").expect("a batch");
            assert_batch(sent, &back, &format!("batch {i} of a stream"));
        }
        if let Some(text) = fails {
            let error = host.next().expect("an error").expect_err("an error");
            assert!(error.to_string().contains(text), "{error}");
        }
        assert!(host.next().is_none(), "the stream goes on after its end");
    }
    Verdict::Kept
}

pub(super) fn no_copies(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if is_refused(device) {
        return REFUSED;
    }
    let batch = batch();
    let up = device.upload(&batch).expect("upload");
    device.synchronize().expect("synchronize");
    let before = device.stats();
    let cut = up.slice(3, 9).expect("slice");
    let batches = vec![Ok(up.clone()), Ok(cut), Ok(up)];
    let batches = DeviceRecordBatches::new(batches, batch.schema(), device.id().device_type);
    let stream = FFI_ArrowDeviceArrayStream::new(
        batches,
        ExportOptions {
            counts_nulls: false,
            ..EVENT
        },
    );
    let reader = open(stream.expect("export"), &options(device));
    let all: Vec<_> = reader.map(|batch| batch.expect("a batch")).collect();
    let cost = device.stats().since(&before);
    let moved = (cost.copies, cost.host_waits, cost.allocations);
    assert_eq!(moved, (0, 0, 0), "{cost:?}");
    // Batches outlive their stream.
    let back = all[1].to_host().expect("to_host");
    assert_batch(&batch.slice(3, 9), &back, "a slice of a stream");
    Verdict::Kept
}
