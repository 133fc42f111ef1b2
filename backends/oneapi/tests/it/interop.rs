//! With programs in plain SYCL, which produce arrays with pending events, and lend queues.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::{ArrayRef, Int64Array};
use arrow_device::abi::FFI_ArrowDeviceArray;
use arrow_device::{Device, DeviceArray, Devices, ImportOptions, Queue, SyncPolicy};
use arrow_device_conformance::{Hold, alone, assert_error, soon};
use arrow_device_oneapi::{OneApiConfig, OneApiMemory, register_with};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field};

use crate::kit::*;

const ROWS: i64 = 5000;

/// Imports what a program produces with `how`, on a set of devices. The producer's work waits until the hold is dropped.
fn import(devices: &Devices, number: usize, how: c_int) -> (DeviceArray, Hold) {
    let mut raw = std::mem::MaybeUninit::<FFI_ArrowDeviceArray>::zeroed();
    let out = raw.as_mut_ptr().cast();
    // SAFETY: the struct has the layout of the specification.
    let gate = hold(|gate| unsafe { (programs().produce)(out, number as i64, ROWS, how, gate) });
    let schema = FFI_ArrowSchema::try_from(Field::new("a", DataType::Int64, true)).unwrap();
    let options = ImportOptions {
        devices: Some(devices.clone()),
        ..Default::default()
    };
    // SAFETY: the producer follows the specification.
    let array = unsafe {
        DeviceArray::import(
            FFI_ArrowDeviceArray::from_raw(raw.as_mut_ptr()),
            &schema,
            &options,
        )
    };
    (array.unwrap(), gate)
}

fn multiples(factor: i64) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values((0..ROWS).map(|i| factor * i)))
}

#[track_caller]
fn assert_values(array: &DeviceArray, factor: i64) {
    assert_eq!(&array.to_host().unwrap(), &multiples(factor));
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
    let config = OneApiConfig::new(number);
    for device in [config.open(), config.with_own_context().open()] {
        let device = device.unwrap();
        let all = OWN_CONTEXT | EVENT_OF_HOST | OUT_OF_ORDER;
        let hows = [
            0,
            OUT_OF_ORDER,
            SHARED,
            EVENT_OF_HOST,
            OWN_CONTEXT,
            NO_HANDLER,
            all,
        ];
        for how in hows {
            // Until the hold is dropped, the queue waits, and no thread.
            let (array, gate) = import(&devices(&device), number, how);
            let queue = device.new_queue().unwrap();
            drop(array.values_on::<i64>(&queue).unwrap());
            let event = queue.record().unwrap().unwrap();
            assert!(!event.is_complete().unwrap(), "how {how}");
            drop(gate);
            event.wait().unwrap();
            // The memory is CPU memory of this process, whatever context it is of.
            assert_values(&array, 3);
            drop(array);
            released();
        }
    }
}

/// A host task that throws leaves its event complete, and without a handler of the queue's, asking for the exception would end the
/// process. The exceptions stay where any test's `throw_asynchronous` would find them.
#[test]
fn a_program_fails_without_a_handler() {
    alone("interop::a_program_fails_without_a_handler", || {
        let Some(number) = number() else { return };
        let device = OneApiConfig::new(number).open().unwrap();
        let all = FAILS | NO_HANDLER | OWN_CONTEXT;
        for how in [FAILS, FAILS | NO_HANDLER, all, 0] {
            let (array, gate) = import(&devices(&device), number, how);
            drop(gate);
            let downloaded = array.to_host();
            assert!(how & FAILS != 0 || downloaded.unwrap().as_ref() == multiples(3).as_ref());
            drop(array);
            released();
        }
    });
}

/// SYCL itself crashes when threads wait across contexts.
#[test]
fn events_of_other_contexts_on_many_threads() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(number) = number() else { return };
    let config = OneApiConfig::new(number);
    let devices_of_both = [config.open(), config.with_own_context().open()].map(Result::unwrap);
    std::thread::scope(|scope| {
        for device in devices_of_both.iter().cycle().take(4) {
            scope.spawn(move || {
                for how in [0, OWN_CONTEXT, OWN_CONTEXT | EVENT_OF_HOST].repeat(2) {
                    let (array, gate) = import(&devices(device), number, how);
                    let queue = device.new_queue().unwrap();
                    drop(array.values_on::<i64>(&queue).unwrap());
                    drop(gate);
                    let downloaded = array.start_to_host(&queue).unwrap().wait();
                    assert_eq!(&downloaded.unwrap(), &multiples(3));
                }
            });
        }
    });
    released();
}

/// A program's own queue: its work and ours run in one order, and its context's memory is found.
#[test]
fn a_program_lends_its_queue() {
    let Some(number) = number() else { return };
    // SAFETY: it has no requirement.
    let queue_new = |how| unsafe { (programs().queue_new)(number as i64, how) };
    let [theirs, out_of_order, in_order] = [OWN_CONTEXT, OUT_OF_ORDER, 0].map(queue_new);
    let config = OneApiConfig::new(usize::MAX).with_memory(OneApiMemory::Shared);
    // SAFETY: the queues live until they are deleted at the end.
    let adopt = |queue: *mut c_void| unsafe { config.adopt(queue) };
    let device = adopt(theirs).unwrap();
    assert_eq!(device.id().id, number as i64);

    // Their host task comes after our upload, and our download after that.
    let (up, queue) = (
        device.upload_array(&multiples(7)).unwrap(),
        device.default_queue(),
    );
    let lent = up.values_on::<i64>(&queue).unwrap();
    let values = lent.address().as_ptr().cast();
    // SAFETY: the queue and the values live until the task has ended.
    let scaled = unsafe { (programs().scale_by_host_task)(sycl_queue(&queue), values, ROWS, 2) };
    assert_eq!(scaled, 0);
    drop(lent);
    queue.synchronize().unwrap();
    assert_values(&up, 14);

    // The context's memory is found by its address, and by the event of an export of ours.
    let others = OneApiConfig::new(number).open().unwrap();
    let devices = Devices::new();
    register_with(&devices, vec![others.clone(), device.clone()]);
    let cases = [
        (&device, SyncPolicy::Event),
        (&device, SyncPolicy::Wait),
        (&others, SyncPolicy::Wait),
    ];
    for (from, policy) in cases {
        let exported = from.upload_array(&multiples(7)).unwrap().export(policy);
        let (array, schema) = exported.unwrap();
        let options = ImportOptions {
            devices: Some(devices.clone()),
            ..Default::default()
        };
        // SAFETY: both come from one export of this crate.
        let again = unsafe { DeviceArray::import(array, &schema, &options) }.unwrap();
        assert_eq!(again.device(), from);
        assert_values(&again, 7);
    }

    // SAFETY: each queue that is passed is a live `sycl::queue` of the program, which it deletes at the end.
    let further = |queue: *mut c_void| unsafe { Queue::adopt(&others, queue.expose_provenance()) };
    let in_order_only = "make it with sycl::property::queue::in_order";
    assert_error(adopt(out_of_order), in_order_only);
    assert_error(further(out_of_order), in_order_only);
    assert_error(further(theirs), "another context");
    assert_error(further(std::ptr::null_mut()), "null");
    assert_error(adopt(std::ptr::null_mut()), "null");
    let adopted = further(in_order).unwrap();
    let up = others.upload_array_on(&multiples(7), &adopted).unwrap();
    let downloaded = up.start_to_host(&adopted).unwrap().wait();
    assert_eq!(&downloaded.unwrap(), &multiples(7));
    drop((up, adopted, device, others));
    for queue in [theirs, out_of_order, in_order] {
        // SAFETY: the queue is not used any more.
        unsafe { (programs().queue_delete)(queue) };
    }
}
