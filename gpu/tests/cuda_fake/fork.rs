//! A child of the process that opened a device: it can drop everything, and do nothing else.

use arrow_array::Array;
use arrow_device::SyncPolicy;

use crate::fake::{Group, MODES};
use crate::gpu_suite::hold::hold;
use crate::rig::Rig;
use crate::support::fork_kit::{alone, forked};
use crate::support::{assert_same_batch, wide_batch};
use crate::support_c::Foreign;
use crate::vendor::{MEMORIES, Memory, load, open_device};

#[test]
fn a_child_drops_everything_and_uses_nothing() {
    alone("fork::a_child_drops_everything_and_uses_nothing", || {
        load();
        for memory in MEMORIES {
            for mode in MODES {
                let group = Group::open(1, mode);
                let rig = Rig::of(group, open_device(memory, group.ordinal()));
                everything(&rig, memory);
                rig.end();
            }
        }
    });
}

fn everything(rig: &Rig, memory: Memory) {
    let batch = wide_batch(8, 300);
    let queue = rig.new_queue().unwrap();
    // What was seen complete in memory that the host reads would need the device no more.
    let held = hold(&queue);
    let up = rig.upload_on(&batch, &queue).unwrap();
    let exported = up.export(SyncPolicy::Event).unwrap();
    let part = up.slice(3, 100).unwrap();
    let event = queue.record().unwrap().unwrap();
    let host = rig.host_buffer(100 << 10).unwrap();
    let foreign = Foreign::new(&batch.column(0).to_data(), &rig.device);
    let (foreign, imported) = {
        let mut foreign = foreign;
        let imported = foreign.import(&rig.options).unwrap();
        (foreign, imported)
    };
    // Work that has not completed uses it.
    drop(imported.values_on::<i64>(&queue).unwrap());
    // A free is under way on a thread, which the child does not have.
    drop(rig.upload(&batch).unwrap());
    let mut child = Some((up.clone(), exported, part, event, host, imported));
    let mut rest = Some((queue, rig.device.clone()));
    forked(|| {
        let (up, exported, part, event, host, imported) = child.take().unwrap();
        let (queue, device) = rest.take().unwrap();
        for e in [
            device.upload(&batch).unwrap_err(),
            up.to_host().unwrap_err(),
            part.to_device(&device)
                .and_then(|d| d.to_host())
                .unwrap_err(),
            device.new_queue().unwrap_err(),
            queue.record().unwrap_err(),
            event.wait().unwrap_err(),
            event.is_complete().unwrap_err(),
            device.synchronize().unwrap_err(),
            device.host_buffer(64 << 20).map(drop).unwrap_err(),
            open_device(memory, rig.group.ordinal()).unwrap_err(),
        ] {
            let text = e.to_string();
            assert!(text.contains("cannot be used after fork"), "{text}");
        }
        let (array, schema) = exported;
        drop((array, schema, host, event, part));
        drop(imported);
        assert_eq!(foreign.releases().0, 1, "released at once, and once");
        drop(up);
        device.trim();
        drop((queue, device));
        assert_eq!(rig.take_drop_error().map(|e| e.to_string()), None);
    });
    drop(held);
    // The parent goes on as if nothing had happened.
    let (up, exported, part, event, host, imported) = child.unwrap();
    assert_same_batch(&batch, &up.to_host().unwrap(), "after the fork");
    assert_eq!(foreign.releases().0, 0);
    drop((up, exported, part, event, host, imported, rest));
    foreign.assert_released_by(&rig.device, "in the parent");
}
