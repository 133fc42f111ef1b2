//! Memory that waits: reservations for it, and loans of batches.

use std::sync::Arc;

use arrow_device::{DeviceArray, Error, Result};
use arrow_device_datafusion::DeviceReservation;
use datafusion::arrow::error::ArrowError;

use super::kernels::Lent;

/// Bytes of the device's memory pool that are reserved until this is dropped. The operator's node reserves what the operator
/// has allocated for the batch that it returned last, and the nodes below it what they are about to return. This is for what the
/// operator keeps longer.
pub(crate) struct Held {
    memory: Arc<DeviceReservation>,
    pub(crate) bytes: usize,
    /// The batch, unless it was made on the operator's queue.
    lent: Option<Lent>,
}

impl Held {
    /// Reserves so many bytes, before they are allocated, for work on a batch.
    ///
    /// # Errors
    /// Returns an error that names the node if the pool has too little left.
    pub(crate) fn new(
        memory: &Arc<DeviceReservation>,
        bytes: usize,
        lent: Option<Lent>,
    ) -> Result<Self> {
        let refused = |e| Error::from(ArrowError::ExternalError(Box::new(e)));
        memory.grow(bytes).map_err(refused)?;
        let memory = memory.clone();
        Ok(Self {
            memory,
            bytes,
            lent,
        })
    }

    /// Drops them, and ends their loans with one event.
    pub(crate) fn end(all: impl Iterator<Item = Self>) {
        Lent::end(all.filter_map(|mut held| held.lent.take()));
    }

    /// Gives back all but so many bytes, and of the batch all but these columns: no kernel uses the others any more.
    pub(crate) fn keep(&mut self, columns: Vec<DeviceArray>, bytes: usize) {
        if let Some(lent) = &mut self.lent {
            lent.arrays = columns;
        }
        self.memory.shrink(self.bytes.saturating_sub(bytes));
        self.bytes = self.bytes.min(bytes);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.memory.shrink(self.bytes);
    }
}
