//! What is HIP's alone: current devices, streams and events by their handles, the thread's last error.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, Int64Array};
use arrow_device::device::DevicePtr;
use arrow_device::dlpack::{DlpackOptions, DlpackStream};
use arrow_device::{
    DeviceArray, DeviceBuffer, DeviceBufferMut, Devices, Error, Queue, ReleasePolicy, SyncEvent,
    SyncPolicy,
};
use arrow_schema::DataType;

use crate::fake::{Group, LAZY, MODES, NO_POOLS, in_mode};
use crate::given::everything;
use crate::hip::*;
use crate::rig::{Rig as Opened, assert_gone, hold, soon};
use crate::support::{assert_same, assert_same_batch, wide_batch};
use crate::support_c::Foreign;
use crate::vendor::{DEVICE, HOST, MEMORIES, open_device};

fn longs(n: i64) -> Int64Array {
    Int64Array::from_iter_values((0..n).map(|i| i * 5 - 9))
}

/// The thread's capture mode, which this sets to `mode`.
fn capture_mode(mut mode: c_int) -> c_int {
    assert_eq!(hipThreadExchangeStreamCaptureMode(&mut mode), 0);
    mode
}

#[test]
fn the_callers_device_and_capture_mode_stay_as_they_were() {
    const THREAD_LOCAL: c_int = 1;
    for mode in MODES {
        for memory in MEMORIES {
            let group = Group::open(2, mode);
            for current in [0, group.first, group.first + 1] {
                let rig = Opened::of(group, open_device(memory, group.ordinal()));
                assert_eq!(hipSetDevice(current), 0);
                let before = capture_mode(THREAD_LOCAL);
                everything(&rig);
                assert_eq!(current_device(), current);
                rig.assert_done();
                drop(rig);
                assert_eq!(current_device(), current);
                assert_eq!(capture_mode(before), THREAD_LOCAL);
            }
            assert_eq!(hipSetDevice(0), 0);
            assert_gone(group);
        }
    }
}

/// A stream of HIP's, of a device.
fn stream_of(ordinal: c_int) -> Ptr {
    assert_eq!(hipSetDevice(ordinal), 0);
    let stream = stream();
    assert_eq!(hipSetDevice(0), 0);
    stream
}

fn queue(rig: &Opened, stream: Ptr) -> Result<Queue, Error> {
    // SAFETY: the tests' streams live until nothing of their queues is left.
    unsafe { Queue::from_hip_stream(&rig.device, stream.cast(), Box::new(())) }
}

/// A stream that lives as long as something needs it.
struct Owned(usize);

impl Drop for Owned {
    fn drop(&mut self) {
        assert_eq!(hipStreamDestroy(self.0 as Ptr), 0);
    }
}

/// A consumer holds what was allocated on the stream long after the queue.
#[test]
fn a_stream_lives_as_long_as_its_memory() {
    for flags in [0, LAZY, NO_POOLS] {
        let rig = Opened::new(flags);
        let before = rig.group.live("streams");
        let stream = stream_of(rig.group.first);
        let owner = Box::new(Owned(stream.addr()));
        // SAFETY: the stream lives until the owner is dropped, which destroys it.
        let queue = unsafe { Queue::from_hip_stream(&rig.device, stream.cast(), owner) }.unwrap();
        let up = rig.upload_on(&wide_batch(8, 300), &queue).unwrap();
        let (array, schema) = up.export(SyncPolicy::Event).unwrap();
        drop((up, queue));
        assert_eq!(rig.group.live("streams"), before + 1);
        std::thread::spawn(move || drop((array, schema)))
            .join()
            .unwrap();
        // The next use of the device finds that the stream's work has ended.
        assert!(soon(|| {
            rig.synchronize().unwrap();
            rig.group.live("streams") == before
        }));
        rig.end();
    }
}

/// HIP waits when it destroys a stream; whoever drops a queue does not.
#[test]
fn a_queue_with_work_is_dropped_without_a_wait() {
    for memory in MEMORIES {
        let rig = Opened::with(0, memory);
        let queue = rig.new_queue().unwrap();
        let held = hold(&queue);
        let up = rig.upload_on(&wide_batch(8, 300), &queue).unwrap();
        let (sender, dropped) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            drop((up, queue));
            let _ = sender.send(());
        });
        let in_time = dropped.recv_timeout(std::time::Duration::from_secs(10));
        drop(held);
        thread.join().unwrap();
        assert!(in_time.is_ok(), "it waited");
        rig.end();
    }
}

#[test]
fn streams_that_are_given() {
    for mode in MODES {
        let rig = Opened::new(mode);
        let batch = wide_batch(8, 300);
        let own = stream_of(rig.group.first);
        for stream in [own, null_mut()] {
            let queue = queue(&rig, stream).unwrap();
            assert_eq!(queue.hip_stream().unwrap(), stream.cast());
            let up = rig.upload_on(&batch, &queue).unwrap();
            drop(up.column(1).unwrap().validity_on(&queue).unwrap());
            assert_same_batch(&batch, &up.to_host().unwrap(), "given stream");
            drop(up);
            rig.assert_done();
        }
        assert_eq!(hipStreamDestroy(own), 0);
        rig.end();
    }
}

#[test]
fn streams_and_events_that_are_refused() {
    let group = Group::open(2, 0);
    let rig = Opened::of(group, open_device(DEVICE, group.ordinal()));
    let other = stream_of(group.first + 1);
    let e = queue(&rig, other).unwrap_err();
    assert!(matches!(e, Error::InvalidArgument(_)), "{e}");
    let text = format!("ROCm device {}", group.first + 1);
    for part in [&text, &rig.device.to_string()] {
        assert!(e.to_string().contains(part), "{e}");
    }
    assert_eq!(hipStreamDestroy(other), 0);
    let e = queue(&rig, 2 as Ptr).unwrap_err();
    assert!(e.to_string().contains("per-thread default stream"), "{e}");
    // SAFETY: the device refuses the call before the stream is used.
    let cpu = unsafe { Queue::from_hip_stream(&Devices::cpu(), null_mut(), Box::new(())) };
    let e = cpu.unwrap_err();
    assert!(matches!(e, Error::NotSupported { .. }), "{e}");
    let e = Devices::cpu().default_queue().hip_stream().unwrap_err();
    assert!(
        e.to_string().contains("no device of the runtime Rocm"),
        "{e}"
    );
    // SAFETY: both are refused before the handle is used.
    let (null, cpu) = unsafe {
        let null = SyncEvent::from_hip_event(&rig.device, null_mut());
        let cpu = SyncEvent::from_hip_event(&Devices::cpu(), 64 as *mut _);
        (null.unwrap_err(), cpu.unwrap_err())
    };
    assert!(null.to_string().contains("null"), "{null}");
    assert!(matches!(cpu, Error::NotSupported { .. }), "{cpu}");
    rig.end();
}

/// Work that would only be captured would run when its memory is gone.
#[test]
fn a_stream_that_is_captured_is_refused() {
    const RELAXED: c_int = 2;
    let rig = Opened::new(0);
    let stream = stream_of(rig.group.first);
    assert_eq!(hipSetDevice(rig.group.first), 0);
    assert_eq!(hipStreamBeginCapture(stream, RELAXED), 0);
    assert_eq!(hipSetDevice(0), 0);
    let e = queue(&rig, stream).unwrap_err();
    assert!(e.to_string().contains("end the capture first"), "{e}");
    let mut graph = null_mut();
    assert_eq!(hipSetDevice(rig.group.first), 0);
    assert_eq!(hipStreamEndCapture(stream, &mut graph), 0);
    assert_eq!(hipSetDevice(0), 0);
    drop(queue(&rig, stream).unwrap());
    assert_eq!(hipStreamDestroy(stream), 0);
    rig.end();
}

#[test]
fn events_that_are_given() {
    for mode in MODES {
        let rig = Opened::new(mode);
        let stream = stream_of(rig.group.first);
        let theirs = queue(&rig, stream).unwrap();
        let source = longs(100);
        let from = rig.upload_array(&source).unwrap();
        rig.synchronize().unwrap();
        // Somebody copies the values, and says when that is done.
        let held = hold(&theirs);
        assert_eq!(hipSetDevice(rig.group.first), 0);
        let to = device(800);
        let values = from.buffer(1).unwrap();
        let at = values.address().as_ptr();
        assert_eq!(hipMemcpyAsync(to, at, 800, DEFAULT, stream), 0);
        let raw = event();
        assert_eq!(hipEventRecord(raw, stream), 0);
        assert_eq!(hipSetDevice(0), 0);
        // SAFETY: the event was recorded above, and nothing else records it again or destroys it.
        let event = unsafe { SyncEvent::from_hip_event(&rig.device, raw.cast()) }.unwrap();
        assert!(!event.is_complete().unwrap());
        let base = DevicePtr::new(to);
        // SAFETY: the memory lives until the end of the test, and nobody writes it.
        let buffer = unsafe {
            DeviceBuffer::from_raw(&rig.device, base, 800, Box::new(()), Some(event.clone()))
        };
        let column = DeviceArray::from_values(DataType::Int64, 100, buffer, None).unwrap();
        assert!(!column.is_ready().unwrap());
        drop(held);
        assert_same(&source, &column.to_host().unwrap(), "event");
        assert!(event.is_complete().unwrap() && column.is_ready().unwrap());
        // Released on a thread that never saw HIP, and destroyed.
        drop((column, from, values));
        rig.synchronize().unwrap();
        std::thread::spawn(move || drop(event)).join().unwrap();
        drop(theirs);
        assert_eq!(hipFree(to), 0);
        rig.assert_done();
        assert_eq!(hipEventQuery(raw), 400, "destroyed");
        assert_eq!(hipStreamDestroy(stream), 0);
        let report = rig.group.report();
        // The query above is all that is wrong.
        let wrong = report.lines().filter(|line| line.starts_with("violation"));
        assert_eq!(wrong.count(), 1, "{report}");
    }
}

/// Calls that fail and are answered for leave no error behind for the program, nor is there none where it has left one
/// (since HIP 7: before, each call of HIP's puts its own in its place).
#[test]
fn the_threads_last_error_stays() {
    let mut version = 0;
    assert_eq!(hipRuntimeGetVersion(&mut version), 0);
    let rig = Opened::new(0);
    let errors: &[_] = match version {
        70_000_000.. => &[0, 101],
        _ => &[0],
    };
    for &error in errors {
        let check = |what: &str, work: &dyn Fn()| {
            let _ = hipGetLastError();
            let _ = hipSetDevice(if error == 0 { 0 } else { 1 << 20 });
            assert_eq!(hipPeekAtLastError(), error);
            work();
            assert_eq!(hipPeekAtLastError() != 0, error != 0, "{what}");
        };
        check("ordinary memory", &|| {
            let mut foreign = Foreign::new(&longs(10).to_data(), &rig.device);
            let heap = [0i64; 10];
            foreign.set_buffer(&[], 1, heap.as_ptr().cast());
            let e = foreign.import(&rig.options).unwrap_err();
            assert!(e.to_string().contains("ordinary host memory"), "{e}");
            foreign.assert_released("ordinary memory");
        });
        check("a large column", &|| {
            let column: ArrayRef = Arc::new(longs(1 << 18));
            let up = rig.upload_array(&column).unwrap();
            assert_same(&column, &up.to_host().unwrap(), "from ordinary memory");
        });
        check("a pool that is full", &|| {
            if in_mode(NO_POOLS) {
                return;
            }
            rig.group.fail("cuMemAllocFromPoolAsync", 1, 2);
            drop(DeviceBufferMut::allocate(&rig.default_queue(), 64).unwrap());
            assert_eq!(rig.group.clear(), 1);
        });
        check("no page-locked memory", &|| {
            rig.group.fail("cuMemHostAlloc", 1, 2);
            rig.trim();
            drop(rig.host_buffer(40 << 20).unwrap());
            assert_eq!(rig.group.clear(), 1);
        });
        check("no such device", &|| {
            assert!(open_device(DEVICE, 1 << 20).is_err());
        });
        check("a failed record", &|| {
            rig.group.fail("cuEventRecord", 1, 400);
            assert!(rig.default_queue().record().is_err());
            assert_eq!(rig.group.clear(), 1);
        });
    }
    rig.end();
}

/// The consumer's stream waits for the upload, on the device: on the lazy driver it would otherwise read
/// what nobody has written yet.
#[test]
fn a_dlpack_consumers_stream_waits() {
    for flags in [0, LAZY, LAZY | NO_POOLS] {
        let rig = Opened::new(flags);
        let source = longs(1000);
        let consumer = stream_of(rig.group.first);
        for (stream, number) in [
            (consumer, Some(consumer.addr() as i64)),
            (null_mut(), Some(0)),
            (null_mut(), None),
        ] {
            let held = hold(&rig.default_queue());
            let column = rig.upload_array(&source).unwrap();
            // SAFETY: the stream lives during the export.
            let order = unsafe { DlpackStream::from_number(number) };
            let options = DlpackOptions {
                release: ReleasePolicy::Ordered,
                ..DlpackOptions::new(order)
            };
            let before = rig.stats();
            let tensor = column.export_dlpack(&options).unwrap().into_versioned();
            let cost = rig.stats().since(&before);
            assert_eq!((cost.host_waits, cost.queue_waits), (0, 1), "{number:?}");
            drop(held);
            // SAFETY: the tensor lives until its deleter is called, once.
            let data = unsafe { (*tensor).dl_tensor.data };
            assert_eq!(hipSetDevice(rig.group.first), 0);
            let to = pinned(8000);
            assert_eq!(hipMemcpyAsync(to, data, 8000, DEVICE_TO_HOST, stream), 0);
            assert_eq!(hipStreamSynchronize(stream), 0);
            // SAFETY: the copy of 1,000 values to this page-locked memory was waited for.
            let seen = unsafe { std::slice::from_raw_parts(to.cast::<i64>(), 1000) };
            assert_eq!(seen, &source.values()[..], "{number:?}");
            assert_eq!(hipHostFree(to), 0);
            assert_eq!(hipSetDevice(0), 0);
            // SAFETY: the tensor lives until this call of its deleter, the only one.
            unsafe { (*tensor).deleter.unwrap()(tensor) };
            drop(column);
        }
        rig.assert_done();
        assert_eq!(hipStreamDestroy(consumer), 0);
        rig.end();
    }
}

#[test]
fn what_a_device_says_of_itself() {
    let group = Group::open(2, 0);
    let rig = Opened::of(group, open_device(HOST, group.ordinal() + 1));
    let mut version = 0;
    assert_eq!(hipRuntimeGetVersion(&mut version), 0);
    let text = format!("{:?} {:?}", rig.backend(), rig.default_queue());
    for part in ["rocm-host", &format!("HIP {version} device")] {
        assert!(text.contains(part), "{text}");
    }
    rig.end();
}
