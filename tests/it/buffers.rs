//! Buffers of device memory and host buffers: how they are made, filled, shortened and copied to the host, and what that costs.

use std::sync::Arc;

use crate::simkit::*;
use arrow_array::cast::AsArray;
use arrow_array::types::Int32Type;
use arrow_array::{Array, ArrayRef, Int32Array, Int64Array, RecordBatch};
use arrow_buffer::Buffer;
use arrow_buffer::ToByteSlice;
use arrow_device::device::DevicePtr;
use arrow_device::device::sim::{FaultOp, SimMode};
use arrow_device::{Device, DeviceArray, DeviceBufferMut, Devices, Error, Queue, TransferStats};
use arrow_schema::DataType;

fn cost<T>(work: impl FnOnce() -> T) -> (T, TransferStats) {
    TransferStats::scope(work)
}

/// Writes consecutive numbers from `first` on.
fn write(queue: &Queue, at: DevicePtr, first: i32, values: usize) {
    launch(queue, move |memory| {
        let slots = memory.slice_mut::<i32>(at, values)?;
        for (slot, value) in slots.iter_mut().zip(first..) {
            *slot = value;
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_buffer_comes_to_the_host() {
    for sim in MODES.map(Sim::new) {
        let queue = sim.new_queue().unwrap();
        let memory = DeviceBufferMut::for_values::<i32>(&queue, 1000).unwrap();
        write(&queue, memory.address(), 5, 1000);
        let buffer = memory.freeze().unwrap();
        let part = buffer.slice(8, 12).unwrap();
        for buffer in [&buffer, &part] {
            let (host, stats) = cost(|| buffer.to_host().unwrap());
            let first = if buffer.len() == 12 { 7 } else { 5 };
            let values: Vec<i32> = (first..).take(buffer.len() / 4).collect();
            assert_eq!(host.typed_data::<i32>(), values);
            assert_eq!(stats.bytes_to_host, buffer.len() as u64);
            assert_eq!((stats.copies, stats.host_waits), (1, 1), "{stats:?}");
        }
        // On the queue that made it, there is no wait for an event either.
        let values = DeviceArray::from_values(DataType::Int32, 3, part.clone(), None).unwrap();
        let (host, stats) = cost(|| values.start_to_host(&queue).unwrap().wait().unwrap());
        assert_eq!(host.as_primitive::<Int32Type>().values(), &[7, 8, 9]);
        drop(host);
        assert_eq!(
            (stats.copies, stats.host_waits, stats.queue_waits),
            (1, 1, 0)
        );
        let (host, stats) = cost(|| buffer.slice(4, 0).unwrap().to_host().unwrap());
        assert_eq!((host.len(), stats.copies, stats.host_waits), (0, 0, 0));
        drop((host, buffer, part, values));
        sim.assert_done();
    }
    let host = Buffer::from_vec(vec![1i32, 2, 3]);
    let buffer = arrow_device::DeviceBuffer::from(host.clone());
    let (same, stats) = cost(|| buffer.to_host().unwrap());
    assert_eq!(stats, TransferStats::default());
    assert_eq!(same.as_ptr(), host.as_ptr());
}

#[test]
fn sizes_of_values_and_bitmaps() {
    let queue = Devices::cpu().default_queue();
    let size = |memory: arrow_device::Result<DeviceBufferMut>| {
        let memory = memory.unwrap();
        (memory.len(), memory.capacity())
    };
    assert_eq!(
        size(DeviceBufferMut::for_values::<i64>(&queue, 9)),
        (72, 128)
    );
    assert_eq!(size(DeviceBufferMut::for_values::<u8>(&queue, 0)), (0, 0));
    for elements in [usize::MAX, usize::MAX / 4, usize::MAX / 8] {
        let e = DeviceBufferMut::for_values::<i64>(&queue, elements).unwrap_err();
        assert!(matches!(e, Error::OutOfMemory { .. }), "{e}");
    }
}

/// In place without a copy and at the same address, or by one copy; work that was queued before sees all of the memory.
#[test]
fn buffers_shrink() {
    for sim in MODES.map(Sim::new) {
        let queue = sim.new_queue().unwrap();
        let mut memory = DeviceBufferMut::for_values::<i32>(&queue, 1000).unwrap();
        write(&queue, memory.address(), 5, 1000);

        let (_, stats) = cost(|| memory.truncate(4000));
        assert_eq!((memory.len(), memory.capacity()), (4000, 4032));
        memory.truncate(5000);
        assert_eq!(memory.len(), 4000, "no more than there is");
        let (_, nothing) = cost(|| memory.shrink_to_fit().unwrap());
        assert_eq!((stats, nothing), Default::default());

        memory.truncate(400);
        assert_eq!((memory.len(), memory.capacity()), (400, 4032));
        let (_, stats) = cost(|| memory.shrink_to_fit().unwrap());
        let mut copied = TransferStats::default();
        (copied.allocations, copied.allocated_bytes) = (1, 448);
        (copied.copies, copied.bytes_on_device, copied.frees) = (1, 400, 1);
        assert_eq!(stats, copied);
        assert_eq!((memory.len(), memory.capacity()), (400, 448));
        // The larger allocation is freed already, as soon as its work is done.
        assert_eq!(sim.sim.report().live_bytes, 448);

        memory.truncate(100);
        memory.shrink_to_fit().unwrap();
        assert_eq!((memory.len(), memory.capacity()), (100, 128));
        let result = DeviceArray::from_values(DataType::Int32, 25, memory.freeze().unwrap(), None);
        let host = result.unwrap().to_host().unwrap();
        let expected = Int32Array::from_iter_values(5..30);
        assert_eq!(host.as_ref(), &expected as &dyn Array);
        drop(host);
        sim.assert_done();
    }
}

/// Nothing is left of a buffer without bytes, and its memory goes if it is dropped or frozen without a shrink.
#[test]
fn truncated_buffers_are_freed_whole() {
    for sim in MODES.map(Sim::new) {
        let queue = sim.default_queue();
        let fresh = || {
            let mut memory = DeviceBufferMut::allocate(&queue, 1000).unwrap();
            memory.truncate(64);
            memory
        };
        let mut none = fresh();
        none.truncate(0);
        let (_, stats) = cost(|| none.shrink_to_fit().unwrap());
        assert_eq!((stats.frees, stats.copies), (1, 0));
        assert_eq!((none.capacity(), none.address().is_null()), (0, true));
        assert!(none.freeze().unwrap().is_empty());
        drop(fresh());
        let mut filled = fresh();
        filled.fill(9).unwrap();
        let frozen = filled.freeze().unwrap();
        assert_eq!(frozen.to_host().unwrap().as_slice(), [9; 64]);
        assert_eq!(sim.sim.report().live_bytes, 1024);
        drop(frozen);
        sim.assert_done();
    }
}

/// A failed shrink leaves the buffer as it was, and the next one succeeds.
#[test]
fn shrinks_that_fail() {
    for sim in MODES.map(Sim::new) {
        let queue = sim.default_queue();
        for op in [FaultOp::Allocate, FaultOp::Copy] {
            let mut memory = DeviceBufferMut::for_values::<i32>(&queue, 1000).unwrap();
            write(&queue, memory.address(), 5, 1000);
            memory.truncate(400);
            sim.faults().clear();
            sim.faults().fail_nth(op, 1);
            memory.shrink_to_fit().unwrap_err();
            sim.faults().clear();
            assert_eq!((memory.len(), memory.capacity()), (400, 4032));
            assert_eq!(sim.sim.report().live_bytes, 4032);
            memory.shrink_to_fit().unwrap();
            let host = memory.freeze().unwrap().to_host().unwrap();
            assert_eq!(host.typed_data::<i32>()[..3], [5, 6, 7]);
            assert_eq!(host.len(), 400);
            drop(host);
            sim.assert_done();
        }
    }
}

/// A column over a host buffer of the device.
fn column(device: &Device, values: usize) -> ArrayRef {
    let mut host = device.host_buffer(values * 8).unwrap();
    let ascending: Vec<_> = (0..values as i64).collect();
    host.copy_from_slice(ascending.to_byte_slice());
    Arc::new(Int64Array::new(Buffer::from(host).into(), None))
}

/// What the documentation of host buffers says of uploads: copies, and bytes that the host packs.
#[test]
fn what_is_copied_from_where_it_is() {
    let sim = Sim::new(SimMode::Async);
    let mib = (1 << 20) / 8;
    // Values of each column, copies, bytes packed.
    let cases: &[(&[usize], u64, u64)] = &[
        // Alone, and of whole blocks: whatever the length.
        (&[8], 1, 0),
        (&[8 << 10], 1, 0),
        (&[mib], 1, 0),
        // Alone, with an end that is no whole block: packed if it is small.
        (&[(8 << 10) + 1], 1, (64 << 10) + 64),
        (&[mib + 1], 2, 64),
        // Not alone: only if they are large.
        (&[8 << 10, 8 << 10], 1, 128 << 10),
        (&[mib, mib], 2, 0),
        // A copy for each MiB, so that it runs while the next one is packed.
        (&[1 << 10; 1000], 8, 8_192_000),
    ];
    for (lengths, copies, packed) in cases {
        let columns: Vec<_> = lengths.iter().map(|n| column(&sim, *n)).collect();
        let context = format!("{} columns, first {:?}", lengths.len(), lengths.first());
        let columns = columns.into_iter().enumerate();
        let batch = RecordBatch::try_from_iter(columns.map(|(i, c)| (format!("c{i}"), c))).unwrap();
        let (up, stats) = cost(|| sim.upload(&batch).unwrap());
        assert_eq!(up.to_host().unwrap(), batch, "{context}");
        assert_eq!(stats.copies, *copies, "{context}: {stats:?}");
        assert_eq!(stats.host_copied_bytes, *packed, "{context}: {stats:?}");
        assert_eq!(stats.host_waits, 0, "{context}");
        drop(up);
    }
}

/// arrow-rs does not own the memory, and says so.
#[test]
fn arrays_over_host_buffers_cannot_be_changed_in_place() {
    let mut host = Devices::cpu().host_buffer(24).unwrap();
    host.copy_from_slice([1i64, 2, 3].to_byte_slice());
    let buffer = Buffer::from(host);
    let address = buffer.as_ptr();
    let buffer = buffer.into_mutable().unwrap_err();
    let array = Int64Array::new(buffer.into(), None);
    let array = array.into_builder().unwrap_err();
    let array = array.unary_mut(|v| v + 1).unwrap_err();
    assert_eq!(array.values(), &[1, 2, 3]);
    assert_eq!(array.values().inner().as_ptr(), address);
}
