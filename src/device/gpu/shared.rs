//! What a device shares with its queues.

use std::sync::Arc;

use super::blocks::Blocks;
use super::context::Context;
use super::runtime::Memory;
use crate::device::backend::DevicePtr;

/// What a queue needs of its device.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) context: Arc<Context>,
    pub(crate) memory: Memory,
    pub(crate) blocks: Arc<Blocks>,
}

impl Shared {
    /// Frees memory that queued work may still use, once all work of the device has ended.
    pub(crate) fn give_up(&self, base: DevicePtr) {
        self.blocks.give_up(&self.context, base);
    }
}
