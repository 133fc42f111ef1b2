//! Managed memory as a kind of device.

use arrow_array::Int32Array;
use arrow_device::cuda::CudaMemory;

use crate::conformance::suite;
use crate::fake::{LAZY, NO_CONCURRENT_MANAGED};
use crate::rig::Rig;
use crate::support::assert_same;

#[test]
fn conformance() {
    suite(0, CudaMemory::Managed);
    suite(LAZY, CudaMemory::Managed);
}

#[test]
fn conformance_where_the_host_must_not_touch_it() {
    suite(NO_CONCURRENT_MANAGED, CudaMemory::Managed);
    suite(NO_CONCURRENT_MANAGED | LAZY, CudaMemory::Managed);
}

#[test]
fn without_concurrent_access_it_is_copied() {
    let rig = Rig::with(NO_CONCURRENT_MANAGED, CudaMemory::Managed);
    assert!(!rig.is_host_readable());
    let ints: Int32Array = (0..100).map(|i| (i % 3 != 0).then_some(i)).collect();
    let up = rig.upload_array(&ints).unwrap();
    assert!(up.buffer(1).unwrap().into_host().is_err());
    let before = rig.stats();
    assert_same(&ints, &up.to_host().unwrap(), "managed");
    assert!(rig.stats().since(&before).bytes_to_host > 0);
    drop(up);
    rig.assert_done();
    rig.end();
}
