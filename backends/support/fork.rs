//! A child of the process that opened a device: it can drop everything, and do nothing else.

use std::sync::Arc;

use arrow_array::{Int64Array, RecordBatch};
use arrow_device::SyncPolicy;

use super::assert_clean;
use crate::fork_kit::{alone, forked};
use crate::rigs::{all, hold, refused};

#[test]
fn a_child_drops_everything_and_uses_nothing() {
    let test = "suite::fork::a_child_drops_everything_and_uses_nothing";
    alone(test, || all().into_iter().for_each(in_a_child));
}

fn in_a_child(device: arrow_device::Device) {
    let column = Arc::new(Int64Array::from_iter_values(0..300)) as _;
    let batch = RecordBatch::try_from_iter([("a", column)]).unwrap();
    let queue = device.new_queue().unwrap();
    let held = hold(&queue);
    let up = device.upload_on(&batch, &queue).unwrap();
    let download = up.start_to_host(&queue).unwrap();
    let exported = up.export(SyncPolicy::Event).ok();
    let event = queue.record().unwrap().unwrap();
    let host = device.host_buffer(100 << 10).unwrap();
    drop(device.upload(&batch).unwrap());
    let mut child = Some((up, download, exported, event, host));
    let mut rest = Some((queue, device.clone()));
    forked(|| {
        let (up, download, exported, event, host) = child.take().unwrap();
        let (queue, device) = rest.take().unwrap();
        let mut errors = vec![
            device.upload(&batch).unwrap_err(),
            up.to_host().unwrap_err(),
            device.new_queue().unwrap_err(),
            queue.record().unwrap_err(),
            event.wait().unwrap_err(),
            event.is_complete().unwrap_err(),
            device.synchronize().unwrap_err(),
        ];
        errors.extend(refused(&queue));
        for e in errors {
            assert!(e.to_string().contains("fork"), "{e}");
        }
        drop((download, exported, host, event, up));
        device.trim();
        drop((queue, device));
    });
    drop(held);
    // The parent goes on as if nothing had happened.
    let (up, download, exported, event, host) = child.unwrap();
    assert_eq!(download.wait().unwrap(), batch);
    assert_eq!(up.to_host().unwrap(), batch);
    drop((up, exported, event, host, rest));
    assert_clean(&device);
}
