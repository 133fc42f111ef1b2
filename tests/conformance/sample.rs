//! The backend of the example `sample_backend`.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use arrow_device::device::engine::{Engine, Runtime};
use arrow_device::{Device, DeviceBufferMut, Devices, Queue};
#[cfg(all(target_os = "linux", not(miri)))]
use arrow_device_conformance::run_in_processes;
use arrow_device_conformance::{Hold, Subject, assert_balanced, assert_error, rules, run};

use super::{Gate, skips_what_it_cannot_see};
use device::{SampleDevice, SampleQueue};

#[path = "../../examples/sample_backend/device.rs"]
mod device;

fn make(host_readable: bool) -> Device {
    static NEXT: AtomicI64 = AtomicI64::new(0);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    SampleDevice::open(id, host_readable).unwrap()
}

fn launch(queue: &Queue, kernel: impl FnOnce() -> Result<(), String> + Send + 'static) {
    // SAFETY: the kernels of these tests touch no memory of the device.
    unsafe { SampleQueue::of(queue).unwrap().launch(kernel) }.unwrap();
}

fn hold(queue: &Queue) -> Hold {
    let gate = Arc::new(Gate::default());
    let kernel = gate.clone();
    launch(queue, move || {
        kernel.pass();
        Ok(())
    });
    gate.hold()
}

fn subject(host_readable: bool) -> Subject {
    Subject::of::<SampleDevice>(move || make(host_readable)).with_hold(hold)
}

fn suite(host_readable: bool) {
    let report = run(&subject(host_readable));
    let skipped: Vec<_> = report.skipped().map(|(rule, _)| rule.name()).collect();
    let expected = [
        "identity.registered",
        "queue.adopted",
        "event.synchronous",
        "foreign.order",
        "foreign.failed",
        "foreign.fails",
        "foreign.imported",
        "host.allocate",
        "export.refused",
    ];
    let unreadable = (!host_readable).then_some("allocate.initialised");
    let mut expected: Vec<_> = expected.into_iter().chain(unreadable).collect();
    // In the order of the rules.
    expected.sort_by_key(|name| rules().iter().position(|rule| rule.name() == *name));
    assert_eq!(skipped, expected);
}

#[test]
fn another_runtimes_device_is_none_of_this_one() {
    let cpu = Devices::cpu();
    let expected = "it is no device of the runtime SampleDevice";
    assert_error(Engine::<SampleDevice>::of(&cpu), expected);
    let queue = cpu.default_queue();
    assert_error(Engine::<SampleDevice>::stream(&queue), expected);
}

#[test]
fn memory_that_only_copies_reach() {
    suite(false);
}

#[test]
fn memory_that_the_host_reads() {
    suite(true);
}

#[test]
fn of_which_nothing_is_known() {
    let report = run(&Subject::new(make(false)));
    skips_what_it_cannot_see(&report);
}

/// The device is threads, which a child of the process does not have, and locks, which may be held there.
#[cfg(all(target_os = "linux", not(miri)))]
#[test]
fn in_processes() {
    run_in_processes("sample::in_processes", || Some(subject(false)));
}

/// A failure of queued work is reported by what waits for it and by all that follows.
#[test]
fn failed_work_stays_failed() {
    for panics in [false, true] {
        let device = make(false);
        let queue = device.new_queue().unwrap();
        let mut memory = DeviceBufferMut::allocate(&queue, 64).unwrap();
        launch(&queue, move || {
            assert!(!panics, "on purpose");
            Err("on purpose".into())
        });
        memory.fill(1).ok();
        for failed in [device.synchronize(), queue.synchronize(), memory.fill(2)] {
            let text = failed.unwrap_err().to_string();
            assert!(
                text.contains(if panics { "panicked" } else { "on purpose" }),
                "{text}"
            );
        }
        drop((memory, queue));
        device.synchronize().unwrap_err();
        assert_balanced::<SampleDevice>(&device);
    }
}

/// Memory that was freed while work uses it serves its own queue at once, and others after that work.
#[test]
fn memory_waits_for_its_work() {
    let device = make(false);
    let (one, two) = (device.new_queue().unwrap(), device.new_queue().unwrap());
    let allocate = |queue: &Queue| DeviceBufferMut::allocate(queue, 5000).unwrap();
    let mut held = hold(&one);
    let used = allocate(&one);
    let address = used.address();
    drop(used);
    let other = allocate(&two);
    assert_ne!(other.address(), address);
    let own = allocate(&one);
    assert_eq!(own.address(), address);
    drop(own);
    held.open();
    device.synchronize().unwrap();
    assert_eq!(allocate(&two).address(), address);
    drop((other, one, two));
    assert_balanced::<SampleDevice>(&device);
}

/// Work that a queue was given while another thread waited for a device that fails meanwhile keeps its memory.
#[test]
fn a_failure_during_a_wait_ends_no_other_work() {
    let device = make(false);
    let (one, two) = (device.new_queue().unwrap(), device.new_queue().unwrap());
    let gate = Arc::new(Gate::default());
    let (failing, opened) = (gate.clone(), gate.clone().hold());
    launch(&one, move || {
        failing.pass();
        Err("on purpose".into())
    });
    let waiting = device.clone();
    let waiter = std::thread::spawn(move || waiting.synchronize());
    std::thread::sleep(std::time::Duration::from_millis(50));
    // A queue of which the waiting thread does not know.
    let three = device.new_queue().unwrap();
    let mut held = hold(&three);
    drop(opened);
    waiter.join().unwrap().unwrap_err();
    assert!(!device.backend().is_over(), "the held work runs on");
    held.open();
    device.synchronize().unwrap_err();
    assert!(device.backend().is_over());
    drop((one, two, three));
    assert_balanced::<SampleDevice>(&device);
}

/// Each call of the runtime fails, in three ways.
#[test]
#[cfg(not(miri))]
fn every_call_fails() {
    arrow_device_conformance::every_call_fails(
        || {
            let device = SampleDevice::new(0, false);
            let stream = device.new_stream()?;
            Ok((device, stream))
        },
        0,
    );
}
