//! Devices, events, addresses.

use super::*;
use crate::support::assert_same;
use crate::support_c::sim::{cpu, simulated};
use arrow_array::Array;
use arrow_device::device::sim::SimMode;
use arrow_device::{ArrowDeviceType, Device, DeviceId, Devices, Error, ImportOptions};
use std::ptr;

/// Who may claim which device.
#[test]
fn devices() {
    both_ways(|| {
        let plain = || Foreign::new(&ints().to_data(), &Devices::cpu());
        let place = cpu();
        // 3.3.6, 2.3.6: types without a backend.
        for (device_type, expected) in [
            (0, "does not name this device type"),
            (99, "does not name this device type"),
            (-5, "does not name this device type"),
            (2, "CUDA"),
            (13, "CUDA"),
            (10, "ROCm"),
            (8, "no backend is registered"),
            (14, "no backend is registered"),
            (16, "no backend is registered"),
            (12, "no extension device with this id is registered"),
        ] {
            let mut foreign = plain();
            foreign.device_array.device_type = device_type;
            refused(&place, foreign, expected);
        }
        let mut foreign = plain();
        foreign.device_array.device_type = 12;
        foreign.device_array.device_id = 9_999_999;
        refused(&place, foreign, "9999999");
        // Page-locked memory is host memory, unless it must be waited for.
        let mut event = 0u64;
        for device_type in [3, 11] {
            let mut foreign = plain();
            foreign.device_array.device_type = device_type;
            foreign.device_array.device_id = 0;
            let imported = foreign.import(&place.options).unwrap();
            assert_eq!(imported.device().id().device_type.value(), device_type);
            assert_same(&ints(), &imported.to_host().unwrap(), "page-locked");
            drop(imported);
            foreign.assert_released("page-locked");
            let mut foreign = plain();
            foreign.device_array.device_type = device_type;
            foreign.device_array.sync_event = ptr::from_mut(&mut event).cast();
            refused(&place, foreign, "is not available");
        }
        let mut foreign = plain();
        foreign.device_array.sync_event = ptr::from_mut(&mut event).cast();
        refused(&place, foreign, "sync_event: cpu has no events");
        // Any id is the CPU, and `reserved` may hold anything.
        for id in [-1, 0, 7, i64::MIN] {
            let mut foreign = plain();
            foreign.device_array.device_id = id;
            foreign.device_array.reserved = [-1, i64::MAX, 0x5A];
            let imported = foreign.import(&place.options).unwrap();
            assert_eq!(imported.device(), &Devices::cpu());
            assert_same(&ints(), &imported.to_host().unwrap(), "CPU");
        }
    });
}

/// Type 12 is everybody's test type: a simulated device takes only what is its own.
#[test]
fn simulated_devices_accept_their_own_only() {
    both_ways(|| {
        let (Some(place), Some(other)) = (simulated(SimMode::Async), simulated(SimMode::Async))
        else {
            return;
        };
        let label = |foreign: &mut Foreign| {
            foreign.device_array.device_type = 12;
            foreign.device_array.device_id = place.device.id().id;
            foreign.device_array.sync_event = ptr::null_mut();
        };
        // Host memory, and memory of another simulated device, under this one's label.
        for from in [&cpu(), &other] {
            for data in [
                ints(),
                of(DataType::Utf8),
                array(&DataType::Utf8View, 40, Nulls::Some, 1),
            ] {
                let mut foreign = Foreign::new(&data.to_data(), &from.device);
                label(&mut foreign);
                refused(&place, foreign, "array.buffers[");
            }
            let mut foreign = Foreign::new(&ints().to_data(), &place.device);
            let mut wrong = Foreign::new(&ints().to_data(), &from.device);
            foreign.set_buffer(&[], 0, wrong.buffer(&[], 0));
            refused(&place, foreign, "array.buffers[0]");
            // A buffer whose length only the data tells is found out when it is asked for.
            let mut foreign = Foreign::new(&of(DataType::Utf8).to_data(), &place.device);
            let mut wrong = Foreign::new(&of(DataType::Utf8).to_data(), &from.device);
            foreign.set_buffer(&[], 2, wrong.buffer(&[], 2));
            let imported = foreign.import(&place.options).unwrap();
            let error = imported.to_host().unwrap_err().to_string();
            assert!(error.contains("array.buffers[2]"), "{error}");
            place.device.synchronize().unwrap();
        }
        // Lengths of view buffers where nobody can read them.
        let views = array(&DataType::Utf8View, 40, Nulls::None, 1).to_data();
        let mut foreign = Foreign::new(&views, &place.device);
        let mut wrong = Foreign::new(&ints().to_data(), &other.device);
        let last = foreign.root().n_buffers as usize - 1;
        foreign.set_buffer(&[], last, wrong.buffer(&[], 1));
        refused(&place, foreign, &format!("array.buffers[{last}]"));
        // Rows beyond the allocation.
        let mut foreign = Foreign::new(&ints().to_data(), &place.device);
        foreign.root().length = 1000;
        refused(&place, foreign, "array.buffers[");
        // Beyond what was found to be the device's for another column.
        let pair = of(struct_of(vec![
            ("a", DataType::Int32),
            ("b", DataType::Int32),
        ]));
        let mut foreign = Foreign::new(&pair.to_data(), &place.device);
        let values = foreign.buffer(&[0], 1);
        foreign.at(&[0]).null_count = 0;
        foreign.set_buffer(&[0], 0, ptr::null());
        let second = foreign.at(&[1]);
        (second.length, second.null_count) = (1000, 0);
        foreign.set_buffer(&[1], 0, ptr::null());
        foreign.set_buffer(&[1], 1, values);
        refused(&place, foreign, "array.children[1].buffers[1]");
        // Events that are not this device's.
        let mut no_event = 0u64;
        let theirs = other.device.default_queue().record().unwrap().unwrap();
        let ours = place.device.default_queue().record().unwrap().unwrap();
        let stale = ours.as_ptr().as_ptr();
        drop(ours);
        for event in [
            ptr::from_mut(&mut no_event).cast(),
            theirs.as_ptr().as_ptr(),
            stale,
        ] {
            let mut foreign = Foreign::new(&ints().to_data(), &place.device);
            foreign.device_array.sync_event = event;
            refused(&place, foreign, "sync_event");
        }
        drop(theirs);
        // The device is none the worse for it.
        let good = place.device.upload_array(&ints()).unwrap();
        assert_same(&ints(), &good.to_host().unwrap(), "after all");
        drop((good, wrong));
        place.assert_clean();
        other.assert_clean();
    });
}

/// An import that reads its options' devices only.
#[test]
fn devices_are_those_of_the_options() {
    both_ways(|| {
        let Some(place) = simulated(SimMode::Async) else {
            return;
        };
        let mut foreign = Foreign::new(&ints().to_data(), &place.device);
        let elsewhere = ImportOptions {
            devices: Some(Devices::new()),
            ..Default::default()
        };
        let error = foreign.import(&elsewhere).unwrap_err().to_string();
        assert!(error.contains(&place.device.id().to_string()), "{error}");
        foreign.assert_released("unknown device");
        drop(foreign);
        place.assert_clean();
    });
}

/// A device that a factory returns serves only the type and id that were asked for: as another one, its memory would be
/// read as what it is not.
#[test]
fn factories_make_the_device_that_was_asked_for() {
    both_ways(|| {
        let answers = |devices: &Devices, device_type, device: Device| {
            devices.register(device_type, move |_| Ok(device.clone()));
        };
        let opencl = DeviceId::new(ArrowDeviceType::OPENCL, 5);
        let devices = Devices::new();
        answers(&devices, opencl.device_type, Devices::cpu());
        let mut place = cpu();
        place.options = ImportOptions {
            devices: Some(devices.clone()),
            ..Default::default()
        };
        for _ in 0..2 {
            let mut foreign = Foreign::new(&ints().to_data(), &Devices::cpu());
            foreign.device_array.device_type = opencl.device_type.value();
            foreign.device_array.device_id = opencl.id;
            let why = "opencl:5 is not available: its factory returned the device cpu";
            refused(&place, foreign, why);
        }
        // The right type, and another id.
        let Some(simulated) = simulated(SimMode::Async) else {
            return;
        };
        let id = simulated.device.id();
        let next = DeviceId::new(id.device_type, id.id + 1);
        let devices = Devices::new();
        answers(&devices, id.device_type, simulated.device.clone());
        assert_eq!(devices.get(id).unwrap(), simulated.device);
        let refused = devices.get(next).unwrap_err();
        assert!(
            matches!(&refused, Error::DeviceNotAvailable { device, .. } if *device == next),
            "{refused}"
        );
        // The id is still free for the device that has it.
        let other = self::simulated(SimMode::Async).unwrap();
        let devices = Devices::new();
        answers(&devices, id.device_type, simulated.device.clone());
        assert!(devices.get(other.device.id()).is_err());
        devices.add(other.device.clone()).unwrap();
        assert_eq!(devices.get(other.device.id()).unwrap(), other.device);
        drop((devices, place));
    });
}

/// All ids of the CPU's type are the CPU: no other device is added under one.
#[test]
fn no_other_device_is_the_cpu() {
    let devices = Devices::new();
    devices.add(Devices::cpu()).unwrap();
    devices.register(ArrowDeviceType::CPU, |_| panic!("asked for the CPU"));
    for id in [-1, 0, 7] {
        let id = DeviceId::new(ArrowDeviceType::CPU, id);
        assert_eq!(devices.get(id).unwrap(), Devices::cpu());
    }
}
