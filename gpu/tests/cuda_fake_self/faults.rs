//! What tests steer: failures that are ordered, engines that break or shut down, reports.

use std::process::Command;
use std::ptr::{null_mut, without_provenance_mut};

use crate::fake::{Group, LAZY, fake};
use crate::raw::*;

#[test]
fn the_nth_call_fails_and_does_nothing() {
    let bound = Bound::new(0);
    let group = bound.group;
    group.fail("cuMemAlloc_v2", 2, 999);
    let first = device(8);
    assert_eq!(cuMemAlloc_v2(&mut 0, 8), 999);
    let second = device(8);
    assert_eq!(group.live("device"), 2);
    group.fail("cuMemFree_v2", 1, 4);
    assert_eq!(cuMemFree_v2(first), 4);
    assert_eq!(group.live("device"), 2);
    assert_eq!(cuMemFree_v2(first), 0);
    assert_eq!(cuMemFree_v2(second), 0);
    assert_eq!(group.clear(), 2);
    assert_eq!(group.clear(), 0);

    // Any call but the quiet ones.
    group.fail("*", 2, 46);
    assert_eq!(cuCtxPushCurrent_v2(bound.ctx), 0);
    assert_eq!(cuCtxPopCurrent_v2(null_mut()), 0);
    assert_eq!(cuCtxGetDevice(&mut 0), 0);
    assert_eq!(cuDeviceGetAttribute(&mut 0, 75, group.first), 0);
    assert_eq!(cuPointerGetAttribute(null_mut(), 2, 8), 1);
    let stream = stream();
    assert_eq!(cuStreamSynchronize(stream), 46);
    assert_eq!(cuStreamSynchronize(stream), 0);
    group.fail("*", 1, 46);
    assert_eq!(group.clear(), 1);
    assert_eq!(cuStreamDestroy_v2(stream), 0);

    assert_eq!(group.calls("cuMemAlloc_v2"), 3);
    assert_eq!(group.calls("cuStreamSynchronize"), 2);
    assert!(group.calls("*") > 5);
    bound.end();
}

#[test]
fn a_broken_engine_answers_its_code_and_keeps_its_books() {
    for flags in [0, LAZY] {
        let bound = Bound::with_group(Group::open(2, flags));
        let group = bound.group;
        let stream = stream();
        let event = recorded(stream);
        let (memory, locked, in_pool) = (device(8), pinned(8), pooled(8, stream));
        let leaked = device(8);
        group.break_with(214);
        group.break_with(700); // the first one counts
        assert_eq!(cuStreamSynchronize(stream), 214);
        assert_eq!(cuStreamQuery(stream), 214);
        assert_eq!(cuEventSynchronize(event), 214);
        assert_eq!(cuEventQuery(event), 214);
        assert_eq!(
            cuMemcpyHtoDAsync_v2(memory, [0u8; 8].as_ptr(), 8, stream),
            214
        );
        assert_eq!(cuMemAlloc_v2(&mut 0, 8), 214);
        assert_eq!(cuCtxSynchronize(), 214);
        assert_eq!(
            cuDevicePrimaryCtxRetain(&mut null_mut(), group.first + 1),
            214
        );
        assert_eq!(cuCtxPushCurrent_v2(bound.ctx), 0);
        assert_eq!(cuCtxPopCurrent_v2(null_mut()), 0);
        assert_eq!(cuDeviceGetAttribute(&mut 0, 75, group.first), 0);
        assert_eq!(cuMemFree_v2(memory), 214);
        assert_eq!(cuMemFreeAsync(in_pool, stream), 214);
        assert_eq!(cuMemFreeHost(locked.cast()), 0);
        assert_eq!(cuEventDestroy_v2(event), 214);
        assert_eq!(cuStreamDestroy_v2(stream), 214);
        assert_eq!(group.live("pending"), 0);
        group.assert_report(&[&format!("{leaked:#x}"), "live: context"]);
        assert_eq!(cuMemFree_v2(leaked), 214);
        assert_eq!(cuDevicePrimaryCtxRelease_v2(group.first), 0);
        group.assert_clean();
    }
}

#[test]
fn a_driver_that_shuts_down_does_nothing() {
    let bound = Bound::new(0);
    let group = bound.group;
    let (memory, locked) = (device(8), pinned(8));
    group.shut_down(4);
    assert_eq!(cuMemFree_v2(memory), 4);
    assert_eq!(cuMemFreeHost(locked.cast()), 4);
    assert_eq!(cuCtxPushCurrent_v2(bound.ctx), 4);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(group.first), 4);
    assert_eq!(cuStreamCreate(&mut null_mut(), 1), 4);
    assert_eq!((group.live("device"), group.live("pinned")), (1, 1));
    group.shut_down(0);
    assert_eq!(cuMemFree_v2(memory), 0);
    assert_eq!(cuMemFreeHost(locked.cast()), 0);
    bound.end();
}

#[test]
fn wrong_handles_are_refused_and_reported() {
    let bound = Bound::new(0);
    let (stream, event) = (stream(), event());
    for dead in [false, true] {
        if dead {
            assert_eq!(cuStreamDestroy_v2(stream), 0);
            assert_eq!(cuEventDestroy_v2(event), 0);
        }
        // Of another kind, later destroyed.
        assert_eq!(cuEventQuery(stream), 400);
        assert_eq!(cuStreamQuery(event), 400);
        assert_eq!(cuEventRecord(stream, null_mut()), 400);
        assert_eq!(cuStreamWaitEvent(null_mut(), stream, 0), 400);
    }
    assert_eq!(cuEventDestroy_v2(null_mut()), 400);
    assert_eq!(cuStreamDestroy_v2(null_mut()), 400);
    assert_eq!(cuStreamSynchronize(without_provenance_mut(0x1234)), 400);
    assert_eq!(cuModuleUnload(without_provenance_mut(0x1234)), 400);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(bound.group.first), 0);
    let report = bound.group.report();
    assert_eq!(report.lines().count(), 12, "{report}");
    assert!(report.contains("stream 0x1234: unknown"));
}

#[test]
fn reports_are_cut_but_their_length_is_whole() {
    let bound = Bound::new(0);
    let whole = bound.group.report();
    let mut short = [b'.'; 8];
    let length = fake!(fake_cuda_report(bound.group.first => i32, short.as_mut_ptr() => *mut u8,
        6 => usize) -> usize);
    assert_eq!((length, &short), (whole.len(), b"live: .."));
    let length = fake!(fake_cuda_report(bound.group.first => i32, null_mut() => *mut u8,
        0 => usize) -> usize);
    assert_eq!(length, whole.len());
    bound.end();
}

#[test]
fn ordinals_come_in_groups() {
    let group = Group::open(3, 0);
    assert!(group.first > 0);
    assert_ne!(Group::open(1, 0).first, group.first + 1);
    let too_many = fake!(fake_cuda_open(901 => i32, 0 => u32, 0 => u64) -> i32);
    assert_eq!(too_many, -1);
}

#[test]
fn ordinals_can_be_given_back() {
    for flags in [0, LAZY].repeat(200) {
        let bound = Bound::with_group(Group::open(2, flags));
        let (group, stream) = (bound.group, stream());
        let memory = pooled(8, stream);
        assert_eq!(cuMemsetD8Async(memory, 0, 8, stream), 0);
        assert_eq!(cuMemFreeAsync(memory, stream), 0);
        assert_eq!(cuStreamDestroy_v2(stream), 0);
        assert!(!group.close(), "it has a context");
        bound.end();
        assert!(group.close());
    }
}

/// Runs one test of this binary in a process of its own.
pub(crate) fn child(test: &str, variable: &str, value: &str) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--test-threads=1"]);
    let output = command.env(variable, value).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}

#[test]
fn the_environment_is_read() {
    child("faults::child_without_a_driver", "FAKE_CUDA_INIT", "100");
    child("faults::child_with_two_devices", "FAKE_CUDA_COUNT", "2");
}

#[test]
fn child_without_a_driver() {
    // Run by `the_environment_is_read`.
    if std::env::var_os("FAKE_CUDA_INIT").is_none() {
        return;
    }
    assert_eq!(cuDevicePrimaryCtxRetain(&mut null_mut(), 0), 3);
    assert_eq!(cuInit(0), 100);
    assert_eq!(cuDevicePrimaryCtxRetain(&mut null_mut(), 0), 3);
}

#[test]
fn child_with_two_devices() {
    if std::env::var_os("FAKE_CUDA_COUNT").is_none() {
        return;
    }
    crate::fake::library();
    assert_eq!(cudarc::driver::CudaContext::device_count().unwrap(), 2);
    let group = Group::open(2, LAZY);
    assert_eq!(group.first, 0);
    Bound::with_group(group).end();
}
