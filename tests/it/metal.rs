//! Memory of type METAL that is the host's: arrays, batches and streams, out and in.

use std::sync::atomic::{AtomicI64, Ordering};

use crate::support::producer::{ints, relabel};
use crate::support::{
    Nulls, all_types, assert_same, assert_same_batch, batch, variants, wide_batch,
    zero_column_batch,
};
use crate::support_c::export::field;
use crate::support_c::{CArray, Foreign, c};
use arrow_array::{Array, RecordBatch, RecordBatchIterator, StructArray};
use arrow_data::ArrayData;
use arrow_device::{
    ArrowDeviceType, Device, DeviceArray, DeviceRecordBatch, DeviceRecordBatchReader,
    DeviceRecordBatchStreamReader, Devices, Error, ExportOptions, FFI_ArrowDeviceArrayStream,
    ImportOptions, SyncPolicy, TransferStats, Validation, export_reader, metal,
};
use arrow_device_conformance::{Subject, run};
use arrow_schema::DataType;

const PAGE: usize = 16 << 10;
/// What ArrowMetal writes, and what nanoarrow does: the registry id of an Apple GPU.
const IDS: [i64; 2] = [-1, 0x1_0000_03a4];

fn options() -> ImportOptions {
    let devices = Devices::new();
    devices.register(ArrowDeviceType::METAL, |id| Ok(metal::shared_memory(id)));
    ImportOptions {
        devices: Some(devices),
        ..Default::default()
    }
}

fn wait() -> ExportOptions {
    ExportOptions::new(SyncPolicy::Wait)
}

/// Checks that each buffer of a struct, and of those below it, begins a page, and returns how many there are. The lengths that
/// follow the data of a view array are not the array's own: they lie in the export.
fn buffers_at_pages(array: &CArray, data: &ArrayData, context: &str) -> usize {
    let is_view = matches!(data.data_type(), DataType::Utf8View | DataType::BinaryView);
    let n_buffers = array.n_buffers as usize - usize::from(is_view);
    let mut found = 0;
    for i in 0..n_buffers {
        // SAFETY: the struct is live, and has `n_buffers` pointers.
        let buffer = unsafe { *array.buffers.add(i) };
        assert_eq!(buffer.addr() % PAGE, 0, "{context}, buffer {i}");
        found += usize::from(!buffer.is_null());
    }
    let mut children = data.child_data().iter();
    for i in 0..array.n_children as usize {
        // SAFETY: the struct is live, and has `n_children` children.
        let child = unsafe { &**array.children.add(i) };
        found += buffers_at_pages(child, children.next().unwrap(), context);
    }
    if !array.dictionary.is_null() {
        // SAFETY: the struct is live, and so is its dictionary.
        let dictionary = unsafe { &*array.dictionary };
        found += buffers_at_pages(dictionary, children.next().unwrap(), context);
    }
    found
}

#[test]
fn every_type_out_and_in() {
    let mut buffers = 0;
    for (i, (name, data_type)) in all_types().into_iter().enumerate() {
        let whole = crate::support::array(&data_type, 70, Nulls::Some, i as u64);
        let id = IDS[i % 2];
        let device = metal::shared_memory(id);
        for made in variants(&whole, 3) {
            let (array, context) = (
                made.array(),
                format!("{name}, {:?} on {device}", made.variant),
            );
            let up = device.upload_array(&array).unwrap();
            let mut exported = up.export_array(&wait()).unwrap();
            assert_eq!(exported.device_type(), ArrowDeviceType::METAL);
            assert_eq!(exported.device_id(), id);
            assert!(c(&mut exported).sync_event.is_null(), "{context}");
            buffers += buffers_at_pages(&c(&mut exported).array, &array.to_data(), &context);
            let options = ImportOptions {
                validation: Validation::Full,
                ..options()
            };
            // SAFETY: the struct comes from an export of this crate, and the type is the exported one.
            let again = unsafe { DeviceArray::import_as(exported, field(&data_type), &options) };
            let again = again.unwrap();
            assert_eq!(*again.device(), device, "{context}");
            drop(up);
            let (down, stats) = TransferStats::scope(|| again.to_host().unwrap());
            assert_eq!(stats.host_copied_bytes, 0, "{context}");
            assert_same(&array, &down, &context);
        }
    }
    assert!(buffers > 1000, "{buffers}");
}

/// The bytes after a buffer's last one, up to the end of its page, which a consumer that wraps pages sees.
#[test]
fn pages_end_with_zeros() {
    let device = metal::shared_memory(-1);
    let used = wide_batch(8, 5000);
    for _ in 0..3 {
        // Memory that held other values before.
        drop(device.upload(&used).unwrap());
        let up = device.upload(&batch(&[DataType::Int64], 10, Nulls::Some, 1));
        let column = up.unwrap().column(0).unwrap();
        let values = column.values_on::<i64>(&device.default_queue()).unwrap();
        let address = values.address().as_ptr().cast::<u8>();
        // SAFETY: the memory is the host's, and each buffer has whole pages.
        let page = unsafe { std::slice::from_raw_parts(address, PAGE) };
        assert!(page[80..].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn compact_copies_have_pages_too() {
    let host = wide_batch(8, 3000);
    let device = metal::shared_memory(3);
    let part = device.upload(&host).unwrap().slice(7, 2000).unwrap();
    let mut exported = part.compact().unwrap().export_array(&wait()).unwrap();
    let data = StructArray::from(host.clone()).to_data();
    assert!(buffers_at_pages(&c(&mut exported).array, &data, "compact") > 8);
    drop(exported);
    let twice = DeviceRecordBatch::concat(&host.schema(), &[part.clone(), part], None).unwrap();
    let expected = host.slice(7, 2000);
    let expected = arrow_select::concat::concat_batches(&host.schema(), [&expected, &expected]);
    assert_same_batch(&expected.unwrap(), &twice.to_host().unwrap(), "concat");
}

#[test]
fn from_and_to_other_devices() {
    let host = wide_batch(8, 300);
    let device = metal::shared_memory(1);
    let cpu = Devices::cpu().upload(&host).unwrap();
    let shared = cpu.slice(3, 200).unwrap().to_device(&device).unwrap();
    let expected = host.slice(3, 200);
    assert_same_batch(&expected, &shared.to_host().unwrap(), "from the CPU");
    let (on_cpu, stats) = TransferStats::scope(|| shared.to_device(&Devices::cpu()).unwrap());
    assert_eq!((stats.host_copied_bytes, stats.copies), (0, 0));
    assert_same_batch(&expected, &on_cpu.to_host().unwrap(), "to the CPU");
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        let sim = Devices::simulated().unwrap();
        let there = shared.to_device(&sim).unwrap();
        let back = there.to_device(&device).unwrap();
        assert_same_batch(&expected, &back.to_host().unwrap(), "there and back");
    }
}

#[test]
fn batches_without_rows_or_columns() {
    let device = metal::shared_memory(-1);
    for host in [zero_column_batch(5), wide_batch(8, 3).slice(1, 0)] {
        let (array, schema) = device
            .upload(&host)
            .unwrap()
            .export(SyncPolicy::Event)
            .unwrap();
        // SAFETY: both structs come from one export of this crate.
        let again = unsafe { DeviceRecordBatch::import(array, &schema, &options()) };
        assert_same_batch(&host, &again.unwrap().to_host().unwrap(), "empty");
    }
}

/// What arrow-rs has for no bytes is no address of offsets.
#[test]
fn a_slice_without_rows_has_an_offset_on_the_cpu() {
    let texts = crate::support::array(&DataType::Utf8, 5, Nulls::None, 1);
    let shared = metal::shared_memory(-1).upload_array(&texts).unwrap();
    let none = shared.slice(0, 0).unwrap();
    let on_cpu = none.to_device(&Devices::cpu()).unwrap();
    let mut exported = on_cpu.export_array(&wait()).unwrap();
    // SAFETY: the export is live, and an array of texts has one offset at least.
    let first = unsafe { *(*c(&mut exported).array.buffers.add(1)).cast::<i32>() };
    assert_eq!(first, 0);
}

/// As nanoarrow and ArrowMetal write them: buffers that start anywhere.
#[test]
fn arrays_of_other_producers() {
    for (i, (name, data_type)) in all_types().into_iter().enumerate() {
        let host = crate::support::array(&data_type, 20, Nulls::Some, i as u64);
        let mut foreign = Foreign::new(&host.to_data(), &Devices::cpu());
        foreign.device_array.device_type = ArrowDeviceType::METAL.value();
        foreign.device_array.device_id = IDS[i % 2];
        let again = foreign.import(&options()).unwrap();
        assert_eq!(again.device().id().id, IDS[i % 2]);
        assert_same(&host, &again.to_host().unwrap(), &name);
        drop(again);
        foreign.assert_released(&name);
    }
}

#[test]
fn only_when_it_is_asked_for() {
    let devices = Devices::new();
    let without = ImportOptions {
        devices: Some(devices.clone()),
        ..Default::default()
    };
    for id in IDS {
        let import = |options: &ImportOptions| {
            let array = relabel(ints_exported(), ArrowDeviceType::METAL, id);
            // SAFETY: the array is valid host memory.
            unsafe { DeviceRecordBatch::import_as(array, ints().schema(), options) }
        };
        let refused = import(&without).unwrap_err();
        assert!(matches!(refused, Error::DeviceNotAvailable { .. }));
        assert!(refused.to_string().contains("module `metal`"), "{refused}");
        let taken = import(&options()).unwrap();
        assert_same_batch(&ints(), &taken.to_host().unwrap(), "taken");
        // The same for a set of devices that has it.
        devices.add(metal::shared_memory(id)).unwrap();
        assert_eq!(import(&without).unwrap().device(), taken.device());
    }
}

#[test]
fn an_event_is_refused() {
    let event = 42_u64;
    let host = crate::support::array(&DataType::Int32, 5, Nulls::Some, 1);
    for options in [options(), {
        let devices = Devices::new();
        devices.add(metal::shared_memory(-1)).unwrap();
        ImportOptions {
            devices: Some(devices),
            ..Default::default()
        }
    }] {
        let mut foreign = Foreign::new(&host.to_data(), &Devices::cpu());
        foreign.device_array.device_type = ArrowDeviceType::METAL.value();
        foreign.device_array.device_id = -1;
        foreign.device_array.sync_event = std::ptr::from_ref(&event).cast_mut().cast();
        let refused = foreign.import(&options).unwrap_err().to_string();
        for part in ["sync_event", "metal:-1", "null event"] {
            assert!(refused.contains(part), "{refused} lacks {part}");
        }
        foreign.assert_released("refused");
    }
}

#[test]
fn streams() {
    let batches: Vec<_> = (1..4).map(|n| wide_batch(8, 100 * n)).collect();
    let reader = RecordBatchIterator::new(batches.clone().into_iter().map(Ok), batches[0].schema());
    let stream: FFI_ArrowDeviceArrayStream =
        export_reader(reader, &metal::shared_memory(-1)).unwrap();
    // SAFETY: `stream` is valid, and nothing else reads it.
    let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, options()) }.unwrap();
    assert_eq!(reader.device_type(), ArrowDeviceType::METAL);
    let back: Vec<RecordBatch> = reader.into_host_reader().map(Result::unwrap).collect();
    assert_eq!(back.len(), 3);
    for (expected, actual) in batches.iter().zip(&back) {
        assert_same_batch(expected, actual, "stream");
    }
}

#[test]
fn one_device_for_an_id() {
    let (a, b): (Device, Device) = (metal::shared_memory(9), metal::shared_memory(9));
    assert!(a == b && a != metal::shared_memory(10));
    assert!(a.is_host_readable() && a.is_synchronous());
    assert_eq!(a.to_string(), "metal:9");
}

#[test]
fn keeps_the_contract_of_a_backend() {
    let next = AtomicI64::new(100);
    let another = move || metal::shared_memory(next.fetch_add(1, Ordering::Relaxed));
    run(&Subject::new(metal::shared_memory(99)).with_another(another));
}

fn ints_exported() -> arrow_device::FFI_ArrowDeviceArray {
    let up = Devices::cpu().upload(&ints()).unwrap();
    up.export_array(&wait()).unwrap()
}
