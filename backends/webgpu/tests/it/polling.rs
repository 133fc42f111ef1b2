//! Who polls: a thread of this crate, or the program in its frames.

use std::sync::Arc;

use arrow_array::{Int64Array, RecordBatch};
use arrow_device::Device;
use arrow_device_wgpu::{Polling, WgpuDevice, adopt, wgpu};

use crate::rigs::{config, hold, own_device, try_open};
use crate::suite::{Count, assert_clean, soon};

fn batch(rows: i64) -> RecordBatch {
    let column = Arc::new(Int64Array::from_iter_values(0..rows)) as _;
    RecordBatch::try_from_iter([("a", column)]).unwrap()
}

fn polled_by_the_program() -> Option<(Device, wgpu::Device)> {
    let (device, queue) = own_device(|_| {})?;
    let config = config().with_polling(Polling::Program);
    Some((adopt(&device, &queue, &config).unwrap(), device))
}

/// A frame polls either way, and never waits.
#[test]
fn frames_complete_downloads() {
    let Some((device, own)) = polled_by_the_program() else {
        return;
    };
    let sent = batch(100_000);
    let ours = || WgpuDevice::of(&device).unwrap().poll().unwrap();
    let theirs = || {
        own.poll(wgpu::PollType::Poll).unwrap();
    };
    for frame in [&ours as &dyn Fn(), &theirs] {
        let up = device.upload(&sent).unwrap();
        let mut download = up.start_to_host().unwrap();
        let count = Arc::new(Count::default());
        let event = device.default_queue().record().unwrap().unwrap();
        let is_complete = event.notify(&count.clone().into()).unwrap();
        let woken = soon(|| {
            frame();
            is_complete || count.get() > 0
        });
        assert!(woken, "not woken by polls");
        assert!(download.is_ready().unwrap());
        assert_eq!(download.wait().unwrap(), sent);
    }
    assert_clean(&device);
}

/// Without a frame, a wait polls by itself.
#[test]
fn waits_need_no_frames() {
    let Some((device, _)) = polled_by_the_program() else {
        return;
    };
    let sent = batch(300_000);
    for _ in 0..3 {
        assert_eq!(device.upload(&sent).unwrap().to_host().unwrap(), sent);
    }
    device.synchronize().unwrap();
    device.backend().settle().unwrap();
    assert_clean(&device);
}

/// Everything is dropped while work runs, and a download has not landed.
#[test]
fn dropped_while_work_is_pending() {
    let Some(device) = try_open() else { return };
    let sent = batch(1_000_000);
    let held = hold(&device.default_queue());
    let up = device.upload(&sent).unwrap();
    let download = up.start_to_host().unwrap();
    let kept = WgpuDevice::of(&device).unwrap().device().clone();
    let start = std::time::Instant::now();
    drop((download, up, device));
    assert!(start.elapsed().as_secs() < 5, "the drop waited");
    drop(held);
    // wgpu has nothing left to do, and is not told to do anything more.
    assert!(soon(|| kept
        .poll(wgpu::PollType::Poll)
        .unwrap()
        .is_queue_empty()));
}
