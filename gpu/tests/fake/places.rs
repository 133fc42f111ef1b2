//! Devices for the suite that real ones go through too.

use std::sync::Arc;

use super::rig::{left, unclean};
use super::{Group, LAZY, MODES, NO_POOLS, in_mode};
use crate::gpu_suite::Place;
use crate::vendor::{SHARE, load};

/// A group of devices in a mode.
pub(crate) fn place(flags: u32) -> Place {
    load();
    let group = Group::with_capacity(3, flags, 256 << 20);
    let first = group.ordinal();
    Place {
        ordinal: first,
        others: vec![first + 1, first + 2],
        rows: 300,
        lazy: flags & LAZY != 0 || in_mode(LAZY),
        pools: (flags & NO_POOLS == 0) && !in_mode(NO_POOLS),
        share: SHARE,
        balance: Some(Arc::new(move || unclean(group).map_or(Ok(()), Err))),
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
}

pub(crate) fn places() -> Vec<Place> {
    MODES.map(place).into()
}
