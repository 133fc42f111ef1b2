//! The tests' operators, and their plugin. What an operator's polls do, a closure says.

use arrow_device::device::sim::SimMemory;
use arrow_device::{DeviceArray, DeviceBufferMut, Queue};
use arrow_device_datafusion::DeviceTask;
use datafusion::common::Result;
use datafusion::logical_expr::Operator as Op;
use datafusion::physical_plan::coop::CooperativeExec;
use datafusion::physical_plan::metrics::MetricBuilder;
use futures::stream::poll_fn;

use crate::kit::*;

/// What a poll returns.
pub(crate) type Step = Poll<Option<arrow_device::Result<DeviceRecordBatch>>>;

type Steps = Arc<dyn Fn(&mut State, &mut Context<'_>) -> Step + Send + Sync>;

/// What the operator has while it runs.
pub(crate) struct State {
    inputs: Vec<SendableDeviceStream>,
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
type Kernel = fn(i64) -> Result<i64, String>;

/// A node that doubles the numbers of its child's first column, which has no nulls.
pub(crate) fn double(child: Plan, device: impl Into<DeviceSpec>) -> Plan {
    double_by(child, device, |_| ())
}

/// The same by an operator of which a test changes something.
pub(crate) fn double_by(
    child: Plan,
    device: impl Into<DeviceSpec>,
    change: impl FnOnce(&mut Operator),
) -> Plan {
    let schema = child.schema();
    let columns = schema.fields().iter().enumerate().map(|(i, field)| {
        let mut expr: Arc<dyn PhysicalExpr> = Arc::new(Column::new(field.name(), i));
        if i == 0 {
            expr = binary(expr, Op::Multiply, lit(2i64), &schema).unwrap();
        }
        let alias = field.name().clone();
        ProjectionExpr { expr, alias }
    });
    let node = Arc::new(ProjectionExec::try_new(columns, child).unwrap());
    let mut operator = Operator::new("MapExec", mapping(|n| Ok(n * 2)));
    change(&mut operator);
    Arc::new(DeviceExec::new(node, device, Arc::new(operator)))
}

/// A node that puts the numbers through a kernel, one child's batches after another's.
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

pub(crate) fn operator(
    name: &'static str,
    mut children: Vec<Plan>,
    device: impl Into<DeviceSpec>,
    steps: impl Fn(&mut State, &mut Context<'_>) -> Step + Send + Sync + 'static,
) -> Plan {
    let node: Plan = match children.len() {
        1 => Arc::new(CooperativeExec::new(children.remove(0))),
        _ => UnionExec::try_new(children).unwrap(),
    };
    let operator = Arc::new(Operator::new(name, steps));
    Arc::new(DeviceExec::new(node, device, operator))
}

#[derive(Clone)]
pub(crate) struct Operator {
    name: &'static str,
    steps: Steps,
    pub(crate) runs_on_host: bool,
    /// The bytes that a partition reserves when it starts.
    pub(crate) at_start: usize,
}

impl Operator {
    pub(crate) fn new(
        name: &'static str,
        steps: impl Fn(&mut State, &mut Context<'_>) -> Step + Send + Sync + 'static,
    ) -> Self {
        Self {
            name,
            steps: Arc::new(steps),
            runs_on_host: false,
            at_start: 0,
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

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let started = MetricBuilder::new(task.metrics()).counter("started", task.partition);
        started.add(1);
        let inputs = (0..task.node().children().len()).map(|i| task.input(i));
        let mut state = State {
            inputs: inputs.collect::<Result<_>>()?,
            queue: task.device.new_queue().map_err(to_datafusion)?,
            memory: task.reservation(),
            kept: Vec::new(),
            batches: Vec::new(),
            polls: 0,
        };
        state.memory.grow(self.at_start)?;
        let (schema, steps) = (state.inputs[0].schema(), self.steps.clone());
        let poll = move |cx: &mut Context<'_>| {
            state.polls += 1;
            steps(&mut state, cx)
        };
        Ok(task.stream_of(schema, poll_fn(poll)))
    }
}

/// An operator that runs its node on the host, and uploads what that returns. So it can be in the place of any node.
#[derive(Debug)]
pub(crate) struct Backed {
    name: String,
    has_small_batches: bool,
}

impl Backed {
    pub(crate) fn new(node: &Plan, has_small_batches: bool) -> Self {
        let name = format!("My{}", node.name());
        Self {
            name,
            has_small_batches,
        }
    }
}

impl DeviceOperator for Backed {
    fn name(&self) -> &str {
        &self.name
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let rows = task.node().execute(task.partition, task.context.clone())?;
        let device = task.device.clone();
        let up = move |batch: Result<_>| device.upload(&batch.map_err(from_datafusion)?);
        Ok(task.stream(rows.map(up)))
    }

    fn has_small_batches(&self, _: &dyn ExecutionPlan) -> bool {
        self.has_small_batches
    }
}

pub(crate) fn from_datafusion(e: DataFusionError) -> Error {
    Error::from(ArrowError::ExternalError(Box::new(e)))
}

type Made = Result<Arc<dyn DeviceOperator>>;

type Make = Arc<dyn Fn(&Plan) -> Made + Send + Sync>;

/// A plugin that runs nodes of some names: with [`Backed`], unless a test makes the operators.
#[derive(Clone, Default)]
pub(crate) struct Runs {
    /// Those that it runs wherever their rows are.
    pub(crate) names: &'static [&'static str],
    /// Those that it runs where their rows are on a device anyway.
    pub(crate) there: &'static [&'static str],
    /// Those that it declines, and why.
    pub(crate) stays: &'static [(&'static str, &'static str)],
    pub(crate) merges: bool,
    pub(crate) has_small_batches: bool,
    pub(crate) target: Option<(usize, usize)>,
    pub(crate) types: Option<fn(&DataType) -> Option<DataType>>,
    pub(crate) make: Option<Make>,
}

impl Runs {
    pub(crate) fn nodes(names: &'static [&'static str]) -> Self {
        Self {
            names,
            ..Self::default()
        }
    }

    pub(crate) fn merging(self, merges: bool) -> Self {
        Self { merges, ..self }
    }

    pub(crate) fn making(self, make: impl Fn(&Plan) -> Made + Send + Sync + 'static) -> Self {
        let make: Option<Make> = Some(Arc::new(make));
        Self { make, ..self }
    }
}

impl fmt::Debug for Runs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Runs {:?} {:?}", self.names, self.there)
    }
}

impl DevicePlugin for Runs {
    fn can_run(&self, node: &Plan, _: &DeviceSpec) -> Verdict {
        let name = node.name();
        if let Some((_, why)) = self.stays.iter().find(|(of, _)| *of == name) {
            return Verdict::stays(*why);
        }
        match (self.names.contains(&name), self.there.contains(&name)) {
            (true, _) => Verdict::Runs,
            (_, true) => Verdict::RunsThere,
            _ => Verdict::Unknown,
        }
    }

    fn replace(&self, node: &Plan) -> Made {
        match &self.make {
            Some(make) => make(node),
            None => Ok(Arc::new(Backed::new(node, self.has_small_batches))),
        }
    }

    fn upload_target(&self) -> Option<(usize, usize)> {
        self.target
    }

    fn upload_type(&self, data_type: &DataType) -> Option<DataType> {
        self.types?(data_type)
    }

    fn merges_uploads(&self) -> bool {
        self.merges
    }
}
