//! A child of the process that opened a device: it can drop everything, and do nothing else.

use std::sync::Arc;

use arrow_array::{Int64Array, RecordBatch};
use arrow_device::SyncPolicy;
use arrow_device_vulkan::{VulkanConfig, VulkanQueue, devices};

use crate::fork_kit::{alone, forked};
use crate::rigs::{assert_clean, hold_back, is_there, open};

#[test]
fn a_child_drops_everything_and_uses_nothing() {
    if !is_there() {
        return;
    }
    alone("fork::a_child_drops_everything_and_uses_nothing", || {
        let device = open();
        let column = Arc::new(Int64Array::from_iter_values(0..300)) as _;
        let batch = RecordBatch::try_from_iter([("a", column)]).unwrap();
        let queue = device.new_queue().unwrap();
        let held = hold_back(&queue);
        let up = device.upload_on(&batch, &queue).unwrap();
        let exported = up.export(SyncPolicy::Event).ok();
        let event = queue.record().unwrap().unwrap();
        let slab = device.host_slab(100 << 10).unwrap();
        drop(device.upload(&batch).unwrap());
        let mut child = Some((up, exported, event, slab));
        let mut rest = Some((queue, device.clone()));
        forked(|| {
            let (up, exported, event, slab) = child.take().unwrap();
            let (queue, device) = rest.take().unwrap();
            let raw = VulkanQueue::of(&queue).unwrap();
            for e in [
                device.upload(&batch).unwrap_err(),
                up.to_host().unwrap_err(),
                device.new_queue().unwrap_err(),
                queue.record().unwrap_err(),
                raw.submitted().unwrap_err(),
                event.wait().unwrap_err(),
                event.is_complete().unwrap_err(),
                device.synchronize().unwrap_err(),
                device.backend().settle().unwrap_err(),
                devices().unwrap_err(),
                VulkanConfig::new(0).open().unwrap_err(),
            ] {
                let text = e.to_string();
                assert!(text.contains("cannot be used after fork"), "{text}");
            }
            drop((exported, slab, event, up));
            device.trim();
            drop((queue, device));
        });
        drop(held);
        // The parent goes on as if nothing had happened.
        let (up, exported, event, slab) = child.unwrap();
        assert_eq!(up.to_host().unwrap(), batch);
        drop((up, exported, event, slab, rest));
        assert_clean(&device);
    });
}
