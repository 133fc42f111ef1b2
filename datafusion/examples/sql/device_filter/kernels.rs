//! Passes columns to kernels and takes their results. The queue waits, and nothing here blocks.

use std::sync::Arc;

use arrow_device::async_stream::{DeviceRecordBatchStream, DeviceRecordBatchStreamAdapter};
use arrow_device::{
    Device, DeviceArray, DeviceBuffer, DeviceBufferMut, DeviceRecordBatch, Queue, Result,
};
use datafusion::arrow::array::cast::AsArray;
use datafusion::arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::filter::FilterExec;
use futures::{StreamExt, stream};

use super::column::Column;
use super::predicate::{Condition, Kind, conditions};
use super::sim;

/// The kernels of a device.
#[derive(Clone, Debug)]
pub(crate) enum Kernels {
    Sim,
    #[cfg(feature = "cuda")]
    Cuda(super::cuda::Kernels),
}

impl Kernels {
    /// Returns `None` for a device without kernels in this example.
    pub(crate) fn of(device: &Device) -> Result<Option<Self>> {
        if sim::is_queue(&device.default_queue()) {
            return Ok(Some(Self::Sim));
        }
        #[cfg(feature = "cuda")]
        if device.as_cuda().is_ok() {
            return Ok(Some(Self::Cuda(super::cuda::Kernels::load(device)?)));
        }
        Ok(None)
    }
}

/// What to do with each batch.
#[derive(Debug)]
pub(crate) struct Filter {
    conditions: Arc<[Condition]>,
    /// The columns to keep, in this order.
    columns: Vec<usize>,
    /// The schema of these columns.
    schema: SchemaRef,
    kernels: Kernels,
}

impl Filter {
    pub(crate) fn new(host: &FilterExec, kernels: Kernels) -> Option<Self> {
        let (input, schema) = (host.input().schema(), host.schema());
        let all_fit = schema
            .fields()
            .iter()
            .all(|field| Kind::of(field.data_type()).is_some());
        let columns = match host.projection() {
            Some(projection) => projection.to_vec(),
            None => (0..input.fields().len()).collect(),
        };
        Some(Self {
            conditions: conditions(host.predicate(), &input).filter(|_| all_fit)?,
            columns,
            schema,
            kernels,
        })
    }

    /// Queues the kernels for a batch that is not empty. Each condition marks the rows that fail
    /// it, the remaining rows are counted and numbered, and the values of each column are gathered.
    pub(crate) fn launch(&self, batch: &DeviceRecordBatch, queue: &Queue) -> Result<Launched> {
        let rows = batch.num_rows();
        let allocate = |bytes| DeviceBufferMut::allocate(queue, bytes);
        let mut passing = allocate(rows)?;
        passing.fill(1)?;
        for condition in &*self.conditions {
            let column = batch.column(condition.column)?;
            Column::lend(&column, queue, |column| match &self.kernels {
                Kernels::Sim => sim::compare(queue, column, *condition, &mut passing),
                #[cfg(feature = "cuda")]
                Kernels::Cuda(kernels) => kernels.compare(queue, column, *condition, &mut passing),
            })?;
        }
        let mut picked = allocate(rows * size_of::<i64>())?;
        // The number of rows that pass, then the number of nulls among them for each column.
        let mut counts = allocate((1 + self.columns.len()) * size_of::<i64>())?;
        counts.fill(0)?;
        match &self.kernels {
            Kernels::Sim => sim::select(queue, &passing, &mut picked, &mut counts)?,
            #[cfg(feature = "cuda")]
            Kernels::Cuda(kernels) => kernels.select(queue, &passing, &mut picked, &mut counts)?,
        }
        let mut columns = Vec::new();
        for (i, column) in self.columns.iter().enumerate() {
            let column = batch.column(*column)?;
            // Large enough for all rows, since the number that pass is not known yet.
            let width = Kind::of(column.data_type()).map_or(0, Kind::width);
            let mut values = allocate(rows * width)?;
            let mut mask = allocate(rows.div_ceil(8))?;
            Column::lend(&column, queue, |column| match &self.kernels {
                Kernels::Sim => sim::gather(
                    queue,
                    column,
                    &picked,
                    i,
                    &mut counts,
                    &mut values,
                    &mut mask,
                ),
                #[cfg(feature = "cuda")]
                Kernels::Cuda(kernels) => kernels.gather(
                    queue,
                    column,
                    &picked,
                    i,
                    &mut counts,
                    &mut values,
                    &mut mask,
                ),
            })?;
            columns.push((values.freeze()?, mask.freeze()?));
        }
        let n = 1 + self.columns.len();
        let counts = DeviceArray::from_values(DataType::Int64, n, counts.freeze()?, None)?;
        Ok(Launched {
            schema: self.schema.clone(),
            counts,
            columns,
        })
    }
}

/// A batch whose kernels are queued.
pub(crate) struct Launched {
    schema: SchemaRef,
    counts: DeviceArray,
    /// Values and validity bitmap.
    columns: Vec<(DeviceBuffer, DeviceBuffer)>,
}

impl Launched {
    /// The batch, once its number of rows has been copied to the host. Nothing else has to be.
    pub(crate) async fn finish(self) -> Result<DeviceRecordBatch> {
        let device = self.counts.device().clone();
        let counts = download(self.counts).await?;
        let count = |i: usize| usize::try_from(counts[i]).unwrap_or(usize::MAX);
        let rows = count(0);
        if self.columns.is_empty() {
            return DeviceRecordBatch::try_new_with_rows(&device, self.schema, &[], rows);
        }
        let mut columns = Vec::new();
        for (i, (values, mask)) in self.columns.into_iter().enumerate() {
            let data_type = self.schema.field(i).data_type().clone();
            let nulls = count(1 + i);
            let mask = (nulls > 0).then_some(mask);
            let buffers = [mask, Some(values)];
            let nulls = Some(nulls);
            // SAFETY: every bit pattern is a valid value of the types of `Kind`, and `gather` has
            // counted the nulls in the bits that it wrote for these rows.
            let column = unsafe { DeviceArray::from_parts(data_type, rows, nulls, &buffers, &[]) };
            columns.push(column?);
        }
        DeviceRecordBatch::try_new(self.schema, &columns)
    }
}

/// Copies numbers from the device to the host, for a task.
async fn download(numbers: DeviceArray) -> Result<Vec<i64>> {
    let schema = Arc::new(Schema::new(vec![Field::new("n", DataType::Int64, false)]));
    let device_type = numbers.device().id().device_type;
    let batch = DeviceRecordBatch::try_new(schema.clone(), &[numbers])?;
    let batch = stream::iter([Ok(batch)]);
    let stream = DeviceRecordBatchStreamAdapter::new(schema, device_type, batch);
    // There is only one batch, so a prefetch would do nothing.
    let mut host = stream.into_host_stream().with_prefetch(0);
    let batch = host.next().await.transpose()?;
    Ok(batch.map_or_else(Vec::new, |batch| {
        batch
            .column(0)
            .as_primitive::<Int64Type>()
            .values()
            .to_vec()
    }))
}
