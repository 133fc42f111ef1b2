//! Host batches on their way to an upload.

use std::fmt;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;

use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchOptions, make_array};
use arrow_cast::{CastOptions, cast_with_options};
use arrow_device::{Device, DeviceId, Error, Result, upload_stream};
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use arrow_select::concat::concat_batches;
use datafusion_execution::{SendableRecordBatchStream, TaskContext};
use datafusion_physical_plan::aggregates::{AggregateExec, AggregateOutputMode};
use datafusion_physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use futures::stream::poll_fn;
use futures::{Stream, StreamExt};

use super::joining::groups;
use super::memory::DeviceReservation;
use super::metrics::{from_datafusion, poll_host, reserved, to_datafusion};
use super::options::DeviceOptions;
use super::stream::{SendableDeviceStream, device_stream};

/// How far small batches are joined before they are uploaded.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) rows: usize,
    pub(super) bytes: usize,
    /// How long rows wait for more.
    pub(super) patience: Duration,
    /// In which types columns go up, if not in their own.
    pub(super) types: Arc<Types>,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Target");
        debug.field("rows", &self.rows).field("bytes", &self.bytes);
        debug.finish_non_exhaustive()
    }
}

type Types = dyn Fn(&DataType) -> Option<DataType> + Send + Sync;

impl Target {
    /// The target of a task's session.
    pub(super) fn of_task(context: &TaskContext) -> Self {
        let options = DeviceOptions::of_task(context);
        Self {
            rows: options.upload_rows,
            bytes: options.upload_bytes,
            patience: Duration::from_millis(options.upload_wait_ms),
            types: Arc::new(|_| None),
        }
    }
}

/// A schema some of whose columns have other types, in more than what nested fields are called.
pub(super) fn with_types(
    schema: &SchemaRef,
    of: impl Fn(usize, &DataType) -> Option<DataType>,
) -> SchemaRef {
    let mut fields = schema.fields().to_vec();
    for (i, field) in fields.iter_mut().enumerate() {
        let own = field.data_type();
        if let Some(other) = of(i, own).filter(|other| !own.equals_datatype(other)) {
            *field = Arc::new(Field::clone(field).with_data_type(other));
        }
    }
    match fields[..] == schema.fields()[..] {
        true => schema.clone(),
        false => Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone())),
    }
}

/// A plan's schema with the types of a stream's.
pub(super) fn typed_as(plan: &SchemaRef, stream: &SchemaRef) -> SchemaRef {
    let own = |i: usize, _: &DataType| Some(stream.fields().get(i)?.data_type().clone());
    with_types(plan, own)
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
    let copies = device.id() != DeviceId::CPU;
    if input.boundedness().is_unbounded() || !copies || has_states(input) {
        target.rows = 0;
    }
    let stream = input.execute(partition, context.clone())?;
    upload_rows(stream, input.schema(), device, target, memory)
}

/// Returns the rows of a stream of the host, of a plan of this schema, on `device`.
pub(super) fn upload_rows(
    rows: SendableRecordBatchStream,
    host: SchemaRef,
    device: &Device,
    target: Target,
    memory: DeviceReservation,
) -> datafusion_common::Result<SendableDeviceStream> {
    let schema = with_types(&host, |_, own| (target.types)(own));
    let copies = device.id() != DeviceId::CPU;
    let queue = device.new_queue().map_err(to_datafusion)?;
    let memory = copies.then(|| Arc::new(memory));
    let own = memory.clone();
    // Memory is reserved before a batch goes up, until the reader asks for the next one.
    let admitted = to_upload(rows, host, schema.clone(), &target);
    let admitted = admitted.map(move |batch| -> Result<_> {
        let batch = batch?;
        if let Some(memory) = &own {
            memory.grow(bytes(&batch)).map_err(from_datafusion)?;
        }
        Ok(batch)
    });
    let mut uploads = upload_stream(admitted, schema.clone(), queue);
    let uploaded = poll_fn(move |cx| {
        memory.iter().for_each(|memory| memory.shrink(usize::MAX));
        let next = ready!(reserved(|| uploads.poll_next_unpin(cx)));
        if let (Some(Ok(batch)), Some(memory)) = (&next, &memory)
            && let Err(e) = memory.resize(batch.get_array_memory_size())
        {
            return Poll::Ready(Some(Err(from_datafusion(e))));
        }
        Poll::Ready(next)
    });
    Ok(device_stream(uploaded, schema, device.id().device_type))
}

/// Whether the rows are states of an aggregate, which must stay as they are: the `percentile_cont` of DataFusion 55 reads the first one of
/// each batch only.
fn has_states(input: &Arc<dyn ExecutionPlan>) -> bool {
    if is_partial(&**input) {
        return true;
    }
    match input.children()[..] {
        // Nodes of the host and of devices that pass them on, such as exchanges.
        [child] => child.schema() == input.schema() && has_states(child),
        _ => false,
    }
}

pub(super) fn is_partial(node: &dyn ExecutionPlan) -> bool {
    let aggregate = node.downcast_ref::<AggregateExec>();
    aggregate.is_some_and(|node| node.mode().output_mode() == AggregateOutputMode::Partial)
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

/// The batch of one schema with another. Columns whose fields have another type there are cast. Some of DataFusion's nodes (unions, for example) pass on
/// batches whose fields have other names or metadata than the plan's, or fewer nulls.
pub(super) fn fitted(batch: RecordBatch, from: &SchemaRef, to: &SchemaRef) -> Result<RecordBatch> {
    if batch.schema_ref() == to {
        return Ok(batch);
    }
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    let (_, mut columns, _) = batch.into_parts();
    let fields = from.fields().iter().zip(to.fields());
    for ((from, to), column) in fields.zip(&mut columns) {
        let (found, wanted) = (column.data_type(), to.data_type());
        // Such as those of a `PlaceholderRowExec` with the schema of an aggregate, whose values nobody reads.
        let is_null = *found == DataType::Null;
        let casts = !from.data_type().equals_datatype(wanted);
        if is_null || casts && found.equals_datatype(from.data_type()) {
            let options = CastOptions {
                safe: false,
                ..Default::default()
            };
            let cast = cast_with_options(column, wanted, &options);
            *column = cast.map_err(|e| match e {
                ArrowError::DictionaryKeyOverflowError => Error::from(e),
                e => Error::InvalidArgument(format!("column {:?}: {e}", to.name()).into()),
            })?;
        }
        if is_null && !to.is_nullable() {
            let values = column.to_data().into_builder().nulls(None);
            *column = make_array(values.build()?);
        }
    }
    let schema = to.clone();
    Ok(RecordBatch::try_new_with_options(
        schema, columns, &options,
    )?)
}

/// The batches of a host plan with this crate's errors, in the wanted schema and not needlessly small.
fn to_upload(
    mut rows: SendableRecordBatchStream,
    host: SchemaRef,
    schema: SchemaRef,
    target: &Target,
) -> impl Stream<Item = Result<RecordBatch>> + Send + Unpin + use<> {
    let most = (target.rows, target.bytes.min(MAX_JOINED));
    let joins = schema.fields().iter().all(|f| can_join(f.data_type()));
    let (of, to) = (schema.clone(), schema.clone());
    // arrow-rs lets a column's type differ from its field's in what nested fields are called and may be null; such columns cannot be
    // joined.
    let size = move |batch: &mut RecordBatch| {
        let mut columns = of.fields().iter().zip(batch.columns());
        let joins = joins
            && batch.num_rows() < most.0 / 2
            && columns.all(|(field, column)| field.data_type() == column.data_type());
        let bytes = joins.then(|| bytes(batch));
        let bytes = bytes.filter(|bytes| *bytes < most.1.div_ceil(2));
        Ok(bytes.map(|bytes| (batch.num_rows(), bytes)))
    };
    let batches = poll_fn(move |cx| poll_host(|| rows.poll_next_unpin(cx)));
    let batches = batches.map(move |batch| fitted(batch.map_err(from_datafusion)?, &host, &to));
    groups(batches, most, target.patience, size).map(move |group| {
        let mut parts = group?;
        match parts.len() {
            1 => Ok(parts.remove(0)),
            _ => Ok(concat_batches(&schema, &parts)?),
        }
    })
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

#[cfg(test)]
mod tests {
    use arrow_array::{Int64Array, StringArray};
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
            types: Arc::new(|_| None),
        };
        let batches = to_upload(stream, schema.clone(), schema, &target);
        block_on(batches.map(Result::unwrap).collect())
    }

    fn wide(columns: usize, rows: usize) -> RecordBatch {
        let column: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows as i64));
        let columns = (0..columns).map(|i| (format!("c{i}"), column.clone()));
        RecordBatch::try_from_iter(columns).unwrap()
    }

    fn text(rows: usize, len: usize) -> RecordBatch {
        let column: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(len); rows]));
        let schema = Arc::new(Schema::new(vec![Field::new("t", DataType::Utf8, true)]));
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
    fn rows_and_bytes_limit_a_join() {
        // Long texts first, then short ones: as many rows as are wanted, if their bytes are fewer.
        let mut given = vec![text(4, 1000), text(4, 1000)];
        given.extend(vec![text(100, 1); 30]);
        assert_eq!(rows(&join(&given, 1000, 20_000)), [908, 1000, 1000, 100]);
        // And back again.
        given.reverse();
        assert_eq!(rows(&join(&given, 1000, 20_000)), [1000, 1000, 1000, 8]);
        // Short rows, and long ones that reach the bytes first.
        let mixed = [text(100, 1), text(9, 1000), text(9, 1000), text(9, 1000)];
        assert_eq!(rows(&join(&mixed, 1000, 20_000)), [118, 9]);
    }
}
