//! Contexts: the stack of each thread, primary ones, what they outlive and what outlives them.

use std::ptr::{null_mut, without_provenance_mut};

use crate::fake::Group;
use crate::raw::*;

#[test]
fn each_thread_has_a_stack() {
    let group = Group::open(2, 0);
    assert_eq!(cuInit(0), 0);
    let (one, two) = (retain(group.first), retain(group.first + 1));
    let current = || {
        let mut ctx = null_mut();
        assert_eq!(cuCtxGetCurrent(&mut ctx), 0);
        ctx
    };
    assert_eq!(current(), null_mut());
    assert_eq!(cuCtxPopCurrent_v2(null_mut()), 201);
    assert_eq!(cuCtxPushCurrent_v2(one), 0);
    assert_eq!(cuCtxPushCurrent_v2(two), 0);
    assert_eq!(current(), two);
    let mut dev = -1;
    assert_eq!(cuCtxGetDevice(&mut dev), 0);
    assert_eq!(dev, group.first + 1);
    std::thread::spawn(move || {
        assert_eq!(cuMemAlloc_v2(&mut 0, 8), 201);
        assert_eq!(cuCtxGetDevice(&mut 0), 201);
    })
    .join()
    .unwrap();
    // Replaces the top; null takes it off.
    assert_eq!(cuCtxSetCurrent(one), 0);
    assert_eq!(cuCtxSetCurrent(null_mut()), 0);
    assert_eq!(current(), one);
    let mut popped = null_mut();
    assert_eq!(cuCtxPopCurrent_v2(&mut popped), 0);
    assert_eq!((popped, current()), (one, null_mut()));

    assert_eq!(cuCtxPushCurrent_v2(null_mut()), 400);
    assert_eq!(cuCtxPushCurrent_v2(without_provenance_mut(8)), 400);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(group.first), 0);
    assert_eq!(cuCtxPushCurrent_v2(one), 400);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(group.first + 1), 0);
    group.assert_report(&["violation: context"]); // the one that is known
}

#[test]
fn primary_contexts_are_counted() {
    let group = Group::open(1, 0);
    assert_eq!(cuInit(0), 0);
    let first = retain(group.first);
    assert_eq!(retain(group.first), first);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(group.first), 0);
    assert_eq!(group.live("contexts"), 1);
    assert_eq!(cuCtxPushCurrent_v2(first), 0);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(group.first), 0);
    assert_eq!(cuMemAlloc_v2(&mut 0, 8), 709);
    assert_eq!(cuCtxPopCurrent_v2(null_mut()), 0);
    assert_ne!(retain(group.first), first, "handles are not used again");
    assert_eq!(cuDevicePrimaryCtxRelease_v2(group.first), 0);
    group.assert_clean();
    assert_eq!(cuDevicePrimaryCtxRelease_v2(group.first), 201);
    group.assert_report(&["released, but not retained"]);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(-1), 101);
    assert_eq!(cuDevicePrimaryCtxRetain(&mut null_mut(), 1024), 101);
}

#[test]
fn what_outlives_its_context_is_reported_and_freed() {
    let bound = Bound::new(0);
    let group = bound.group;
    let stream = stream();
    event();
    device(8);
    pooled(8, stream);
    pinned(8);
    managed(8);
    let mut pool = null_mut();
    let props = [1, 0, 1, group.first, 0, 0, 0, 0];
    assert_eq!(cuMemPoolCreate(&mut pool, props.as_ptr()), 0);
    for what in [
        "streams", "events", "pools", "contexts", "pinned", "managed",
    ] {
        assert_eq!(group.live(what), 1, "{what}");
    }
    assert_eq!(group.live("device"), 2);
    assert_eq!(group.report().lines().count(), 8);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(group.first), 0);
    // A pool is the device's.
    assert_eq!(cuMemPoolDestroy(pool), 0);
    let report = group.report();
    assert_eq!(report.lines().count(), 6, "{report}");
    assert!(
        report
            .lines()
            .all(|line| line.contains("outlived its context"))
    );
    assert_eq!(cuStreamDestroy_v2(stream), 400);
}

#[test]
fn created_contexts_are_destroyed() {
    let group = Group::open(1, 0);
    assert_eq!(cuInit(0), 0);
    let mut ctx = null_mut();
    assert_eq!(cuCtxCreate_v2(&mut ctx, 0, group.first), 0);
    let memory = device(8); // it is current
    assert_eq!(cuMemFree_v2(memory), 0);
    let primary = retain(group.first);
    assert_eq!(cuCtxDestroy_v2(primary), 201);
    assert_eq!(cuCtxDestroy_v2(ctx), 0);
    assert_eq!(cuCtxPopCurrent_v2(null_mut()), 201);
    assert_eq!(cuCtxDestroy_v2(ctx), 400);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(group.first), 0);
    group.assert_report(&["destroyed instead of released", "context"]);
}

#[test]
fn work_needs_the_context_of_its_stream() {
    let bound = Bound::with_group(Group::open(2, 0));
    let (stream, event) = (stream(), event());
    let memory = pooled(8, stream);
    let other = retain(bound.group.first + 1);
    extern "C" fn nothing(_: Ptr) {}
    for ctx in [other, null_mut()] {
        assert_eq!(cuCtxPushCurrent_v2(bound.ctx), 0);
        assert_eq!(cuCtxSetCurrent(ctx), 0);
        let nobody = ctx.is_null();
        if nobody {
            assert_eq!(cuCtxPopCurrent_v2(null_mut()), 0);
        }
        assert_eq!(
            cuMemcpyHtoDAsync_v2(memory, [0u8; 8].as_ptr(), 8, stream),
            201
        );
        assert_eq!(cuMemsetD8Async(memory, 0, 8, stream), 201);
        assert_eq!(cuMemAllocAsync(&mut 0, 8, stream), 201);
        assert_eq!(cuMemFreeAsync(memory, stream), 201);
        assert_eq!(cuEventRecord(event, stream), 201);
        assert_eq!(cuLaunchHostFunc(stream, nothing, null_mut()), 201);
        // These go by their handles.
        assert_eq!(cuStreamWaitEvent(stream, event, 0), 0);
        assert_eq!(cuStreamQuery(stream), 0);
        assert_eq!(cuStreamSynchronize(stream), 0);
        assert_eq!(cuEventQuery(event), 0);
        assert_eq!(cuEventSynchronize(event), 0);
        let mut of = null_mut();
        assert_eq!(cuStreamGetCtx(stream, &mut of), 0);
        assert_eq!(of, bound.ctx);
        // The default stream is the current context's.
        let expected = if nobody { 201 } else { 400 };
        assert_eq!(cuEventRecord(event, null_mut()), expected);
        match nobody {
            true => assert_eq!(cuCtxPushCurrent_v2(bound.ctx), 0),
            false => assert_eq!(cuCtxPopCurrent_v2(null_mut()), 0),
        }
    }
    assert_eq!(cuMemFreeAsync(memory, stream), 0);
    assert_eq!(cuEventDestroy_v2(event), 0);
    assert_eq!(cuStreamDestroy_v2(stream), 0);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(bound.group.first + 1), 0);
    assert_eq!(bound.group.drain(), 0);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(bound.group.first), 0);
    bound.group.assert_report(&["stream of another context"]);
}

#[test]
fn ordinals_of_a_group_are_peers() {
    let bound = Bound::with_group(Group::open(2, 0));
    let first = bound.group.first;
    let other = retain(first + 1);
    let can = |dev, peer| {
        let mut can = -1;
        assert_eq!(cuDeviceCanAccessPeer(&mut can, dev, peer), 0);
        can
    };
    assert_eq!(
        (can(first, first + 1), can(first, first), can(first, 0)),
        (1, 0, 0)
    );
    assert_eq!(cuCtxDisablePeerAccess(other), 705);
    assert_eq!(cuCtxEnablePeerAccess(other, 0), 0);
    assert_eq!(cuCtxEnablePeerAccess(other, 0), 704);
    assert_eq!(cuCtxDisablePeerAccess(other), 0);
    let foreign = Bound::new(0);
    assert_eq!(cuCtxEnablePeerAccess(other, 0), 217);
    foreign.end();
    assert_eq!(cuDevicePrimaryCtxRelease_v2(first + 1), 0);
    bound.end();
}
