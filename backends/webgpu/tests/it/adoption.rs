//! A program's own `wgpu::Device`: adopted once, with its queue.

use std::time::Duration;

use arrow_device::device::{AddressClass, DevicePtr};
use arrow_device_conformance::{assert_error, assert_works, next_id, numbers};
use arrow_device_wgpu::{WgpuConfig, WgpuDevice, devices, wgpu};

use crate::rigs::{assert_clean, config, is_there, own_device};

#[test]
fn a_device_is_adopted_once() {
    let Some((device, queue)) = own_device(|_| {}) else {
        return;
    };
    let config = config();
    let one = config.adopt(&device, &queue).unwrap();
    let again = WgpuConfig::best()
        .with_id(77)
        .adopt(&device.clone(), &queue.clone())
        .unwrap();
    assert_eq!(one, again);
    assert_eq!(one.id(), again.id());
    let gpu = WgpuDevice::of(&one).unwrap();
    assert_eq!((gpu.device(), gpu.queue()), (&device, &queue));
    assert_eq!(config.adopt(gpu.device(), gpu.queue()).unwrap(), one);
    // Once it is not used any more, it is adopted anew.
    drop((one, again));
    let anew = WgpuConfig::best()
        .with_id(77)
        .adopt(&device, &queue)
        .unwrap();
    assert_eq!(anew.id().id, 77);
}

/// wgpu runs the program's callbacks within an adoption, which submits something, or in a later poll. They may
/// adopt devices too.
#[test]
fn a_callback_adopts_devices() {
    let (Some((device, queue)), Some((two, other))) = (own_device(|_| {}), own_device(|_| {}))
    else {
        return;
    };
    let (sender, adopted) = std::sync::mpsc::channel();
    let (own, own_queue) = (device.clone(), queue.clone());
    queue.on_submitted_work_done(move || {
        let both = [(&own, &own_queue), (&two, &other)]
            .map(|(device, queue)| config().adopt(device, queue).unwrap());
        sender.send(both).unwrap();
    });
    let outer = config().adopt(&device, &queue).unwrap();
    device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
    let [inner, another] = adopted
        .recv_timeout(Duration::from_secs(60))
        .expect("not called");
    assert_eq!(outer, inner, "adopted twice");
    assert_ne!(outer, another);
}

/// wgpu calls the devices of two instances equal if their numbers are.
#[test]
fn devices_of_two_instances_are_two() {
    let [Some((one, queue)), Some((two, other))] = [own_device(|_| {}), own_device(|_| {})] else {
        return;
    };
    assert_eq!(one, two, "wgpu tells them apart; so can `is_same`");
    let first = config().adopt(&one, &queue).unwrap();
    let second = config().adopt(&two, &other).unwrap();
    assert_ne!(first, second);
    for device in [&first, &second] {
        assert_works(device);
        assert_clean(device);
    }
    // Memory of the other is neither this one's nor the host's.
    let up = first.upload(&numbers(3)).unwrap();
    let address = up.column(0).unwrap().buffer(1).unwrap().address();
    for (device, class) in [
        (&first, AddressClass::Device),
        (&second, AddressClass::Inaccessible),
    ] {
        assert_eq!(device.backend().classify(address, 8).class, class);
    }
    let before = DevicePtr::new(address.as_ptr().wrapping_byte_sub(8));
    let found = second.backend().classify(before, 16);
    assert_eq!(
        found.class,
        AddressClass::Inaccessible,
        "it reaches into the memory"
    );
    let host = DevicePtr::new((&raw const first).cast_mut().cast());
    assert_eq!(second.backend().classify(host, 8).class, AddressClass::Host);
    drop(up);
    first.trim();
}

#[test]
fn a_queue_of_another_device_is_refused() {
    let Some((device, _queue)) = own_device(|_| {}) else {
        return;
    };
    let Some((_, other)) = own_device(|_| {}) else {
        return;
    };
    assert_error(
        config().adopt(&device, &other),
        "the queue takes no work of the device",
    );
}

/// What this crate has made is used again once nobody does.
#[test]
fn a_device_is_opened_again() {
    if !is_there() {
        return;
    }
    let open = || WgpuConfig::new(0).with_id(next_id()).open().unwrap();
    let (device, other) = (open(), open());
    let gpu = WgpuDevice::of(&device).unwrap();
    assert_eq!(gpu.info(), devices().unwrap()[0]);
    let (gpu, queue) = (gpu.device().clone(), gpu.queue().clone());
    drop(device);
    let again = open();
    assert_eq!(config().adopt(&gpu, &queue).unwrap(), again);
    assert_ne!(other, again);
    // But not if it is lost.
    gpu.destroy();
    drop(again);
    assert_works(&open());
}
