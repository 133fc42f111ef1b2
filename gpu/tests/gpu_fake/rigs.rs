//! Devices for the suite of streams.

use crate::fake::{NO_BATCH, NO_POOLS};
use crate::rig::{self, MODES, unclean};
use crate::stream_suite::Rig;
use crate::vendor::{MANAGED, Memory};

pub(crate) fn rigs() -> Vec<Rig> {
    let open = |flags, memory| {
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
    let lazy = MODES.map(|mode| open(mode, Memory::Device));
    let other = [
        open(NO_POOLS | NO_BATCH, Memory::Device),
        open(0, Memory::Host),
    ];
    let managed = MANAGED.map(|memory| open(0, memory));
    lazy.into_iter().chain(other).chain(managed).collect()
}
