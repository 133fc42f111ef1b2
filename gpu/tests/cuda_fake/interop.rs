//! cudarc's types in and out, and the order of streams in each.

use std::ptr;

use arrow_array::Int64Array;
use arrow_device::{DeviceArray, DeviceBuffer, DeviceBufferMut, Error, Queue, SyncEvent};
use arrow_schema::DataType;
use cudarc::driver::{CudaStream, sys};

use crate::fake::{Group, MODES, NO_POOLS, PAGEABLE_EAGER, fake};
use crate::rig::{Rig, hold};
use crate::support::assert_same;
use crate::vendor::{DEVICE, MANAGED, open_device};
use crate::world::World;

/// Sources of cudarc's copies are temporaries here.
fn world(flags: u32) -> World {
    World::new(flags | PAGEABLE_EAGER, DEVICE)
}

fn longs(n: i64) -> Vec<i64> {
    (0..n).map(|i| i * 3 - 7).collect()
}

#[test]
fn a_slice_becomes_a_column_and_a_slice_again() {
    for flags in MODES.into_iter().chain([NO_POOLS]) {
        let world = world(flags);
        let (rig, stream) = (&world.rig, &world.stream);
        let values = longs(1000);
        let other = Queue::from_cuda_stream(&rig.device, stream.clone()).unwrap();
        let held = hold(&other);
        let slice = stream.clone_htod(&values).unwrap();
        let address = slice_address(&slice, stream);
        let before = rig.stats();
        let buffer = DeviceBuffer::from_cuda_slice(&rig.device, slice).unwrap();
        assert_eq!(buffer.len(), 8000);
        assert_eq!(buffer.address().address() as u64, address, "copied");
        let column = DeviceArray::from_values(DataType::Int64, 1000, buffer.clone(), None).unwrap();
        assert!(!column.is_ready().unwrap(), "the stream has not run");
        assert_eq!(rig.stats().since(&before).host_waits, 0);
        drop(held);
        assert_same(
            &Int64Array::from(values.clone()),
            &column.to_host().unwrap(),
            "column",
        );

        // Shared memory is not given up, nor a part of it.
        let (buffer, e) = buffer.try_into_cuda_slice::<i64>(stream).unwrap_err();
        assert!(e.to_string().contains("shared"), "{e}");
        drop(column);
        let (part, e) = buffer
            .slice(8, 80)
            .unwrap()
            .try_into_cuda_slice::<i64>(stream)
            .unwrap_err();
        assert!(e.to_string().contains("shared"), "{e}");
        drop(buffer);
        let (part, e) = part.try_into_cuda_slice::<i64>(stream).unwrap_err();
        assert!(e.to_string().contains("not all"), "{e}");
        drop(part);

        // Our own memory, filled on another queue: the stream waits for it.
        let queue = rig.new_queue().unwrap();
        let mut memory = DeviceBufferMut::allocate(&queue, 800).unwrap();
        let held = hold(&queue);
        memory.fill(1).unwrap();
        let buffer = memory.freeze().unwrap();
        let address = buffer.address();
        let odd = DeviceBufferMut::allocate(&queue, 12).unwrap();
        let (odd, e) = odd
            .freeze()
            .unwrap()
            .try_into_cuda_slice::<i64>(stream)
            .unwrap_err();
        assert!(e.to_string().contains("whole number"), "{e}");
        drop(odd);
        let before = rig.stats();
        let slice = buffer.try_into_cuda_slice::<i64>(stream).unwrap();
        assert_eq!(rig.stats().since(&before).host_waits, 0);
        assert_eq!(
            (slice.len(), slice_address(&slice, stream)),
            (100, address.address() as u64)
        );
        drop(held);
        let mut back = vec![0i64; 100];
        stream.memcpy_dtoh(&slice, &mut back).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(back, [0x0101_0101_0101_0101; 100]);
        drop((slice, queue, other));
        stream.synchronize().unwrap();
        world.end();
    }
}

fn slice_address(slice: &cudarc::driver::CudaSlice<i64>, stream: &CudaStream) -> u64 {
    use cudarc::driver::DevicePtr;
    slice.device_ptr(stream).0
}

/// Work of the home queue that reads a buffer comes before the slice's.
#[test]
fn a_slice_waits_for_the_home_queue() {
    for mode in MODES {
        let world = world(mode);
        let (rig, stream) = (&world.rig, &world.stream);
        let queue = rig.new_queue().unwrap();
        let mut memory = DeviceBufferMut::allocate(&queue, 800).unwrap();
        memory.fill(1).unwrap();
        let buffer = memory.freeze().unwrap();
        // What a kernel of the home queue would do: it reads the buffer.
        let seen = DeviceBufferMut::allocate(&queue, 800).unwrap();
        {
            let loan = buffer.on(&queue).unwrap();
            let copy = arrow_device::device::CopyOp {
                src: loan.address(),
                dst: seen.address(),
                bytes: 800,
                kind: arrow_device::device::CopyKind::DeviceToDevice,
            };
            // SAFETY: source and destination have 800 bytes, and are freed in the queue's order.
            unsafe { queue.raw().copy(&[copy]) }.unwrap();
        }
        let mut slice = buffer.try_into_cuda_slice::<i64>(stream).unwrap();
        stream.memset_zeros(&mut slice).unwrap();
        // On the lazy driver nothing else has run then.
        stream.synchronize().unwrap();
        let seen = seen.freeze().unwrap();
        let seen = DeviceArray::from_values(DataType::Int64, 100, seen, None).unwrap();
        let expected = Int64Array::from(vec![0x0101_0101_0101_0101; 100]);
        assert_same(
            &expected,
            &seen.to_host().unwrap(),
            "read before it was given away",
        );
        drop((seen, slice));
        stream.synchronize().unwrap();
        drop(queue);
        world.end();
    }
}

/// A slice that was given away, used on another stream of cudarc's: that one waits as well.
#[test]
fn a_slice_given_away_on_another_stream() {
    for mode in MODES {
        let world = world(mode);
        let (rig, stream) = (&world.rig, &world.stream);
        let reader = world.context.new_stream().unwrap();
        let queue = rig.new_queue().unwrap();
        let mut back = vec![0i64; 100];
        let mut memory = DeviceBufferMut::allocate(&queue, 800).unwrap();
        let held = hold(&queue);
        memory.fill(1).unwrap();
        let buffer = memory.freeze().unwrap();
        let slice = buffer.try_into_cuda_slice::<i64>(stream).unwrap();
        reader.memcpy_dtoh(&slice, &mut back).unwrap();
        let event = reader.record_event(None).unwrap();
        let event = SyncEvent::from_cuda_event(&rig.device, event).unwrap();
        let early = event.is_complete().unwrap();
        drop(held);
        reader.synchronize().unwrap();
        assert!(!early, "the other stream does not wait");
        assert_eq!(back, [0x0101_0101_0101_0101; 100]);
        drop((event, slice));
        stream.synchronize().unwrap();
        reader.synchronize().unwrap();
        drop((queue, reader));
        world.end();
    }
}

/// Does something while a stream is captured.
fn captured(raw: sys::CUstream, work: impl FnOnce()) {
    let code = fake!(cuStreamBeginCapture_v2(raw => sys::CUstream, 0 => i32) -> i32);
    assert_eq!(code, 0);
    work();
    let mut graph: *mut () = ptr::null_mut();
    let code =
        fake!(cuStreamEndCapture(raw => sys::CUstream, &raw mut graph => *mut *mut ()) -> i32);
    assert_eq!(code, 0);
}

/// Work that would only be captured would run when its memory is gone.
#[test]
fn a_stream_that_is_captured_is_refused() {
    fn refused<T>(result: Result<T, Error>) {
        let e = result.err().unwrap();
        assert!(matches!(e, Error::InvalidArgument(_)), "{e}");
        assert!(e.to_string().contains("end the capture first"), "{e}");
    }
    for mode in MODES {
        let world = world(mode);
        let (rig, stream) = (&world.rig, &world.stream);
        captured(stream.cu_stream(), || {
            refused(Queue::from_cuda_stream(&rig.device, stream.clone()));
        });
        // Also a stream that the queue has, given or its own.
        let given = Queue::from_cuda_stream(&rig.device, stream.clone()).unwrap();
        for queue in [given, rig.device.new_queue().unwrap()] {
            let values = Int64Array::from(longs(500));
            let column = rig.upload_array_on(&values, &queue).unwrap();
            let freed = DeviceBufferMut::allocate(&queue, 640).unwrap();
            let raw = queue.cuda_stream().unwrap().cu_stream();
            captured(raw, || {
                refused(rig.upload_array_on(&values, &queue));
                refused(DeviceBufferMut::allocate(&queue, 64));
                refused(queue.record());
                refused(column.start_to_host(&queue));
                drop(freed);
            });
            assert_same(
                &values,
                &column.start_to_host(&queue).unwrap().wait().unwrap(),
                "afterwards",
            );
            rig.synchronize().unwrap();
        }
        world.end();
    }
}

/// A program's stream may go with its queue, also if the end of its work could not be marked.
#[test]
fn a_stream_that_goes_with_its_queue() {
    for mode in MODES {
        let world = world(mode);
        let (rig, stream) = (&world.rig, world.context.new_stream().unwrap());
        let raw = stream.cu_stream();
        // SAFETY: the stream lives longer than the queue.
        let queue = unsafe { Queue::adopt(&rig.device, raw.expose_provenance()) }.unwrap();
        drop(
            rig.upload_array_on(&Int64Array::from(longs(500)), &queue)
                .unwrap(),
        );
        rig.synchronize().unwrap();
        captured(raw, || drop(queue));
        drop(stream);
        // Looks for streams whose work has ended.
        drop(rig.new_queue().unwrap());
        world.end();
    }
}

/// Uses of a slice on other streams, which cudarc knows of, come before the column's.
#[test]
fn other_streams_that_wrote_a_slice() {
    for mode in MODES {
        let world = world(mode);
        let (rig, stream) = (&world.rig, &world.stream);
        let writer = world.context.new_stream().unwrap();
        let mut slice = stream.alloc_zeros::<i64>(500).unwrap();
        stream.synchronize().unwrap();
        let queue = Queue::from_cuda_stream(&rig.device, writer.clone()).unwrap();
        let values = longs(500);
        // SAFETY: the memory is written below before the stream reads it, and kept until then.
        let mut pinned = unsafe { world.context.alloc_pinned_with_flags::<i64>(500, 0) }.unwrap();
        pinned.as_mut_slice().unwrap().copy_from_slice(&values);
        // Declared last: were the test to fail, what waits for the stream would wait for it.
        let held = hold(&queue);
        writer.memcpy_htod(&pinned, &mut slice).unwrap();
        let buffer = DeviceBuffer::from_cuda_slice(&rig.device, slice).unwrap();
        let column = DeviceArray::from_values(DataType::Int64, 500, buffer, None).unwrap();
        assert!(!column.is_ready().unwrap());
        drop(held);
        assert_same(
            &Int64Array::from(values),
            &column.to_host().unwrap(),
            "written elsewhere",
        );
        writer.synchronize().unwrap();
        drop((column, pinned, queue, writer));
        world.end();
    }
}

#[test]
fn slices_that_are_refused() {
    let world = world(0);
    let (rig, stream) = (&world.rig, &world.stream);
    // Nothing in it.
    let address = stream.clone_htod(&longs(1)).unwrap().leak();
    // SAFETY: the address was just leaked by a slice, and nothing else owns the memory.
    let empty = unsafe { stream.upgrade_device_ptr::<i64>(address, 0) };
    let buffer = DeviceBuffer::from_cuda_slice(&rig.device, empty).unwrap();
    assert!(buffer.is_empty());
    let (_, e) = buffer.try_into_cuda_slice::<i64>(stream).unwrap_err();
    assert!(matches!(e, Error::InvalidArgument(_)), "{e}");
    // Other devices, other kinds of memory.
    let slice = stream.clone_htod(&longs(10)).unwrap();
    let e = DeviceBuffer::from_cuda_slice(&arrow_device::Devices::cpu(), slice).unwrap_err();
    assert!(matches!(e, Error::NotSupported { .. }), "{e}");
    let slice = stream.clone_htod(&longs(10)).unwrap();
    let managed = open_device(MANAGED, rig.group.ordinal()).unwrap();
    let e = DeviceBuffer::from_cuda_slice(&managed, slice).unwrap_err();
    assert!(matches!(e, Error::NotSupported { .. }), "{e}");
    drop(managed);
    let other = Group::open(1, 0);
    let elsewhere = Rig::of(other, open_device(DEVICE, other.ordinal()));
    let slice = stream.clone_htod(&longs(10)).unwrap();
    let e = DeviceBuffer::from_cuda_slice(&elsewhere.device, slice).unwrap_err();
    assert!(matches!(e, Error::InvalidArgument(_)), "{e}");
    assert!(Queue::from_cuda_stream(&arrow_device::Devices::cpu(), stream.clone()).is_err());
    assert!(
        arrow_device::Devices::cpu()
            .default_queue()
            .cuda_stream()
            .is_err()
    );
    elsewhere.end();
    stream.synchronize().unwrap();
    world.end();
}

/// Every failure of the driver on the way: an error or a slice, and nothing is lost.
#[test]
fn failures_on_the_way() {
    for flags in [0, NO_POOLS] {
        let world = world(flags);
        let (rig, stream) = (&world.rig, &world.stream);
        for into in [true, false] {
            for n in 1.. {
                let slice = stream.clone_htod(&longs(100)).unwrap();
                let mut memory = DeviceBufferMut::allocate(&rig.default_queue(), 800).unwrap();
                memory.fill(1).unwrap();
                let memory = memory.freeze().unwrap();
                rig.group.fail("*", n, 1);
                // A slice that came back lives on: if its own drop fails cudarc frees too early.
                let (failed, _slice) = match into {
                    true => match memory.try_into_cuda_slice::<i64>(stream) {
                        Ok(slice) => (None, Some(slice)),
                        Err((_, e)) => (Some(e), None),
                    },
                    false => (
                        DeviceBuffer::from_cuda_slice(&rig.device, slice).err(),
                        None,
                    ),
                };
                let fired = rig.group.clear();
                if let Some(e) = &failed {
                    let sane =
                        matches!(e, Error::Device { code: 1, .. } | Error::InvalidArgument(_));
                    assert!(sane && fired > 0, "{n}: {e:?}");
                }
                // cudarc keeps errors of its drops for later.
                let _ = world.context.check_err();
                stream.synchronize().unwrap();
                let _ = rig.take_drop_error();
                if fired == 0 {
                    assert!(n > 3 && failed.is_none(), "{n}: {failed:?}");
                    break;
                }
            }
        }
        world.context.check_err().unwrap();
        // cudarc loses what its own drops could not free.
        let _ = rig.unclean();
        assert!(
            !rig.group.report().contains("violation"),
            "{}",
            rig.group.report()
        );
    }
}

#[test]
fn events_of_cudarc() {
    for mode in MODES {
        let world = world(mode);
        let (rig, stream) = (&world.rig, &world.stream);
        let theirs = Queue::from_cuda_stream(&rig.device, stream.clone()).unwrap();
        let held = hold(&theirs);
        let slice = stream.clone_htod(&longs(100)).unwrap();
        let event = stream.record_event(None).unwrap();
        let event = SyncEvent::from_cuda_event(&rig.device, event).unwrap();
        assert!(!event.is_complete().unwrap());
        // Adopted memory with an adopted event.
        let address = slice_address(&slice, stream) as usize;
        let base = arrow_device::device::DevicePtr::new(ptr::with_exposed_provenance_mut(address));
        // SAFETY: the owner keeps the slice, which has 800 bytes that nobody writes after the
        // event.
        let buffer = unsafe {
            DeviceBuffer::from_raw(&rig.device, base, 800, Box::new(slice), Some(event.clone()))
        };
        let column = DeviceArray::from_values(DataType::Int64, 100, buffer, None).unwrap();
        assert!(!column.is_ready().unwrap());
        drop(held);
        assert_same(
            &Int64Array::from(longs(100)),
            &column.to_host().unwrap(),
            "event",
        );
        assert!(event.is_complete().unwrap() && column.is_ready().unwrap());
        drop((column, theirs));
        assert!(
            SyncEvent::from_cuda_event(
                &arrow_device::Devices::cpu(),
                stream.record_event(None).unwrap()
            )
            .is_err()
        );
        // Released on a thread that never saw CUDA.
        std::thread::spawn(move || drop(event)).join().unwrap();
        stream.synchronize().unwrap();
        world.end();
    }
}
