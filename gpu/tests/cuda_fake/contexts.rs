//! Contexts, streams and threads.

use std::ptr;
use std::sync::Arc;

use arrow_device::cuda::{CudaConfig, CudaMemory};
use arrow_device::{DeviceRecordBatch, Error, Queue, SyncPolicy};
use cudarc::driver::{CudaContext, sys};

use crate::fake::{Group, MODES, NO_POOLS, fake};
use crate::given::{everything, on_many_threads};
use crate::rig::{Rig, all_done, assert_gone, soon};
use crate::support::{assert_same_batch, wide_batch};
use crate::vendor::load;

/// A context that is not the primary one.
fn another_context(ordinal: i32) -> Arc<CudaContext> {
    let mut raw: sys::CUcontext = ptr::null_mut();
    let code =
        fake!(cuCtxCreate_v2(&raw mut raw => *mut sys::CUcontext, 0 => u32, ordinal => i32) -> i32);
    assert_eq!(code, 0);
    let mut popped = ptr::null_mut();
    // SAFETY: `popped` is valid for the write of a handle, and what is popped was pushed when the
    // context was created; cudarc owns the context from here on.
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
    // SAFETY: `raw` is valid for the write of a handle.
    unsafe { assert_eq!(sys::cuCtxGetCurrent(&raw mut raw) as i32, 0) };
    raw
}

#[test]
fn the_callers_context_stays_as_it_was() {
    // Who has a context of its own has initialised the driver.
    load();
    // SAFETY: `cuInit` may be called at any time, with the only flags that there are.
    assert_eq!(unsafe { sys::cuInit(0) } as i32, 0);
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
            // SAFETY: `mine` keeps the context alive.
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
            // SAFETY: `popped` is valid for the write of a handle; what is popped was pushed above.
            unsafe { assert_eq!(sys::cuCtxPopCurrent_v2(&raw mut popped) as i32, 0) };
            assert!(current().is_null());
            drop(mine);
            // What cudarc's drop has made current is gone.
            // SAFETY: null is a valid argument: it makes no context current.
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
        // SAFETY: null is a valid argument: it makes no context current, where cudarc had made one
        // so.
        unsafe { assert_eq!(sys::cuCtxSetCurrent(ptr::null_mut()) as i32, 0) };
        drop(config);
        drop(context);
        let e = CudaConfig::new(group.ordinal() + 1).with_context(another_context(group.first));
        assert!(matches!(e.open(), Err(Error::InvalidArgument(_))));
        drop(e);
        // SAFETY: null is a valid argument: it makes no context current, where cudarc had made one
        // so.
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
        // SAFETY: both structs come from one export of this crate.
        let refused = unsafe { DeviceRecordBatch::import_with(array, &schema, &primary.options) }
            .unwrap_err();
        assert!(refused.to_string().contains("with_context"), "{refused}");
        let (array, schema) = up.export(SyncPolicy::Event).unwrap();
        // SAFETY: both structs come from one export of this crate.
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
        // SAFETY: null is a valid argument: it makes no context current, where cudarc had made one
        // so.
        unsafe { assert_eq!(sys::cuCtxSetCurrent(ptr::null_mut()) as i32, 0) };
        rig.assert_done();
        rig.end();
    }
}

/// What a green context's streams order is not known well enough: the refusal says what serves.
#[test]
fn streams_of_green_contexts_are_refused() {
    let rig = Rig::new(0);
    let context = rig.device.as_cuda().unwrap().cuda_context().unwrap();
    context.bind_to_thread().unwrap();
    let mut raw: sys::CUstream = ptr::null_mut();
    assert_eq!(
        fake!(fake_cuda_green_stream(&raw mut raw => *mut sys::CUstream) -> i32),
        0
    );
    for code in [0, 801] {
        // SAFETY: the stream is live until it is destroyed below.
        let stream = unsafe { context.wrap_borrowed_stream(raw) };
        if code != 0 {
            rig.group.fail("cuStreamGetCtx", 1, code);
        }
        let e = Queue::from_cuda_stream(&rig.device, stream).unwrap_err();
        assert!(matches!(e, Error::InvalidArgument(_)), "{e}");
        for part in ["green context", "use a queue of the device"] {
            assert!(e.to_string().contains(part), "{e}");
        }
        assert!(!e.to_string().contains("with_context"), "{e}");
    }
    assert_eq!(fake!(cuStreamDestroy_v2(raw => sys::CUstream) -> i32), 0);
    drop(context);
    // SAFETY: null is a valid argument: it makes no context current, where cudarc had made one so.
    unsafe { assert_eq!(sys::cuCtxSetCurrent(ptr::null_mut()) as i32, 0) };
    rig.group.clear();
    rig.assert_done();
    rig.end();
}

#[test]
fn the_per_thread_stream_on_many_threads() {
    for mode in MODES {
        let rig = Rig::new(mode);
        let context = rig.device.as_cuda().unwrap().cuda_context().unwrap();
        let stream = context.per_thread_stream();
        let queue = Queue::from_cuda_stream(&rig.device, stream).unwrap();
        on_many_threads(&rig, &queue);
        drop(queue);
        drop(context);
        // SAFETY: null is a valid argument: it makes no context current, where cudarc had made one
        // so.
        unsafe { assert_eq!(sys::cuCtxSetCurrent(ptr::null_mut()) as i32, 0) };
        rig.assert_done();
        rig.end();
    }
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
        // SAFETY: null is a valid argument: it makes no context current, where cudarc had made one
        // so.
        unsafe { assert_eq!(sys::cuCtxSetCurrent(ptr::null_mut()) as i32, 0) };
        rig.end();
    }
}
