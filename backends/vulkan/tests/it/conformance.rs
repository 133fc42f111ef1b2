//! The conformance suite, on a device of this crate and on one that a program has. What keeps a queue busy is on the device.

use crate::program::Program;
use crate::rigs::{hold, is_there, open};

#[test]
fn on_a_device_of_this_crate() {
    crate::suite::conforms(|| is_there().then(open), hold);
}

#[test]
fn on_a_device_of_a_program() {
    crate::suite::conforms(|| is_there().then(|| Program::new().adopt()), hold);
}
