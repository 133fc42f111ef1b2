//! [`ReleasePolicy`]: when memory that a consumer has released is freed.

use std::sync::Arc;

use crate::device::Device;
use crate::memory::Owner;

/// What this crate may conclude from a consumer's release.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum ReleasePolicy {
    /// A consumer that releases guarantees that its device work on the memory is done, or ordered
    /// before this crate's later work.
    #[default]
    Ordered,
    /// For consumers that do not guarantee this: a thread of the device first waits for all work of
    /// the device. The release itself still returns at once.
    Synchronize,
}

impl ReleasePolicy {
    /// Drops memory that a consumer has released. Never waits and never unwinds: a panic in the
    /// owner's drop is kept by the device.
    pub(crate) fn let_go(self, owner: Arc<Owner>) {
        if self.waits_for(owner.device()) {
            let device = owner.device().clone();
            device.parking("release", || self.let_go_after(&device, owner));
        } else if let Some(owner) = Arc::into_inner(owner) {
            // Nothing happens while something else holds it.
            let device = owner.device().clone();
            device.parking("release", || drop(owner));
        }
    }

    /// Drops what work of `device` may still read. Never waits.
    pub(super) fn let_go_after<T: Send + 'static>(self, device: &Device, kept: T) {
        if !self.waits_for(device) {
            return drop(kept);
        }
        device.settled(move || drop(kept));
    }

    /// Work of a synchronous device has always completed.
    fn waits_for(self, device: &Device) -> bool {
        self == Self::Synchronize && !device.is_synchronous()
    }
}
