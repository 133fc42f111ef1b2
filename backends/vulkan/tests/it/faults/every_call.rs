//! Each call of a list of operations fails, one after the other. Each time the operation succeeds all the same or is an error that
//! names the device, nothing is lost or destroyed twice, and the device works afterwards or says that it does not.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{Array, Int64Array, RecordBatch, StringArray};
use arrow_device::device::{CopyKind, CopyOp, DevicePtr, EventPtr};
use arrow_device::{
    Device, DeviceBufferMut, DeviceRecordBatch, Devices, Error, ImportOptions, Result, SyncPolicy,
};
use arrow_device_vulkan::{VulkanConfig, VulkanDevice, VulkanQueue, devices, register};
use arrow_schema::DataType;
use ash::vk;

use crate::interposer::account::{calls, clear, fail, fail_from, live, misuses};
use crate::interposer::functions::VERSION;
use crate::interposer::{interposed, interposed_at_first};
use crate::program::Program;
use crate::rigs::{hold, is_there};
use crate::suite::{assert_error, soon};

pub(crate) fn batch() -> RecordBatch {
    let numbers = Arc::new(Int64Array::from_iter(
        (0..900).map(|i| (i % 7 > 0).then_some(i)),
    )) as _;
    let names = Arc::new(StringArray::from_iter_values(
        (0..900).map(|i| format!("row {i}")),
    )) as _;
    RecordBatch::try_from_iter([("a", numbers), ("s", names)]).unwrap()
}

/// An operation on a device, which is the program's.
type Operation = (&'static str, fn(&Arc<Program>, &Device) -> Result<()>);

const OPERATIONS: &[Operation] = &[
    ("upload and download", |_, device| {
        let up = device.upload(&batch())?;
        assert_eq!(up.to_host()?, batch());
        Ok(())
    }),
    ("queues", |_, device| {
        let (one, two) = (device.new_queue()?, device.new_queue()?);
        let up = device.upload_on(&batch(), &one)?;
        if let Some(event) = one.record()? {
            two.wait(&event)?;
        }
        assert_eq!(up.start_to_host_on(&two)?.wait()?, batch());
        one.synchronize()?;
        device.synchronize()
    }),
    ("buffers", |_, device| {
        let queue = device.new_queue()?;
        let mut buffer = DeviceBufferMut::allocate(&queue, 100_001)?;
        buffer.fill(0x5A)?;
        let other = DeviceBufferMut::allocate(&queue, 50)?;
        let buffer = buffer.freeze()?;
        drop(other);
        let (_, offset) = VulkanDevice::of(device)?.resolve(buffer.address(), 100_001)?;
        assert_eq!(offset % 4, 0);
        let host = buffer.to_host_on(&queue)?;
        assert!(host.iter().all(|byte| *byte == 0x5A));
        Ok(())
    }),
    ("host memory", |_, device| {
        let mut slab = device.host_slab(70_000)?;
        slab.fill(7);
        let column = Int64Array::new(slab.into_buffer().slice_with_length(0, 69_992).into(), None);
        let batch = RecordBatch::try_from_iter([("a", Arc::new(column) as _)]).unwrap();
        assert_eq!(device.upload(&batch)?.to_host()?, batch);
        Ok(())
    }),
    ("ordinary memory", |_, device| {
        let queue = device.new_queue()?;
        let memory = DeviceBufferMut::allocate(&queue, 5000)?;
        let (from, mut to) = (vec![9_u8; 5000], vec![0_u8; 5000]);
        let op = |kind, src: *const u8, dst: *mut u8| CopyOp {
            src: DevicePtr::new(src.cast_mut().cast()),
            dst: DevicePtr::new(dst.cast()),
            bytes: 5000,
            kind,
        };
        let there = memory.address().as_ptr().cast::<u8>();
        let up = op(CopyKind::HostToDevice, from.as_ptr(), there);
        let down = op(CopyKind::DeviceToHost, there, to.as_mut_ptr());
        // SAFETY: all memory lives, and is not used otherwise, until everything has ended.
        let copied = unsafe {
            let raw = queue.raw();
            raw.copy(&[up]).and_then(|()| raw.copy(&[down]))
        };
        let copied = copied.and_then(|()| queue.synchronize());
        // After an error, the copies may still run.
        device.backend().settle().and(copied)?;
        assert_eq!(from, to);
        Ok(())
    }),
    ("a kernel without commands", |_, device| {
        let queue = device.new_queue()?;
        let column = device.upload(&batch())?.column(0)?;
        let mut result = DeviceBufferMut::for_values::<i64>(&queue, column.len())?;
        result.fill(0)?;
        let raw = VulkanQueue::of(&queue)?;
        let loan = column.values_on::<i64>(&queue)?;
        // SAFETY: there are no command buffers.
        unsafe { raw.submit(&[]) }?;
        drop(loan);
        let (_, value) = raw.submitted()?;
        assert!(value > 0);
        let zeros = column.with_values(DataType::Int64, result.freeze()?)?;
        let zeros = zeros.start_to_host_on(&queue)?.wait()?;
        let zeros = zeros.as_primitive::<Int64Type>();
        assert_eq!(zeros.null_count(), batch().column(0).null_count());
        assert!(zeros.iter().flatten().all(|value| value == 0));
        Ok(())
    }),
    ("export and import", |program, device| {
        let devices = Devices::new();
        devices.add(device.clone())?;
        let up = device.upload(&batch())?;
        let (array, schema) = up.export(SyncPolicy::Event)?;
        // SAFETY: the first member of what `sync_event` points to is an event of the device.
        let event = unsafe { *array.sync_event().cast::<vk::Event>() };
        // SAFETY: the event is live as long as the array.
        let poll = || unsafe { program.device.get_event_status(event) };
        // A poll may be what fails. A device that is lost never sets it.
        assert!(soon(|| poll() != Ok(false)), "the event is never set");
        let options = ImportOptions::default().with_devices(devices);
        // SAFETY: both structs come from one export of this crate.
        let again = unsafe { DeviceRecordBatch::import_with(array, &schema, &options) }?;
        assert_eq!(again.to_host()?, batch());
        Ok(())
    }),
    ("a foreign event", |program, device| {
        let info = vk::EventCreateInfo::default();
        // SAFETY: the device is live.
        let make = || unsafe { program.device.create_event(&info, None) };
        // The first call of each may be the one that fails.
        let mut event = make().or_else(|_| make()).unwrap();
        // SAFETY: the event is live, and nobody else uses it.
        let set = || unsafe { program.device.set_event(event) };
        set().or_else(|_| set()).unwrap();
        let queue = device.new_queue();
        let pointer = EventPtr::new((&raw mut event).cast()).unwrap();
        let waited = queue.and_then(|queue| {
            // SAFETY: the event is live: it is destroyed below.
            unsafe { queue.raw().wait(pointer) }?;
            let up = device.upload_on(&batch(), &queue)?;
            assert_eq!(up.to_host()?, batch());
            // SAFETY: the event is live: it is destroyed below.
            unsafe { device.backend().wait_event(pointer) }
        });
        // SAFETY: nobody uses the event any more.
        unsafe { program.device.destroy_event(event, None) };
        waited
    }),
    ("adoption", |program, _| {
        let device = program.try_adopt()?;
        assert_eq!(device.upload(&batch())?.to_host()?, batch());
        Ok(())
    }),
    ("opening", |_, _| {
        devices()?;
        let opened = VulkanConfig::new(0).open()?;
        assert_eq!(opened.upload(&batch())?.to_host()?, batch());
        let set = Devices::new();
        register(&set);
        set.get(opened.id()).map(|_| ())
    }),
];

const CODES: [vk::Result; 4] = [
    vk::Result::ERROR_OUT_OF_HOST_MEMORY,
    vk::Result::ERROR_OUT_OF_DEVICE_MEMORY,
    vk::Result::ERROR_INITIALIZATION_FAILED,
    vk::Result::ERROR_DEVICE_LOST,
];

#[test]
fn every_call_fails_once() {
    if !interposed("faults::every_call::every_call_fails_once") {
        return;
    }
    let program = Program::new();
    // Without what an opening keeps.
    let left = || {
        let mut left = live();
        left.retain(|kind, _| !["instance", "device"].contains(kind));
        left
    };
    let owned = left();
    let mut lost = 0;
    for (name, operation) in OPERATIONS {
        for code in CODES {
            for nth in 1.. {
                // NVIDIA's driver 580 ends with a signal where a process makes about its 33rd device, and lost ones are kept.
                lost += usize::from(*name == "opening" && code == vk::Result::ERROR_DEVICE_LOST);
                if program.is_nvidia() && lost > 20 {
                    break;
                }
                let device = program.adopt();
                fail("*", nth, code);
                let outcome = operation(&program, &device);
                let failed = clear();
                let case = format!("{name}, call {nth} {failed:?}, {code:?}: {outcome:?}");
                check_error(&outcome, &case);
                check_device(&device, &case);
                drop(device);
                assert!(soon(|| left() == owned), "{case}: left {:?}", live());
                assert!(misuses().is_empty(), "{case}: {:?}", misuses());
                if failed.is_empty() {
                    assert!(outcome.is_ok(), "{case}");
                    assert!(nth > 3, "{case}: too few calls");
                    break;
                }
            }
        }
    }
}

/// The error names the device, and what was done.
#[track_caller]
fn check_error(outcome: &Result<()>, case: &str) {
    match outcome {
        Ok(()) => {}
        Err(Error::Device { device, .. } | Error::OutOfMemory { device, .. }) => {
            assert_eq!(
                device.device_type,
                arrow_device::ArrowDeviceType::VULKAN,
                "{case}"
            );
        }
        Err(Error::DeviceNotAvailable { reason, .. }) => {
            assert!(reason.contains("vk"), "{case}");
        }
        Err(e) => panic!("{case}: {e}"),
    }
}

/// The device works, or says that it does not.
#[track_caller]
fn check_device(device: &Device, case: &str) {
    match device.upload(&batch()).and_then(|up| up.to_host()) {
        Ok(back) => assert_eq!(back, batch(), "{case}"),
        Err(e @ Error::Device { .. }) => {
            let text = e.to_string();
            assert!(text.contains("cannot be used any more"), "{case}: {text}");
        }
        Err(e) => panic!("{case}: {e}"),
    }
}

/// From each call on, all calls fail, as those of a lost device do: every operation is an error from then on, nothing hangs, and all
/// objects are destroyed.
#[test]
fn a_lost_device_stays_lost() {
    if !interposed("faults::every_call::a_lost_device_stays_lost") {
        return;
    }
    let program = Program::new();
    let owned = live();
    for (name, operation) in &OPERATIONS[..7] {
        for nth in 1.. {
            let device = program.adopt();
            fail_from("*", nth, vk::Result::ERROR_DEVICE_LOST);
            let outcome = operation(&program, &device);
            // The calls until now, and those that the device makes of itself.
            let upload = device.upload(&batch()).and_then(|up| up.to_host());
            let case = format!("{name}, lost at call {nth}: {outcome:?}, then {upload:?}");
            assert!(upload.is_err(), "{case}");
            assert!(device.synchronize().is_err(), "{case}");
            let failed = clear();
            assert!(!failed.is_empty(), "{case}");
            // It is the crate that remembers.
            assert!(device.upload(&batch()).is_err(), "{case}");
            let submits = calls("vkQueueSubmit");
            assert!(device.synchronize().is_err(), "{case}");
            assert_eq!(calls("vkQueueSubmit"), submits, "{case}");
            drop(device);
            assert!(soon(|| live() == owned), "{case}: left {:?}", live());
            assert!(misuses().is_empty(), "{case}: {:?}", misuses());
            if outcome.is_ok() {
                break;
            }
        }
    }
}

/// Each call of an opening fails once, and the next opening does what is left. Neither instance nor devices are made again.
#[test]
fn openings_fail_and_go_on() {
    if !interposed_at_first("faults::every_call::openings_fail_and_go_on") {
        return;
    }
    let open = || VulkanConfig::new(0).open();
    // Instances of such a loader lack functions that the crate calls.
    VERSION.store(vk::API_VERSION_1_1, Ordering::SeqCst);
    let (listed, opened) = (devices(), open());
    VERSION.store(0, Ordering::SeqCst);
    for error in [listed.map(drop), opened.map(drop)] {
        assert_error(error, "loader is older than Vulkan 1.2; update it");
    }
    assert_eq!(calls("vkCreateInstance"), 0);
    if !is_there() {
        return;
    }
    for call in ["vkEnumeratePhysicalDevices", "vkCreateDevice"] {
        fail(call, 1, vk::Result::ERROR_OUT_OF_HOST_MEMORY);
        assert_error(open().map(drop), call);
        assert_eq!(clear(), [call]);
    }
    for _ in 0..10 {
        let (one, two) = (open().unwrap(), open().unwrap());
        for device in [&one, &two] {
            assert_eq!(device.upload(&batch()).unwrap().to_host().unwrap(), batch());
        }
        drop((one, two));
        // What still runs keeps a device.
        assert!(soon(|| !live().contains_key("buffer")), "{:?}", live());
    }
    // One failed above. A device is idle a moment after the last of its objects has gone.
    let made = ["vkCreateInstance", "vkCreateDevice"].map(calls);
    assert!(made[0] == 1 && made[1] < 1 + 10, "{made:?}");
    assert_eq!(calls("vkDestroyDevice") + calls("vkDestroyInstance"), 0);
}

/// A driver may wait for a shorter time than it was asked for. Nobody takes that for the end of the work.
#[test]
fn a_wait_that_ends_early_is_repeated() {
    if !interposed("faults::every_call::a_wait_that_ends_early_is_repeated") {
        return;
    }
    let program = Program::new();
    let device = program.adopt();
    let queue = device.new_queue().unwrap();
    let mut held = hold(&queue);
    let up = device.upload_on(&batch(), &queue).unwrap();
    let waits = calls("vkWaitSemaphores");
    fail("vkWaitSemaphores", 1, vk::Result::TIMEOUT);
    std::thread::scope(|scope| {
        let back = scope.spawn(|| up.to_host().unwrap());
        assert!(
            soon(|| calls("vkWaitSemaphores") > waits + 1),
            "not repeated"
        );
        held.open();
        assert_eq!(back.join().unwrap(), batch());
    });
    assert_eq!(clear(), ["vkWaitSemaphores"]);
}
