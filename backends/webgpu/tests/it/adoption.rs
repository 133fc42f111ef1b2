//! A program's own `wgpu::Device`: adopted once, with its queue, in the order of its submissions.

use arrow_array::record_batch;
use arrow_device::device::{CopyKind, CopyOp, DeviceId, DevicePtr};
use arrow_device::{ArrowDeviceType, DeviceBufferMut, Devices};
use arrow_device_wgpu::{WgpuConfig, WgpuDevice, adopt, register, wgpu};

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

/// wgpu runs the program's callbacks within an adoption, which submits something. They may adopt devices too.
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
    let [inner, another] = adopted.try_recv().expect("not called within the adoption");
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
}

/// What the program submits comes after what this crate was given before, and before what it is given later; what it writes by
/// `write_buffer` counts from the next submission on.
#[test]
fn the_order_of_the_programs_submissions() {
    let Some((device, queue)) = own_device(|_| {}) else {
        return;
    };
    let ours = adopt(&device, &queue, &config()).unwrap();
    let own = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 64,
        usage: wgpu::BufferUsages::COPY_SRC
            | wgpu::BufferUsages::COPY_DST
            | wgpu::BufferUsages::STORAGE,
        mapped_at_creation: false,
    });
    queue.write_buffer(&own, 0, &[1; 64]);
    let memory = DeviceBufferMut::allocate(&ours.default_queue(), 64).unwrap();
    let mut back = [0_u8; 64];
    let dst = DevicePtr::new(back.as_mut_ptr().cast());
    let read = CopyOp {
        src: memory.address(),
        dst,
        bytes: 64,
        kind: CopyKind::DeviceToHost,
    };
    let raw = ours.default_queue();
    // SAFETY: the memory has 64 bytes, and lives until the queue is done.
    unsafe { raw.raw().fill(memory.address(), 7, 64) }.unwrap();
    // An event includes what the program has submitted before, though this crate did not submit it.
    let done = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let sets = done.clone();
    let mut encoder = device.create_command_encoder(&Default::default());
    encoder.clear_buffer(&own, 0, None);
    queue.submit([encoder.finish()]);
    queue.on_submitted_work_done(move || sets.store(true, std::sync::atomic::Ordering::SeqCst));
    raw.record().unwrap().unwrap().wait().unwrap();
    assert!(
        done.load(std::sync::atomic::Ordering::SeqCst),
        "the event does not include the program's work"
    );
    // SAFETY: both have 64 bytes, and live until the queue is done.
    unsafe { raw.raw().copy(&[read]) }.unwrap();
    raw.synchronize().unwrap();
    assert_eq!(back, [7; 64]);
    // What `write_buffer` writes counts from the next event on, whoever submits.
    queue.write_buffer(&own, 0, &[3; 64]);
    raw.record().unwrap().unwrap().wait().unwrap();
    // SAFETY: the buffer is of the device, and not written to while it is wrapped.
    let wrapped = unsafe { WgpuDevice::wrap(&ours, own.clone(), ()) }.unwrap();
    assert_eq!(wrapped.to_host().unwrap().as_slice(), [3; 64]);
    drop(wrapped);
    drop(memory);
    assert_clean(&ours);
}
