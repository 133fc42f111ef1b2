//! The tests' operator, whose polls do what a closure says: each number through a kernel, say.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::device::sim::SimMemory;
use arrow_device::{ArrowDeviceType, DeviceArray, DeviceBufferMut, DeviceRecordBatch, Queue};
use arrow_device_datafusion::{
    DeviceExec, DeviceOperator, DeviceReservation, DeviceSpec, DeviceTask, SendableDeviceStream,
    to_datafusion,
};
use datafusion::arrow::datatypes::{DataType, SchemaRef};
use datafusion::common::Result;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::execution_plan::{
    Boundedness, ChildrenPropertiesMode, EmissionType, ReplaceChildrenOptions,
};
use datafusion::physical_plan::metrics::MetricBuilder;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, PlanProperties,
};
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
    operator("MapExec", children, device, mapping(kernel))
}

fn mapping(kernel: Kernel) -> impl Fn(&mut State, &mut Context<'_>) -> Step {
    move |state, cx| {
        let next = ready!(state.next(cx));
        let mapped = |batch| state.mapped(&batch, kernel);
        Poll::Ready(next.map(|batch| batch.and_then(mapped)))
    }
}

/// The operator that doubles, in the place of any node.
pub(crate) fn doubling(has_small_batches: bool) -> Arc<dyn DeviceOperator> {
    let operator = Operator::new("MapExec", mapping(|n| Ok(n * 2)));
    Arc::new(Operator {
        has_small_batches,
        ..operator
    })
}

pub(crate) fn operator(
    name: &'static str,
    children: Vec<Plan>,
    device: impl Into<DeviceSpec>,
    steps: impl Fn(&mut State, &mut Context<'_>) -> Step + Send + Sync + 'static,
) -> Plan {
    let operator = Arc::new(Operator::new(name, steps));
    Arc::new(DeviceExec::new(
        Arc::new(Node::new(children)),
        device,
        operator,
    ))
}

/// The same operator, of a node that does the same on the host.
pub(crate) fn or_on_host(plan: Plan, host: fn(Vec<Plan>) -> Plan) -> Plan {
    remade(&plan, |node, _| node.host = Some(host))
}

/// The same operator, whose partitions reserve so many bytes when they start.
pub(crate) fn starting_with(plan: Plan, at_start: usize) -> Plan {
    remade(&plan, |_, operator| operator.at_start = at_start)
}

fn remade(plan: &Plan, change: impl FnOnce(&mut Node, &mut Operator)) -> Plan {
    let exec = DeviceExec::of(plan).unwrap();
    let mut node = exec.node().downcast_ref::<Node>().unwrap().clone();
    let mut operator = DeviceExec::operator::<Operator>(plan).unwrap().clone();
    change(&mut node, &mut operator);
    operator.runs_on_host = node.host.is_some();
    Arc::new(DeviceExec::new(
        Arc::new(node),
        exec.device().clone(),
        Arc::new(operator),
    ))
}

/// It says nothing of its rows' order.
#[derive(Clone, Debug)]
struct Node {
    children: Vec<Plan>,
    properties: Arc<PlanProperties>,
    /// The same on the host.
    host: Option<fn(Vec<Plan>) -> Plan>,
}

impl Node {
    fn new(children: Vec<Plan>) -> Self {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(children[0].schema()),
            children[0].output_partitioning().clone(),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        Self {
            children,
            properties: Arc::new(properties),
            host: None,
        }
    }
}

impl DisplayAs for Node {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Node")
    }
}

impl ExecutionPlan for Node {
    fn name(&self) -> &str {
        "Node"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Plan> {
        self.children.iter().collect()
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn replace_children(
        self: Arc<Self>,
        children: Vec<Plan>,
        _: ReplaceChildrenOptions,
    ) -> Result<Plan> {
        let host = self.host;
        Ok(Arc::new(Self {
            host,
            ..Self::new(children)
        }))
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Plan>) -> Result<Plan> {
        let options = ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute);
        self.replace_children(children, options)
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        let host = self.host.expect("a node on the host");
        host(self.children.clone()).execute(partition, context)
    }
}

#[derive(Clone)]
struct Operator {
    name: &'static str,
    steps: Steps,
    runs_on_host: bool,
    at_start: usize,
    has_small_batches: bool,
}

impl Operator {
    fn new(
        name: &'static str,
        steps: impl Fn(&mut State, &mut Context<'_>) -> Step + Send + Sync + 'static,
    ) -> Self {
        Self {
            name,
            steps: Arc::new(steps),
            runs_on_host: false,
            at_start: 0,
            has_small_batches: false,
        }
    }
}

impl fmt::Debug for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl DeviceOperator for Operator {
    fn name(&self) -> &str {
        self.name
    }

    fn runs_on_host(&self) -> bool {
        self.runs_on_host
    }

    fn describe(&self, _: &dyn ExecutionPlan, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }

    fn has_small_batches(&self, _: &dyn ExecutionPlan) -> bool {
        self.has_small_batches
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let children = task.node().children().len();
        let started = MetricBuilder::new(task.metrics()).counter("started", task.partition);
        started.add(1);
        let state = State {
            inputs: (0..children)
                .map(|i| task.input(i))
                .collect::<Result<_>>()?,
            schema: task.node().children()[0].schema(),
            queue: task.device.new_queue().map_err(to_datafusion)?,
            memory: DeviceReservation::new(task.context, self.name, task.partition, task.device),
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
