//! A child of the process that opened a device gives nothing back: the runtime must not be called there.

use std::sync::Arc;

use arrow_array::{Int64Array, RecordBatch};
use arrow_device::SyncPolicy;

use crate::fake;
use crate::fork_kit::{alone, forked};
use crate::rigs::{memories, open};
use crate::suite::{assert_clean, soon};

#[test]
fn a_child_makes_no_call() {
    alone("faults::forks::a_child_makes_no_call", || {
        fake::load();
        for memory in memories() {
            // What the device before has left, a thread gives back.
            assert!(soon(|| fake::live() == 0));
            let device = open(memory);
            let column = Arc::new(Int64Array::from_iter_values(0..300)) as _;
            let batch = RecordBatch::try_from_iter([("a", column)]).unwrap();
            let queue = device.new_queue().unwrap();
            let up = device.upload_on(&batch, &queue).unwrap();
            let exported = up.export(SyncPolicy::Event).ok();
            let event = queue.record().unwrap().unwrap();
            let host = device.backend().allocate_host(4096).unwrap();
            device.synchronize().unwrap();
            let mut all = Some((up, exported, event, queue));
            let mut last = Some(device);
            forked(|| {
                // Here no thread of the parent gives anything back any more.
                let owned = fake::live();
                let child = last.take().unwrap();
                if let Some(host) = host {
                    // SAFETY: it is freed once in each process.
                    unsafe { child.backend().free_host(host, 4096) };
                }
                drop(all.take());
                child.trim();
                drop(child);
                assert_eq!(fake::live(), owned, "{memory:?}: given back");
            });
            let device = last.unwrap();
            if let Some(host) = host {
                // SAFETY: it is freed once in each process, and this is the parent.
                unsafe { device.backend().free_host(host, 4096) };
            }
            drop(all);
            assert_clean(&device);
        }
    });
}
