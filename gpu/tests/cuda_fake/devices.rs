//! Several devices, other threads, and a driver that goes away.

use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_device::{Error, SyncPolicy};

use crate::fake::{Group, LAZY, MODES};
use crate::rig::{Rig, assert_gone, end_all, soon};
use crate::support::{assert_same_batch, wide_batch};
use crate::support_c::Foreign;
use crate::vendor::{DEVICE, HOST, MEMORIES, open_device};

#[test]
fn two_devices() {
    for mode in MODES {
        let group = Group::open(2, mode);
        let rigs = [0, 1].map(|i| Rig::of(group, open_device(DEVICE, group.ordinal() + i)));
        let batch = wide_batch(8, 1000);
        let up = rigs[0].upload(&batch).unwrap();
        // Between the pools of two devices the driver must be told both contexts.
        let before = group.calls("cuMemcpyPeerAsync");
        let there = up.to_device(&rigs[1].device).unwrap();
        assert!(group.calls("cuMemcpyPeerAsync") > before);
        drop(up);
        assert_eq!(rigs[1].stats().host_waits, 0);
        assert_eq!(rigs[0].stats().bytes_to_host, 0);
        assert_same_batch(&batch, &there.to_host().unwrap(), "the other device");
        drop(there);
        end_all(group, rigs);
    }
}

/// The last handle of a device, too.
#[test]
fn the_device_goes_on_another_thread() {
    let rig = Rig::new(LAZY);
    let group = rig.group;
    let up = rig.upload(&wide_batch(4, 100)).unwrap();
    rig.synchronize().unwrap();
    drop(rig);
    std::thread::spawn(move || drop(up)).join().unwrap();
    assert_gone(group);
}

/// An array whose columns are in several kinds of memory goes to another device: each copy as its memory asks for.
#[test]
fn mixed_memory_to_another_device() {
    for pinned_first in [true, false] {
        let group = Group::open(2, 0);
        let rigs = [0, 1].map(|i| Rig::of(group, open_device(DEVICE, group.ordinal() + i)));
        let host = Rig::of(group, open_device(HOST, group.ordinal()));
        let column: ArrayRef = Arc::new(Int64Array::from_iter_values(0..100));
        let names = ["a", "b"];
        let columns = names.map(|name| (name, column.clone()));
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let pinned = host.upload_array(&column).unwrap();
        host.synchronize().unwrap();
        let data = arrow_array::StructArray::from(batch.clone());
        let data = arrow_array::Array::to_data(&data);
        let mut foreign = Foreign::new(&data, &rigs[0].device);
        let child = usize::from(!pinned_first);
        let address = pinned.buffer(1).unwrap().address().as_ptr();
        foreign.set_buffer(&[child], 1, address.cast_const());
        let imported = foreign.import_batch(&rigs[0].options).unwrap();
        let there = imported.to_device(&rigs[1].device).unwrap();
        assert_eq!(there.to_host().unwrap().columns(), batch.columns());
        drop((imported, there, pinned));
        for rig in &rigs {
            rig.synchronize().unwrap();
        }
        assert!(soon(|| foreign.releases().0 == 3));
        let [one, two] = rigs;
        end_all(group, [one, two, host]);
    }
}

/// A code that a foreign event brings with it does not end the device.
#[test]
fn a_code_of_another_context() {
    let rig = Rig::new(0);
    let batch = wide_batch(4, 100);
    for (call, code) in [
        ("cuStreamWaitEvent", 709),
        ("cuEventQuery", 700),
        ("cuEventSynchronize", 201),
        ("cuMemcpyAsync", 719),
    ] {
        let up = rig.upload(&batch).unwrap();
        let queue = rig.new_queue().unwrap();
        rig.group.fail(call, 1, code);
        drop(
            up.column(0)
                .unwrap()
                .buffer(1)
                .map(|b| b.on(&queue).map(drop)),
        );
        let _ = up.to_host();
        rig.group.clear();
        let e = rig.synchronize();
        assert!(e.is_ok(), "{call}: {e:?}");
        assert_same_batch(&batch, &up.to_host().unwrap(), call);
    }
    let _ = rig.take_drop_error();
    rig.assert_done();
    // What cannot be asked now can be later.
    rig.group.fail("cuCtxSynchronize", 1, 900);
    let e = rig.synchronize().unwrap_err();
    assert!(matches!(e, Error::Device { code: 900, .. }), "{e}");
    rig.synchronize().unwrap();
    rig.end();
}

/// A driver that is going away, or has gone, is waited for by nothing.
#[test]
fn a_driver_that_shuts_down() {
    // Deinitialized, and not initialized: what a driver answers in a child process.
    for (memory, gone) in MEMORIES
        .into_iter()
        .flat_map(|memory| [(memory, 4), (memory, 3)])
    {
        let rig = Rig::with(0, memory);
        let up = rig.upload(&wide_batch(8, 300)).unwrap();
        let (array, schema) = up.export(SyncPolicy::Event).unwrap();
        rig.synchronize().unwrap();
        rig.group.shut_down(gone);
        let start = std::time::Instant::now();
        std::thread::spawn(move || drop((array, schema, up)))
            .join()
            .unwrap();
        let e = rig.upload(&wide_batch(1, 10)).unwrap_err();
        assert!(
            matches!(e, Error::Device { code, .. } if code == gone),
            "{e}"
        );
        rig.trim();
        assert!(rig.synchronize().is_err() && rig.backend().is_over());
        assert!(
            start.elapsed().as_secs() < 4,
            "it waited for a driver that has gone"
        );
        std::thread::sleep(std::time::Duration::from_millis(20));
        // At most what the driver has said.
        let error = rig.take_drop_error();
        let is_expected = match &error {
            None => true,
            Some(Error::Device { code, .. }) => *code == gone,
            Some(_) => false,
        };
        assert!(is_expected, "{error:?}");
        let group = rig.group;
        drop(rig);
        soon(|| !group.report().contains("violation"));
        assert!(!group.report().contains("violation"), "{}", group.report());
    }
}
