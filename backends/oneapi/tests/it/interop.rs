//! With programs in plain SYCL: one that produces for this crate, one that consumes, each with pending events.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{Array, Int64Array, RecordBatch};
use arrow_device::abi::FFI_ArrowDeviceArray;
use arrow_device::{Device, DeviceArray, Devices, ImportOptions, SyncPolicy};
use arrow_device_oneapi::{OneApiConfig, OneApiDevice, adopt_queue, register_with};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field};

use crate::first::number;
use crate::fork_kit::alone;
use crate::gate::{Gate, hold_by_event, hold_by_host_task};
use crate::programs::*;
use crate::suite::soon;

const ROWS: i64 = 5000;

/// Imports what a program produces with `how`, on a set of devices. The producer's work waits for the gate.
fn import(devices: &Devices, number: usize, how: c_int) -> (DeviceArray, Gate) {
    let mut raw = std::mem::MaybeUninit::<FFI_ArrowDeviceArray>::zeroed();
    // SAFETY: the struct has the layout of the specification; the gate is opened once.
    let gate = unsafe {
        let gate = Shared((programs().gate_new)());
        let out = raw.as_mut_ptr().cast();
        let made = (programs().produce)(out, number as i64, ROWS, how, gate.get());
        assert_eq!(made, 0);
        Gate::new(move || (programs().gate_open)(gate.get()))
    };
    let schema = FFI_ArrowSchema::try_from(Field::new("a", DataType::Int64, true)).unwrap();
    let options = ImportOptions::default().with_devices(devices.clone());
    // SAFETY: the producer follows the specification.
    let array = unsafe {
        DeviceArray::import_with(
            FFI_ArrowDeviceArray::from_raw(raw.as_mut_ptr()),
            &schema,
            &options,
        )
    };
    (array.unwrap(), gate)
}

fn values(array: &dyn Array) -> Vec<i64> {
    array.as_primitive::<Int64Type>().values().to_vec()
}

fn expected(factor: i64) -> Vec<i64> {
    (0..ROWS).map(|i| factor * i).collect()
}

fn released() {
    // SAFETY: it has no requirement.
    let live = || unsafe { (programs().producer_live)() };
    assert!(soon(|| live() == 0), "an array was not released");
}

fn devices(device: &Device) -> Devices {
    let devices = Devices::new();
    register_with(&devices, vec![device.clone()]);
    devices
}

/// Tests whose producers are counted run one by one.
static ONE: Mutex<()> = Mutex::new(());

#[test]
fn a_program_produces() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(number) = number() else { return };
    for own_context in [false, true] {
        let config = OneApiConfig::new(number);
        let device = if own_context {
            config.with_own_context()
        } else {
            config
        }
        .open()
        .unwrap();
        device
            .upload_array(&Int64Array::from(vec![1]))
            .unwrap()
            .to_host()
            .unwrap();
        let hows = [
            0,
            OUT_OF_ORDER,
            SHARED,
            EVENT_OF_HOST,
            OWN_CONTEXT,
            NO_HANDLER,
            OWN_CONTEXT | EVENT_OF_HOST | OUT_OF_ORDER,
        ];
        for how in hows {
            // Until the gate is open, the queue waits, and no thread.
            let (array, gate) = import(&devices(&device), number, how);
            let queue = device.new_queue().unwrap();
            drop(array.values_on::<i64>(&queue).unwrap());
            let event = queue.record().unwrap().unwrap();
            assert!(!event.is_complete().unwrap(), "how {how}");
            gate.open();
            event.wait().unwrap();
            // The memory is CPU memory of this process, whatever context it is of.
            assert_eq!(values(&array.to_host().unwrap()), expected(3), "how {how}");
            drop(array);
            released();
        }
    }
}

/// A host task that throws leaves its event complete, and without a handler of the queue's, asking for the exception would end the
/// process.
#[test]
fn a_program_fails_without_a_handler() {
    // The exceptions stay where any test's `throw_asynchronous` would find them.
    alone(
        "interop::a_program_fails_without_a_handler",
        fails_without_a_handler,
    );
}

fn fails_without_a_handler() {
    let Some(number) = number() else { return };
    let device = OneApiConfig::new(number).open().unwrap();
    for how in [FAILS, FAILS | NO_HANDLER, FAILS | NO_HANDLER | OWN_CONTEXT] {
        let (array, gate) = import(&devices(&device), number, how);
        gate.open();
        let _ = array.to_host();
        drop(array);
        released();
    }
    let (array, gate) = import(&devices(&device), number, 0);
    gate.open();
    assert_eq!(values(&array.to_host().unwrap()), expected(3));
    drop(array);
    released();
}

/// SYCL itself crashes when threads wait across contexts.
#[test]
fn events_of_other_contexts_on_many_threads() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(number) = number() else { return };
    let device = OneApiConfig::new(number).open().unwrap();
    let own = OneApiConfig::new(number).with_own_context().open().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let device = if thread % 2 == 0 { &device } else { &own };
            scope.spawn(move || {
                for round in 0..6 {
                    let how = [0, OWN_CONTEXT, OWN_CONTEXT | EVENT_OF_HOST][round % 3];
                    let (array, gate) = import(&devices(device), number, how);
                    let queue = device.new_queue().unwrap();
                    drop(array.values_on::<i64>(&queue).unwrap());
                    gate.open();
                    assert_eq!(
                        values(&array.start_to_host_on(&queue).unwrap().wait().unwrap()),
                        expected(3)
                    );
                }
            });
        }
    });
    released();
}

fn sevens() -> RecordBatch {
    let values: Int64Array = expected(7).into();
    RecordBatch::try_from_iter([("a", Arc::new(values) as _)]).unwrap()
}

/// The export's event is pending, and the consumer's queue waits for it.
#[test]
fn a_program_consumes() {
    let Some(number) = number() else { return };
    let device = OneApiConfig::new(number).open().unwrap();
    for held_by_host_task in [true, false] {
        let queue = device.new_queue().unwrap();
        let gate = match held_by_host_task {
            true => hold_by_host_task(&queue, false),
            false => hold_by_event(&queue),
        };
        let up = device.upload_on(&sevens(), &queue).unwrap();
        let (array, _schema) = up.export(SyncPolicy::Event).unwrap();
        assert!(!array.sync_event().is_null(), "the upload is pending");
        let buffer = array.array().child(0).buffer(1);
        // SAFETY: the export has one child with one buffer of values, and lives until the consumer has ended.
        unsafe {
            let consumed = (programs().consume)((&raw const array).cast(), buffer.cast(), ROWS);
            assert!(!consumed.is_null());
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!((programs().consumed_is_complete)(consumed), 0);
            gate.open();
            assert_eq!((programs().consumed_is)(consumed, 7), 1);
        }
    }
}

/// A program's own queue: its work and ours run in one order, and its context's memory is found.
#[test]
fn a_program_lends_its_queue() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(number) = number() else { return };
    // SAFETY: the queues live until they are deleted at the end.
    unsafe {
        let theirs = (programs().queue_new)(number as i64, OWN_CONTEXT);
        let config = OneApiConfig::from_queue(theirs).unwrap();
        let device = config
            .with_memory(arrow_device_oneapi::OneApiMemory::Shared)
            .open()
            .unwrap();
        assert_eq!(device.id().id, number as i64);

        // Their host task comes after our upload, and our download after that.
        let up = device.upload_array(&Int64Array::from(expected(7))).unwrap();
        let event = {
            let lent = up.values_on::<i64>(&device.default_queue()).unwrap();
            let address = lent.address().as_ptr().cast();
            let handle = device.default_queue().raw().stream_handle().unwrap();
            assert_eq!(
                (programs().scale_by_host_task)(
                    std::ptr::with_exposed_provenance_mut(handle),
                    address,
                    ROWS,
                    2
                ),
                0
            );
            drop(lent);
            device.default_queue().record().unwrap().unwrap()
        };
        event.wait().unwrap();
        assert_eq!(values(&up.to_host().unwrap()), expected(14));

        // The context's own memory is found by its address, and by the event of an export of ours.
        let backend = OneApiDevice::of(&device).unwrap();
        let memory = (programs().queue_malloc)(theirs, 100);
        assert!(
            backend
                .owns(arrow_device::device::DevicePtr::new(memory))
                .unwrap()
        );
        (programs().queue_free)(theirs, memory);
        let others = OneApiConfig::new(number).open().unwrap();
        let devices = Devices::new();
        register_with(&devices, vec![others.clone(), device.clone()]);
        for (from, policy) in [
            (&device, SyncPolicy::Event),
            (&device, SyncPolicy::Wait),
            (&others, SyncPolicy::Wait),
        ] {
            let (array, schema) = from
                .upload_array(&Int64Array::from(expected(7)))
                .unwrap()
                .export(policy)
                .unwrap();
            let options = ImportOptions::default().with_devices(devices.clone());
            let again = DeviceArray::import_with(array, &schema, &options).unwrap();
            assert_eq!(again.device(), from);
            assert_eq!(values(&again.to_host().unwrap()), expected(7));
        }

        let out_of_order = (programs().queue_new)(number as i64, OUT_OF_ORDER);
        for refused in [
            OneApiConfig::from_queue(out_of_order).map(drop),
            adopt_queue(&others, out_of_order).map(drop),
        ] {
            let refused = refused.unwrap_err().to_string();
            assert!(
                refused.contains("out of order") && refused.contains("property::queue::in_order"),
                "{refused}"
            );
        }
        let refused = adopt_queue(&others, theirs).unwrap_err().to_string();
        assert!(refused.contains("another context"), "{refused}");
        let refused = adopt_queue(&others, std::ptr::null())
            .unwrap_err()
            .to_string();
        assert!(refused.contains("null"), "{refused}");
        let in_order = (programs().queue_new)(number as i64, 0);
        let adopted = adopt_queue(&others, in_order).unwrap();
        let up = others
            .upload_array_on(&Int64Array::from(expected(7)), &adopted)
            .unwrap();
        assert_eq!(
            values(&up.start_to_host_on(&adopted).unwrap().wait().unwrap()),
            expected(7)
        );
        drop((up, adopted, device, others));
        for queue in [theirs, out_of_order, in_order] {
            (programs().queue_delete)(queue);
        }
    }
}
