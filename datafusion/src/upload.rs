//! Host batches on their way to an upload.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use arrow_array::{Array, RecordBatch, RecordBatchOptions};
use arrow_device::{Error, Result};
use arrow_schema::{DataType, SchemaRef};
use arrow_select::coalesce::BatchCoalescer;
use datafusion_execution::SendableRecordBatchStream;
use futures_core::Stream;

use super::metrics::{from_datafusion, poll_host};

/// The most bytes of a batch that is joined with others. The transfer of a larger one takes so long
/// that joining gains nothing. The limit also keeps joined columns far from the end of their 32-bit
/// offsets.
const MAX_JOINED: usize = 16 << 20;

/// A host plan's stream with this crate's errors, whose batches have the plan's schema and are not
/// needlessly small.
///
/// Some of DataFusion's nodes (unions, for example) pass on batches whose fields have other names
/// or metadata than the plan's, or fewer nulls.
pub(super) struct ToUpload {
    /// `None` once it has ended.
    stream: Option<SendableRecordBatchStream>,
    schema: SchemaRef,
    small: BatchCoalescer,
    /// Bytes in `small`, at most.
    bytes: usize,
    /// Batches of at least this many rows are not joined.
    large: usize,
    /// What comes after the rows in `small`.
    after: Option<Result<RecordBatch>>,
}

impl ToUpload {
    /// Joins small batches into batches of `rows` rows.
    pub(super) fn new(stream: SendableRecordBatchStream, schema: SchemaRef, rows: usize) -> Self {
        let joins = schema.fields().iter().all(|f| can_join(f.data_type()));
        Self {
            stream: Some(stream),
            small: BatchCoalescer::new(schema.clone(), rows.max(1)),
            schema,
            bytes: 0,
            large: if joins { rows / 2 } else { 0 },
            after: None,
        }
    }

    /// The batch with the plan's schema.
    fn named(&self, batch: RecordBatch) -> Result<RecordBatch> {
        if batch.schema_ref() == &self.schema {
            return Ok(batch);
        }
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        let (_, columns, _) = batch.into_parts();
        Ok(RecordBatch::try_new_with_options(
            self.schema.clone(),
            columns,
            &options,
        )?)
    }

    /// Whether the batch is to be joined with others. arrow-rs lets a column's type differ from its
    /// field's in what nested fields are called and may be null; such columns cannot be joined.
    fn is_small(&self, batch: &RecordBatch) -> bool {
        let mut columns = self.schema.fields().iter().zip(batch.columns());
        batch.num_rows() < self.large
            && batch.get_array_memory_size() <= MAX_JOINED
            && columns.all(|(field, column)| field.data_type() == column.data_type())
    }

    fn push(&mut self, batch: RecordBatch) -> Result<()> {
        let batch = self.named(batch)?;
        if !self.is_small(&batch) {
            self.after = Some(Ok(batch));
            return self.flush();
        }
        let bytes = batch.get_array_memory_size();
        if self.bytes + bytes > MAX_JOINED {
            self.flush()?;
        }
        self.small.push_batch(batch)?;
        // Rows that are left over are the last batch's.
        self.bytes = match self.small.has_completed_batch() {
            true => bytes,
            false => self.bytes + bytes,
        };
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.bytes = 0;
        Ok(self.small.finish_buffered_batch()?)
    }

    /// What has been joined comes first, then `e`.
    fn fail(&mut self, e: Error) {
        self.stream = None;
        self.after = Some(Err(e));
        // The first error is the one to report.
        let _ = self.flush();
    }
}

/// Whether joining columns of a type never fails: their values take memory, whose size is limited,
/// and have no keys or run ends that could be exhausted.
fn can_join(data_type: &DataType) -> bool {
    use DataType::*;
    match data_type {
        Boolean | Utf8 | LargeUtf8 | Utf8View | Binary | LargeBinary | BinaryView => true,
        FixedSizeBinary(size) => *size > 0,
        List(item) | LargeList(item) | Map(item, _) => can_join(item.data_type()),
        FixedSizeList(item, size) => *size > 0 && can_join(item.data_type()),
        Struct(fields) => !fields.is_empty() && fields.iter().all(|f| can_join(f.data_type())),
        other => other.is_primitive(),
    }
}

impl Stream for ToUpload {
    type Item = Result<RecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            if let Some(batch) = this.small.next_completed_batch() {
                return Poll::Ready(Some(Ok(batch)));
            }
            if let Some(after) = this.after.take() {
                return Poll::Ready(Some(after));
            }
            let Some(stream) = &mut this.stream else {
                return Poll::Ready(None);
            };
            let done = match ready!(poll_host(|| stream.as_mut().poll_next(cx))) {
                Some(Ok(batch)) => this.push(batch),
                Some(Err(e)) => Err(from_datafusion(e)),
                None => {
                    this.stream = None;
                    this.flush()
                }
            };
            if let Err(e) = done {
                this.fail(e);
            }
        }
    }
}
