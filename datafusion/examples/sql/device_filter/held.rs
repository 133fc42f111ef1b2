//! Reservations for memory that waits.

use std::sync::Arc;

use arrow_device::{MemoryBudget, Result};
use arrow_device_datafusion::DeviceReservation;

/// Bytes of the session's memory pool that are reserved until this is dropped. The operator's node reserves what the operator
/// allocates for the batch that it returns next, and the nodes below it what they are about to return. This is for what the
/// operator keeps longer.
pub(crate) struct Held {
    memory: Arc<DeviceReservation>,
    bytes: usize,
}

impl Held {
    /// # Errors
    /// Returns an error that names the node if the pool has too little left.
    pub(crate) fn reserve(memory: &Arc<DeviceReservation>, bytes: usize) -> Result<Self> {
        memory.reserve(bytes)?;
        Ok(Self {
            memory: memory.clone(),
            bytes,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Gives back all but so many bytes.
    pub(crate) fn shrink_to(&mut self, bytes: usize) {
        self.memory.shrink(self.bytes.saturating_sub(bytes));
        self.bytes = self.bytes.min(bytes);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.memory.shrink(self.bytes);
    }
}
