//! The example `cuda_kernel`, its own code.

use arrow_device::{DeviceId, Devices};

use crate::cuda_suite::example;
use crate::gpu_suite::everywhere;
use crate::vendor::MEMORIES;

#[test]
fn the_example_in_every_memory() {
    everywhere(|place| {
        for memory in MEMORIES {
            let id = DeviceId::new(memory, place.ordinal as i64);
            // From the default set, as the example has it.
            let device = Devices::open(&id.to_string()).unwrap();
            let report = example::run(&device).unwrap_or_else(|e| panic!("{device}: {e}"));
            assert_eq!((report.rows, report.nulls), (100_000, 31_428), "{device}");
            // Whether the export needs an event depends on how fast the device is.
            let _ = report.has_event;
            let stats = report.stats;
            assert_eq!(stats.allocations, 3, "{device}");
            assert!(stats.host_waits <= 1, "{device}: {stats:?}");
        }
    });
}
