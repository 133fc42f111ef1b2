//! What SYCL does that a backend must know, each with what this crate does instead.

use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array};
use arrow_device::device::{AddressClass, DevicePtr, EventPtr};
use arrow_device::{Device, DeviceArray, Devices, ImportOptions, SyncPolicy};
use arrow_device_conformance::{alone, assert_error};
use arrow_device_oneapi::{OneApiConfig, OneApiMemory, device_count, register_with};

use crate::kit::{config, hold_by_host_task, number, programs};

fn numbers() -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(0..1000))
}

/// The host reads the memory of some devices: what it must not read is refused, also if it is of the device's context.
#[test]
fn the_host_reads_no_device_memory() {
    let Some(number) = number() else { return };
    let open = |memory| {
        OneApiConfig::new(number)
            .with_memory(memory)
            .open()
            .unwrap()
    };
    let [plain, shared, host] = [
        OneApiMemory::Device,
        OneApiMemory::Shared,
        OneApiMemory::Host,
    ]
    .map(open);
    let classify = |device: &Device, address| device.backend().classify(address, 8);
    let on_heap = DevicePtr::new((&raw const plain).cast_mut().cast());
    for device in [&shared, &host] {
        // Memory that this crate, and a program, has allocated in the context.
        let ours = plain.default_queue().raw().allocate(4096).unwrap();
        assert_eq!(classify(device, ours).class, AddressClass::Inaccessible);
        // Refused too, except the sizes of view arrays, which exports keep there.
        assert_eq!(classify(device, on_heap).class, AddressClass::Host);
        assert!(
            classify(device, on_heap)
                .reason
                .unwrap()
                .contains("SYCL does not know")
        );
        for readable in [&shared, &host] {
            let base = readable.default_queue().raw().allocate(4096).unwrap();
            let class = match readable == device {
                true => AddressClass::HostAccessible,
                false => AddressClass::Unknown,
            };
            let found = classify(device, base);
            assert_eq!((found.class, found.reason), (class, None));
            // SAFETY: freed once.
            unsafe { readable.default_queue().raw().free(base, 4096) }.unwrap();
        }
        // SAFETY: freed once.
        unsafe { plain.default_queue().raw().free(ours, 4096) }.unwrap();

        // An import: there is no other device.
        let import = |opened: &[&Device]| {
            let devices = Devices::new();
            register_with(&devices, opened.iter().copied().cloned().collect());
            let up = plain.upload_array(&numbers()).unwrap();
            let (array, schema) = up.export(SyncPolicy::Wait).unwrap();
            let options = ImportOptions {
                devices: Some(devices),
                ..Default::default()
            };
            // SAFETY: both come from one export of this crate.
            unsafe { DeviceArray::import(array, &schema, &options) }
        };
        for part in ["kind device", "the host reads", "OneApiMemory::Device"] {
            assert_error(import(&[device]), part);
        }
        // The device that fits, whatever comes first.
        for opened in [[device, &plain], [&plain, device]] {
            let again = import(&opened).unwrap();
            assert_eq!(again.device(), &plain);
            assert_eq!(again.to_host().unwrap().as_ref(), numbers().as_ref());
        }
        let own = OneApiConfig::new(number).with_own_context().open().unwrap();
        assert_eq!(import(&[device, &own]).unwrap().device(), &own);
    }
}

/// A `sycl::event` has two words, none of which is null.
#[test]
fn null_words_are_no_event() {
    let Some(config) = config() else { return };
    let device = config.open().unwrap();
    let check = |words: &[usize]| {
        let event = EventPtr::new(words.as_ptr().cast_mut().cast()).unwrap();
        // SAFETY: two words can be read.
        unsafe { device.backend().check_event(event) }
    };
    check(&[1, 1]).unwrap();
    for wrong in [[0, 0], [1, 0], [0, 1]] {
        assert_error(check(&wrong), "null handle");
    }
}

/// A host task that throws on a queue of ours: SYCL goes on, and says so when a program asks. Then the device has failed.
#[test]
fn failed_host_tasks_are_remembered() {
    alone("traps::failed_host_tasks_are_remembered", || {
        let Some(number) = number() else { return };
        let device = OneApiConfig::new(number).open().unwrap();
        let queue = device.new_queue().unwrap();
        // SAFETY: the queue is live.
        unsafe {
            let gate = hold_by_host_task(&queue, true);
            let event = queue.record().unwrap().unwrap();
            drop(gate);
            event.wait().unwrap();
            let theirs = (programs().queue_new)(number as i64, 0);
            assert_eq!((programs().ask_for_exceptions)(theirs), 0);
            (programs().queue_delete)(theirs);
        }
        let failed = "the host task has failed; the device cannot be used any more";
        assert_error(queue.synchronize(), failed);
        assert_error(device.upload_array(&numbers()), failed);
    });
}

/// Shared and host memory holds values at once.
#[test]
fn host_readable_memory_is_initialised() {
    let Some(config) = config() else { return };
    for memory in [OneApiMemory::Shared, OneApiMemory::Host] {
        let device = config.clone().with_memory(memory).open().unwrap();
        let queue = device.default_queue();
        for bytes in [300, 5000, 100_000, 5000, 300] {
            // SYCL gets it back.
            device.trim();
            let base = queue.raw().allocate(bytes).unwrap();
            // SAFETY: the memory is initialised, which the host can read and no work uses.
            let found = unsafe { std::slice::from_raw_parts(base.as_ptr().cast::<u8>(), bytes) };
            assert!(found.iter().all(|byte| *byte == 0));
            // SAFETY: the memory has `bytes` bytes, and is freed once, after the fill.
            unsafe {
                queue.raw().fill(base, 7, bytes).unwrap();
                queue.raw().free(base, bytes).unwrap();
            }
        }
    }
}

/// A device without unified shared memory says so: PoCL's.
#[test]
fn devices_without_usm_are_refused() {
    let Some(_) = number() else { return };
    let mut refused = 0;
    for number in 0..device_count().unwrap() {
        if let Err(e) = OneApiConfig::new(number).open() {
            let text = e.to_string();
            let is_said = text.contains("no unified shared memory (USM)");
            assert!(
                is_said && text.contains(&format!("oneapi:{number}")),
                "{text}"
            );
            refused += 1;
        }
    }
    if refused == 0 {
        let why = "every SYCL device here has unified shared memory; pocl-opencl-icd has none";
        assert!(
            std::env::var_os("ARROW_DEVICE_ONEAPI_REQUIRED").is_none(),
            "{why}"
        );
        eprintln!("skipped: {why}");
    }
    assert_error(OneApiConfig::new(1000).open(), "oneapi:1000");
}

/// The library of this crate stays open under its name.
#[test]
fn the_file_in_memory_stays_open() {
    let Some(_) = number() else { return };
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let mut names = files.filter_map(|file| std::fs::read_link(file.unwrap().path()).ok());
    assert!(names.any(|name| name.to_string_lossy().contains("memfd:arrow-device-oneapi")));
}
