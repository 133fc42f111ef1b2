//! What SYCL does that a backend must know, each with what this crate does instead.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use arrow_array::{ArrayRef, Int64Array};
use arrow_device::device::{AddressClass, Backend, CopyKind, CopyOp, DevicePtr, EventPtr};
use arrow_device::{Device, DeviceArray, Devices, Error, ImportOptions, SyncPolicy};
use arrow_device_oneapi::{OneApiConfig, OneApiDevice, OneApiMemory, device_count, register_with};

use crate::first::{config, number};
use crate::fork_kit::alone;
use crate::gate::{Gate, hold_by_host_task};
use crate::programs::*;
use crate::suite::soon;

pub(crate) fn backend(device: &Device) -> &OneApiDevice {
    OneApiDevice::of(device).unwrap()
}

pub(crate) fn numbers() -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(0..1000))
}

/// Waits until nothing of the device is left.
pub(crate) fn frees_are_done(device: &Device) {
    let left = || backend(device).outstanding();
    assert!(soon(|| left() == [0; 5]), "{:?}", left());
}

/// An event of a program's, in a context, and what ends it.
pub(crate) struct Held {
    queue: Shared,
    event: Shared,
    held: Shared,
}

impl Held {
    pub(crate) fn new(number: usize, how: c_int) -> Self {
        let mut held = std::ptr::null_mut();
        // SAFETY: the queue is live until this is dropped; `held` is valid for a write.
        unsafe {
            let queue = (programs().queue_new)(number as i64, how);
            let event = (programs().event_held)(queue, &raw mut held);
            assert!(!queue.is_null() && !event.is_null());
            Self {
                queue: Shared(queue),
                event: Shared(event),
                held: Shared(held),
            }
        }
    }

    pub(crate) fn event(&self) -> EventPtr {
        EventPtr::new(self.event.get()).unwrap()
    }

    /// What ends it.
    pub(crate) fn gate(&self, status: c_int) -> Gate {
        let held = self.held;
        // SAFETY: called once for each.
        Gate::new(move || unsafe { (programs().end_event)(held.get(), status) })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: nothing uses them any more.
        unsafe {
            (programs().event_delete)(self.event.get());
            (programs().queue_delete)(self.queue.get());
        }
    }
}

/// No exception leaves the C interface, and the error has all of its message, and the call.
#[test]
fn messages_are_kept() {
    let Some(config) = config() else { return };
    let device = config.open().unwrap();
    let mut bytes = [0u8; 8];
    let copy = CopyOp {
        src: DevicePtr::NULL,
        dst: DevicePtr::new(bytes.as_mut_ptr().cast()),
        bytes: 8,
        kind: CopyKind::DeviceToHost,
    };
    // SAFETY: SYCL refuses null before it reads.
    let refused = unsafe { device.default_queue().raw().copy(&[copy]) }.unwrap_err();
    let Error::Device {
        operation,
        code,
        message,
        ..
    } = &refused
    else {
        panic!("{refused}")
    };
    assert_eq!(*operation, "sycl::queue::memcpy");
    assert!(
        *code > 0 && message.to_lowercase().contains("null"),
        "{refused}"
    );
    assert_eq!(
        device
            .upload_array(&numbers())
            .unwrap()
            .to_host()
            .unwrap()
            .as_ref(),
        numbers().as_ref()
    );
}

/// SYCL knows no addresses of other contexts, and no lengths.
#[test]
fn addresses_of_other_contexts_are_unknown() {
    let Some(config) = config() else { return };
    let (device, other) = (
        config.open().unwrap(),
        config.with_own_context().open().unwrap(),
    );
    let base = other.default_queue().raw().allocate(4096).unwrap();
    let class =
        |device: &Device, offset, bytes| backend(device).classify(base.offset(offset), bytes).class;
    assert_eq!(class(&other, 0, 4096), AddressClass::Device);
    assert_eq!(class(&other, 1, 4096), AddressClass::Inaccessible);
    assert_eq!(class(&device, 0, 1), AddressClass::Unknown);
    assert!(backend(&other).owns(base).unwrap() && !backend(&device).owns(base).unwrap());
    // SAFETY: freed once.
    unsafe { other.default_queue().raw().free(base, 4096) }.unwrap();
    assert_eq!(class(&other, 0, 1), AddressClass::Unknown);
}

/// The host reads the memory of some devices: what it must not read is refused, also if it is of the device's context.
#[test]
fn the_host_reads_no_device_memory() {
    let Some(number) = number() else { return };
    let [plain, shared, host] = [
        OneApiMemory::Device,
        OneApiMemory::Shared,
        OneApiMemory::Host,
    ]
    .map(|memory| {
        OneApiConfig::new(number)
            .with_memory(memory)
            .open()
            .unwrap()
    });
    let class = |device: &Device, address| backend(device).classify(address, 8).class;
    let on_heap = DevicePtr::new(Box::leak(Box::new(1u64)) as *mut u64 as *mut _);
    for device in [&shared, &host] {
        // Memory that this crate, and a program, has allocated in the context.
        let ours = plain.default_queue().raw().allocate(4096).unwrap();
        assert_eq!(class(device, ours), AddressClass::Inaccessible);
        // Refused too, except the sizes of view arrays, which exports keep there.
        assert_eq!(class(device, on_heap), AddressClass::Host);
        for readable in [&shared, &host] {
            let base = readable.default_queue().raw().allocate(4096).unwrap();
            let expected = match readable == device {
                true => AddressClass::Device,
                false => AddressClass::Unknown,
            };
            assert_eq!(class(device, base), expected);
            assert_eq!(backend(device).classify(base, 8).reason, None);
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
            let options = ImportOptions::default().with_devices(devices);
            // SAFETY: both come from one export of this crate.
            unsafe { DeviceArray::import_with(array, &schema, &options) }
        };
        let refused = import(&[device]).unwrap_err().to_string();
        for part in ["kind device", "the host reads", "OneApiMemory::Device"] {
            assert!(refused.contains(part), "{refused}");
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
    for device in [&shared, &host] {
        let why = backend(device).classify(on_heap, 8).reason.unwrap();
        assert!(why.contains("SYCL does not know"), "{why}");
    }
}

/// What cannot be a `sycl::event` is refused; a released or foreign one cannot be told.
#[test]
fn null_words_are_no_event() {
    let Some(config) = config() else { return };
    let device = config.open().unwrap();
    let check = |words: &[usize]| {
        let event = EventPtr::new(words.as_ptr().cast_mut().cast()).unwrap();
        // SAFETY: two words can be read.
        unsafe { backend(&device).check_event(event) }
    };
    let word = &raw const device as usize & !7;
    assert!(check(&[word, word]).is_ok());
    for wrong in [[0, 0], [word, 0], [0, word], [word | 1, word]] {
        let refused = check(&wrong).unwrap_err().to_string();
        assert!(refused.contains("sycl::event"), "{refused}");
    }
    let unaligned = EventPtr::new(std::ptr::without_provenance_mut(0x1001)).unwrap();
    // SAFETY: an address that is not aligned is not read.
    assert!(unsafe { backend(&device).check_event(unaligned) }.is_err());
}

/// A queue that was told to wait for work that fails must not go on as if it had not: SYCL does.
#[test]
fn failed_events() {
    let Some(number) = number() else { return };
    let device = OneApiConfig::new(number).open().unwrap();
    for how in [0, OWN_CONTEXT] {
        // Failed already: an error of this call only.
        let failed = Held::new(number, how);
        failed.gate(-5).open();
        let queue = device.new_queue().unwrap();
        // SAFETY: the event is live.
        unsafe {
            assert!(queue.raw().wait(failed.event()).is_err());
            assert!(backend(&device).query_event(failed.event()).is_err());
            assert!(backend(&device).wait_event(failed.event()).is_err());
        }
        assert_eq!(
            device
                .upload_array(&numbers())
                .unwrap()
                .to_host()
                .unwrap()
                .as_ref(),
            numbers().as_ref()
        );
    }
    for how in [0, OWN_CONTEXT] {
        // Pending: the device fails, for good.
        let device = OneApiConfig::new(number).open().unwrap();
        let failing = Held::new(number, how);
        let gate = failing.gate(-5);
        let queue = device.new_queue().unwrap();
        // SAFETY: the event is live.
        unsafe { queue.raw().wait(failing.event()) }.unwrap();
        let after = { device.upload_array_on(&numbers(), &queue).unwrap() };
        let event = queue.record().unwrap().unwrap();
        gate.open();
        let error = event.wait().unwrap_err().to_string();
        assert!(
            error.contains("the device cannot be used any more"),
            "{error}"
        );
        for _ in 0..2 {
            assert_eq!(after.to_host().unwrap_err().to_string(), error);
            assert_eq!(
                device.upload_array(&numbers()).unwrap_err().to_string(),
                error
            );
            assert_eq!(device.synchronize().unwrap_err().to_string(), error);
        }
    }
}

/// What another device of this crate did after such a failure is not taken for complete.
#[test]
fn failures_of_other_devices() {
    let Some(number) = number() else { return };
    let [failed, other] = [(); 2].map(|()| OneApiConfig::new(number).open().unwrap());
    let failing = Held::new(number, 0);
    let gate = failing.gate(-5);
    let queue = failed.new_queue().unwrap();
    // SAFETY: the event is live.
    unsafe { queue.raw().wait(failing.event()) }.unwrap();
    let event = queue.record().unwrap().unwrap();
    let waiting = other.new_queue().unwrap();
    waiting.wait(&event).unwrap();
    gate.open();
    let errors = [waiting.synchronize(), other.synchronize(), event.wait()];
    for error in errors.map(|done| done.unwrap_err().to_string()) {
        assert!(
            error.contains("the device cannot be used any more"),
            "{error}"
        );
    }
    assert!(other.new_queue().is_err());
    let third = OneApiConfig::new(number).open().unwrap();
    assert!(third.default_queue().wait(&event).is_err());
    third.default_queue().synchronize().unwrap();
}

/// An event of another context holds up the queue only.
#[test]
fn waits_for_foreign_events_do_not_block() {
    let Some(number) = number() else { return };
    let device = OneApiConfig::new(number).open().unwrap();
    for how in [0, OWN_CONTEXT] {
        let held = Held::new(number, how);
        let gate = held.gate(0);
        let (queue, other) = (device.new_queue().unwrap(), device.new_queue().unwrap());
        // SAFETY: the event is live.
        unsafe { queue.raw().wait(held.event()) }.unwrap();
        let waits = queue.record().unwrap().unwrap();
        other.synchronize().unwrap();
        let up = device.upload_array_on(&numbers(), &other).unwrap();
        assert_eq!(
            up.start_to_host_on(&other)
                .unwrap()
                .wait()
                .unwrap()
                .as_ref(),
            numbers().as_ref()
        );
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waits.is_complete().unwrap());
        gate.open();
        waits.wait().unwrap();
        // A program's stream waits for it too, and for ours.
        let held = Held::new(number, how);
        let gate = held.gate(0);
        let queue = device.new_queue().unwrap();
        // SAFETY: queue and event are live.
        unsafe {
            let stream = (programs().queue_new)(number as i64, OWN_CONTEXT | OUT_OF_ORDER);
            queue.raw().wait(held.event()).unwrap();
            let ours = queue.record().unwrap().unwrap();
            assert!(
                backend(&device)
                    .stream_wait(stream.expose_provenance(), ours.as_ptr())
                    .unwrap()
            );
            let memory = (programs().queue_malloc)(stream, 1 << 16);
            let theirs = (programs().queue_fill)(stream, memory, 1 << 16);
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!((programs().event_is_complete)(theirs), 0);
            gate.open();
            ours.wait().unwrap();
            let runs = || (programs().event_is_complete)(theirs) == 1;
            assert!(soon(runs), "the program's work does not run");
            (programs().event_delete)(theirs);
            (programs().queue_free)(stream, memory);
            (programs().queue_delete)(stream);
            let refused = backend(&device).stream_wait(0, ours.as_ptr()).unwrap_err();
            let refused = refused.to_string();
            assert!(
                refused.contains("oneapi:") && refused.contains("sycl::queue"),
                "{refused}"
            );
        }
    }
}

/// A host task that throws on a queue of ours: SYCL goes on, and says so when a program asks. Then the device has failed.
#[test]
fn failed_host_tasks_are_remembered() {
    alone("traps::failed_host_tasks_are_remembered", host_task_fails);
}

fn host_task_fails() {
    let Some(number) = number() else { return };
    let device = OneApiConfig::new(number).open().unwrap();
    let queue = device.new_queue().unwrap();
    // SAFETY: the queue is live.
    unsafe {
        let gate = hold_by_host_task(&queue, true);
        let event = queue.record().unwrap().unwrap();
        gate.open();
        event.wait().unwrap();
        let theirs = (programs().queue_new)(number as i64, 0);
        assert_eq!((programs().ask_for_exceptions)(theirs), 0);
        (programs().queue_delete)(theirs);
    }
    let event = queue.record();
    let error = event
        .and_then(|event| event.unwrap().wait())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("the host task has failed; the device cannot be used any more"),
        "{error}"
    );
    assert_eq!(
        device.upload_array(&numbers()).unwrap_err().to_string(),
        error
    );
}

/// Shared and host memory holds values at once, fresh and used again.
#[test]
fn host_readable_memory_is_initialised() {
    let Some(config) = config() else { return };
    for memory in [OneApiMemory::Shared, OneApiMemory::Host] {
        let device = config.clone().with_memory(memory).open().unwrap();
        let queue = device.default_queue();
        for (round, bytes) in [300, 300, 5000, 5000, 100_000, 100_000, 300, 300]
            .into_iter()
            .enumerate()
        {
            // Even rounds get memory that SYCL has had back, and odd ones that of the round before.
            if round % 2 == 0 {
                device.trim();
                frees_are_done(&device);
            }
            let base = queue.raw().allocate(bytes).unwrap();
            // SAFETY: the memory is initialised, which the host can read and no work uses.
            let found = unsafe { std::slice::from_raw_parts(base.as_ptr().cast::<u8>(), bytes) };
            let expected = if round % 2 == 0 { 0 } else { 7 };
            assert!(found.iter().all(|byte| *byte == expected), "round {round}");
            // SAFETY: the memory has `bytes` bytes, no work uses it any more when it is freed, and it is freed once.
            unsafe {
                queue.raw().fill(base, 7, bytes).unwrap();
                queue.synchronize().unwrap();
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
            assert!(
                text.contains(&format!("oneapi:{number}"))
                    && text.contains("no unified shared memory (USM)"),
                "{text}"
            );
            refused += 1;
        }
    }
    if refused == 0 {
        assert!(
            std::env::var_os("ARROW_DEVICE_ONEAPI_REQUIRED").is_none(),
            "every SYCL device here has unified shared memory; pocl-opencl-icd has none"
        );
        eprintln!(
            "skipped: every SYCL device here has unified shared memory; pocl-opencl-icd has none"
        );
    }
    let beyond = OneApiConfig::new(1000).open().unwrap_err().to_string();
    assert!(
        beyond.contains("oneapi:1000") && beyond.contains("SYCL device"),
        "{beyond}"
    );
}

/// The library of this crate stays open under its name.
#[test]
fn the_file_in_memory_stays_open() {
    let Some(_) = number() else { return };
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let mut names = files.filter_map(|file| std::fs::read_link(file.unwrap().path()).ok());
    assert!(names.any(|name| name.to_string_lossy().contains("memfd:arrow-device-oneapi")));
}
