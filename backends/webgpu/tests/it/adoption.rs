//! A program's own `wgpu::Device`: adopted once, with its queue.

use std::time::Duration;

use arrow_array::record_batch;
use arrow_device::device::DeviceId;
use arrow_device::{ArrowDeviceType, Devices};
use arrow_device_wgpu::{WgpuConfig, WgpuDevice, adopt, register};

use crate::rigs::{config, own_device, try_open};
use crate::suite::{assert_clean, assert_error};

#[test]
fn a_device_is_adopted_once() {
    let Some((device, queue)) = own_device(|_| {}) else {
        return;
    };
    let config = config();
    let one = adopt(&device, &queue, &config).unwrap();
    let again = adopt(
        &device.clone(),
        &queue.clone(),
        &WgpuConfig::new().with_id(77),
    )
    .unwrap();
    assert_eq!(one, again);
    assert_eq!(one.id(), again.id());
    let gpu = WgpuDevice::of(&one).unwrap();
    assert_eq!((gpu.device(), gpu.queue()), (&device, &queue));
    assert_eq!(adopt(gpu.device(), gpu.queue(), &config).unwrap(), one);
    // Once it is not used any more, it is adopted anew.
    drop((one, again));
    let anew = adopt(&device, &queue, &WgpuConfig::new().with_id(77)).unwrap();
    assert_eq!(anew.id().id, 77);
}

/// wgpu runs the program's callbacks within an adoption, which submits something, or on the thread that polls from then on. They may
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
            .map(|(device, queue)| adopt(device, queue, &config()).unwrap());
        sender.send(both).unwrap();
    });
    let outer = adopt(&device, &queue, &config()).unwrap();
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
    let first = adopt(&one, &queue, &config()).unwrap();
    let second = adopt(&two, &other, &config()).unwrap();
    assert_ne!(first, second);
    let sent = record_batch!(("a", Int64, [1, 2, 3])).unwrap();
    for device in [&first, &second] {
        assert_eq!(device.upload(&sent).unwrap().to_host().unwrap(), sent);
        assert_clean(device);
    }
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
        adopt(&device, &other, &config()),
        "the queue takes no work of the device",
    );
}

#[test]
fn the_registry_opens_adapters_by_number() {
    let devices = Devices::new();
    register(&devices);
    assert_error(
        devices.get(DeviceId::new(ArrowDeviceType::WEBGPU, -1)),
        "WebGPU adapters are numbered from 0",
    );
    if try_open().is_none() {
        return;
    }
    let device = devices
        .get(DeviceId::new(ArrowDeviceType::WEBGPU, 0))
        .unwrap();
    assert_eq!(device.id().to_string(), "webgpu:0");
    assert!(!WgpuDevice::of(&device).unwrap().info().name.is_empty());
    assert_error(
        devices.get(DeviceId::new(ArrowDeviceType::WEBGPU, 99)),
        "which are numbered from 0",
    );
    assert_error(WgpuDevice::of(&Devices::cpu()), "is not a WebGPU device");
    // What this crate has made is used again once nobody does.
    let open = || config().with_adapter(0).open().unwrap();
    let other = open();
    let gpu = WgpuDevice::of(&device).unwrap();
    let (gpu, queue) = (gpu.device().clone(), gpu.queue().clone());
    drop((devices, device));
    let again = open();
    assert_eq!(adopt(&gpu, &queue, &config()).unwrap(), again);
    assert_ne!(other, again);
    // But not if it is lost.
    gpu.destroy();
    drop(again);
    let sent = record_batch!(("a", Int64, [1, 2, 3])).unwrap();
    assert_eq!(open().upload(&sent).unwrap().to_host().unwrap(), sent);
}
