//! Every call of the driver fails once; the device fails for good; there is no driver.

use std::sync::Arc;

use arrow_array::{Int64Array, RecordBatch};
use arrow_device::{DeviceBufferMut, DeviceRecordBatch, Devices, Error, SyncPolicy};

use crate::fake::child::child;
use crate::fake::failing::{fail_everywhere, keep};
use crate::fake::{Group, LAZY, NO_BATCH, NO_CONCURRENT_MANAGED, NO_POOLS};
use crate::rig::{Rig, soon};
use crate::support::{assert_same_batch, wide_batch};
use crate::support_c::Foreign;
use crate::vendor::{
    self, DEVICE, HOST, MANAGED, MEMORIES, MEMORY_NAMES, Memory, error_text, open_device,
};

fn batch() -> RecordBatch {
    wide_batch(12, 300)
}

/// A test for each kind of memory, so that they run side by side.
mod every_call_fails_once {
    use super::*;

    #[test]
    fn device_memory() {
        check(0, DEVICE);
    }

    #[test]
    fn lazy_and_without_lists() {
        check(LAZY | NO_BATCH, DEVICE);
    }

    #[test]
    fn without_pools() {
        check(NO_POOLS, DEVICE);
    }

    #[test]
    fn page_locked_memory() {
        check(0, HOST);
    }

    #[test]
    fn managed_memory() {
        check(0, MANAGED);
        check(NO_CONCURRENT_MANAGED, MANAGED);
    }

    fn check(flags: u32, memory: Memory) {
        let rig = Rig::with(flags, memory);
        let batch = batch();
        fail_everywhere(&rig, "up and down", || {
            let up = rig.upload(&batch)?;
            let down = up.slice(3, 200)?.to_host()?;
            assert_same_batch(&batch.slice(3, 200), &down, "down");
            Ok(())
        });
        fail_everywhere(&rig, "interchange", || {
            let (array, schema) = rig.upload(&batch)?.export(SyncPolicy::Event)?;
            // SAFETY: both structs come from one export of this crate.
            let again = unsafe { DeviceRecordBatch::import(array, &schema, &rig.options) }?;
            assert_same_batch(&batch, &again.to_host()?, "again");
            Ok(())
        });
        fail_everywhere(&rig, "memory", || {
            let queue = rig.new_queue()?;
            keep(queue.clone());
            let mut memory = DeviceBufferMut::allocate(&queue, 1000)?;
            memory.fill(3)?;
            let buffer = memory.freeze()?;
            drop(buffer.on(&rig.default_queue())?);
            queue.synchronize()
        });
        fail_everywhere(&rig, "compact", || {
            let compact = rig.upload(&batch)?.slice(3, 200)?.compact()?;
            assert_same_batch(&batch.slice(3, 200), &compact.to_host()?, "compact");
            Ok(())
        });
        rig.end();
    }
}

/// Opening a device, and every failure on the way.
#[test]
fn opening_fails() {
    vendor::load();
    for memory in MEMORIES {
        let group = Group::open(1, 0);
        for n in 1.. {
            group.fail("*", n, 1);
            let opened = open_device(memory, group.ordinal());
            let fired = group.clear();
            match opened {
                Err(e) => assert!(fired > 0 && e.to_string().contains("code 1"), "{e}"),
                Ok(device) => drop(device),
            }
            crate::rig::assert_gone(group);
            if fired == 0 {
                assert!(n > 2);
                break;
            }
        }
    }
}

/// After a kernel has failed: every call says so, foreign arrays are released once, host memory is let
/// go, and nothing hangs.
#[test]
fn a_failed_kernel() {
    for flags in [0, LAZY, NO_POOLS] {
        let rig = Rig::new(flags);
        let column = Arc::new(Int64Array::from_iter_values(0..300_000));
        let watch = Arc::downgrade(&column);
        let held = RecordBatch::try_from_iter([("v", column as _)]).unwrap();
        let foreign_source = Int64Array::from_iter_values(0..100);
        let mut foreign = Foreign::new(&arrow_array::Array::to_data(&foreign_source), &rig.device);
        let imported = foreign.import(&rig.options).unwrap();
        let queue = rig.new_queue().unwrap();
        drop(imported.values_on::<i64>(&queue).unwrap());
        let up = rig.upload(&held).unwrap();
        let (array, schema) = up.export(SyncPolicy::Event).unwrap();
        drop(held);
        vendor::launch_failing(&rig.default_queue());
        let e = rig.synchronize().unwrap_err();
        let text = e.to_string();
        assert!(matches!(e, Error::Device { code: 719, .. }), "{e}");
        for part in [
            error_text(719),
            "cannot be used any more",
            &rig.device.to_string(),
        ] {
            assert!(text.contains(part), "{text} lacks {part}");
        }
        for result in [
            rig.upload(&batch()).map(drop),
            up.to_host().map(drop),
            rig.new_queue().map(drop),
            DeviceBufferMut::allocate(&queue, 10).map(drop),
            imported.to_host().map(drop),
        ] {
            let e = result.unwrap_err();
            assert!(matches!(e, Error::Device { code: 719, .. }), "{e}");
        }
        drop((array, schema, up, imported, queue));
        assert!(soon(|| foreign.releases() == (1, 1)), "one release");
        assert!(soon(|| watch.strong_count() == 0), "the source is let go");
        let group = rig.group;
        rig.trim();
        drop(rig);
        assert!(
            soon(|| group.live("contexts") == 0 && group.live("pinned") == 0),
            "{}",
            group.report()
        );
        assert!(!group.report().contains("violation"), "{}", group.report());
    }
}

/// A device that has failed cannot say whose memory an address is: nothing is read on the host then.
#[test]
fn views_on_a_failed_device() {
    let texts = ["short", "one that is longer than twelve bytes"];
    let array = arrow_array::StringViewArray::from_iter_values(texts);
    let rig = Rig::new(0);
    let mut foreign = Foreign::new(&arrow_array::Array::to_data(&array), &rig.device);
    // On the device, and ready.
    let lengths = arrow_array::UInt8Array::from(vec![36, 0, 0, 0, 0, 0, 0, 0]);
    let lengths = rig.upload_array(&lengths).unwrap().buffer(1).unwrap();
    let last = foreign.root().n_buffers as usize - 1;
    foreign.set_buffer(&[], last, lengths.address().as_ptr());
    rig.synchronize().unwrap();
    foreign.device_array.sync_event = std::ptr::null_mut();
    let imported = foreign.import(&rig.options).unwrap();
    rig.group.break_with(700);
    let e = imported.to_host().unwrap_err();
    assert!(
        e.to_string().contains("700") || e.to_string().contains(error_text(700)),
        "{e}"
    );
    drop((imported, lengths));
    assert!(soon(|| foreign.releases() == (1, 1)));
}

/// What failed for now is tried again; what is not there is not.
#[test]
fn a_device_that_could_not_be_opened_yet() {
    let group = Group::open(1, 0);
    let devices = Devices::new();
    vendor::load();
    arrow_device::cuda::register(&devices);
    let id = format!("{}:{}", MEMORY_NAMES[0], group.first)
        .parse()
        .unwrap();
    group.fail("cuDevicePrimaryCtxRetain", 1, 2);
    let e = devices.get(id).unwrap_err();
    assert!(e.to_string().contains("cuDevicePrimaryCtxRetain"), "{e}");
    assert_eq!(devices.get(id).unwrap().id(), id);
    drop(devices);
    crate::rig::assert_gone(group);
}

/// What a program sees where there is no device, in a process of its own.
#[test]
fn no_device() {
    if std::env::var_os("FAKE_CUDA_INIT").is_some() {
        vendor::load();
        for name in MEMORY_NAMES {
            let name = &format!("{name}:0");
            let e = Devices::open(name).unwrap_err();
            assert!(matches!(e, Error::DeviceNotAvailable { .. }), "{e:?}");
            let text = e.to_string();
            for part in [name, "cuInit", error_text(100), "code 100"] {
                assert!(text.contains(part), "{text} lacks {part}");
            }
        }
        let e = arrow_device::cuda::device_count().unwrap_err();
        assert!(e.to_string().contains("cuInit"), "{e}");
        let e = Devices::gpu().unwrap_err().to_string();
        assert!(e.contains("no GPU") && e.contains(error_text(100)), "{e}");
        return;
    }
    child(&["failures::no_device", "--exact"], "1 passed", |command| {
        command.env("FAKE_CUDA_INIT", "100");
    });
    vendor::load();
    assert_eq!(arrow_device::cuda::device_count().unwrap(), 900);
}

/// Page-locked memory without a backend is host memory still.
#[test]
fn page_locked_memory_without_a_device() {
    let array = Int64Array::from_iter_values(0..100);
    let cpu = Devices::cpu();
    let mut foreign = Foreign::new(&arrow_array::Array::to_data(&array), &cpu);
    foreign.device_array.device_type = HOST.value();
    foreign.device_array.device_id = 999;
    vendor::load();
    let imported = foreign
        .import(&arrow_device::ImportOptions::default())
        .unwrap();
    assert_eq!(*imported.to_host().unwrap(), array as Int64Array);
    drop(imported);
    foreign.assert_released("page-locked");
}
