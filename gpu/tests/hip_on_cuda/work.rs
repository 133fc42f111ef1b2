//! Copies, fills, host functions, events, captures, kernels.

use std::ptr::{from_mut, null_mut};
use std::slice::from_raw_parts;
use std::sync::Mutex;

use crate::fake::{LAZY, NO_BATCH};
use crate::hip::*;
use crate::raw::Attributes as BatchAttributes;

/// What page-locked memory holds.
fn bytes(ptr: Ptr, n: usize) -> Vec<u8> {
    // SAFETY: callers pass live memory of at least this length, after a wait.
    unsafe { from_raw_parts(ptr.cast::<u8>(), n) }.to_vec()
}

#[test]
fn bytes_go_up_and_come_down_in_order() {
    static SEEN: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    extern "C" fn host(_: Ptr) {
        SEEN.lock().unwrap().push("host function");
    }
    let rig = Rig::new(1, LAZY);
    let (up, down) = (stream(), stream());
    let pool = made(|pool| hipMemPoolCreate(pool, &PoolProperties::on(rig.first)));
    let memory = made(|ptr| hipMallocFromPoolAsync(ptr, 256, pool, up));
    let (source, target) = (pinned(256), pinned(256));
    let expected: Vec<u8> = (0..=255).collect();
    // SAFETY: `source` has 256 bytes of page-locked memory that nothing uses yet.
    unsafe { source.cast::<u8>().copy_from(expected.as_ptr(), 256) };

    assert_eq!(hipMemcpyAsync(memory, source, 256, HOST_TO_DEVICE, up), 0);
    assert_eq!(hipLaunchHostFunc(up, host, null_mut()), 0);
    let mark = event();
    assert_eq!(hipEventRecord(mark, up), 0);
    assert_eq!(hipStreamWaitEvent(down, mark, 0), 0);
    assert_eq!(hipMemcpyAsync(target, memory, 256, DEVICE_TO_HOST, down), 0);
    assert_eq!((hipEventQuery(mark), hipStreamQuery(down)), (600, 600));
    assert!(SEEN.lock().unwrap().is_empty());

    assert_eq!(hipEventSynchronize(mark), 0);
    assert_eq!(*SEEN.lock().unwrap(), ["host function"]);
    assert_eq!((hipEventQuery(mark), hipStreamQuery(down)), (0, 600));
    assert_eq!(hipStreamSynchronize(down), 0);
    assert_eq!(bytes(target, 256), expected);

    assert_eq!(hipFreeAsync(memory, down), 0);
    assert_eq!(hipEventDestroy(mark), 0);
    assert_eq!((hipStreamDestroy(up), hipStreamDestroy(down)), (0, 0));
    assert_eq!((hipHostFree(source), hipHostFree(target)), (0, 0));
    assert_eq!(hipMemPoolDestroy(pool), 0);
    rig.end();
}

#[test]
fn fills_and_copies_of_the_default_stream() {
    let rig = Rig::new(1, LAZY);
    let (memory, target) = (device(8), pinned(8));
    assert_eq!(hipMemset(memory, 0x1_07, 8), 0, "the low byte counts");
    assert_eq!(hipMemsetD8Async(memory, 9, 4, null_mut()), 0);
    assert_eq!(hipStreamQuery(null_mut()), 600);
    assert_eq!(hipMemcpy(target, memory, 8, DEVICE_TO_HOST), 0);
    assert_eq!(bytes(target, 8), [9, 9, 9, 9, 7, 7, 7, 7]);
    assert_eq!(hipMemset(memory, 1, 8), 0);
    assert_eq!(rig.group.live("pending"), 1);
    assert_eq!(hipDeviceSynchronize(), 0);
    assert_eq!(rig.group.live("pending"), 0);
    for kind in 0..=4 {
        assert_eq!(
            hipMemcpyAsync(target, memory, 8, kind, null_mut()),
            0,
            "{kind}"
        );
    }
    for kind in [-1, 5, 1024] {
        assert_eq!(hipMemcpyAsync(target, memory, 8, kind, null_mut()), 21);
        assert_eq!(hipMemcpy(target, memory, 8, kind), 21);
    }
    assert_eq!(rig.group.calls("cuMemcpyAsync"), 5);
    assert_eq!(hipDeviceSynchronize(), 0);
    assert_eq!((hipFree(memory), hipHostFree(target)), (0, 0));
    rig.end();
}

#[test]
fn peers_copy_between_their_pools() {
    let rig = Rig::new(2, 0);
    let (first, second) = (rig.first, rig.first + 1);
    let own = stream();
    let a = made(|ptr| hipMallocAsync(ptr, 8, own));
    assert_eq!(hipMemsetD8Async(a, 5, 8, own), 0);
    assert_eq!(hipStreamSynchronize(own), 0);
    assert_eq!(hipSetDevice(second), 0);
    let other = stream();
    let b = made(|ptr| hipMallocAsync(ptr, 8, other));
    assert_eq!(hipMemcpyPeerAsync(b, second, a, first, 8, other), 0);
    for (to, from) in [(second, 1000), (-1, first)] {
        assert_eq!(hipMemcpyPeerAsync(b, to, a, from, 8, other), 101);
    }
    let target = pinned(8);
    assert_eq!(hipMemcpyAsync(target, b, 8, DEVICE_TO_HOST, other), 0);
    assert_eq!(hipFreeAsync(b, other), 0);
    assert_eq!(hipStreamSynchronize(other), 0);
    assert_eq!(bytes(target, 8), [5; 8]);
    assert_eq!((hipHostFree(target), hipStreamDestroy(other)), (0, 0));
    assert_eq!(hipSetDevice(first), 0);
    assert_eq!((hipFreeAsync(a, own), hipStreamDestroy(own)), (0, 0));
    rig.end();
}

#[test]
fn batches_copy_all_or_say_that_there_are_none() {
    // Without attributes, and with them, which an older version refuses.
    let versions = [(0, 70_151_831), (1, 70_151_831), (1, 70_300_000)];
    let ways = [LAZY, LAZY | NO_BATCH];
    for (flags, (attributes, number)) in ways.iter().flat_map(|f| versions.map(|v| (*f, v))) {
        let _version = Version::new(number);
        let rig = Rig::new(1, flags);
        let own = stream();
        let (memory, target) = (device(8), pinned(8));
        assert_eq!(hipMemsetD8Async(memory, 3, 4, own), 0);
        assert_eq!(hipMemsetD8Async(memory.wrapping_add(4), 4, 4, own), 0);
        let mut targets = [target, target.wrapping_add(4)];
        let mut sources = [memory.wrapping_add(4), memory];
        let batch = |targets: &mut [Ptr; 2], sources: &mut [Ptr; 2], failed: *mut usize| {
            let (mut in_order, mut start) = (BatchAttributes::new(1), 0);
            let mut sizes = [4usize; 2];
            hipMemcpyBatchAsync(
                targets.as_mut_ptr(),
                sources.as_mut_ptr(),
                sizes.as_mut_ptr(),
                2,
                &mut in_order,
                &mut start,
                attributes,
                failed,
                own,
            )
        };
        let mut failed = 77;
        let refused = attributes > 0 && number < 70_300_000;
        let expected = if flags & NO_BATCH == 0 && !refused {
            0
        } else {
            801
        };
        assert_eq!(batch(&mut targets, &mut sources, &mut failed), expected);
        assert_eq!(batch(&mut targets, &mut sources, null_mut()), expected);
        assert_eq!(hipStreamSynchronize(own), 0);
        if expected == 0 {
            assert_eq!(failed, 77, "written after failures only");
            assert_eq!(bytes(target, 8), [4, 4, 4, 4, 3, 3, 3, 3]);
            rig.group.fail("cuMemcpyBatchAsync_v2", 1, 2);
            assert_eq!(batch(&mut targets, &mut sources, &mut failed), 2);
        }
        assert_eq!(failed, if refused { 77 } else { usize::MAX });
        assert_eq!((hipFree(memory), hipHostFree(target)), (0, 0));
        assert_eq!(hipStreamDestroy(own), 0);
        rig.end();
    }
}

#[test]
fn captures_are_begun_seen_and_ended() {
    let rig = Rig::new(1, 0);
    let own = stream();
    let is_capturing = || {
        let mut status = -1;
        assert_eq!(hipStreamIsCapturing(own, &mut status), 0);
        status
    };
    assert_eq!(is_capturing(), 0);
    assert_eq!(hipStreamBeginCapture(own, 2), 0);
    assert_eq!(is_capturing(), 1);
    let mut graph = own;
    assert_eq!(hipStreamEndCapture(own, &mut graph), 0);
    assert!(graph.is_null(), "the stand-in makes none");
    assert_eq!(is_capturing(), 0);
    let mut mode = 2;
    assert_eq!(hipThreadExchangeStreamCaptureMode(&mut mode), 0);
    let before = mode;
    assert_eq!(hipThreadExchangeStreamCaptureMode(&mut mode), 0);
    assert_eq!((before, mode), (0, 2));
    assert_eq!(hipStreamDestroy(own), 0);
    rig.end();
}

#[test]
fn kernels_run() {
    let rig = Rig::new(1, LAZY);
    let own = stream();
    let module = made(|module| {
        hipModuleLoadData(
            module,
            c".visible .entry fill_i64(.param .u64 out)".as_ptr(),
        )
    });
    let function = made(|f| hipModuleGetFunction(f, module, c"fill_i64".as_ptr()));
    assert_eq!(
        hipModuleGetFunction(&mut null_mut(), module, c"other".as_ptr()),
        500
    );
    let (memory, target) = (device(16), pinned(16));
    let (mut out, mut value, mut n) = (memory, 42u64, 2u64);
    let mut parameters: [Ptr; 3] = [
        from_mut(&mut out).cast(),
        from_mut(&mut value).cast(),
        from_mut(&mut n).cast(),
    ];
    let launch = |parameters: &mut [Ptr; 3], stream| {
        let extra = null_mut();
        hipModuleLaunchKernel(
            function,
            1,
            1,
            1,
            32,
            1,
            1,
            0,
            stream,
            parameters.as_mut_ptr(),
            extra,
        )
    };
    assert_eq!(launch(&mut parameters, own), 0);
    assert_eq!(hipMemcpyAsync(target, memory, 16, DEVICE_TO_HOST, own), 0);
    assert_eq!(hipStreamSynchronize(own), 0);
    assert_eq!(bytes(target, 16), [42u64.to_ne_bytes(); 2].concat());
    assert_eq!(hipModuleUnload(module), 0);
    assert_eq!((hipFree(memory), hipHostFree(target)), (0, 0));
    assert_eq!(hipStreamDestroy(own), 0);
    rig.end();
}
