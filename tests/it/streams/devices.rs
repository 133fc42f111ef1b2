//! Streams over several devices of one type, and where readers end.

use arrow_array::{RecordBatch, RecordBatchIterator};
use arrow_device::device::sim::{FaultOp, SimMode};
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatchReader, DeviceRecordBatchStreamReader, DeviceRecordBatches,
    Devices, ExportOptions, FFI_ArrowDeviceArrayStream, ImportOptions, Result, SyncPolicy,
    Validation, upload_reader,
};
use arrow_schema::ArrowError;

use crate::simkit::{MODES, Sim};
use crate::support::{assert_same_batch, wide_batch};

const EVENT: ExportOptions = ExportOptions::new(SyncPolicy::Event);

/// Two devices, and options that find both.
fn two(mode: SimMode) -> ([Sim; 2], ImportOptions) {
    let sims = [Sim::new(mode), Sim::new(mode)];
    let devices = Devices::new();
    for sim in &sims {
        devices.add(sim.device.clone()).unwrap();
    }
    (
        sims,
        ImportOptions {
            devices: Some(devices),
            ..Default::default()
        },
    )
}

/// Batches of 50 rows; those at even places differ from the others.
fn batches(n: usize) -> Vec<RecordBatch> {
    (0..n).map(|i| wide_batch(8, 60).slice(i % 2, 50)).collect()
}

/// The stream of a producer that keeps its batches on both devices in turn.
fn stream_over(sims: &[Sim; 2], sent: &[RecordBatch]) -> FFI_ArrowDeviceArrayStream {
    let up = sent.iter().zip(sims.iter().cycle());
    let up: Vec<_> = up.map(|(batch, sim)| sim.upload(batch)).collect();
    let reader = DeviceRecordBatches::new(up, sent[0].schema(), ArrowDeviceType::EXT_DEV);
    FFI_ArrowDeviceArrayStream::new(reader, EVENT).unwrap()
}

fn open(
    stream: FFI_ArrowDeviceArrayStream,
    options: &ImportOptions,
) -> DeviceRecordBatchStreamReader {
    // SAFETY: this crate exported the stream with its arrays, and this is its only owner.
    unsafe { DeviceRecordBatchStreamReader::new(stream, options.clone()) }.unwrap()
}

#[test]
fn batches_of_two_devices_go_out_and_in() {
    for mode in MODES {
        for validation in [Validation::default(), Validation::Full] {
            let (sims, options) = two(mode);
            let options = ImportOptions {
                validation,
                ..options
            };
            let sent = batches(6);
            let reader = open(stream_over(&sims, &sent), &options);
            assert_eq!(reader.device_type(), ArrowDeviceType::EXT_DEV);
            let back: Vec<_> = reader.map(|batch| batch.unwrap()).collect();
            assert_eq!(back.len(), sent.len());
            for ((back, sent), sim) in back.iter().zip(&sent).zip(sims.iter().cycle()) {
                assert_eq!(back.device(), &sim.device);
                assert_same_batch(sent, &back.to_host().unwrap(), sim.id());
            }
            drop(back);
            sims.iter().for_each(Sim::assert_done);
        }
    }
}

/// Each batch is brought down from its own device, on that device's queue for copies, of which there is one, after its sizes
/// were read on another one.
#[test]
fn batches_of_two_devices_come_down() {
    for mode in MODES {
        for prefetch in [0, 1, 3] {
            let (sims, options) = two(mode);
            let sent = batches(6);
            let stream = stream_over(&sims, &sent);
            let before = sims.each_ref().map(|sim| {
                sim.faults().clear();
                sim.stats()
            });
            let reader = open(stream, &options).into_host_reader();
            let back: Vec<_> = reader.with_prefetch(prefetch).map(Result::unwrap).collect();
            assert_eq!(back.len(), sent.len());
            for (back, sent) in back.iter().zip(&sent) {
                assert_same_batch(sent, back, prefetch);
            }
            for (sim, before) in sims.iter().zip(&before) {
                let queues = sim.faults().seen(FaultOp::NewQueue);
                assert_eq!(
                    queues,
                    2 * u64::from(prefetch > 0),
                    "{} {prefetch}",
                    sim.id()
                );
                let cost = sim.stats().since(before);
                assert!(
                    cost.bytes_to_host > 0 && cost.bytes_on_device == 0,
                    "{cost:?}"
                );
            }
            drop(back);
            sims.iter().for_each(Sim::assert_done);
        }
    }
}

/// After an error there is nothing more, though the reader beneath has more.
#[test]
fn readers_end_with_an_error() {
    let sent = batches(2);
    let schema = sent[0].schema();
    let items = || {
        let error = Err(ArrowError::ParseError("line 7".into()));
        vec![Ok(sent[0].clone()), error, Ok(sent[1].clone())]
    };
    fn ends<T>(mut reader: impl Iterator<Item = Result<T>>) {
        assert!(reader.next().unwrap().is_ok());
        assert!(reader.next().unwrap().is_err());
        assert!(reader.next().is_none() && reader.next().is_none());
    }
    let host = RecordBatchIterator::new(items(), schema.clone());
    ends(upload_reader(host, &Devices::cpu()));
    let up = items()
        .into_iter()
        .map(|batch| Devices::cpu().upload(&batch?));
    ends(DeviceRecordBatches::new(
        up,
        schema.clone(),
        ArrowDeviceType::CPU,
    ));
    // Of an upload.
    let sim = Sim::new(SimMode::Async);
    let host = RecordBatchIterator::new(sent.iter().cloned().map(Ok), schema);
    let mut reader = upload_reader(host, &sim);
    sim.faults().fail_nth(FaultOp::Allocate, 1);
    assert!(reader.next().unwrap().is_err());
    assert!(reader.next().is_none());
    drop(reader);
    sim.assert_done();
}
