//! The devices whose memory can be shared keep to the contract of every device.

use arrow_device_conformance::{Subject, check_all, run};
use arrow_device_share::shared_cpu;

use crate::round_trips::sim;

/// It is not the device that is registered for the CPU's id, by which imports would find it, and unlike on that one an upload to it
/// copies. It keeps all other rules.
#[test]
fn the_cpu() {
    let report = check_all(&Subject::new(shared_cpu()));
    let broken: Vec<_> = report.broken().map(|(rule, _)| rule.name()).collect();
    assert_eq!(
        broken,
        [
            "identity.registry",
            "export.handover",
            "export.types",
            "stream.types",
            "stream.no-copies",
            "transfer.counts"
        ],
        "{report:?}"
    );
    assert_eq!(report.not_run().count(), 0);
}

#[test]
fn the_simulated_device() {
    run(&Subject::new(sim().1));
}
