//! The backend of the example `sample_backend`.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

#[cfg(target_os = "linux")]
use arrow_device::device::AddressClass::Inaccessible;
use arrow_device::{Device, DeviceBufferMut, Queue};
use arrow_device_conformance::{Hold, Subject, run};

use super::{Gate, skips_what_it_cannot_see, wrap};
use device::SampleDevice;
use queue::SampleQueue;

#[path = "../../examples/sample_backend/device.rs"]
mod device;
#[path = "../../examples/sample_backend/event.rs"]
mod event;
#[cfg(target_os = "linux")]
#[path = "../it/support/fork_kit.rs"]
mod fork_kit;
#[path = "../../examples/sample_backend/memory.rs"]
mod memory;
#[path = "../../examples/sample_backend/queue.rs"]
mod queue;

fn make(host_readable: bool) -> (Device, Arc<SampleDevice>) {
    static NEXT: AtomicI64 = AtomicI64::new(0);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let sample = SampleDevice::new(id, host_readable).unwrap();
    (wrap(sample.clone()), sample)
}

fn launch(queue: &Queue, kernel: impl FnOnce() -> Result<(), String> + Send + 'static) {
    let queue: &SampleQueue = queue.raw().downcast_ref().unwrap();
    // SAFETY: the kernels of these tests touch no memory of the device.
    unsafe { queue.launch(kernel) }.unwrap();
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

fn suite(host_readable: bool) {
    let (device, sample) = make(host_readable);
    let subject = Subject::new(device)
        .with_another(move || make(host_readable).0)
        .with_hold(hold)
        .with_balance(move || sample.balance())
        .strict();
    let report = run(&subject);
    let skipped: Vec<_> = report.skipped().map(|(rule, _)| rule.name()).collect();
    let expected = ["event.synchronous", "host.allocate", "export.refused"];
    let unreadable = (!host_readable).then_some("allocate.initialised");
    assert_eq!(
        skipped,
        unreadable.into_iter().chain(expected).collect::<Vec<_>>()
    );
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
    let report = run(&Subject::new(make(false).0));
    skips_what_it_cannot_see(&report);
}

/// The device is a thread, which a child does not have, and locks, which may be held there.
#[cfg(target_os = "linux")]
#[test]
fn a_forked_child_has_no_device() {
    fork_kit::alone("sample::a_forked_child_has_no_device", || {
        let (device, sample) = make(false);
        let queue = device.new_queue().unwrap();
        let mut memory = DeviceBufferMut::allocate(&queue, 64).unwrap();
        let event = queue.record().unwrap().unwrap();
        let other = DeviceBufferMut::allocate(&queue, 64).unwrap();
        let all = (device.clone(), queue.clone(), event.clone(), sample.clone());
        let mut child = Some((all, other));
        fork_kit::forked(|| {
            let ((device, queue, event, sample), other) = child.take().unwrap();
            for e in [
                device.new_queue().unwrap_err(),
                device.synchronize().unwrap_err(),
                queue.record().unwrap_err(),
                queue.synchronize().unwrap_err(),
                queue.wait(&event).unwrap_err(),
                event.is_complete().unwrap_err(),
                event.wait().unwrap_err(),
                memory.fill(1).unwrap_err(),
                DeviceBufferMut::allocate(&queue, 64).unwrap_err(),
            ] {
                let text = e.to_string();
                assert!(text.contains("cannot be used after fork"), "{text}");
            }
            drop(other);
            device.trim();
            let backend = device.backend();
            assert_eq!(backend.classify(memory.address(), 64).class, Inaccessible);
            backend.settle().unwrap();
            let error = device.take_drop_error();
            assert!(error.is_none(), "{error:?}");
            drop((device, queue, event, sample));
        });
        memory.fill(1).unwrap();
        drop((memory, event, queue, child));
        device.synchronize().unwrap();
        device.trim();
        assert_eq!(sample.balance(), Ok(()));
    });
}

/// A failure of queued work is reported by what waits for it and by all that follows.
#[test]
fn failed_work_stays_failed() {
    for panics in [false, true] {
        let (device, sample) = make(false);
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
        device.trim();
        assert_eq!(sample.balance(), Ok(()));
    }
}
