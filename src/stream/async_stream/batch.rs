//! What a stream yields.

use std::collections::HashMap;

use crate::data::DeviceRecordBatch;

/// A batch of an async device stream with its metadata.
#[derive(Clone, Debug)]
pub struct AsyncBatch {
    /// The batch.
    pub batch: DeviceRecordBatch,
    /// Key-value metadata of the `on_next_task` call that announced the batch; usually empty.
    pub metadata: HashMap<String, String>,
}

impl From<DeviceRecordBatch> for AsyncBatch {
    /// Without metadata.
    fn from(batch: DeviceRecordBatch) -> Self {
        let metadata = HashMap::new();
        Self { batch, metadata }
    }
}
