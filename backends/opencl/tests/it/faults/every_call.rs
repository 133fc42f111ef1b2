//! Each call of the provider fails, one after the other.

use arrow_device_conformance::every_call_fails;
use arrow_device_opencl::OpenClConfig;

use crate::rigs::memories;

#[test]
fn every_call_fails_once() {
    for memory in memories() {
        let config = OpenClConfig::new(0).with_memory(memory);
        every_call_fails(
            || config.parts().map(|(device, queue, _)| (device, queue)),
            0,
        );
    }
}
