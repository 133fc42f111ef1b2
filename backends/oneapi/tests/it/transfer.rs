//! Arrays of every type, and streams.

use std::sync::Arc;

use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchIterator, RecordBatchReader};
use arrow_device::{
    Device, DeviceArray, DeviceRecordBatchReader, DeviceRecordBatchStreamReader, Devices,
    ImportOptions, Result, SyncPolicy, export_reader,
};
use arrow_device_oneapi::{OneApiDevice, OneApiMemory, register_with};
use arrow_schema::{Field, Schema};

use crate::kit::compare::assert_same;
use crate::kit::r#gen::cases;
use crate::kit::types::all_types;
use crate::rigs::config;

fn devices(device: &Device) -> Devices {
    let devices = Devices::new();
    register_with(&devices, vec![device.clone()]);
    devices
}

/// Up, out as C structs, in again, and down.
fn round_trip(device: &Device, options: &ImportOptions, array: &ArrayRef) -> Result<ArrayRef> {
    let up = device.upload_array(array)?;
    let (out, schema) = up.export(SyncPolicy::Event)?;
    // SAFETY: both come from one export of this crate.
    let again = unsafe { DeviceArray::import_with(out, &schema, options) }?;
    assert_eq!(again.device(), device);
    again.to_host()
}

#[test]
fn every_type() {
    let Some(config) = config() else { return };
    for memory in [
        OneApiMemory::Device,
        OneApiMemory::Shared,
        OneApiMemory::Host,
    ] {
        let device = config.clone().with_memory(memory).open().unwrap();
        let options = ImportOptions::default().with_devices(devices(&device));
        for (seed, (name, data_type)) in all_types().into_iter().enumerate() {
            for (case, array) in cases(&data_type, seed as u64) {
                let context = format!("{memory:?} memory, {name}, {case}");
                let back = round_trip(&device, &options, &array)
                    .unwrap_or_else(|e| panic!("{context}: {e}"));
                assert_same(&array, &back, &context);
                if array.len() > 20 {
                    let part = array.slice(7, array.len() - 11);
                    let back = round_trip(&device, &options, &part)
                        .unwrap_or_else(|e| panic!("{context}: {e}"));
                    assert_same(&part, &back, &context);
                }
            }
        }
        let start = std::time::Instant::now();
        while OneApiDevice::of(&device).unwrap().outstanding()[0] > 0 {
            assert!(start.elapsed().as_secs() < 10, "memory is left");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

fn batches() -> (Arc<Schema>, Vec<RecordBatch>) {
    let types = all_types();
    let columns = |seed: u64| -> Vec<ArrayRef> {
        let array = |(_, data_type): &(String, _)| {
            crate::kit::r#gen::array(data_type, 100, crate::kit::r#gen::Nulls::Some, seed)
        };
        types.iter().map(array).collect()
    };
    let fields = types
        .iter()
        .map(|(name, data_type)| Field::new(name, data_type.clone(), true));
    let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    let batch = |seed| RecordBatch::try_new(schema.clone(), columns(seed)).unwrap();
    (schema.clone(), (0..5).map(batch).collect())
}

/// Batches with every type, through a C stream, to the host and on the device.
#[test]
fn streams() {
    let Some(config) = config() else { return };
    let device = config.open().unwrap();
    let options = ImportOptions::default().with_devices(devices(&device));
    let (schema, batches) = batches();
    let stream = || {
        let reader = RecordBatchIterator::new(batches.clone().into_iter().map(Ok), schema.clone());
        let stream = export_reader(reader, &device).unwrap();
        // SAFETY: the stream is this crate's.
        unsafe { DeviceRecordBatchStreamReader::new(stream, options.clone()) }.unwrap()
    };
    let same = |batch: &RecordBatch, back: &RecordBatch| {
        for (column, (want, have)) in batch.columns().iter().zip(back.columns()).enumerate() {
            assert_same(want, have, format!("column {column}"));
        }
    };
    let host = stream().into_host_reader();
    assert_eq!(host.schema(), schema);
    let back: Vec<_> = host.map(|batch| batch.unwrap()).collect();
    assert_eq!(back.len(), batches.len());
    batches
        .iter()
        .zip(&back)
        .for_each(|(batch, back)| same(batch, back));

    let reader = stream();
    assert_eq!(reader.schema(), schema);
    for (batch, on_device) in batches.iter().zip(reader) {
        let on_device = on_device.unwrap();
        assert_eq!(on_device.device(), &device);
        same(batch, &on_device.to_host().unwrap());
    }
}
