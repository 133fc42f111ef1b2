//! Reading ahead within a budget of memory.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchReader};
use arrow_device::abi::ArrowDeviceType;
use arrow_device::{
    Device, DeviceRecordBatch, DeviceRecordBatchReader, Result, upload_reader_ahead,
};
use arrow_schema::{ArrowError, DataType, SchemaRef};

/// Reads and uploads on two threads, ahead of who asks for the batches: at most `2 * batches + 2` of them, and no more while those that
/// nobody has taken have `budget` bytes together with one more like the last. One is always read.
pub(crate) fn upload_ahead(
    reader: impl RecordBatchReader + Send + 'static,
    device: &Device,
    batches: usize,
    budget: usize,
) -> Result<impl DeviceRecordBatchReader + Send + 'static> {
    let shared = Arc::new((Mutex::default(), Condvar::new()));
    let budget = Budget(shared, budget, std::process::id());
    let limited = Limited(reader, budget.clone());
    let reader = upload_reader_ahead(limited, device, batches)?;
    Ok(Taken { reader, budget })
}

#[derive(Clone)]
struct Budget(Arc<(Mutex<Waiting>, Condvar)>, usize, u32);

/// The batches that were read and not taken.
#[derive(Default)]
struct Waiting {
    /// The bytes of each, oldest first.
    sizes: VecDeque<usize>,
    /// The bytes of all.
    bytes: usize,
    /// Nobody takes one any more.
    closed: bool,
}

impl Budget {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what waits, and wakes the reader. Does nothing in a forked child, where the thread may have the lock for ever.
    fn change(&self, change: impl FnOnce(&mut Waiting)) {
        if self.2 == std::process::id() {
            change(&mut self.lock());
            self.0.1.notify_all();
        }
    }

    /// Waits until one more batch may be read. Returns whether anybody wants it.
    fn wait(&self) -> bool {
        let full = |waiting: &mut Waiting| {
            let last = waiting.sizes.back();
            !waiting.closed && last.is_some_and(|last| waiting.bytes.saturating_add(*last) > self.1)
        };
        let waited = self.0.1.wait_while(self.lock(), full);
        !waited.unwrap_or_else(PoisonError::into_inner).closed
    }
}

/// Runs on a thread of its own.
struct Limited<R>(R, Budget);

impl<R: RecordBatchReader> Iterator for Limited<R> {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        if !self.1.wait() {
            return None;
        }
        let batch = self.0.next()?;
        // Batches may be slices of one large buffer: only their own rows count.
        let bytes = batch.as_ref().map_or(0, |batch| {
            let sizes = batch.columns().iter().map(bytes);
            sizes.fold(0, usize::saturating_add)
        });
        self.1.change(|waiting| {
            waiting.sizes.push_back(bytes);
            waiting.bytes = waiting.bytes.saturating_add(bytes);
        });
        Some(batch)
    }
}

/// The bytes of a column's rows; of columns that have views, and where arrow-rs does not know it, those of all of its buffers.
fn bytes(column: &ArrayRef) -> usize {
    let knows = !has_views(column.data_type());
    let rows = knows.then(|| column.to_data().get_slice_memory_size().ok());
    rows.flatten()
        .unwrap_or_else(|| column.get_array_memory_size())
}

fn has_views(data_type: &DataType) -> bool {
    use DataType::*;
    match data_type {
        Utf8View | BinaryView => true,
        List(item) | LargeList(item) | FixedSizeList(item, _) | Map(item, _) => {
            has_views(item.data_type())
        }
        Struct(fields) => fields.iter().any(|f| has_views(f.data_type())),
        Dictionary(_, values) => has_views(values),
        _ => false,
    }
}

impl<R: RecordBatchReader> RecordBatchReader for Limited<R> {
    fn schema(&self) -> SchemaRef {
        self.0.schema()
    }
}

/// What the consumer reads.
struct Taken<R> {
    reader: R,
    budget: Budget,
}

impl<R: DeviceRecordBatchReader> Iterator for Taken<R> {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.reader.next();
        self.budget.change(|waiting| {
            let taken = waiting.sizes.pop_front().unwrap_or(0);
            waiting.bytes = waiting.bytes.saturating_sub(taken);
        });
        batch
    }
}

impl<R: DeviceRecordBatchReader> DeviceRecordBatchReader for Taken<R> {
    fn schema(&self) -> SchemaRef {
        self.reader.schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.reader.device_type()
    }
}

impl<R> Drop for Taken<R> {
    fn drop(&mut self) {
        self.budget.change(|waiting| waiting.closed = true);
    }
}
