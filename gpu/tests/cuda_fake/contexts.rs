//! Contexts, streams and threads.

use std::ptr;

use arrow_device::abi::ArrowDeviceType;
use arrow_device::{Device, DeviceRecordBatch, Error, Queue, SyncPolicy};
use cudarc::driver::sys;

use crate::cuda_suite::interop::{another_context, current};
use crate::fake::{Group, MODES, NO_POOLS, fake};
use crate::given::everything;
use crate::rig::{Rig, assert_gone, end_all};
use crate::support::{assert_same_batch, wide_batch};
use crate::vendor::{DEVICE, HOST, MANAGED, assert_untouched, load, open_device, unset_context};
use crate::world::World;

#[test]
fn the_callers_context_stays_as_it_was() {
    load();
    for mode in MODES {
        for memory in [DEVICE, HOST, MANAGED] {
            let group = Group::open(2, mode);
            // None.
            assert_untouched();
            let rig = Rig::of(group, open_device(memory, group.ordinal()));
            everything(&rig);
            assert_untouched();
            // Another device's.
            let mine = another_context(group.ordinal() + 1);
            // SAFETY: `mine` keeps the context alive.
            unsafe { assert_eq!(sys::cuCtxPushCurrent_v2(mine.cu_ctx()) as i32, 0) };
            everything(&rig);
            let context = rig.device.cuda_context().unwrap();
            assert_eq!(current(), mine.cu_ctx());
            drop(context);
            rig.assert_done();
            drop(rig);
            assert_eq!(current(), mine.cu_ctx());
            let mut popped = ptr::null_mut();
            // SAFETY: `popped` is valid for the write of a handle; what is popped was pushed above.
            unsafe { assert_eq!(sys::cuCtxPopCurrent_v2(&raw mut popped) as i32, 0) };
            assert_untouched();
            drop(mine);
            // What cudarc's drop has made current is gone.
            unset_context();
            assert_gone(group);
        }
    }
}

/// Memory that belongs to a context, not to a pool: only that context's kernels reach it. Copies out of it
/// name it.
#[test]
fn memory_of_another_context() {
    for mode in MODES {
        let group = Group::open(1, mode | NO_POOLS);
        let primary = Rig::of(group, open_device(DEVICE, group.ordinal()));
        let context = another_context(group.ordinal());
        let other = Rig::of(group, Device::from_cuda_context(context.clone(), DEVICE));
        let batch = wide_batch(8, 500);
        let up = other.upload(&batch).unwrap();
        let (array, schema) = up.export(SyncPolicy::Event).unwrap();
        // SAFETY: both structs come from one export of this crate.
        let refused =
            unsafe { DeviceRecordBatch::import(array, &schema, &primary.options) }.unwrap_err();
        assert!(
            refused.to_string().contains("from_cuda_context"),
            "{refused}"
        );
        let (array, schema) = up.export(SyncPolicy::Event).unwrap();
        // SAFETY: both structs come from one export of this crate.
        let again = unsafe { DeviceRecordBatch::import(array, &schema, &other.options) }.unwrap();
        drop(again);
        let (before, stats) = (group.calls("cuMemcpyPeerAsync"), other.stats());
        let there = up.to_device(&primary.device).unwrap();
        assert!(group.calls("cuMemcpyPeerAsync") > before);
        assert_eq!(other.stats().since(&stats).bytes_to_host, 0, "straight");
        drop(up);
        // An event of the other is the one's too.
        let stats = primary.stats();
        let event = other.default_queue().record().unwrap().unwrap();
        primary.default_queue().wait(&event).unwrap();
        assert_eq!(primary.stats().since(&stats).host_waits, 0);
        drop(event);
        let e = Device::from_cuda_context(context.clone(), ArrowDeviceType::ROCM);
        assert!(matches!(e, Err(Error::InvalidArgument(_))));
        assert_same_batch(&batch, &there.to_host().unwrap(), "other context");
        drop((there, e, context));
        end_all(group, [primary, other]);
        assert_untouched();
    }
}

/// A green context is another context.
#[test]
fn streams_of_green_contexts_are_refused() {
    let rig = Rig::new(0);
    let context = rig.device.cuda_context().unwrap();
    context.bind_to_thread().unwrap();
    let mut raw: sys::CUstream = ptr::null_mut();
    assert_eq!(
        fake!(fake_cuda_green_stream(&raw mut raw => *mut sys::CUstream) -> i32),
        0
    );
    // SAFETY: the stream is live until it is destroyed below.
    let stream = unsafe { context.wrap_borrowed_stream(raw) };
    let e = Queue::from_cuda_stream(&rig.device, stream).unwrap_err();
    assert!(matches!(e, Error::InvalidArgument(_)), "{e}");
    assert!(e.to_string().contains("another context"), "{e}");
    assert_eq!(fake!(cuStreamDestroy_v2(raw => sys::CUstream) -> i32), 0);
    drop(context);
    unset_context();
    rig.end();
}

/// A driver takes no lists on the default stream.
#[test]
fn streams_that_are_given() {
    for mode in MODES {
        let World {
            rig,
            context,
            stream,
        } = World::new(mode, DEVICE);
        let batch = wide_batch(8, 300);
        for stream in [stream, context.default_stream()] {
            let queue = Queue::from_cuda_stream(&rig.device, stream).unwrap();
            let up = rig.upload_on(&batch, &queue).unwrap();
            let part = up.slice(1, 200).unwrap();
            let down = part.start_to_host(&queue).unwrap().wait().unwrap();
            assert_same_batch(&batch.slice(1, 200), &down, "given stream");
        }
        drop(context);
        unset_context();
        rig.end();
    }
}

/// It is another stream on each thread.
#[test]
fn a_per_thread_stream_is_refused() {
    let rig = Rig::new(0);
    let context = rig.device.cuda_context().unwrap();
    let e = Queue::from_cuda_stream(&rig.device, context.per_thread_stream()).unwrap_err();
    assert!(matches!(e, Error::InvalidArgument(_)), "{e}");
    for part in ["per-thread", "use an ordinary stream"] {
        assert!(e.to_string().contains(part), "{e}");
    }
    drop(context);
    unset_context();
    rig.end();
}
