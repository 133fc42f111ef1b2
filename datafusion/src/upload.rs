//! Host batches on their way to an upload.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchOptions, new_null_array};
use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{
    ArrowDeviceType, Device, DeviceId, DeviceRecordBatch, Error, Result, upload_stream,
};
use arrow_schema::{DataType, SchemaRef};
use arrow_select::coalesce::BatchCoalescer;
use datafusion_execution::{SendableRecordBatchStream, TaskContext};
use datafusion_physical_plan::aggregates::{AggregateExec, AggregateOutputMode};
use datafusion_physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use futures::Stream;

use super::memory::DeviceReservation;
use super::metrics::{from_datafusion, poll_host, reserved, to_datafusion};
use super::options::DeviceOptions;
use super::stream::SendableDeviceStream;
use super::timer::wake_at;

/// How far small batches are joined before they are uploaded.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Target {
    pub(super) rows: usize,
    pub(super) bytes: usize,
    /// How long rows wait for more.
    pub(super) patience: Duration,
}

impl Target {
    /// The target of a task's session.
    pub(super) fn of_task(context: &TaskContext) -> Self {
        let options = DeviceOptions::of_task(context);
        Self {
            rows: options.upload_rows,
            bytes: options.upload_bytes,
            patience: Duration::from_millis(options.upload_wait_ms),
        }
    }
}

/// Starts a partition of a plan on the host, and returns its batches on `device`.
pub(super) fn upload(
    input: &Arc<dyn ExecutionPlan>,
    partition: usize,
    device: &Device,
    context: &Arc<TaskContext>,
    mut target: Target,
    memory: DeviceReservation,
) -> datafusion_common::Result<SendableDeviceStream> {
    // To the CPU nothing is copied, so that a join would be the only copy.
    if input.boundedness().is_unbounded() || device.id() == DeviceId::CPU || has_states(input) {
        target.rows = 0;
    }
    let stream = input.execute(partition, context.clone())?;
    let schema = input.schema();
    let queue = device.new_queue().map_err(to_datafusion)?;
    let memory = (device.id() != DeviceId::CPU).then(|| Arc::new(memory));
    let batches = Admitted {
        batches: ToUpload::new(stream, schema.clone(), target),
        memory: memory.clone(),
    };
    Ok(Box::pin(Uploaded {
        uploads: Some(Box::pin(upload_stream(batches, schema.clone(), queue))),
        schema,
        device_type: device.id().device_type,
        memory,
    }))
}

/// Whether the rows are states of an aggregate, which must stay as they are: the `percentile_cont` of DataFusion 55 reads the first one of
/// each batch only.
fn has_states(input: &Arc<dyn ExecutionPlan>) -> bool {
    if let Some(aggregate) = input.downcast_ref::<AggregateExec>() {
        return aggregate.mode().output_mode() == AggregateOutputMode::Partial;
    }
    let passes = [
        "RepartitionExec",
        "CoalescePartitionsExec",
        "CoalesceBatchesExec",
        "CooperativeExec",
    ];
    match input.children()[..] {
        [child] => passes.contains(&input.name()) && has_states(child),
        _ => false,
    }
}

/// Host batches for whose upload memory was reserved, if that takes any.
struct Admitted {
    batches: ToUpload,
    memory: Option<Arc<DeviceReservation>>,
}

impl Stream for Admitted {
    type Item = Result<RecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = ready!(Pin::new(&mut self.batches).poll_next(cx));
        if let (Some(Ok(batch)), Some(memory)) = (&next, &self.memory)
            && let Err(e) = memory.grow(bytes(batch))
        {
            return Poll::Ready(Some(Err(from_datafusion(e))));
        }
        Poll::Ready(next)
    }
}

/// Uploads, whose memory is reserved until the reader asks for the next one.
struct Uploaded {
    /// `None` after its end or an error.
    uploads: Option<SendableDeviceStream>,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    memory: Option<Arc<DeviceReservation>>,
}

impl Stream for Uploaded {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(uploads) = &mut this.uploads else {
            return Poll::Ready(None);
        };
        let memory = this.memory.as_ref();
        let give_back = || memory.iter().for_each(|memory| memory.shrink(usize::MAX));
        give_back();
        let mut next = ready!(reserved(|| uploads.as_mut().poll_next(cx)));
        if let (Some(Ok(batch)), Some(memory)) = (&next, memory)
            && let Err(e) = memory.resize(batch.get_array_memory_size())
        {
            next = Some(Err(from_datafusion(e)));
        }
        if !matches!(next, Some(Ok(_))) {
            give_back();
            this.uploads = None;
        }
        Poll::Ready(next)
    }
}

impl DeviceRecordBatchStream for Uploaded {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}

/// The most bytes of a joined batch, which keep its columns far from the end of their 32-bit offsets.
const MAX_JOINED: usize = 1 << 30;

/// Returns the bytes of a batch's rows; of view types and of those of which arrow-rs does not know it, those of all buffers.
fn bytes(batch: &RecordBatch) -> usize {
    let bytes = |column: &ArrayRef| {
        let rows = match has_views(column.data_type()) {
            true => None,
            false => column.to_data().get_slice_memory_size().ok(),
        };
        rows.unwrap_or_else(|| column.get_array_memory_size())
    };
    batch.columns().iter().map(bytes).sum()
}

fn has_views(data_type: &DataType) -> bool {
    use DataType::*;
    match data_type {
        Utf8View | BinaryView => true,
        List(item) | LargeList(item) | FixedSizeList(item, _) | Map(item, _) => {
            has_views(item.data_type())
        }
        Struct(fields) => fields.iter().any(|f| has_views(f.data_type())),
        _ => false,
    }
}

/// A host plan's stream with this crate's errors, whose batches have the plan's schema and are not
/// needlessly small.
///
/// Some of DataFusion's nodes (unions, for example) pass on batches whose fields have other names
/// or metadata than the plan's, or fewer nulls.
struct ToUpload {
    /// `None` once it has ended.
    stream: Option<SendableRecordBatchStream>,
    schema: SchemaRef,
    small: BatchCoalescer,
    /// The rows for which `small` allocates its columns, with which it is complete.
    rows: usize,
    /// The most rows of a joined batch.
    max_rows: usize,
    /// What came out of `small` before it was made anew.
    joined: VecDeque<RecordBatch>,
    /// Bytes in `small`, at most.
    bytes: usize,
    /// When the first rows came into `small`.
    since: Instant,
    /// Who is woken when the rows have waited long enough.
    timer: Option<Waker>,
    patience: Duration,
    /// The most bytes in `small`.
    max_bytes: usize,
    /// Batches of at least this many rows are not joined, nor those of half of `max_bytes`.
    large: usize,
    /// What comes after the rows in `small`.
    after: Option<Result<RecordBatch>>,
}

impl ToUpload {
    fn new(stream: SendableRecordBatchStream, schema: SchemaRef, target: Target) -> Self {
        let joins = schema.fields().iter().all(|f| can_join(f.data_type()));
        Self {
            stream: Some(stream),
            small: BatchCoalescer::new(schema.clone(), 1),
            schema,
            rows: 1,
            max_rows: target.rows.max(1),
            joined: VecDeque::new(),
            bytes: 0,
            since: Instant::now(),
            timer: None,
            patience: target.patience,
            max_bytes: target.bytes.min(MAX_JOINED),
            large: if joins { target.rows / 2 } else { 0 },
            after: None,
        }
    }

    /// The batch with the plan's schema.
    fn named(&self, batch: RecordBatch) -> Result<RecordBatch> {
        if batch.schema_ref() == &self.schema {
            return Ok(batch);
        }
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        let (_, mut columns, rows) = batch.into_parts();
        for (field, column) in self.schema.fields().iter().zip(&mut columns) {
            // Such as those of a `PlaceholderRowExec` with the schema of an aggregate.
            if column.data_type() == &DataType::Null {
                *column = new_null_array(field.data_type(), rows);
            }
        }
        Ok(RecordBatch::try_new_with_options(
            self.schema.clone(),
            columns,
            &options,
        )?)
    }

    /// The batch's bytes, if it is to be joined with others. arrow-rs lets a column's type differ from its
    /// field's in what nested fields are called and may be null; such columns cannot be joined.
    fn small_bytes(&self, batch: &RecordBatch) -> Option<usize> {
        let mut columns = self.schema.fields().iter().zip(batch.columns());
        let joins = batch.num_rows() < self.large
            && columns.all(|(field, column)| field.data_type() == column.data_type());
        joins
            .then(|| bytes(batch))
            .filter(|bytes| *bytes < self.max_bytes.div_ceil(2))
    }

    fn push(&mut self, batch: RecordBatch) -> Result<()> {
        let batch = self.named(batch)?;
        let Some(bytes) = self.small_bytes(&batch) else {
            self.after = Some(Ok(batch));
            return self.flush();
        };
        let rows = batch.num_rows();
        if rows == 0 {
            return Ok(());
        }
        let waiting = self.small.get_buffered_rows();
        // Only at `max_rows` are batches cut.
        let too_many = self.rows < self.max_rows && waiting + rows > self.rows;
        if waiting == 0 || self.bytes + bytes > self.max_bytes || too_many {
            self.flush()?;
            self.start(rows, bytes);
            self.since = Instant::now();
        }
        self.small.push_batch(batch)?;
        if self.since.elapsed() > self.patience {
            // The input is slow, and may be endless: a query with a limit needs no more than there is.
            return self.flush();
        }
        // Rows that are left over are the last batch's.
        self.bytes = match self.small.has_completed_batch() {
            true => bytes,
            false => self.bytes + bytes,
        };
        Ok(())
    }

    /// Makes room for a joined batch whose first part has so many rows and bytes: columns are allocated for all rows at once,
    /// which must be no more bytes than may come.
    fn start(&mut self, rows: usize, bytes: usize) {
        let fit = self.max_bytes.saturating_mul(rows).checked_div(bytes);
        let fit = fit.map_or(self.max_rows, |fit| fit.min(self.max_rows));
        if fit == self.rows {
            return;
        }
        while let Some(batch) = self.small.next_completed_batch() {
            self.joined.push_back(batch);
        }
        self.small = BatchCoalescer::new(self.schema.clone(), fit);
        self.rows = fit;
    }

    /// Asks to be polled once the rows have waited long enough.
    fn wake_later(&mut self, waker: &Waker) {
        if !self
            .timer
            .as_ref()
            .is_some_and(|timer| timer.will_wake(waker))
        {
            self.timer = Some(waker.clone());
            // Beyond what a clock can tell, rows wait for ever.
            if let Some(due) = self.since.checked_add(self.patience) {
                wake_at(due, waker);
            }
        }
    }

    fn flush(&mut self) -> Result<()> {
        self.timer = None;
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
pub(super) fn can_join(data_type: &DataType) -> bool {
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
            let joined = this.joined.pop_front();
            if let Some(batch) = joined.or_else(|| this.small.next_completed_batch()) {
                return Poll::Ready(Some(Ok(batch)));
            }
            if let Some(after) = this.after.take() {
                return Poll::Ready(Some(after));
            }
            let Some(stream) = &mut this.stream else {
                return Poll::Ready(None);
            };
            let done = match poll_host(|| stream.as_mut().poll_next(cx)) {
                Poll::Pending if this.small.get_buffered_rows() == 0 => return Poll::Pending,
                Poll::Pending if this.since.elapsed() < this.patience => {
                    this.wake_later(cx.waker());
                    return Poll::Pending;
                }
                Poll::Pending => this.flush(),
                Poll::Ready(Some(Ok(batch))) => this.push(batch),
                Poll::Ready(Some(Err(e))) => Err(from_datafusion(e)),
                Poll::Ready(None) => {
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

#[cfg(test)]
mod tests {
    use arrow_array::{Int64Array, StringArray};
    use arrow_schema::Field;
    use datafusion_physical_plan::stream::RecordBatchStreamAdapter;
    use futures::{StreamExt, executor::block_on, stream};

    use super::*;

    fn join(given: &[RecordBatch], rows: usize, bytes: usize) -> Vec<RecordBatch> {
        let schema = given[0].schema();
        let given: Vec<_> = given.iter().cloned().map(Ok).collect();
        let stream = stream::iter(given);
        let stream = Box::pin(RecordBatchStreamAdapter::new(schema.clone(), stream));
        let patience = Duration::MAX;
        let target = Target {
            rows,
            bytes,
            patience,
        };
        let batches = ToUpload::new(stream, schema, target);
        block_on(batches.map(Result::unwrap).collect())
    }

    fn wide(columns: usize, rows: usize) -> RecordBatch {
        let column: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows as i64));
        let columns = (0..columns).map(|i| (format!("c{i}"), column.clone()));
        RecordBatch::try_from_iter(columns).unwrap()
    }

    fn text(rows: usize, len: usize) -> RecordBatch {
        let column: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(len); rows]));
        let schema = Arc::new(arrow_schema::Schema::new(vec![Field::new(
            "t",
            DataType::Utf8,
            true,
        )]));
        RecordBatch::try_new(schema, vec![column]).unwrap()
    }

    fn rows(batches: &[RecordBatch]) -> Vec<usize> {
        batches.iter().map(RecordBatch::num_rows).collect()
    }

    #[test]
    fn a_join_allocates_the_bytes_of_its_rows() {
        // 1,600,000 bytes each, and 10 of them below 16 MiB.
        let given = vec![wide(1000, 200); 25];
        let joined = join(&given, 131_072, 16 << 20);
        assert_eq!(rows(&joined), [2000, 2000, 1000]);
        for batch in &joined[..2] {
            let (used, held) = (batch.num_rows() * 8000, batch.get_array_memory_size());
            assert!(held < used + used / 4, "{held} bytes for {used}");
        }
        // The last one was to be as large.
        let held = joined[2].get_array_memory_size();
        assert!(held < 18 << 20, "{held} bytes");
    }

    #[test]
    fn few_rows_per_column_follow_their_bytes_again() {
        // Long texts first, of which few fit; then short ones are joined as far as ever.
        let mut given = vec![text(4, 1000), text(4, 1000)];
        given.extend(vec![text(100, 1); 30]);
        // 8,000 bytes and offsets; then rows only.
        assert_eq!(rows(&join(&given, 1000, 20_000)), [8, 1000, 1000, 1000]);
        // And back again.
        given.reverse();
        assert_eq!(rows(&join(&given, 1000, 20_000)), [1000, 1000, 1000, 8]);
        // Short rows, and long ones that reach the bytes first.
        let mixed = [text(100, 1), text(9, 1000), text(9, 1000), text(9, 1000)];
        assert_eq!(rows(&join(&mixed, 1000, 20_000)), [118, 9]);
    }
}
