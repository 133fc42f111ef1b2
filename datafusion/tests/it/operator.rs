//! The tests' operator: each number of a column through a kernel.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::device::sim::SimMemory;
use arrow_device::{
    ArrowDeviceType, Device, DeviceArray, DeviceBufferMut, DeviceRecordBatch, Queue,
};
use arrow_device_datafusion::{
    DeviceExec, DevicePlan, DeviceSpec, SendableDeviceStream, execute_child, to_datafusion,
};
use datafusion::arrow::datatypes::{DataType, SchemaRef};
use datafusion::common::Result;
use datafusion::execution::TaskContext;
use datafusion::physical_expr::EquivalenceProperties;
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::{ExecutionPlanProperties, PlanProperties};
use futures::{Stream, StreamExt};

use crate::kit::Plan;

/// Queues a kernel, which writes only memory that is not frozen yet.
fn launch(
    queue: &Queue,
    kernel: impl FnOnce(&mut SimMemory<'_>) -> Result<(), String> + Send + 'static,
) -> arrow_device::Result<()> {
    let sim = queue.as_sim().unwrap();
    // SAFETY: the kernels of these tests write only buffers that are not frozen yet.
    unsafe { sim.launch(kernel) }
}

/// What a kernel does to a number.
type Kernel = fn(i64) -> Result<i64, String>;

/// An operator that puts each number of its child's first column through a kernel. No nulls.
#[derive(Clone)]
struct MapExec {
    children: Vec<Plan>,
    device: DeviceSpec,
    kernel: Kernel,
    properties: Arc<PlanProperties>,
}

impl fmt::Debug for MapExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MapExec")
    }
}

impl MapExec {
    /// The children's batches come one child after another.
    fn new(children: Vec<Plan>, device: &DeviceSpec, kernel: Kernel) -> Self {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(children[0].schema()),
            children[0].output_partitioning().clone(),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        Self {
            children,
            device: device.clone(),
            kernel,
            properties: Arc::new(properties),
        }
    }
}

/// A node that doubles.
pub(crate) fn double(child: Plan, device: impl Into<DeviceSpec>) -> Plan {
    map(vec![child], device, |n| Ok(n * 2))
}

pub(crate) fn map(children: Vec<Plan>, device: impl Into<DeviceSpec>, kernel: Kernel) -> Plan {
    let map = MapExec::new(children, &device.into(), kernel);
    Arc::new(DeviceExec::new(Arc::new(map)))
}

impl DevicePlan for MapExec {
    fn name(&self) -> &str {
        "MapExec"
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Plan> {
        self.children.iter().collect()
    }

    fn with_children(&self, children: Vec<Plan>) -> Result<Arc<dyn DevicePlan>> {
        Ok(Arc::new(Self::new(children, &self.device, self.kernel)))
    }

    fn execute_device(
        &self,
        partition: usize,
        device: &Device,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let start = |child| execute_child(child, partition, device, context.clone());
        let streams = self.children.iter().map(start).collect::<Result<_>>()?;
        Ok(Box::pin(Mapped {
            schema: self.properties.equivalence_properties().schema().clone(),
            streams,
            queue: device.new_queue().map_err(to_datafusion)?,
            kernel: self.kernel,
        }))
    }
}

struct Mapped {
    schema: SchemaRef,
    streams: Vec<SendableDeviceStream>,
    queue: Queue,
    kernel: Kernel,
}

impl Mapped {
    fn mapped(&self, batch: &DeviceRecordBatch) -> arrow_device::Result<DeviceRecordBatch> {
        let mut columns: Vec<DeviceArray> = batch.columns().collect();
        let rows = batch.num_rows();
        let out = DeviceBufferMut::allocate(&self.queue, rows * 8)?;
        let values = columns[0].values_on::<i64>(&self.queue)?;
        let (from, to, kernel) = (values.address(), out.address(), self.kernel);
        if rows > 0 {
            launch(&self.queue, move |memory| {
                let ([from], to) = memory.in_out::<i64, i64, 1>([(from, rows)], (to, rows))?;
                for (from, to) in from.iter().zip(to) {
                    *to = kernel(*from)?;
                }
                Ok(())
            })?;
        }
        drop(values);
        columns[0] = DeviceArray::from_values(DataType::Int64, rows, out.freeze()?, None)?;
        DeviceRecordBatch::try_new(batch.schema(), &columns)
    }
}

impl Stream for Mapped {
    type Item = arrow_device::Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        while let Some(stream) = self.streams.first_mut() {
            match ready!(stream.poll_next_unpin(cx)) {
                Some(batch) => {
                    return Poll::Ready(Some(batch.and_then(|batch| self.mapped(&batch))));
                }
                None => drop(self.streams.remove(0)),
            }
        }
        Poll::Ready(None)
    }
}

impl DeviceRecordBatchStream for Mapped {
    type Batch = DeviceRecordBatch;

    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.queue.device().id().device_type
    }
}
