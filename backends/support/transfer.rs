//! Values survive the way to a device and back, by copies, structs and between devices: every type of Arrow.

use super::assert_clean;
use crate::rigs::{all, rigs};
use crate::support::round_trips;

#[test]
fn every_type() {
    for device in all() {
        round_trips::every_type(&device, 1);
        assert_clean(&device);
    }
}

#[test]
fn batches_whole_and_sliced_on_both_sides() {
    for device in all() {
        round_trips::batches_whole_and_sliced_on_both_sides(&device);
        assert_clean(&device);
    }
}

#[test]
fn structs_out_and_in() {
    for rig in rigs() {
        round_trips::structs_out_and_in(&rig.device, &rig.options);
        assert_clean(&rig.device);
    }
}

#[test]
fn between_devices() {
    for one in all() {
        for two in all() {
            round_trips::there_and_back(&one, &two);
            assert_clean(&one);
            assert_clean(&two);
        }
    }
}
