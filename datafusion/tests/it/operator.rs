//! The tests' operator, whose polls do what a closure says: each number through a kernel, say.

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
    DeviceExec, DevicePlan, DeviceReservation, DeviceSpec, SendableDeviceStream, execute_child,
    to_datafusion,
};
use datafusion::arrow::datatypes::{DataType, SchemaRef};
use datafusion::common::Result;
use datafusion::execution::TaskContext;
use datafusion::physical_expr::EquivalenceProperties;
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::{ExecutionPlanProperties, PlanProperties};
use futures::{Stream, StreamExt};

use crate::kit::Plan;

/// What a poll returns.
pub(crate) type Step = Poll<Option<arrow_device::Result<DeviceRecordBatch>>>;

type Steps = Arc<dyn Fn(&mut State, &mut Context<'_>) -> Step + Send + Sync>;

/// What the operator has while it runs.
pub(crate) struct State {
    inputs: Vec<SendableDeviceStream>,
    schema: SchemaRef,
    pub(crate) queue: Queue,
    pub(crate) memory: DeviceReservation,
    pub(crate) kept: Vec<DeviceBufferMut>,
    pub(crate) batches: Vec<DeviceRecordBatch>,
    pub(crate) polls: usize,
}

impl State {
    /// The inputs' next batch, one input after another.
    pub(crate) fn next(&mut self, cx: &mut Context<'_>) -> Step {
        while let Some(input) = self.inputs.first_mut() {
            match ready!(input.poll_next_unpin(cx)) {
                None => drop(self.inputs.remove(0)),
                batch => return Poll::Ready(batch),
            }
        }
        Poll::Ready(None)
    }

    pub(crate) fn allocated(&self, bytes: usize) -> DeviceBufferMut {
        DeviceBufferMut::allocate(&self.queue, bytes).unwrap()
    }

    fn mapped(
        &self,
        batch: &DeviceRecordBatch,
        kernel: Kernel,
    ) -> arrow_device::Result<DeviceRecordBatch> {
        let mut columns: Vec<DeviceArray> = batch.columns().collect();
        let rows = batch.num_rows();
        let out = DeviceBufferMut::allocate(&self.queue, rows * 8)?;
        let values = columns[0].values_on::<i64>(&self.queue)?;
        let (from, to) = (values.address(), out.address());
        if rows > 0 {
            let kernel = move |memory: &mut SimMemory<'_>| {
                let values = memory.slice::<i64>(from, rows)?.iter();
                let values = values.map(|value| kernel(*value));
                let values = values.collect::<Result<Vec<_>, _>>()?;
                memory.write(to, &values)
            };
            // SAFETY: the kernel writes only `out`, which is not frozen yet.
            unsafe { self.queue.as_sim()?.launch(kernel)? };
        }
        drop(values);
        columns[0] = DeviceArray::from_values(DataType::Int64, rows, out.freeze()?, None)?;
        DeviceRecordBatch::try_new(batch.schema(), &columns)
    }
}

/// To be polled again.
pub(crate) fn again(cx: &Context<'_>) -> Step {
    cx.waker().wake_by_ref();
    Poll::Pending
}

/// What a kernel does to a number.
pub(crate) type Kernel = fn(i64) -> Result<i64, String>;

/// A node that doubles the numbers of its child's first column, which has no nulls.
pub(crate) fn double(child: Plan, device: impl Into<DeviceSpec>) -> Plan {
    map(vec![child], device, |n| Ok(n * 2))
}

/// A node that puts them through a kernel, one child's batches after another's.
pub(crate) fn map(children: Vec<Plan>, device: impl Into<DeviceSpec>, kernel: Kernel) -> Plan {
    operator("MapExec", children, device, move |state, cx| {
        let next = ready!(state.next(cx));
        let mapped = |batch| state.mapped(&batch, kernel);
        Poll::Ready(next.map(|batch| batch.and_then(mapped)))
    })
}

pub(crate) fn operator(
    name: &'static str,
    children: Vec<Plan>,
    device: impl Into<DeviceSpec>,
    steps: impl Fn(&mut State, &mut Context<'_>) -> Step + Send + Sync + 'static,
) -> Plan {
    let operator = Operator::new(name, children, device.into(), Arc::new(steps));
    Arc::new(DeviceExec::new(Arc::new(operator)))
}

/// The same operator, of a node that does the same on the host.
pub(crate) fn or_on_host(plan: Plan, host: fn(Vec<Plan>) -> Plan) -> Plan {
    let own = DeviceExec::operator::<Operator>(&plan).unwrap().clone();
    let host = Some(host);
    Arc::new(DeviceExec::new(Arc::new(Operator { host, ..own })))
}

/// The same operator, whose partitions reserve so many bytes when they start.
pub(crate) fn starting_with(plan: Plan, at_start: usize) -> Plan {
    let own = DeviceExec::operator::<Operator>(&plan).unwrap().clone();
    Arc::new(DeviceExec::new(Arc::new(Operator { at_start, ..own })))
}

/// It says nothing of its rows' order.
#[derive(Clone)]
struct Operator {
    name: &'static str,
    children: Vec<Plan>,
    device: DeviceSpec,
    steps: Steps,
    properties: Arc<PlanProperties>,
    /// The same on the host.
    host: Option<fn(Vec<Plan>) -> Plan>,
    at_start: usize,
}

impl fmt::Debug for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Operator {
    fn new(name: &'static str, children: Vec<Plan>, device: DeviceSpec, steps: Steps) -> Self {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(children[0].schema()),
            children[0].output_partitioning().clone(),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        Self {
            name,
            children,
            device,
            steps,
            properties: Arc::new(properties),
            host: None,
            at_start: 0,
        }
    }
}

impl DevicePlan for Operator {
    fn name(&self) -> &str {
        self.name
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
        let (device, steps) = (self.device.clone(), self.steps.clone());
        let own = Self::new(self.name, children, device, steps);
        Ok(Arc::new(Self {
            host: self.host,
            at_start: self.at_start,
            ..own
        }))
    }

    fn on_host(&self) -> Option<Plan> {
        self.host.map(|host| host(self.children.clone()))
    }

    fn execute_device(
        &self,
        partition: usize,
        device: &Device,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let start = |child| execute_child(child, partition, device, context.clone());
        let state = State {
            inputs: self.children.iter().map(start).collect::<Result<_>>()?,
            schema: self.children[0].schema(),
            queue: device.new_queue().map_err(to_datafusion)?,
            memory: DeviceReservation::new(&context, self.name, partition, device),
            kept: Vec::new(),
            batches: Vec::new(),
            polls: 0,
        };
        state.memory.grow(self.at_start)?;
        Ok(Box::pin(Running(state, self.steps.clone())))
    }
}

struct Running(State, Steps);

impl Stream for Running {
    type Item = arrow_device::Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Step {
        let Self(state, steps) = &mut *self;
        state.polls += 1;
        steps(state, cx)
    }
}

impl DeviceRecordBatchStream for Running {
    fn schema(&self) -> SchemaRef {
        self.0.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.0.queue.device().id().device_type
    }
}
