//! What a backend says about exports and imports: what they carry, a refusal, which device an array belongs to; and whole
//! allocations that are taken out of their buffers.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::altered::Altered;
use crate::simkit::{Sim, ints, launch};
use crate::support_c::{CArray, empty};
use arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray, StructArray};
use arrow_device::device::sim::{SimConfig, SimMode};
use arrow_device::device::{AddressClass, DevicePtr, EventPtr, ExportSync};
use arrow_device::dlpack::{DlpackOptions, DlpackStream};
use arrow_device::{
    ArrowDeviceType, Device, DeviceArray, DeviceBuffer, DeviceBufferMut, DeviceId,
    DeviceRecordBatch, DeviceRecordBatchStreamReader, Devices, Error, ExportOptions,
    FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream, ImportOptions, Result, SyncPolicy,
};
use arrow_schema::{DataType, Field};

const OPENCL: DeviceId = DeviceId::new(ArrowDeviceType::OPENCL, 0);

/// A simulated device under another id, with other answers, and the simulated one behind it.
fn hooked(exports: ExportSync) -> (Device, Sim) {
    hooked_with(|device| device.capabilities.exports = exports)
}

fn hooked_with(alter: impl FnOnce(&mut Altered)) -> (Device, Sim) {
    let sim = Sim::with(SimConfig {
        mode: SimMode::Deferred,
        ..SimConfig::default()
    });
    let mut backend = Altered::new(sim.sim.clone());
    (backend.capabilities.id, backend.direct) = (OPENCL, Some(false));
    alter(&mut backend);
    (Device::new(Arc::new(backend)).unwrap(), sim)
}

fn batch() -> RecordBatch {
    let text: ArrayRef = Arc::new(StringArray::from(vec!["a", "bc", ""]));
    let numbers: ArrayRef = Arc::new(ints(3));
    RecordBatch::try_from_iter([("text", text), ("numbers", numbers)]).unwrap()
}

fn import(array: FFI_ArrowDeviceArray, devices: &Devices) -> Result<DeviceRecordBatch> {
    let options = ImportOptions {
        devices: Some(devices.clone()),
        ..Default::default()
    };
    // SAFETY: the array comes from an export of the same batch.
    unsafe { DeviceRecordBatch::import_as(array, batch().schema(), &options) }
}

fn only(device: &Device) -> Devices {
    let devices = Devices::new();
    devices.add(device.clone()).unwrap();
    devices
}

#[test]
fn an_export_hands_over_what_the_backend_says() {
    for (exports, sync, waits) in [
        (ExportSync::Event, SyncPolicy::Event, 0),
        (ExportSync::Event, SyncPolicy::Wait, 1),
        (ExportSync::QueueOrder, SyncPolicy::Event, 0),
        (ExportSync::QueueOrder, SyncPolicy::Wait, 1),
        (ExportSync::Wait, SyncPolicy::Event, 1),
    ] {
        let context = format!("{exports:?}, {sync:?}");
        let (device, sim) = hooked(exports);
        let up = device.upload(&batch()).unwrap();
        let before = device.stats();
        let array = up.export_array(&ExportOptions::new(sync)).unwrap();
        let cost = device.stats().since(&before);
        assert_eq!(cost.host_waits, waits, "{context}");
        assert_eq!(cost.events, 0, "{context}");
        let has_event = exports == ExportSync::Event && sync == SyncPolicy::Event;
        assert_eq!(!array.sync_event().is_null(), has_event, "{context}");
        let ready = sim.sim.report().pending_operations == 0;
        assert_eq!(ready, waits == 1, "{context}");
        // The deferred device runs nothing before somebody waits: the import reads in the order of its queue.
        drop(up);
        let again = import(array, &only(&device)).unwrap();
        assert_eq!(again.to_host().unwrap(), batch(), "{context}");
        drop((again, device));
        sim.assert_done();
    }
}

/// Memory of several owners, each with an event of its own.
#[test]
fn many_events_become_none_in_the_order_of_a_queue() {
    let (device, sim) = hooked(ExportSync::QueueOrder);
    let columns: Vec<DeviceArray> = (0..3)
        .map(|_| device.upload_array(&ints(3)).unwrap())
        .collect();
    let fields = (0..3).map(|i| Field::new(format!("c{i}"), DataType::Int32, true));
    let schema = Arc::new(arrow_schema::Schema::new(fields.collect::<Vec<_>>()));
    let together = DeviceRecordBatch::try_new(schema.clone(), &columns).unwrap();
    let before = device.stats();
    let array = together
        .export_array(&ExportOptions::new(SyncPolicy::Event))
        .unwrap();
    let cost = device.stats().since(&before);
    assert_eq!((cost.host_waits, cost.events, cost.queue_waits), (0, 0, 0));
    assert!(array.sync_event().is_null());
    let options = ImportOptions {
        devices: Some(only(&device)),
        ..Default::default()
    };
    // SAFETY: the array comes from the export above.
    let again = unsafe { DeviceRecordBatch::import_as(array, schema, &options) }.unwrap();
    for column in again.to_host().unwrap().columns() {
        assert_eq!(column.as_ref(), &ints(3) as &dyn arrow_array::Array);
    }
    drop((again, together, columns, options, device));
    sim.assert_done();
}

/// The order of the device's own queue says nothing about another device's work.
#[test]
fn the_order_of_a_queue_comes_after_other_devices() {
    let (device, sim) = hooked(ExportSync::QueueOrder);
    let other = Sim::new(SimMode::Deferred);
    let ran = Arc::new(AtomicUsize::new(0));
    let there = ran.clone();
    let queue = other.default_queue();
    launch(&queue, move |_| {
        there.fetch_add(1, Ordering::SeqCst);
        Ok(())
    })
    .unwrap();
    let ready = queue.record().unwrap();
    let home = device.default_queue();
    let memory = DeviceBufferMut::for_values::<i32>(&home, 4).unwrap();
    let address = memory.address();
    // SAFETY: `memory` is the owner of these 16 bytes, whose content does not matter.
    let values =
        unsafe { DeviceBuffer::from_raw(&device, address, 16, Box::new(Keep(memory)), ready) };
    let array = DeviceArray::from_values(DataType::Int32, 4, values, None).unwrap();
    assert_eq!(ran.load(Ordering::SeqCst), 0);
    let out = array
        .export_array(&ExportOptions::new(SyncPolicy::Event))
        .unwrap();
    assert_eq!(ran.load(Ordering::SeqCst), 1);
    assert!(out.sync_event().is_null());
    drop((out, array, queue, home, device));
    sim.assert_done();
    other.assert_done();
}

/// Memory as an owner.
struct Keep(#[allow(dead_code)] DeviceBufferMut);

#[test]
fn a_backend_may_refuse_exports() {
    let (device, sim) = hooked(ExportSync::Refused("its addresses are handles"));
    let up = device.upload(&batch()).unwrap();
    let numbers = up.column(1).unwrap();
    let refused = |result: Result<()>| {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("opencl:0"), "{text}");
        assert!(text.contains("its addresses are handles"), "{text}");
    };
    for sync in [SyncPolicy::Event, SyncPolicy::Wait] {
        refused(up.export(sync).map(drop));
        refused(up.export_array(&ExportOptions::new(sync)).map(drop));
        refused(numbers.export(sync).map(drop));
    }
    let reader = || arrow_array::RecordBatchIterator::new([Ok(batch())], batch().schema());
    let before = device.stats();
    refused(arrow_device::export_reader(reader(), &device).map(drop));
    assert_eq!(device.stats().since(&before).allocations, 0);
    // A stream of any reader reports it as the error of its first batch.
    let uploading = arrow_device::upload_reader(reader(), &device);
    let options = ExportOptions::new(SyncPolicy::Event);
    let stream = FFI_ArrowDeviceArrayStream::new(uploading, options).unwrap();
    let options = ImportOptions {
        devices: Some(only(&device)),
        ..Default::default()
    };
    // SAFETY: the stream is an export of this crate's.
    let mut stream = unsafe { DeviceRecordBatchStreamReader::new(stream, options) }.unwrap();
    refused(stream.next().unwrap().map(drop));
    drop(stream);
    // DLPack's own refusal of the type comes first.
    assert!(
        numbers
            .export_dlpack(&DlpackOptions::new(DlpackStream::NONE))
            .is_err()
    );
    assert_eq!(up.to_host().unwrap(), batch());
    drop((numbers, up, device));
    sim.assert_done();
}

/// Finds the device among these by the array's event or its first address.
fn resolver(
    devices: Vec<Device>,
) -> impl Fn(DeviceId, Option<EventPtr>, Option<DevicePtr>) -> Result<Option<Device>> {
    move |_, event, address| {
        let knows = |device: &&Device| match (event, address) {
            // SAFETY: only an `unsafe` import passes an event, which is live and of this type.
            (Some(event), _) => unsafe { device.backend().check_event(event) }.is_ok(),
            (None, Some(address)) => {
                device.backend().classify(address, 1).class == AddressClass::Device
            }
            (None, None) => false,
        };
        Ok(devices.iter().find(knows).cloned())
    }
}

#[test]
fn a_resolver_tells_devices_of_one_id_apart() {
    let (one, first) = hooked(ExportSync::Event);
    let (two, second) = hooked(ExportSync::Event);
    let devices = Devices::new();
    devices.register_resolver(
        ArrowDeviceType::OPENCL,
        resolver(vec![one.clone(), two.clone()]),
    );
    for sync in [SyncPolicy::Event, SyncPolicy::Wait] {
        for device in [&one, &two] {
            let up = device.upload(&batch()).unwrap();
            let array = up.export_array(&ExportOptions::new(sync)).unwrap();
            let again = import(array, &devices).unwrap();
            assert_eq!(again.device(), device, "{sync:?}");
            assert_eq!(again.to_host().unwrap(), batch(), "{sync:?}");
        }
    }
    // Nothing tells whose an array without buffers is: there is no device but those of the resolver.
    let empty = RecordBatch::from(StructArray::new_empty_fields(3, None));
    let up = one.upload(&empty).unwrap();
    let array = up
        .export_array(&ExportOptions::new(SyncPolicy::Wait))
        .unwrap();
    let options = ImportOptions {
        devices: Some(devices.clone()),
        ..Default::default()
    };
    // SAFETY: the array comes from the export above.
    let missing = unsafe { DeviceRecordBatch::import_as(array, empty.schema(), &options) };
    assert!(
        matches!(missing, Err(Error::DeviceNotAvailable { .. })),
        "{missing:?}"
    );
    // It is then a matter of the id.
    devices.add(two.clone()).unwrap();
    let array = up
        .export_array(&ExportOptions::new(SyncPolicy::Wait))
        .unwrap();
    // SAFETY: the array comes from the export above.
    let found = unsafe { DeviceRecordBatch::import_as(array, empty.schema(), &options) };
    assert_eq!(found.unwrap().device(), &two);
    drop((up, options, devices, one, two));
    first.assert_done();
    second.assert_done();
}

#[test]
fn what_a_resolver_does_wrong_is_refused_and_the_array_released() {
    let (device, sim) = hooked(ExportSync::Event);
    let other = Sim::new(SimMode::Async);
    let up = device.upload(&batch()).unwrap();
    let attempt = |devices: &Devices| {
        let array = up
            .export_array(&ExportOptions::new(SyncPolicy::Event))
            .unwrap();
        import(array, devices).unwrap_err().to_string()
    };
    let wrong = Devices::new();
    let returned = other.device.clone();
    wrong.register_resolver(ArrowDeviceType::OPENCL, move |_, _, _| {
        Ok(Some(returned.clone()))
    });
    let text = attempt(&wrong);
    assert!(
        text.contains("its resolver returned the device sim"),
        "{text}"
    );
    wrong.register_resolver(ArrowDeviceType::OPENCL, |_, _, _| panic!("no"));
    assert!(attempt(&wrong).contains("its resolver panicked"));
    wrong.register_resolver(ArrowDeviceType::OPENCL, |_, _, _| {
        Err(Error::InvalidArgument("whose context is this".into()))
    });
    assert!(attempt(&wrong).contains("whose context is this"));
    drop((wrong, up, device));
    sim.assert_done();
}

/// Safe requests and the CPU's arrays have nothing to resolve.
#[test]
fn a_resolver_is_asked_by_imports_only() {
    let asked = Arc::new(AtomicUsize::new(0));
    let devices = Devices::new();
    for device_type in [ArrowDeviceType::CPU, ArrowDeviceType::OPENCL] {
        let asked = asked.clone();
        devices.register_resolver(device_type, move |_, _, _| {
            asked.fetch_add(1, Ordering::SeqCst);
            Ok(None)
        });
    }
    assert!(devices.get(OPENCL).is_err());
    let up = Devices::cpu().upload(&batch()).unwrap();
    let array = up
        .export_array(&ExportOptions::new(SyncPolicy::Event))
        .unwrap();
    assert_eq!(import(array, &devices).unwrap().device(), &Devices::cpu());
    assert_eq!(asked.load(Ordering::SeqCst), 0);
    let (device, _sim) = hooked(ExportSync::Event);
    devices.add(device.clone()).unwrap();
    let array = device.upload(&batch()).unwrap();
    let array = array
        .export_array(&ExportOptions::new(SyncPolicy::Event))
        .unwrap();
    assert_eq!(import(array, &devices).unwrap().device(), &device);
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

unsafe extern "C" fn released(array: *mut CArray) {
    // SAFETY: whoever releases an array passes it.
    unsafe { (*array).release = None };
}

/// An address is sought only in a struct that is one of the type: its lists are as long as the type says.
#[test]
fn an_address_is_sought_where_the_type_has_one() {
    let (device, _sim) = hooked(ExportSync::Event);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let devices = Devices::new();
    let (all, found) = (seen.clone(), device.clone());
    devices.register_resolver(ArrowDeviceType::OPENCL, move |_, _, address| {
        all.lock().unwrap().push(address.map(|a| a.address()));
        Ok(Some(found.clone()))
    });
    let options = ImportOptions {
        devices: Some(devices),
        ..Default::default()
    };
    let mut buffers = [
        std::ptr::null::<c_void>(),
        std::ptr::without_provenance(0x4040),
    ];
    let attempt = |data_type: &DataType, counts: [i64; 5], buffers: *mut *const c_void| {
        let [length, null_count, offset, n_buffers, n_children] = counts;
        let raw = CArray {
            length,
            null_count,
            offset,
            n_buffers,
            n_children,
            buffers,
            release: Some(released),
            ..empty()
        };
        // SAFETY: both are `struct ArrowArray`.
        let array = unsafe { std::mem::transmute::<CArray, arrow_data::ffi::FFI_ArrowArray>(raw) };
        // SAFETY: the list of buffers lives until the import has returned, and there is nothing to wait for.
        let array = unsafe {
            FFI_ArrowDeviceArray::new(array, OPENCL.device_type, 0, std::ptr::null_mut())
        };
        let field = Arc::new(Field::new("", data_type.clone(), true));
        // SAFETY: the struct complies with the interface, except in what the import refuses before it follows a pointer.
        let imported = unsafe { DeviceArray::import_as(array, field, &options) };
        let address = seen.lock().unwrap().pop().unwrap();
        (address, imported.map(drop).map_err(|e| e.to_string()))
    };
    let list = buffers.as_mut_ptr();
    let (address, imported) = attempt(&DataType::Int32, [0, 0, 0, 2, 0], list);
    assert_eq!((address, imported), (Some(0x4040), Ok(())));
    for (counts, buffers) in [
        ([0, 0, 0, 1000, 0], list),
        ([0, 0, 0, 1, 0], list),
        ([0, 0, 0, -1, 0], list),
        ([0, 0, 0, 2, 0], std::ptr::null_mut()),
    ] {
        let (address, imported) = attempt(&DataType::Int32, counts, buffers);
        assert_eq!(address, None, "{counts:?}");
        assert!(imported.is_err(), "{counts:?}");
    }
    // Children that are missing.
    let fields = vec![Field::new("a", DataType::Int32, true)];
    for n_children in [0, 1, 1000] {
        let counts = [0, 0, 0, 1, n_children];
        let (address, imported) = attempt(&DataType::Struct(fields.clone().into()), counts, list);
        assert_eq!(address, None, "{n_children}");
        assert!(imported.is_err(), "{n_children}");
    }
}

/// A backend whose copies read any host memory at full speed gets no packed copies: large columns are copied from where they are.
#[test]
fn what_is_copied_directly_is_not_packed() {
    let column: ArrayRef = Arc::new(Int64Array::from_iter_values(0..1 << 18)); // 2 MiB
    let large = RecordBatch::try_from_iter([("a", column.clone()), ("b", column)]).unwrap();
    for direct in [true, false] {
        let (device, sim) = hooked_with(|device| device.direct = Some(direct));
        let before = device.stats();
        let up = device.upload(&large).unwrap();
        let cost = device.stats().since(&before);
        assert_eq!(cost.host_allocations == 0, direct, "{cost:?}");
        let packed = if direct { 0 } else { 4 << 20 };
        assert_eq!(cost.host_copied_bytes, packed, "{cost:?}");
        assert_eq!(cost.bytes_to_device, 4 << 20);
        assert_eq!(up.to_host().unwrap(), large);
        drop((up, device));
        sim.assert_done();
    }
}

#[test]
fn an_allocation_leaves_its_buffer_whole() {
    for mode in crate::simkit::MODES {
        let sim = Sim::new(mode);
        let (home, other) = (sim.default_queue(), sim.new_queue().unwrap());
        let make = || {
            let mut memory = DeviceBufferMut::allocate(&home, 100).unwrap();
            memory.fill(7).unwrap();
            memory.freeze().unwrap()
        };
        // Shared, cut, of another device.
        let whole = make();
        let shared = whole.clone();
        let (whole, e) = whole.into_raw(&home).unwrap_err();
        assert!(e.to_string().contains("shared"), "{e}");
        drop(shared);
        let cut = whole.slice(0, 8).unwrap();
        drop(whole);
        let (cut, e) = cut.into_raw(&home).unwrap_err();
        assert!(e.to_string().contains("not all of an allocation"), "{e}");
        let stranger = Sim::new(mode);
        let (cut, e) = cut.into_raw(&stranger.default_queue()).unwrap_err();
        assert!(e.to_string().contains("for memory of"), "{e}");
        assert_eq!(&*cut.to_host().unwrap(), [7; 8]);
        drop(cut);

        // The other queue waits for the fill, and for a loan's use.
        let whole = make();
        let lent = sim.new_queue().unwrap();
        let from = whole.on(&lent).unwrap();
        let address = from.address();
        launch(&lent, move |memory| {
            let seen = memory.slice::<u8>(address, 100)?;
            assert_eq!(seen, [7; 100]);
            Ok(())
        })
        .unwrap();
        drop(from);
        let before = sim.stats();
        let (base, bytes) = whole.into_raw(&other).unwrap();
        let cost = sim.stats().since(&before);
        assert_eq!((cost.host_waits, cost.copies, cost.frees), (0, 0, 0));
        assert_eq!(bytes, 128);
        // SAFETY: `into_raw` gave up these bytes, which are used on this queue and freed once.
        unsafe {
            other.raw().fill(base, 8, bytes).unwrap();
            other.raw().free(base, bytes).unwrap();
        }
        drop((home, other, lent));
        sim.assert_done();
    }
}

/// Memory that the crate did not allocate on the device has nothing to give.
#[test]
fn host_memory_has_no_allocation() {
    let cpu = Devices::cpu();
    let wrapped = arrow_device::DeviceBuffer::from(arrow_buffer::Buffer::from_vec(vec![1u8; 64]));
    let (wrapped, e) = wrapped.into_raw(&cpu.default_queue()).unwrap_err();
    assert!(e.to_string().contains("not all of an allocation"), "{e}");
    assert_eq!(&*wrapped.to_host().unwrap(), [1; 64]);
}
