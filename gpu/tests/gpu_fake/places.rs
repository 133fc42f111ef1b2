//! Devices for the suite that real ones go through too.

use crate::fake::{Group, LAZY, NO_POOLS, PINS, POOL_CREATION_FAILS, in_mode};
use crate::gpu_suite::Place;
use crate::rig::{MODES, left};
use crate::vendor::load;

pub(crate) fn places() -> Vec<Place> {
    load();
    let place = |flags| {
        let group = Group::with_capacity(3, flags | PINS, 256 << 20);
        let first = group.ordinal();
        Place {
            ordinal: first,
            others: vec![first + 1, first + 2],
            rows: 300,
            lazy: flags & LAZY != 0 || in_mode(LAZY),
            pools: !in_mode(NO_POOLS | POOL_CREATION_FAILS),
            // The simulated device's own tests go through all of them. Prime: other cases for each type.
            share: 5,
            unclean: Box::new(move || {
                let report = left(group);
                if !report.is_empty() {
                    return Some(report);
                }
                // For other tests: there are not many ordinals.
                group.close();
                None
            }),
            alone: None,
        }
    };
    MODES.map(place).into()
}
