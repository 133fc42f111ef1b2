//! Devices for the suite of streams.

use arrow_device::cuda::CudaMemory;

use crate::fake::{NO_BATCH, NO_POOLS};
use crate::rig::{self, MODES, unclean};
use crate::stream_suite::Rig;

pub fn rigs() -> Vec<Rig> {
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
    let lazy = MODES.map(|mode| open(mode, CudaMemory::Device));
    let other = [
        open(NO_POOLS | NO_BATCH, CudaMemory::Device),
        open(0, CudaMemory::Host),
        open(0, CudaMemory::Managed),
    ];
    lazy.into_iter().chain(other).collect()
}
