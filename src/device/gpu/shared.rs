//! What a device and its queues have in common.

use std::sync::Arc;

use super::blocks::Blocks;
use super::context::Context;
use super::runtime::Memory;
use crate::device::backend::DevicePtr;

/// What a queue needs of its device.
#[derive(Clone)]
pub(in crate::device) struct Shared {
    pub(in crate::device) context: Arc<Context>,
    pub(in crate::device) memory: Memory,
    pub(super) blocks: Arc<Blocks>,
}

impl Shared {
    /// A block is not the device's any more.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(in crate::device) fn forget(&self, base: DevicePtr) {
        self.blocks.forget(base);
    }

    /// Takes back memory that anything may use.
    pub(in crate::device) fn give_up(&self, base: DevicePtr) {
        self.blocks.give_up(&self.context, base);
    }
}
