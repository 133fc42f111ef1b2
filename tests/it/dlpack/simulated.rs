//! Tensors of a simulated device.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use arrow_array::Int64Array;
use arrow_device::device::DevicePtr;
use arrow_device::device::sim::{FaultOp, SimMode};
use arrow_device::dlpack::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DlpackOptions, DlpackStream,
};
use arrow_device::{ArrowDeviceType, DeviceArray, DeviceBufferMut, Error, ReleasePolicy};
use arrow_schema::DataType;

use crate::dlpack::kit::{Calls, Form, Held, plain, produce};
use crate::simkit::{MODES, Sim, launch};
use crate::support::{Nulls, assert_same};

#[test]
fn every_type_on_a_simulated_device() {
    for mode in MODES {
        let sim = Sim::new(mode);
        crate::dlpack::out::every_type(&sim);
        sim.assert_done();
    }
}

/// A copy stays on the device, and the host waits for it alone.
#[test]
fn a_copy_on_the_device() {
    let sim = Sim::new(SimMode::Deferred);
    let column = sim.upload_array(&longs(100)).unwrap();
    let before = sim.stats();
    let tensor = column.slice(10, 80).unwrap().export_dlpack(&DlpackOptions {
        copy: true,
        ..plain()
    });
    let copy = Held::<DLManagedTensorVersioned>::new(tensor.unwrap());
    let since = sim.stats().since(&before);
    assert_eq!((since.allocations, since.bytes_to_host), (1, 0));
    assert_ne!(
        copy.dl_tensor.data.addr(),
        column.buffer(1).unwrap().address().address() + 80
    );
    drop(column);
    // SAFETY: the tensor is the test's own, and nothing writes to its memory.
    let again = unsafe { DeviceArray::import_dlpack(copy.into_raw(), &sim.default_queue()) };
    assert_same(
        &longs(100).slice(10, 80),
        &again.unwrap().to_host().unwrap(),
        "the copy",
    );
    sim.assert_done();
}

const INT64: DLDataType = DLDataType {
    code: DLDataType::INT,
    bits: 64,
    lanes: 1,
};

fn longs(n: i64) -> Int64Array {
    Int64Array::from_iter_values((0..n).map(|i| i * 3 - 7))
}

/// Without a stream the host waits, once, and never reads.
#[test]
fn the_host_waits() {
    let sim = Sim::new(SimMode::Deferred);
    let column = sim.upload_array(&longs(100)).unwrap();
    assert!(!column.is_ready().unwrap());
    let before = sim.stats();
    let tensor = column
        .slice(10, 80)
        .unwrap()
        .export_dlpack(&plain())
        .unwrap();
    let since = sim.stats().since(&before);
    assert_eq!((since.host_waits, since.queue_waits), (1, 0));
    assert!(column.is_ready().unwrap());
    let held = Held::<DLManagedTensorVersioned>::new(tensor);
    assert_eq!(held.dl_tensor.device.device_type, ArrowDeviceType::EXT_DEV);
    assert_eq!(i64::from(held.dl_tensor.device.device_id), sim.id().id);
    assert_eq!(
        held.dl_tensor.data.addr(),
        column.buffer(1).unwrap().address().address() + 80
    );
    // Again: nothing to wait for.
    let before = sim.stats();
    drop(column.export_dlpack(&plain()).unwrap());
    let since = sim.stats().since(&before);
    assert_eq!(
        (since.host_waits, since.queue_waits, since.copies),
        (0, 0, 0)
    );
    drop((held, column));
    sim.assert_done();
}

/// On a queue nothing but the queue waits; on none nothing does.
#[test]
fn a_queue_waits() {
    for mode in MODES {
        let sim = Sim::new(mode);
        let queue = sim.new_queue().unwrap();
        let column = sim.upload_array(&longs(1000)).unwrap();
        let before = sim.stats();
        let options = DlpackOptions::new(DlpackStream::from(&queue));
        let held = Held::<DLManagedTensorVersioned>::new(column.export_dlpack(&options).unwrap());
        let since = sim.stats().since(&before);
        assert_eq!((since.host_waits, since.queue_waits), (0, 1));
        let (sender, seen) = channel();
        let address = DevicePtr::new(held.dl_tensor.data);
        launch(&queue, move |memory| {
            let values = memory.slice::<i64>(address, 1000)?.to_vec();
            sender.send(values).map_err(|e| e.to_string())
        })
        .unwrap();
        queue.synchronize().unwrap();
        assert_eq!(seen.recv().unwrap(), longs(1000).values().to_vec());
        drop((held, column, queue));
        sim.assert_done();
    }
    // In deferred mode nothing has run, as nobody has waited.
    let sim = Sim::new(SimMode::Deferred);
    let column = sim.upload_array(&longs(10)).unwrap();
    let before = sim.stats();
    let options = DlpackOptions::new(DlpackStream::NO_SYNC);
    let held = Held::<DLManagedTensor>::new(column.export_dlpack(&options).unwrap());
    let since = sim.stats().since(&before);
    assert_eq!((since.host_waits, since.queue_waits), (0, 0));
    assert!(!column.is_ready().unwrap());
    drop((held, column));
    sim.assert_done();
}

/// A consumer's kernel still reads when its deleter is called: the memory is kept until it has run.
#[test]
fn deleted_while_in_use() {
    for mode in MODES {
        let sim = Sim::new(mode);
        let consumer = sim.new_queue().unwrap();
        let column = sim.upload_array(&longs(1000)).unwrap();
        let options = DlpackOptions::new(DlpackStream::from(&consumer));
        let held = Held::<DLManagedTensorVersioned>::new(column.export_dlpack(&options).unwrap());
        drop(column);
        let address = DevicePtr::new(held.dl_tensor.data);
        let (sender, seen) = channel();
        let (open, gate) = channel::<()>();
        launch(&consumer, move |memory| {
            gate.recv().map_err(|e| e.to_string())?;
            let values = memory.slice::<i64>(address, 1000)?.to_vec();
            sender.send(values).map_err(|e| e.to_string())
        })
        .unwrap();
        let before = sim.stats();
        let (sender, deleted) = channel();
        let deleter = std::thread::spawn(move || {
            drop(held);
            sender.send(()).unwrap();
        });
        let returned = deleted.recv_timeout(Duration::from_secs(5));
        open.send(()).unwrap();
        deleter.join().unwrap();
        returned.expect("the deleter waits");
        let seen = seen.recv_timeout(Duration::from_secs(5)).unwrap();
        assert_eq!(seen, longs(1000).values().to_vec());
        sim.assert_done();
        assert_eq!(sim.stats().since(&before).frees, 1);
    }
}

/// A consumer that orders its work needs no wait for the device.
#[test]
fn consumers_that_order_their_work() {
    for (policy, waits) in [(ReleasePolicy::Ordered, 0), (ReleasePolicy::Synchronize, 1)] {
        let sim = Sim::new(SimMode::Async);
        let column = sim.upload_array(&longs(100)).unwrap();
        let options = DlpackOptions {
            release: policy,
            ..plain()
        };
        let held = Held::<DLManagedTensor>::new(column.export_dlpack(&options).unwrap());
        drop(column);
        let before = sim.stats();
        drop(held);
        let end = Instant::now() + Duration::from_secs(5);
        while sim.stats().since(&before).frees == 0 {
            assert!(Instant::now() < end, "not freed");
            std::thread::yield_now();
        }
        assert_eq!(sim.stats().since(&before).host_waits, waits, "{policy:?}");
        sim.assert_done();
    }
}

/// However many deleters are called while the device is busy, it is waited for once or twice.
#[test]
fn deleters_wait_together() {
    let sim = Sim::new(SimMode::Async);
    let held: Vec<_> = (0..100)
        .map(|_| {
            let column = sim.upload_array(&longs(100)).unwrap();
            Held::<DLManagedTensor>::new(column.export_dlpack(&plain()).unwrap())
        })
        .collect();
    sim.synchronize().unwrap();
    let (open, gate) = channel::<()>();
    let queue = sim.new_queue().unwrap();
    launch(&queue, move |_| gate.recv().map_err(|e| e.to_string())).unwrap();
    let before = sim.stats();
    drop(held);
    assert_eq!(sim.stats().since(&before).frees, 0);
    open.send(()).unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while sim.stats().since(&before).frees < 100 {
        assert!(Instant::now() < end, "not freed");
        std::thread::yield_now();
    }
    let waits = sim.stats().since(&before).host_waits;
    assert!((1..=2).contains(&waits), "{waits} waits");
    drop(queue);
    sim.assert_done();
}

/// A producer's memory on the device: ready for the queue, deleted after the last use of it.
#[test]
fn tensors_of_device_memory() {
    fn one<F: Form>(mode: SimMode) {
        let sim = Sim::new(mode);
        let queue = sim.new_queue().unwrap();
        let mut memory = DeviceBufferMut::allocate(&queue, 800).unwrap();
        memory.fill(1).unwrap();
        let memory = memory.freeze().unwrap();
        let calls = Calls::default();
        let device = DLDevice::try_from(sim.id()).unwrap();
        let data = memory.address().as_ptr();
        let tensor = produce::<F>(data, device, INT64, &[100], memory, &calls);
        assert_eq!(queue.dlpack_stream().unwrap(), None);
        let before = sim.stats();
        // SAFETY: the tensor is valid, and the work that writes its memory was given to the same
        // queue.
        let column = unsafe { F::import(tensor, &queue) }.unwrap();
        let since = sim.stats().since(&before);
        assert_eq!((since.host_waits, since.events, since.copies), (0, 1, 0));
        assert!(mode == SimMode::Async || !column.is_ready().unwrap());
        // A use on another queue, which comes before the deleter.
        let other = sim.new_queue().unwrap();
        let (sender, seen) = channel();
        {
            let values = column.values_on::<i64>(&other).unwrap();
            let address = values.address();
            let calls = calls.clone();
            launch(&other, move |memory| {
                std::thread::sleep(Duration::from_millis(5));
                let values = memory.slice::<i64>(address, 100)?.to_vec();
                sender
                    .send((values, calls.get()))
                    .map_err(|e| e.to_string())
            })
            .unwrap();
        }
        drop(column);
        sim.synchronize().unwrap();
        let (values, deleted) = seen.recv_timeout(Duration::from_secs(5)).unwrap();
        assert_eq!(values, [0x0101_0101_0101_0101; 100]);
        assert_eq!(deleted, 0, "deleted before the kernel ran");
        let end = Instant::now() + Duration::from_secs(5);
        while calls.get() == 0 {
            assert!(Instant::now() < end, "never deleted");
            std::thread::yield_now();
        }
        drop((queue, other));
        sim.assert_done();
        assert_eq!(calls.get(), 1);
    }
    for mode in MODES {
        one::<DLManagedTensor>(mode);
        one::<DLManagedTensorVersioned>(mode);
    }
}

/// Addresses that are not the device's, and tensors of another device.
#[test]
fn memory_that_is_not_the_devices() {
    let (sim, other) = (Sim::new(SimMode::Async), Sim::new(SimMode::Async));
    let calls = Calls::default();
    let device = DLDevice::try_from(sim.id()).unwrap();
    let column = other.upload_array(&longs(10)).unwrap();
    let own = sim.upload_array(&longs(10)).unwrap();
    let (theirs, ours) = (column.buffer(1).unwrap(), own.buffer(1).unwrap());
    for (data, rows) in [
        (theirs.address().as_ptr(), 10),
        (ours.address().as_ptr(), 1_000_000),
    ] {
        let tensor = produce::<DLManagedTensorVersioned>(data, device, INT64, &[rows], (), &calls);
        // SAFETY: the tensor is refused before its memory is read: not all of it is live memory of
        // the device.
        let e = unsafe { DeviceArray::import_dlpack(tensor, &sim.default_queue()) }.unwrap_err();
        let text = e.to_string();
        assert!(
            text.contains("dl_tensor.data") && text.contains("are not memory"),
            "{text}"
        );
    }
    let data = ours.address().as_ptr();
    let tensor = produce::<DLManagedTensorVersioned>(data, device, INT64, &[10], (), &calls);
    // SAFETY: the tensor is refused for its device before anything is read through it.
    let e = unsafe { DeviceArray::import_dlpack(tensor, &other.default_queue()) }.unwrap_err();
    assert!(e.to_string().contains("dl_tensor.device"), "{e}");
    assert_eq!(calls.get(), 3);
    drop((column, own, theirs, ours));
    sim.assert_done();
    other.assert_done();
}

/// Every failure of the device on the way: the memory is given back, the deleter called once.
#[test]
fn failures_on_the_way() {
    let nulls = crate::support::array(&DataType::Int64, 100, Nulls::Some, 3);
    for (ignored, on_queue, op) in [
        // A count that nobody knows is read back.
        (false, false, FaultOp::Copy),
        (false, false, FaultOp::Record),
        (false, false, FaultOp::HostWait),
        (true, true, FaultOp::QueueWait),
        (true, false, FaultOp::HostWait),
    ] {
        // Deferred: only this thread does what is made to fail.
        let sim = Sim::new(SimMode::Deferred);
        let queue = sim.new_queue().unwrap();
        let all = match on_queue {
            true => DlpackOptions {
                nulls_ignored: true,
                ..DlpackOptions::new(DlpackStream::from(&queue))
            },
            false => DlpackOptions {
                nulls_ignored: true,
                ..plain()
            },
        };
        let options = if ignored { all } else { plain() };
        let column = sim.upload_array(&nulls).unwrap().slice(1, 90).unwrap();
        sim.faults().fail_nth(op, 1);
        let e = column.export_dlpack(&options).unwrap_err();
        assert_eq!(sim.faults().fired(), 1, "{op:?}");
        assert!(matches!(e, Error::Device { .. }), "{op:?}: {e}");
        sim.faults().clear();
        // The column is as it was.
        assert_eq!(column.export_dlpack(&all).unwrap().shape(), [90]);
        drop((column, queue));
        sim.assert_done();
    }
    // The one thing that an import asks the device for.
    let sim = Sim::new(SimMode::Deferred);
    let memory = sim.upload_array(&longs(10)).unwrap().buffer(1).unwrap();
    let calls = Calls::default();
    let device = DLDevice::try_from(sim.id()).unwrap();
    let data = memory.address().as_ptr();
    let tensor = produce::<DLManagedTensorVersioned>(data, device, INT64, &[10], memory, &calls);
    sim.faults().fail_nth(FaultOp::Record, 1);
    // SAFETY: the tensor's memory is live, and nobody writes to it.
    let e = unsafe { DeviceArray::import_dlpack(tensor, &sim.default_queue()) }.unwrap_err();
    assert!(matches!(e, Error::Device { .. }), "{e}");
    assert_eq!(calls.get(), 1);
    sim.faults().clear();
    sim.assert_done();
}
