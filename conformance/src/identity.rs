//! Rules about the identity of devices.

use std::sync::Arc;

use super::kit::{Block, join, record};
use super::{Subject, Verdict};
use arrow_device::device::AddressClass;
use arrow_device::{ArrowDeviceType, DeviceId, Devices, Error};

pub(super) fn stable(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let backend = device.backend();
    let queue = backend.default_queue().expect("default_queue");
    let capabilities = backend.capabilities();
    assert_eq!(capabilities.id, device.id());
    assert_eq!(device.clone(), *device);
    std::thread::scope(|scope| {
        let threads = [(); 2].map(|()| {
            scope.spawn(|| {
                assert_eq!(backend.capabilities(), capabilities);
                let again = backend.default_queue().expect("default_queue");
                assert!(Arc::ptr_eq(&queue, &again), "another default queue");
            })
        });
        join(threads);
    });
    assert_eq!(device.default_queue(), device.default_queue());
    assert_eq!(device.new_queue().expect("new_queue").device(), device);
    let name = device.id().to_string();
    assert_eq!(name.parse::<DeviceId>().ok(), Some(device.id()), "{name}");
    Verdict::Kept
}

pub(super) fn registry(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let devices = Devices::new();
    if device.id().device_type == ArrowDeviceType::CPU {
        assert_eq!(devices.get(device.id()).as_ref().ok(), Some(device));
        return Verdict::Kept;
    }
    assert!(devices.get(device.id()).is_err());
    devices.add(device.clone()).expect("add");
    devices.add(device.clone()).expect("add the same again");
    assert_eq!(devices.get(device.id()).as_ref().ok(), Some(device));

    let made = Devices::new();
    let factory = device.clone();
    made.register(device.id().device_type, move |_| Ok(factory.clone()));
    assert_eq!(made.get(device.id()).as_ref().ok(), Some(device));
    Verdict::Kept
}

pub(super) fn registered(subject: &Subject) -> Verdict {
    let Some((register, number)) = subject.registration else {
        return Verdict::Skipped("the subject registers no devices");
    };
    let devices = Devices::new();
    register(&devices);
    let id = |number| DeviceId::new(subject.device.id().device_type, number);
    let first = devices.get(id(number)).expect("a registered device");
    assert_eq!(first.id(), id(number));
    assert_eq!(devices.get(id(number)).ok(), Some(first), "another one");
    for number in [-1, i64::MIN, 1000, i64::MAX] {
        let refused = devices.get(id(number));
        let refused = refused.expect_err("a number that no device has");
        let is_said =
            matches!(&refused, Error::DeviceNotAvailable { device, .. } if *device == id(number));
        assert!(is_said, "{refused}");
    }
    Verdict::Kept
}

pub(super) fn another(subject: &Subject) -> Verdict {
    let Some(make) = &subject.another else {
        return Verdict::Skipped("there is only one device of the type");
    };
    let (one, two) = (&subject.device, make());
    assert_ne!(one.id(), two.id());
    assert_ne!(*one, two);
    let queue = two.default_queue();
    let block = Block::new(&queue, 64);
    let class = one.backend().classify(block.at(0), 64).class;
    if subject.knows_its_memory {
        assert_ne!(class, AddressClass::Device, "memory of {two}");
    }
    if subject.refuses_foreign_events && !one.is_synchronous() {
        let event = record(&queue);
        // SAFETY: the event is live, and of a device of the same type, which is all that
        // `check_event` requires.
        let checked = unsafe { one.backend().check_event(event.as_ptr()) };
        assert!(checked.is_err(), "accepted an event of {two}");
        event.wait().expect("wait");
    }
    Verdict::Kept
}
