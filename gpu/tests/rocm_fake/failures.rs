//! Every call of HIP fails once; a kernel fails; there is no device. Errors name HIP's calls and codes.

use arrow_device::{DeviceBufferMut, DeviceRecordBatch, Devices, Error, SyncPolicy};

use crate::fake::child::child;
use crate::fake::failing::fail_everywhere;
use crate::fake::{LAZY, NO_BATCH};
use crate::rig::{Rig, soon};
use crate::support::{assert_same_batch, wide_batch};
use crate::vendor::{self, DEVICE, HOST};

#[test]
fn every_call_fails_once() {
    let batch = wide_batch(5, 300);
    for (flags, memory) in [(0, HOST), (LAZY | NO_BATCH, DEVICE)] {
        let rig = Rig::with(flags, memory);
        fail_everywhere(&rig, "everything", || {
            let (array, schema) = rig.upload(&batch)?.export(SyncPolicy::Event)?;
            // SAFETY: both structs come from one export of this crate.
            let again = unsafe { DeviceRecordBatch::import(array, &schema, &rig.options) }?;
            let compact = again.slice(3, 200)?.compact()?.to_host()?;
            assert_same_batch(&batch.slice(3, 200), &compact, "compact");
            Ok(())
        });
        rig.end();
    }
}

#[test]
fn a_failed_kernel() {
    let rig = Rig::new(0);
    let batch = wide_batch(4, 100);
    let up = rig.upload(&batch).unwrap();
    vendor::launch_failing(&rig.default_queue());
    for result in [
        rig.synchronize(),
        rig.upload(&batch).map(drop),
        up.to_host().map(drop),
        DeviceBufferMut::allocate(&rig.default_queue(), 10).map(drop),
    ] {
        let e = result.unwrap_err();
        assert!(matches!(e, Error::Device { code: 719, .. }), "{e}");
        for part in ["hipErrorLaunchFailure", "cannot be used any more"] {
            assert!(e.to_string().contains(part), "{e}");
        }
    }
    let group = rig.group;
    drop((up, rig));
    assert!(soon(|| {
        vendor::let_go(group);
        group.live("contexts") == 0 && group.live("pinned") == 0
    }));
    assert!(!group.report().contains("violation"), "{}", group.report());
}

/// What a program sees where there is no device, in a process of its own.
#[test]
fn no_device() {
    vendor::load();
    if std::env::var_os("FAKE_CUDA_INIT").is_none() {
        let e = Devices::open("rocm:999").unwrap_err().to_string();
        assert!(e.contains("ROCm devices, 0 to"), "{e}");
        child(&["failures::no_device", "--exact"], "1 passed", |command| {
            command.env("FAKE_CUDA_INIT", "100");
        });
        return;
    }
    for name in ["rocm:0", "rocm-host:0"] {
        let e = Devices::open(name).unwrap_err();
        assert!(matches!(e, Error::DeviceNotAvailable { .. }), "{e:?}");
        for part in [name, "hip", "hipErrorNoDevice", "code 100"] {
            assert!(e.to_string().contains(part), "{e} lacks {part}");
        }
    }
    let e = Devices::gpu().unwrap_err().to_string();
    assert!(
        e.contains("no GPU") && e.contains("hipErrorNoDevice"),
        "{e}"
    );
}
