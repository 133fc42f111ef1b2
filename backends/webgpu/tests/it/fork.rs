//! A child of the process that opened a device: it can drop everything, and do nothing else.

use arrow_array::record_batch;
use arrow_device::SyncPolicy;
use arrow_device_wgpu::{WgpuConfig, WgpuDevice, adopt, open};

use crate::fork_kit::{alone, forked};
use crate::rigs::{assert_clean, hold, try_open};

#[test]
fn a_child_drops_everything_and_uses_nothing() {
    alone("fork::a_child_drops_everything_and_uses_nothing", || {
        let Some(device) = try_open() else { return };
        let batch = record_batch!(("a", Int64, [1, 2, 3])).unwrap();
        let queue = device.new_queue().unwrap();
        let up = device.upload(&batch).unwrap();
        up.wait().unwrap();
        let held = hold(&queue);
        let download = up.start_to_host().unwrap();
        let exported = up.export(SyncPolicy::Event).unwrap();
        let event = queue.record().unwrap().unwrap();
        let mut all = Some((up, exported, event, download));
        let mut rest = Some((queue, device.clone()));
        forked(|| {
            let (up, exported, event, download) = all.take().unwrap();
            let (queue, device) = rest.take().unwrap();
            let gpu = WgpuDevice::of(&device).unwrap();
            for e in [
                device.upload(&batch).unwrap_err(),
                up.to_host().unwrap_err(),
                device.new_queue().unwrap_err(),
                queue.record().unwrap_err(),
                event.wait().unwrap_err(),
                event.is_complete().unwrap_err(),
                device.synchronize().unwrap_err(),
                device.backend().settle().unwrap_err(),
                gpu.poll().unwrap_err(),
                open().unwrap_err(),
                adopt(gpu.device(), gpu.queue(), &WgpuConfig::new()).unwrap_err(),
            ] {
                let text = e.to_string();
                assert!(text.contains("cannot be used after fork"), "{text}");
            }
            drop((download, exported, event, up));
            device.trim();
            drop((queue, device));
        });
        drop(held);
        // The parent goes on as if nothing had happened.
        let (up, exported, event, download) = all.unwrap();
        assert_eq!(download.wait().unwrap(), batch);
        assert_eq!(up.to_host().unwrap(), batch);
        drop((up, exported, event, rest));
        assert_clean(&device);
    });
}
