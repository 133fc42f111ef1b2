//! Devices for the suite of streams.

use crate::fake::{LAZY, NO_BATCH, NO_POOLS};
use crate::rig::{self, unclean};
use crate::stream_suite::Rig;
use crate::vendor::{DEVICE, HOST};

pub(crate) fn rigs() -> Vec<Rig> {
    let modes = [(LAZY, DEVICE), (NO_POOLS | NO_BATCH, DEVICE), (0, HOST)];
    let open = |(flags, memory)| {
        let rig::Rig {
            group,
            device,
            options,
        } = rig::Rig::with(flags, memory);
        Rig {
            device,
            options,
            unclean: Box::new(move || unclean(group)),
            fail_nth: Box::new(move |n| group.fail("*", u32::try_from(n).unwrap(), 1)),
            failed: Box::new(move || group.clear() > 0),
        }
    };
    modes.map(open).into()
}
