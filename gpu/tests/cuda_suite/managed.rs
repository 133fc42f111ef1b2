//! Managed memory as a kind of device.

use arrow_device::SyncPolicy;

use crate::gpu_suite::conformance::suite;
use crate::gpu_suite::everywhere;
use crate::gpu_suite::foreign::import;
use crate::gpu_suite::transfer::every_type;
use crate::support::producer::relabel;
use crate::support::{assert_same_batch, wide_batch};
use crate::vendor::{HOST, MANAGED};

#[test]
fn conformance() {
    everywhere(|place| suite(place, MANAGED));
}

#[test]
fn every_type_in_managed_memory() {
    every_type(MANAGED);
}

#[test]
fn page_locked_and_managed_labels_are_taken_for_each_other() {
    everywhere(|place| {
        let sent = wide_batch(8, 100);
        let host = place.open(HOST);
        let managed = place.open(MANAGED);
        for (from, to) in [(&host, &managed), (&managed, &host)] {
            let up = from.upload(&sent).unwrap();
            let (array, schema) = up.export(SyncPolicy::Wait).unwrap();
            let array = relabel(array, to.id().device_type, to.id().id);
            let imported = import(to, array, &schema).unwrap();
            assert_same_batch(&sent, &imported.to_host().unwrap(), "relabelled");
        }
        host.assert_done();
        managed.assert_done();
    });
}
