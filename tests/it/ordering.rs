//! When memory is read, written and freed; who owns it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use crate::simkit::*;
use crate::support::*;
use arrow_array::{Array, ArrayRef, Int64Array, StringArray};
use arrow_buffer::{ArrowNativeType, Buffer};
use arrow_device::device::sim::{SimConfig, SimMemory, SimMode};
use arrow_device::device::{DevicePtr, EventPtr};
use arrow_device::{DeviceArray, DeviceBuffer, DeviceBufferMut, Devices, Queue};
use arrow_schema::DataType;

/// Queues a kernel that sends what it reads.
fn read<T: Send + 'static>(
    queue: &Queue,
    reader: impl FnOnce(&mut SimMemory<'_>) -> Result<T, String> + Send + 'static,
) -> Receiver<T> {
    let (sender, receiver) = channel();
    let kernel = move |memory: &mut SimMemory<'_>| {
        let value = reader(memory)?;
        sender.send(value).map_err(|e| e.to_string())
    };
    launch(queue, kernel).unwrap();
    receiver
}

fn elements<T: ArrowNativeType>(queue: &Queue, address: DevicePtr, n: usize) -> Receiver<Vec<T>> {
    read(queue, move |m| Ok(m.slice::<T>(address, n)?.to_vec()))
}

fn until(what: &str, done: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(5);
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Large columns are read from where they are: they live until the copies have run, and no longer.
#[test]
fn sources_live_until_the_copies_have_run() {
    let sim = Sim::new(SimMode::Deferred);
    let (values, watch) = watched(200_000);
    let up = sim.upload_array(&values).unwrap();
    drop(values);
    assert!(!up.is_ready().unwrap());
    assert_eq!(watch.strong_count(), 1);
    up.wait().unwrap();
    assert!(up.is_ready().unwrap());
    until("the source was not let go", || watch.strong_count() == 0);
    let expected = Int64Array::from_iter_values(0..200_000);
    assert_same(&expected, &up.to_host().unwrap(), "direct");
    drop(up);
    sim.assert_done();
}

/// The device that a copy comes from runs its free only afterwards.
#[test]
fn sources_on_peers_live_until_the_copies_have_run() {
    let config = SimConfig {
        mode: SimMode::Deferred,
        ..SimConfig::default()
    };
    let config = SimConfig {
        peer_access: true,
        ..config
    };
    let (from, to) = (Sim::with(config.clone()), Sim::with(config));
    let expected = wide_batch(16, 64);
    let up = from.upload(&expected).unwrap();
    let there = up.to_device(&to).unwrap();
    assert!(to.stats().bytes_on_device > 0);
    drop(up);
    from.synchronize().unwrap();
    assert_same_batch(&expected, &there.to_host().unwrap(), "from a peer");
    drop(there);
    to.assert_done();
    from.assert_done();
}

/// In deferred mode a kernel that did not wait would see poison.
#[test]
fn kernels_on_another_queue_see_the_values() {
    for mode in MODES {
        let sim = Sim::new(mode);
        let queue = sim.new_queue().unwrap();
        let numbers = ints(100);
        let texts: StringArray = (0..100).map(|i| Some("x".repeat(i % 4))).collect();
        let (offset, rows) = (13, 50);

        let up = sim
            .upload_array(&numbers)
            .unwrap()
            .slice(offset, rows)
            .unwrap();
        let before = sim.stats();
        let values = up.values_on::<i32>(&queue).unwrap();
        assert_eq!(sim.stats().since(&before).queue_waits, 1);
        assert_eq!(sim.stats().since(&before).host_waits, 0);
        assert_eq!(values.len(), rows);
        let values = (
            elements::<i32>(&queue, values.address(), values.len()),
            values,
        )
            .0;
        let mask = up.validity_on(&queue).unwrap().unwrap();
        let (mask_address, skip, bytes) = (
            mask.address(),
            mask.bit_offset(),
            (offset + rows).div_ceil(8),
        );
        assert_eq!(mask.len(), rows);
        let mask_bytes = elements::<u8>(&queue, mask_address, bytes);
        drop(mask);
        // The array goes while its readers are queued.
        drop(up);

        let up = sim
            .upload_array(&texts)
            .unwrap()
            .slice(offset, rows)
            .unwrap();
        let lent = up.offsets_on::<i32>(&queue).unwrap();
        assert_eq!(lent.len(), rows + 1);
        let offsets = elements::<i32>(&queue, lent.address(), lent.len());
        drop(lent);
        drop(up);

        queue.synchronize().unwrap();
        let slice = numbers.slice(offset, rows);
        assert_eq!(values.recv().unwrap(), slice.values().to_vec());
        let is_set = |bytes: &[u8], i: usize| bytes[i / 8] >> (i % 8) & 1 == 1;
        let mask_bytes = mask_bytes.recv().unwrap();
        for i in 0..rows {
            assert_eq!(is_set(&mask_bytes, skip + i), slice.is_valid(i), "{i}");
        }
        assert_eq!(
            offsets.recv().unwrap(),
            texts.slice(offset, rows).value_offsets()
        );
        sim.assert_done();
    }
}

/// The free comes after the reader, whichever queue it is on.
#[test]
fn the_free_waits_for_recorded_uses() {
    for mode in MODES {
        let sim = Sim::new(mode);
        let queues = [
            sim.default_queue(),
            sim.new_queue().unwrap(),
            sim.new_queue().unwrap(),
        ];
        for _ in 0..20 {
            let up = sim.upload_array(&ints(1000)).unwrap();
            let reads = queues.each_ref().map(|queue| {
                let values = up.slice(7, 900).unwrap();
                let values = values.values_on::<i32>(queue).unwrap();
                elements::<i32>(queue, values.address(), values.len())
            });
            let before = sim.stats();
            drop(up);
            assert_eq!(sim.stats().since(&before).host_waits, 0);
            // Fresh memory must not be the memory that is still read.
            let other = sim.upload_array(&ints(1000).slice(1, 999)).unwrap();
            sim.synchronize().unwrap();
            for read in reads {
                assert_eq!(
                    read.recv().unwrap(),
                    ints(1000).slice(7, 900).values().to_vec()
                );
            }
            drop(other);
        }
        sim.assert_done();
    }
}

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn events_wake() {
    let sim = Sim::new(SimMode::Deferred);
    let queue = sim.default_queue();
    let up = sim.upload_array(&ints(10)).unwrap();
    let event = queue.record().unwrap().unwrap();
    assert_eq!(EventPtr::new(event.as_ptr().as_ptr()), Some(event.as_ptr()));
    let count = Arc::new(Count::default());
    let waker = Waker::from(count.clone());
    assert!(!event.notify(&waker).unwrap());
    assert!(!event.is_complete().unwrap());
    // Dropped before it completes: still woken.
    let clone = event.clone();
    drop(event);
    assert_eq!(count.0.load(Ordering::SeqCst), 0);
    clone.wait().unwrap();
    until("not woken", || count.0.load(Ordering::SeqCst) == 1);
    assert!(clone.notify(&waker).unwrap());
    assert_eq!(count.0.load(Ordering::SeqCst), 1);
    drop((clone, up));
    sim.assert_done();
    assert_eq!(
        Devices::cpu().default_queue().record().unwrap().map(|_| ()),
        None
    );
}

/// A wrong count from safe code must not reach arrow-rs, which relies on it.
#[test]
fn host_buffers_become_buffers_and_bytes_and_come_back() {
    let sim = Sim::new(SimMode::Async);
    let mut host = sim.host_buffer(1000).unwrap();
    assert_eq!((host.len(), host.is_empty()), (1000, false));
    host.fill(3);
    let address = host.as_device_ptr().address();
    assert_eq!(address % 64, 0);
    let buffer = Buffer::from(host);
    assert_eq!((buffer.as_ptr().addr(), buffer.len()), (address, 1000));
    let part = buffer.slice_with_length(10, 20);
    drop(buffer);
    let other = sim.host_buffer(1000).unwrap();
    assert_ne!(other.as_device_ptr().address(), address, "still held");
    assert_eq!(part.as_slice(), [3; 20]);
    drop(part);
    let again = sim.host_buffer(900).unwrap();
    assert_eq!(again.as_device_ptr().address(), address);
    let buffer = Buffer::from(again);
    assert_eq!((buffer.as_ptr().addr(), buffer.len()), (address, 900));
    let part = buffer.slice_with_length(5, 4);
    drop(buffer);
    assert_eq!(part.len(), 4);
    assert_eq!(sim.sim.report().live_host_allocations, 2);
    drop(part);
    assert_eq!(sim.stats().host_allocations, 2);
    // Idle ones stay until asked to go.
    assert_eq!(sim.sim.report().live_host_allocations, 2);
    sim.trim();
    assert_eq!(sim.sim.report().live_host_allocations, 1);
    drop(other);
    // The device's own end gives back the rest.
    let backend = sim.sim.clone();
    drop(sim);
    backend.assert_clean();
    assert!(Devices::cpu().host_buffer(usize::MAX).is_err());
    assert!(Devices::cpu().host_buffer(usize::MAX - 64).is_err());
}

#[test]
fn host_memory_becomes_device_buffers_without_a_copy() {
    let mut host = Devices::cpu().host_buffer(24).unwrap();
    host.copy_from_slice(&[7; 24]);
    let buffer = Buffer::from(host);
    let address = buffer.as_ptr().addr();
    let device = DeviceBuffer::from(buffer);
    assert_eq!((device.address().address(), device.len()), (address, 24));
    assert_eq!(device.device(), &Devices::cpu());
    assert!(!format!("{device:?}").contains("7, 7"));
    let part = device.slice(8, 8).unwrap();
    drop(device);
    let host = part.to_host().unwrap();
    assert_eq!(
        (host.as_ptr().addr(), host.as_slice()),
        (address + 8, &[7u8; 8][..])
    );

    let bytes = Buffer::from_vec(vec![9u8; 33]);
    let address = bytes.as_ptr().addr();
    let device = DeviceBuffer::from(bytes);
    assert_eq!((device.address().address(), device.len()), (address, 33));
    let array = DeviceArray::from_values(DataType::Int8, 33, device, None).unwrap();
    let down = array.to_host().unwrap();
    assert_eq!(down.to_data().buffers()[0].as_ptr().addr(), address);
    assert_eq!(
        DeviceBuffer::from(Buffer::default())
            .to_host()
            .unwrap()
            .len(),
        0
    );
}

/// An adopted owner goes once its last reader has run, and no earlier.
#[test]
fn adopted_memory_is_dropped_after_its_uses() {
    let sim = Sim::new(SimMode::Deferred);
    let home = sim.default_queue();
    let mut memory = DeviceBufferMut::allocate(&home, 64).unwrap();
    memory.fill(1).unwrap();
    let address = memory.address();
    let memory = memory.freeze().unwrap();
    let ready = home.record().unwrap();
    let owner = Arc::new(memory);
    let watch = Arc::downgrade(&owner);
    // SAFETY: the owner holds the memory, which has 64 bytes that nothing changes after the event.
    let adopted = unsafe { DeviceBuffer::from_raw(&sim, address, 64, Box::new(owner), ready) };
    let queue = sim.new_queue().unwrap();
    let lent = adopted.on(&queue).unwrap();
    let values = elements::<u8>(&queue, lent.address(), 64);
    drop(lent);
    drop(adopted);
    assert_eq!(watch.strong_count(), 1);
    queue.synchronize().unwrap();
    assert_eq!(values.recv().unwrap(), [1; 64]);
    until("the owner was not dropped", || watch.strong_count() == 0);
    sim.assert_done();
}

/// Handles outlive each other in any order, on any thread.
#[test]
fn arrays_go_on_any_thread() {
    for mode in MODES {
        let sim = Sim::new(mode);
        let expected = wide_batch(16, 64);
        let up = sim.upload(&expected).unwrap();
        std::thread::scope(|scope| {
            for i in 0..8 {
                let (part, expected) = (up.slice(i, 20).unwrap(), expected.slice(i, 20));
                scope.spawn(move || {
                    assert_same_batch(&expected, &part.to_host().unwrap(), i);
                });
            }
            scope.spawn(move || drop(up));
        });
        sim.assert_done();
        let backend = sim.sim.clone();
        let last: ArrayRef = sim.upload_array(&ints(10)).unwrap().to_host().unwrap();
        drop(sim);
        assert_same(&ints(10), &last, "outlives its device");
        drop(last);
        until("the device did not end", || backend.report().is_clean());
    }
}
