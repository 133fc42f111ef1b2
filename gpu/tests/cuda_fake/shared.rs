//! Which memory other processes can map, and which not.

use arrow_array::record_batch;
use arrow_device::DeviceBufferMut;
use arrow_device_conformance::{Subject, run};
use arrow_device_share::{Publisher, shared_cuda, socket_pair};

use crate::fake::{Group, LAZY, NO_DESCRIPTORS, NO_VIRTUAL_MEMORY, in_mode};
use crate::rig::{Rig, hold};
use crate::vendor::{DEVICE, HOST, MANAGED, open_device, unset_context};

#[test]
fn the_shared_device_keeps_the_contract() {
    if in_mode(LAZY) {
        return;
    }
    crate::vendor::load();
    let group = Group::with_capacity(1, 0, 16 << 30);
    let plain = Rig::of(group, open_device(DEVICE, group.ordinal()));
    let shared = shared_cuda(&plain).unwrap();
    assert_eq!(shared_cuda(&plain).unwrap(), shared);
    assert_eq!(shared_cuda(&shared).unwrap(), shared);
    run(&Subject::new(shared.clone()).with_hold(hold));
    // cudarc would free it as memory of the driver's.
    let stream = shared.cuda_context().unwrap().new_stream().unwrap();
    let memory = DeviceBufferMut::allocate(&shared.default_queue(), 64).unwrap();
    let (memory, refused) = memory
        .freeze()
        .unwrap()
        .try_into_cuda_slice::<u8>(&stream)
        .unwrap_err();
    assert!(refused.to_string().contains("no program"), "{refused}");
    drop((memory, stream, shared));
    unset_context();
    plain.end();
}

/// A device without memory of this kind says so when it is asked for, and not at the first allocation.
#[test]
fn a_gpu_without_such_memory_says_so() {
    for flag in [NO_VIRTUAL_MEMORY, NO_DESCRIPTORS] {
        let plain = Rig::with(flag, DEVICE);
        let refused = shared_cuda(&plain).unwrap_err();
        let is_clear = refused.to_string().contains("no virtual memory");
        let refused = arrow_device::Error::from(refused);
        let is_unsupported = matches!(refused, arrow_device::Error::NotSupported { .. });
        assert!(is_clear && is_unsupported, "{refused}");
        unset_context();
        plain.end();
    }
}

/// Memory that has no descriptors is refused before anything is copied.
#[test]
fn other_memory_is_refused() {
    let (here, _there) = socket_pair().unwrap();
    let publisher = Publisher::over(here).unwrap();
    for kind in [HOST, MANAGED] {
        let rig = Rig::with(0, kind);
        let batch = rig
            .upload(&record_batch!(("id", Int64, [1, 2, 3])).unwrap())
            .unwrap();
        let before = rig.stats();
        let refused = publisher.send(&batch).unwrap_err();
        assert!(refused.to_string().contains("shared_cuda"), "{refused}");
        let did = rig.stats().since(&before);
        assert_eq!((did.allocations, did.copies), (0, 0), "{kind:?}");
        drop(batch);
        rig.end();
    }
}
