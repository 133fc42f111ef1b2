//! Each call of a list of operations fails, one after the other. Each time the operation succeeds all the same or is an error,
//! nothing is lost or given back twice, and the device works afterwards.

use std::sync::Arc;

use arrow_array::{Int64Array, RecordBatch, StringArray};
use arrow_device::device::EventPtr;
use arrow_device::{
    Device, DeviceBufferMut, DeviceRecordBatch, Devices, Error, ImportOptions, Result, SyncPolicy,
};
use arrow_device_opencl::{
    OpenClConfig, OpenClDevice, OpenClMemory, OpenClQueue, devices, register,
};

use crate::fake;
use crate::rigs::{Gate, memories, open, unclean};
use crate::suite::{assert_clean, soon};

fn batch() -> RecordBatch {
    let numbers = Arc::new(Int64Array::from_iter(
        (0..900).map(|i| (i % 7 > 0).then_some(i)),
    )) as _;
    let names = Arc::new(StringArray::from_iter_values(
        (0..900).map(|i| format!("row {i}")),
    )) as _;
    RecordBatch::try_from_iter([("a", numbers), ("s", names)]).unwrap()
}

/// An operation, on a device and one with a context of its own.
type Operation = (&'static str, fn(&Device, &Device) -> Result<()>);

const OPERATIONS: &[Operation] = &[
    ("upload and download", |device, _| {
        let up = device.upload(&batch())?;
        assert_eq!(up.to_host()?, batch());
        Ok(())
    }),
    ("queues", |device, _| {
        let (one, two) = (device.new_queue()?, device.new_queue()?);
        let up = device.upload_on(&batch(), &one)?;
        if let Some(event) = one.record()? {
            two.wait(&event)?;
        }
        let back = up.start_to_host_on(&two)?.wait()?;
        assert_eq!(back, batch());
        one.synchronize()?;
        device.synchronize()
    }),
    ("buffers", |device, _| {
        let queue = device.new_queue()?;
        let mut buffer = DeviceBufferMut::allocate(&queue, 100_000)?;
        buffer.fill(0x5A)?;
        let other = DeviceBufferMut::allocate(&queue, 50)?;
        let buffer = buffer.freeze()?;
        drop(other);
        let host = buffer.to_host_on(&queue)?;
        assert!(host.iter().all(|byte| *byte == 0x5A));
        Ok(())
    }),
    ("export and import", |device, _| {
        let devices = Devices::new();
        devices.add(device.clone())?;
        let up = device.upload(&batch())?;
        let exported = up.export(SyncPolicy::Event);
        if OpenClDevice::of(device)?.memory() == OpenClMemory::Handles {
            let refused = exported.unwrap_err().to_string();
            assert!(refused.contains("cl_mem"), "{refused}");
            return Ok(());
        }
        let (array, schema) = exported?;
        let options = ImportOptions::default().with_devices(devices);
        // SAFETY: both structs come from one export of this crate.
        let again = unsafe { DeviceRecordBatch::import_with(array, &schema, &options) }?;
        assert_eq!(again.to_host()?, batch());
        Ok(())
    }),
    ("events of another context", |device, other| {
        let gate = Gate::try_new(other)?;
        let event = gate.event();
        let pointer = EventPtr::new((&raw const event).cast_mut().cast()).unwrap();
        let queue = device.new_queue()?;
        // SAFETY: the event is live.
        let waits = unsafe { queue.raw().wait(pointer) };
        let up = waits.and_then(|()| device.upload_on(&batch(), &queue));
        gate.end(0);
        assert_eq!(up?.to_host()?, batch());
        // SAFETY: the gate keeps the event alive.
        unsafe { device.backend().wait_event(pointer) }
    }),
    ("adoption", |device, _| {
        let opencl = OpenClDevice::of(device)?;
        let config = OpenClConfig::new(0)
            .with_id(4711)
            .with_memory(opencl.memory());
        let queue = device.new_queue()?;
        let handle = OpenClQueue::of(&queue)?.handle();
        // SAFETY: all are live and belong together.
        let adopted = unsafe { config.adopt(opencl.context(), opencl.device_id(), handle) }?;
        // SAFETY: the queue is live.
        let again = unsafe { OpenClDevice::adopt_queue(&adopted, handle) }?;
        assert_eq!(adopted.upload_on(&batch(), &again)?.to_host()?, batch());
        Ok(())
    }),
    ("a program's cl_mem", |device, _| {
        let opencl = OpenClDevice::of(device)?;
        if opencl.memory() != OpenClMemory::Handles {
            return Ok(());
        }
        let queue = device.new_queue()?;
        let mut memory = DeviceBufferMut::allocate(&queue, 256)?;
        memory.fill(3)?;
        let memory = memory.freeze()?;
        let (mem, _) = opencl.handle(memory.address())?;
        queue.synchronize()?;
        // SAFETY: the buffer is live, and nobody writes to it any more.
        let wrapped = unsafe { OpenClDevice::wrap_mem(device, mem) }?;
        assert_eq!(wrapped.to_host_on(&queue)?[..256], [3; 256]);
        Ok(())
    }),
    ("opening", |device, _| {
        let memory = OpenClDevice::of(device)?.memory();
        devices()?;
        let opened = OpenClConfig::new(0).with_memory(memory).open()?;
        assert_eq!(opened.upload(&batch())?.to_host()?, batch());
        let set = Devices::new();
        register(&set);
        set.get(opened.id()).map(|_| ())
    }),
];

/// A code that each call may return, and success without a result.
const CODES: [i32; 3] = [-5, -36, 0];

#[test]
fn every_call_fails_once() {
    if !fake::is_loaded("faults::every_call::every_call_fails_once") {
        return;
    }
    for memory in memories() {
        let other = open(memory);
        for (name, operation) in OPERATIONS {
            for code in CODES {
                for nth in 1.. {
                    let device = open(memory);
                    fake::fail("*", nth, code);
                    let outcome = operation(&device, &other);
                    let failed = fake::clear();
                    let case =
                        format!("{name} on {memory:?}, call {nth}, code {code}: {outcome:?}");
                    check(&device, &case);
                    assert!(failed || outcome.is_ok(), "{case}");
                    drop(device);
                    if !failed {
                        assert!(
                            nth > 3 || *name == "a program's cl_mem",
                            "{case}: too few calls"
                        );
                        break;
                    }
                }
            }
        }
        assert_clean(&other);
    }
}

/// Nothing is lost, and the device works, or says that it does not.
fn check(device: &Device, case: &str) {
    // Two devices: a context and the default queue each.
    let owned = 4;
    let mut left = (0, None);
    let clean = soon(|| {
        let _ = device.synchronize();
        left = (fake::live(), unclean(device));
        left == (owned, None)
    });
    assert!(clean, "{case}: {left:?} instead of {owned} references");
    assert_eq!(fake::misuses(), 0, "{case}");
    match device.upload(&batch()).and_then(|up| up.to_host()) {
        Ok(back) => assert_eq!(back, batch(), "{case}"),
        Err(Error::Device { message, .. }) => {
            assert!(
                message.contains("cannot be used any more"),
                "{case}: {message}"
            );
        }
        Err(e) => panic!("{case}: {e}"),
    }
}
