//! Contexts, streams and threads.

use std::ptr;
use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_device::cuda::{CudaConfig, CudaMemory};
use arrow_device::{DeviceRecordBatch, Error, Queue, SyncPolicy};
use cudarc::driver::{CudaContext, sys};

use crate::fake::{Group, LAZY, NO_POOLS, fake};
use crate::rig::{MODES, Rig, assert_gone, soon};
use crate::support::{assert_same_batch, wide_batch};

/// A context that is not the primary one.
fn another_context(ordinal: i32) -> Arc<CudaContext> {
    let mut raw: sys::CUcontext = ptr::null_mut();
    let code =
        fake!(cuCtxCreate_v2(&raw mut raw => *mut sys::CUcontext, 0 => u32, ordinal => i32) -> i32);
    assert_eq!(code, 0);
    let mut popped = ptr::null_mut();
    // SAFETY: creating pushed it; cudarc owns it from here on.
    unsafe {
        assert_eq!(sys::cuCtxPopCurrent_v2(&raw mut popped) as i32, 0);
        let before = current();
        let context = CudaContext::from_raw_context(ordinal as usize, ordinal, raw).unwrap();
        assert_eq!(sys::cuCtxSetCurrent(before) as i32, 0);
        context
    }
}

fn current() -> sys::CUcontext {
    let mut raw = ptr::null_mut();
    // SAFETY: `raw` is written.
    unsafe { assert_eq!(sys::cuCtxGetCurrent(&raw mut raw) as i32, 0) };
    raw
}

/// Everything that a program does with a device.
fn everything(rig: &Rig) {
    let batch = wide_batch(8, 300);
    let up = rig.upload(&batch).unwrap();
    let queue = rig.new_queue().unwrap();
    drop(up.column(1).unwrap().validity_on(&queue).unwrap());
    let (array, schema) = up.export(SyncPolicy::Event).unwrap();
    // SAFETY: just exported.
    let again = unsafe { DeviceRecordBatch::import_with(array, &schema, &rig.options) }.unwrap();
    assert_same_batch(&batch, &again.to_host().unwrap(), "everything");
    drop((up, again, queue));
    rig.synchronize().unwrap();
    rig.trim();
}

/// As `Rig::assert_done`, for several of a group.
#[track_caller]
fn all_done(rigs: &[&Rig]) {
    let done = soon(|| {
        rigs.iter().for_each(|rig| rig.trim());
        rigs.iter().all(|rig| rig.unclean().is_none())
    });
    assert!(done, "{:?}", rigs[0].unclean());
}

#[test]
fn the_callers_context_stays_as_it_was() {
    for mode in MODES {
        for memory in [CudaMemory::Device, CudaMemory::Host, CudaMemory::Managed] {
            let group = Group::open(2, mode);
            // None.
            assert!(current().is_null());
            let rig = Rig::of(group, &CudaConfig::new(group.ordinal()).with_memory(memory));
            everything(&rig);
            assert!(current().is_null());
            // Another device's.
            let mine = another_context(group.first + 1);
            // SAFETY: it lives.
            unsafe { assert_eq!(sys::cuCtxPushCurrent_v2(mine.cu_ctx()) as i32, 0) };
            everything(&rig);
            let cuda = rig.device.as_cuda().unwrap();
            let context = cuda.cuda_context().unwrap();
            assert_eq!(current(), mine.cu_ctx());
            drop(context);
            rig.assert_done();
            drop(rig);
            assert_eq!(current(), mine.cu_ctx());
            let mut popped = ptr::null_mut();
            // SAFETY: pushed above.
            unsafe { assert_eq!(sys::cuCtxPopCurrent_v2(&raw mut popped) as i32, 0) };
            assert!(current().is_null());
            drop(mine);
            // What cudarc's drop has made current is gone.
            // SAFETY: null: none.
            unsafe { assert_eq!(sys::cuCtxSetCurrent(ptr::null_mut()) as i32, 0) };
            assert_gone(group);
        }
    }
}

#[test]
fn two_contexts_of_one_device() {
    for mode in MODES {
        let group = Group::open(1, mode);
        let primary = Rig::of(group, &CudaConfig::new(group.ordinal()));
        let context = another_context(group.first);
        let config = CudaConfig::new(group.ordinal()).with_context(context.clone());
        let other = Rig::of(group, &config);
        assert_eq!(
            other.device.as_cuda().unwrap().cu_context(),
            context.cu_ctx()
        );
        assert_ne!(
            primary.device.as_cuda().unwrap().cu_context(),
            context.cu_ctx()
        );
        everything(&other);
        let batch = wide_batch(8, 1000);
        let up = primary.upload(&batch).unwrap();
        let (before, start) = (other.stats(), primary.stats());
        let there = up.to_device(&other.device).unwrap();
        let cost = other.stats().since(&before);
        assert_eq!((cost.host_waits, cost.bytes_to_device), (0, 0), "straight");
        assert_eq!(primary.stats().since(&start).bytes_to_host, 0);
        drop(up);
        assert_same_batch(&batch, &there.to_host().unwrap(), "other context");
        drop(there);
        all_done(&[&primary, &other]);
        // A stream of the one is none of the other, and an event of the other is the one's too.
        let stream = context.new_stream().unwrap();
        let e = Queue::from_cuda_stream(&primary.device, stream.clone()).unwrap_err();
        assert!(matches!(e, Error::InvalidArgument(_)), "{e}");
        assert!(e.to_string().contains("with_context"), "{e}");
        let theirs = Queue::from_cuda_stream(&other.device, stream).unwrap();
        let event = theirs.record().unwrap().unwrap();
        let start = primary.stats();
        primary.default_queue().wait(&event).unwrap();
        assert_eq!(primary.stats().since(&start).host_waits, 0);
        drop((theirs, event));
        // SAFETY: null: none; cudarc has made the context current.
        unsafe { assert_eq!(sys::cuCtxSetCurrent(ptr::null_mut()) as i32, 0) };
        drop(config);
        drop(context);
        let e = CudaConfig::new(group.ordinal() + 1).with_context(another_context(group.first));
        assert!(matches!(e.open(), Err(Error::InvalidArgument(_))));
        drop(e);
        // SAFETY: as above.
        unsafe { assert_eq!(sys::cuCtxSetCurrent(ptr::null_mut()) as i32, 0) };
        primary.synchronize().unwrap();
        drop(primary);
        drop(other);
        assert_gone(group);
        assert!(current().is_null());
    }
}

/// Memory that belongs to a context, not to a pool: only that context's kernels reach it. Copies out of it
/// name it.
#[test]
fn memory_of_another_context() {
    for mode in MODES {
        let group = Group::open(1, mode | NO_POOLS);
        let primary = Rig::of(group, &CudaConfig::new(group.ordinal()));
        let context = another_context(group.first);
        let config = CudaConfig::new(group.ordinal()).with_context(context.clone());
        let other = Rig::of(group, &config);
        let batch = wide_batch(8, 500);
        let up = other.upload(&batch).unwrap();
        let address = up.column(0).unwrap().buffer(1).unwrap().address();
        for rig in [&primary, &other] {
            let cuda = rig.device.as_cuda().unwrap();
            assert_eq!(cuda.context_of(address).unwrap(), Some(context.cu_ctx()));
        }
        let (array, schema) = up.export(SyncPolicy::Event).unwrap();
        // SAFETY: just exported; the memory is the other context's.
        let refused = unsafe { DeviceRecordBatch::import_with(array, &schema, &primary.options) }
            .unwrap_err();
        assert!(refused.to_string().contains("with_context"), "{refused}");
        let (array, schema) = up.export(SyncPolicy::Event).unwrap();
        // SAFETY: just exported.
        let again =
            unsafe { DeviceRecordBatch::import_with(array, &schema, &other.options) }.unwrap();
        drop(again);
        let before = group.calls("cuMemcpyPeerAsync");
        let there = up.to_device(&primary.device).unwrap();
        assert!(group.calls("cuMemcpyPeerAsync") > before);
        drop(up);
        assert_same_batch(&batch, &there.to_host().unwrap(), "other context");
        drop((there, config, context));
        all_done(&[&primary, &other]);
        drop((primary, other));
        assert_gone(group);
        assert!(current().is_null());
    }
}

#[test]
fn two_devices() {
    for mode in MODES {
        let group = Group::open(2, mode);
        let rigs = [0, 1].map(|i| Rig::of(group, &CudaConfig::new(group.ordinal() + i)));
        let batch = wide_batch(8, 1000);
        let up = rigs[0].upload(&batch).unwrap();
        let there = up.to_device(&rigs[1].device).unwrap();
        drop(up);
        assert_eq!(rigs[1].stats().host_waits, 0);
        assert_eq!(rigs[0].stats().bytes_to_host, 0);
        assert_same_batch(&batch, &there.to_host().unwrap(), "the other device");
        drop(there);
        all_done(&[&rigs[0], &rigs[1]]);
        for rig in rigs {
            drop(rig);
        }
        assert_gone(group);
    }
}

/// A consumer releases on a thread that has nothing to do with CUDA.
#[test]
fn released_on_any_thread() {
    for mode in MODES {
        for memory in [CudaMemory::Device, CudaMemory::Host, CudaMemory::Managed] {
            let rig = Rig::with(mode, memory);
            let batch = wide_batch(8, 300);
            let exports: Vec<_> = (0..4)
                .map(|_| {
                    rig.upload(&batch)
                        .unwrap()
                        .export(SyncPolicy::Event)
                        .unwrap()
                })
                .collect();
            std::thread::scope(|scope| {
                for (array, schema) in exports {
                    scope.spawn(move || {
                        drop((array, schema));
                        assert!(current().is_null());
                    });
                }
            });
            rig.assert_done();
            rig.end();
        }
    }
}

/// The last handle of a device, too.
#[test]
fn the_device_goes_on_another_thread() {
    let rig = Rig::new(LAZY);
    let group = rig.group;
    let up = rig.upload(&wide_batch(4, 100)).unwrap();
    rig.synchronize().unwrap();
    drop(rig);
    std::thread::spawn(move || drop(up)).join().unwrap();
    assert_gone(group);
}

#[test]
fn streams_that_are_given() {
    for mode in MODES {
        let rig = Rig::new(mode);
        let context = rig.device.as_cuda().unwrap().cuda_context().unwrap();
        let batch = wide_batch(8, 300);
        let streams = [
            context.new_stream().unwrap(),
            context.default_stream(),
            context.per_thread_stream(),
        ];
        for stream in streams {
            let queue = Queue::from_cuda_stream(&rig.device, stream).unwrap();
            let up = rig.upload_on(&batch, &queue).unwrap();
            // On the stream itself, with a list of many copies.
            let column = up.column(0).unwrap();
            assert!(column.values_on::<i64>(&queue).is_ok() || column.len() == 300);
            assert_same_batch(&batch, &up.to_host().unwrap(), "given stream");
        }
        drop(context);
        // SAFETY: null: none; cudarc has made the context current.
        unsafe { assert_eq!(sys::cuCtxSetCurrent(ptr::null_mut()) as i32, 0) };
        rig.assert_done();
        rig.end();
    }
}

/// The per-thread stream is another one on each thread: events keep one order.
#[test]
fn the_per_thread_stream_on_many_threads() {
    for mode in MODES {
        let rig = Rig::new(mode);
        let context = rig.device.as_cuda().unwrap().cuda_context().unwrap();
        let stream = context.per_thread_stream();
        let queue = Queue::from_cuda_stream(&rig.device, stream).unwrap();
        for round in 0..20i64 {
            let values: Vec<i64> = (0..5000).map(|i| i * round).collect();
            let column: ArrayRef = Arc::new(Int64Array::from(values));
            let batch = RecordBatch::try_from_iter([("v", column)]).unwrap();
            let device = &rig.device;
            let up = std::thread::scope(|scope| {
                let up = scope.spawn(|| device.upload_on(&batch, &queue).unwrap());
                up.join().unwrap()
            });
            // Read on this thread's stream, freed on a third one's.
            let down = up.to_host().unwrap();
            assert_eq!(down, batch);
            let mut copy = arrow_device::DeviceBufferMut::allocate(&queue, 64).unwrap();
            copy.fill(1).unwrap();
            let queue = &queue;
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    drop((up, copy));
                    // Without an order this runs the free, and the fill comes later.
                    queue.synchronize().unwrap();
                });
            });
        }
        drop(queue);
        drop(context);
        // SAFETY: null: none; cudarc has made the context current.
        unsafe { assert_eq!(sys::cuCtxSetCurrent(ptr::null_mut()) as i32, 0) };
        rig.assert_done();
        rig.end();
    }
}

/// Between the pools of two devices the driver must be told both contexts.
#[test]
fn pools_of_two_devices() {
    let group = Group::open(2, 0);
    let rigs = [0, 1].map(|i| Rig::of(group, &CudaConfig::new(group.ordinal() + i)));
    let batch = wide_batch(30, 50);
    let up = rigs[0].upload(&batch).unwrap();
    let before = group.calls("cuMemcpyPeerAsync");
    let there = up.to_device(&rigs[1].device).unwrap();
    assert!(group.calls("cuMemcpyPeerAsync") > before);
    assert_same_batch(&batch, &there.to_host().unwrap(), "peers");
    drop((up, there));
    all_done(&[&rigs[0], &rigs[1]]);
    drop(rigs);
    assert_gone(group);
}

/// An array whose columns are in several kinds of memory goes to another device: each copy as its memory asks for.
#[test]
fn mixed_memory_to_another_device() {
    for pinned_first in [true, false] {
        let group = Group::open(2, 0);
        let rigs = [0, 1].map(|i| Rig::of(group, &CudaConfig::new(group.ordinal() + i)));
        let host = Rig::of(
            group,
            &CudaConfig::new(group.ordinal()).with_memory(CudaMemory::Host),
        );
        let column: ArrayRef = Arc::new(Int64Array::from_iter_values(0..100));
        let names = ["a", "b"];
        let columns = names.map(|name| (name, column.clone()));
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let pinned = host.upload_array(&column).unwrap();
        host.synchronize().unwrap();
        let data = arrow_array::StructArray::from(batch.clone());
        let data = arrow_array::Array::to_data(&data);
        let mut foreign = crate::support_c::Foreign::new(&data, &rigs[0].device);
        let child = usize::from(!pinned_first);
        let address = pinned.buffer(1).unwrap().address().as_ptr();
        foreign.set_buffer(&[child], 1, address.cast_const());
        let imported = foreign.import_batch(&rigs[0].options).unwrap();
        let there = imported.to_device(&rigs[1].device).unwrap();
        assert_eq!(there.to_host().unwrap().columns(), batch.columns());
        drop((imported, there, pinned));
        for rig in &rigs {
            rig.synchronize().unwrap();
        }
        assert!(soon(|| foreign.releases().0 == 3));
        all_done(&[&rigs[0], &rigs[1], &host]);
        drop((rigs, host));
        assert_gone(group);
    }
}

/// A code that a foreign event brings with it does not end the device.
#[test]
fn a_code_of_another_context() {
    let rig = Rig::new(0);
    let batch = wide_batch(4, 100);
    for (call, code) in [
        ("cuStreamWaitEvent", 709),
        ("cuEventQuery", 700),
        ("cuEventSynchronize", 201),
        ("cuMemcpyAsync", 719),
    ] {
        let up = rig.upload(&batch).unwrap();
        let queue = rig.new_queue().unwrap();
        rig.group.fail(call, 1, code);
        drop(
            up.column(0)
                .unwrap()
                .buffer(1)
                .map(|b| b.on(&queue).map(drop)),
        );
        let _ = up.to_host();
        rig.group.clear();
        let e = rig.synchronize();
        assert!(e.is_ok(), "{call}: {e:?}");
        assert_same_batch(&batch, &up.to_host().unwrap(), call);
    }
    let _ = rig.take_drop_error();
    rig.assert_done();
    // What cannot be asked now can be later.
    rig.group.fail("cuCtxSynchronize", 1, 900);
    let e = rig.synchronize().unwrap_err();
    assert!(matches!(e, Error::Device { code: 900, .. }), "{e}");
    rig.synchronize().unwrap();
    rig.end();
}

/// Where the driver refuses on the way, a per-thread queue keeps its order.
#[test]
fn failures_of_a_per_thread_stream() {
    for mode in MODES {
        let rig = Rig::new(mode);
        let context = rig.device.as_cuda().unwrap().cuda_context().unwrap();
        let queue = Queue::from_cuda_stream(&rig.device, context.per_thread_stream()).unwrap();
        let batch = wide_batch(6, 200);
        for n in 1.. {
            assert!(n < 300, "never ends");
            rig.group.fail("*", n, 1);
            let up = std::thread::scope(|scope| {
                scope
                    .spawn(|| rig.device.upload_on(&batch, &queue))
                    .join()
                    .unwrap()
            });
            let fired = rig.group.clear();
            if let Ok(up) = &up {
                assert_same_batch(&batch, &up.to_host().unwrap(), format!("call {n}"));
            }
            drop(up);
            let _ = rig.take_drop_error();
            let mut last = None;
            assert!(
                soon(|| {
                    last = rig.unclean();
                    last.is_none()
                }),
                "call {n}: {last:?}"
            );
            if fired == 0 {
                break;
            }
        }
        drop((queue, context));
        // SAFETY: null: none; cudarc has made the context current.
        unsafe { assert_eq!(sys::cuCtxSetCurrent(ptr::null_mut()) as i32, 0) };
        rig.end();
    }
}

/// A driver that is going away is no error of a release.
#[test]
fn a_driver_that_shuts_down() {
    for memory in [CudaMemory::Device, CudaMemory::Host, CudaMemory::Managed] {
        let rig = Rig::with(0, memory);
        let up = rig.upload(&wide_batch(8, 300)).unwrap();
        let (array, schema) = up.export(SyncPolicy::Event).unwrap();
        rig.synchronize().unwrap();
        rig.group.shut_down(true);
        std::thread::spawn(move || drop((array, schema, up)))
            .join()
            .unwrap();
        let e = rig.upload(&wide_batch(1, 10)).unwrap_err();
        assert!(matches!(e, Error::Device { code: 4, .. }), "{e}");
        rig.trim();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let error = rig.take_drop_error();
        assert!(error.is_none(), "{error:?}");
        let group = rig.group;
        drop(rig);
        soon(|| !group.report().contains("violation"));
        assert!(!group.report().contains("violation"), "{}", group.report());
    }
}
