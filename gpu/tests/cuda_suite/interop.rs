//! Contexts, threads, and cudarc's slices and streams.

use std::ffi::c_uint;
use std::ptr::null_mut;
use std::sync::Arc;

use arrow_array::Int64Array;
use arrow_device::{
    Device, DeviceArray, DeviceBuffer, DeviceRecordBatch, Error, Queue, SyncEvent, SyncPolicy,
};
use arrow_schema::DataType;
use cudarc::driver::{CudaContext, sys};
use libloading::Library;

use crate::gpu_suite::everywhere;
use crate::gpu_suite::hold::hold;
use crate::support::{assert_same, assert_same_batch, wide_batch};
use crate::vendor::{DEVICE, MEMORIES, open_device};

pub(crate) fn current() -> sys::CUcontext {
    let mut raw = null_mut();
    // SAFETY: `raw` is valid for the write of a handle.
    unsafe { assert_eq!(sys::cuCtxGetCurrent(&raw mut raw) as i32, 0) };
    raw
}

/// A context that is not the primary one.
pub(crate) fn another_context(ordinal: usize) -> Arc<CudaContext> {
    type Create = unsafe extern "C" fn(*mut sys::CUcontext, c_uint, sys::CUdevice) -> i32;
    let names = ["libcuda.so", "libcuda.so.1", "nvcuda.dll"];
    // Not all bindings have this function; all drivers have.
    // SAFETY: the library is the driver, whose initialisers have run: it is loaded already.
    let library = names
        .iter()
        .find_map(|name| unsafe { Library::new(*name) }.ok());
    let library = library.expect("the driver");
    // Who makes a context initialises the driver.
    // SAFETY: `cuInit` may be called at any time, with the only flags that there are.
    assert_eq!(unsafe { sys::cuInit(0) } as i32, 0);
    let (mut raw, mut device, before) = (null_mut(), 0, current());
    // SAFETY: the function has this type; creating pushes the context, which is taken off again, and
    // cudarc owns it from then on, and sets it.
    unsafe {
        let create = library.get::<Create>("cuCtxCreate_v2").unwrap();
        assert_eq!(sys::cuDeviceGet(&raw mut device, ordinal as i32) as i32, 0);
        assert_eq!(create(&raw mut raw, 0, device), 0);
        assert_eq!(sys::cuCtxPopCurrent_v2(&raw mut raw) as i32, 0);
        let context = CudaContext::from_raw_context(ordinal, device, raw).unwrap();
        assert_eq!(sys::cuCtxSetCurrent(before) as i32, 0);
        context
    }
}

#[test]
fn two_contexts_of_one_device() {
    everywhere(|place| {
        let sent = wide_batch(20, 2000);
        for memory in MEMORIES {
            // Without a pool, device memory belongs to its context.
            if memory == DEVICE && !place.pools {
                continue;
            }
            let given = another_context(place.ordinal);
            let (one, two) = (
                place.open(memory),
                place.open_with(Device::from_cuda_context(given.clone(), memory)),
            );
            let contexts = [&one, &two].map(|device| device.cuda_context().unwrap().cu_ctx());
            assert_ne!(contexts[0], contexts[1]);
            assert_eq!(one.id(), two.id());

            // Copied across, and handed over as structs with an event of the other context.
            for (from, to) in [(&one, &two), (&two, &one)] {
                let up = from.upload(&sent).unwrap();
                let across = up.slice(3, 1990).unwrap().to_device(&**to).unwrap();
                let (array, schema) = up.export(SyncPolicy::Event).unwrap();
                drop(up);
                // SAFETY: both structs come from one export of this crate.
                let imported = unsafe { DeviceRecordBatch::import(array, &schema, &to.options) };
                let imported = imported.unwrap();
                assert_same_batch(&sent, &imported.to_host().unwrap(), "imported");
                let sent = sent.slice(3, 1990);
                assert_same_batch(&sent, &across.to_host().unwrap(), "copied");
            }
            // A stream belongs to one context.
            let stream = given.new_stream().unwrap();
            let refused = Queue::from_cuda_stream(&one, stream.clone());
            assert!(
                matches!(refused, Err(Error::InvalidArgument(_))),
                "{refused:?}"
            );
            let queue = Queue::from_cuda_stream(&two, stream).unwrap();
            let up = two.upload_on(&sent, &queue).unwrap();
            assert_same_batch(&sent, &up.to_host().unwrap(), "on a given stream");
            drop((up, queue));
            one.assert_done();
            two.assert_done();
            drop((one, two));
            // SAFETY: null is a valid argument: it makes no context current. (A context is not
            // destroyed while it is current.)
            assert_eq!(unsafe { sys::cuCtxSetCurrent(null_mut()) } as i32, 0);
            drop(given);
        }
    });
}

/// No call makes a context current for the caller.
#[test]
fn no_context_becomes_current() {
    everywhere(|place| {
        for memory in MEMORIES {
            let ordinal = place.ordinal;
            // A thread of its own: cudarc's calls leave their context current.
            let work = move || {
                let device = open_device(memory, ordinal).unwrap();
                let up = device.upload(&wide_batch(8, 300)).unwrap();
                drop(up.to_host().unwrap());
                drop(up.export(SyncPolicy::Event).unwrap());
                drop((up, device));
                current() as usize
            };
            assert_eq!(std::thread::spawn(work).join().unwrap(), 0);
        }
    });
}

#[test]
fn release_on_a_thread_that_never_saw_cuda() {
    everywhere(|place| {
        for memory in MEMORIES {
            let device = place.open(memory);
            let sent = wide_batch(8, 500);
            let up = device.upload(&sent).unwrap();
            let (array, schema) = up.export(SyncPolicy::Event).unwrap();
            let (kept, _) = up.export(SyncPolicy::Event).unwrap();
            // SAFETY: both structs come from one export of this crate.
            let imported = unsafe { DeviceRecordBatch::import(kept, &schema, &device.options) };
            let (imported, queue) = (imported.unwrap(), device.new_queue().unwrap());
            let released = std::thread::spawn(move || {
                drop(array);
                drop((up, imported));
                drop(queue);
                current() as usize
            });
            assert_eq!(released.join().unwrap(), 0);
            device.assert_done();
        }
    });
}

fn longs(n: i64) -> Vec<i64> {
    (0..n).map(|i| i * 3 - 7).collect()
}

#[test]
fn slices_are_adopted_and_given_back() {
    everywhere(|place| {
        let device = place.open(DEVICE);
        let context = device.cuda_context().unwrap();
        let stream = context.new_stream().unwrap();
        for round in 0..50 {
            let values = longs(place.rows as i64 + round);
            let slice = stream.clone_htod(&values).unwrap();
            let buffer = DeviceBuffer::from_cuda_slice(&device, slice).unwrap();
            let (kind, rows) = (DataType::Int64, values.len());
            let column = DeviceArray::from_values(kind, rows, buffer, None).unwrap();
            let back = column.to_host().unwrap();
            assert_same(&Int64Array::from(values.clone()), &back, "adopted");

            let buffer = column.buffer(1).unwrap();
            drop(column);
            let address = buffer.address().address() as u64;
            let other = context.new_stream().unwrap();
            let slice = buffer.try_into_cuda_slice::<i64>(&other).unwrap();
            assert_eq!(slice.len(), rows);
            let back = other.clone_dtoh(&slice).unwrap();
            other.synchronize().unwrap();
            assert!(back == values, "given back, round {round}");
            // The same memory, freed by cudarc.
            assert_eq!(slice.leak(), address);
            // SAFETY: the address was just leaked by a slice, and nothing else owns the memory.
            drop(unsafe { other.upgrade_device_ptr::<i64>(address, rows) });
            other.synchronize().unwrap();
        }
        context.check_err().unwrap();
        device.synchronize().unwrap();
        assert_eq!(device.take_drop_error().map(|e| e.to_string()), None);
    });
}

/// An event of cudarc's is waited for.
#[test]
fn events_are_adopted() {
    everywhere(|place| {
        let device = place.open(DEVICE);
        let context = device.cuda_context().unwrap();
        let stream = context.new_stream().unwrap();
        let queue = Queue::from_cuda_stream(&device, stream.clone()).unwrap();
        // Warm: the driver may wait for held work when it allocates page-locked memory.
        let sent = wide_batch(4, 100);
        device.upload(&sent).unwrap().wait().unwrap();
        device.synchronize().unwrap();
        let mut held = hold(&queue);
        let event = stream.record_event(None).unwrap();
        let event = SyncEvent::from_cuda_event(&device, event).unwrap();
        assert!(!event.is_complete().unwrap());
        let other = device.new_queue().unwrap();
        other.wait(&event).unwrap();
        let up = device.upload_on(&sent, &other).unwrap();
        assert!(!up.is_ready().unwrap());
        held.open();
        event.wait().unwrap();
        assert!(event.is_complete().unwrap());
        up.wait().unwrap();
        drop((up, other, queue, event));
        device.assert_done();
    });
}
