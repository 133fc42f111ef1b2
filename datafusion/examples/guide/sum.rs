use std::sync::Arc;

use arrow_device::device::sim::SimMemory;
use arrow_device::{DeviceArray, DeviceBufferMut, DeviceRecordBatch, Devices, Queue};
use arrow_device_datafusion::{
    DeviceOperator, DevicePlugin, DeviceRule, DeviceSpec, DeviceTable, DeviceTask,
    SendableDeviceStream, Verdict, to_datafusion,
};
use datafusion::arrow::array::{AsArray, Int64Array, RecordBatch, new_null_array};
use datafusion::arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SessionStateBuilder;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::{BinaryExpr, Column, Literal};
use datafusion::physical_plan::aggregates::{AggregateExec, AggregateInputMode};
use datafusion::physical_plan::{ExecutionPlan, displayable};
use datafusion::prelude::SessionContext;
use datafusion::scalar::ScalarValue;
use futures::TryStreamExt;

/// What the kernel computes for each row, of columns of 64-bit integers without nulls.
#[derive(Clone, Debug)]
enum Program {
    Column(usize),
    Number(i64),
    Add(Box<Self>, Box<Self>),
    Multiply(Box<Self>, Box<Self>),
}

impl Program {
    /// Returns the program of an expression over the columns of `input`, or why there is none.
    fn of(expression: &Arc<dyn PhysicalExpr>, input: &Schema) -> std::result::Result<Self, String> {
        let why = || format!("the kernel does not compute {expression}");
        let is_number = expression.data_type(input).is_ok_and(|own| own == DataType::Int64);
        if !is_number || expression.nullable(input).unwrap_or(true) {
            return Err(why());
        }
        if let Some(column) = expression.downcast_ref::<Column>() {
            return Ok(Self::Column(column.index()));
        }
        if let Some(literal) = expression.downcast_ref::<Literal>() {
            let ScalarValue::Int64(Some(number)) = literal.value() else { return Err(why()) };
            return Ok(Self::Number(*number));
        }
        let binary = expression.downcast_ref::<BinaryExpr>().ok_or_else(why)?;
        let side = |side| Self::of(side, input).map(Box::new);
        let (left, right) = (side(binary.left())?, side(binary.right())?);
        match binary.op() {
            Operator::Plus => Ok(Self::Add(left, right)),
            Operator::Multiply => Ok(Self::Multiply(left, right)),
            _ => Err(why()),
        }
    }

    /// Overflows wrap, as DataFusion's do.
    fn run(&self, columns: &[&[i64]], row: usize) -> i64 {
        let of = |program: &Self| program.run(columns, row);
        match self {
            Self::Column(i) => columns[*i][row],
            Self::Number(number) => *number,
            Self::Add(left, right) => of(left).wrapping_add(of(right)),
            Self::Multiply(left, right) => of(left).wrapping_mul(of(right)),
        }
    }
}

/// `sum(expression)` of all rows of a partition.
#[derive(Debug)]
struct SumExec(Program);

impl SumExec {
    /// The whole aggregate, or its first half, whose state is the sum, too.
    fn in_place_of(node: &AggregateExec) -> std::result::Result<Self, String> {
        let [function] = node.aggr_expr() else { return Err("it is not one function".into()) };
        let arguments = function.expressions();
        let is_sum = function.fun().name() == "sum" && !function.is_distinct();
        let all_rows = node.group_expr().expr().is_empty() && node.filter_expr() == [None];
        let of_rows = matches!(node.mode().input_mode(), AggregateInputMode::Raw);
        match &arguments[..] {
            [of] if is_sum && all_rows && of_rows => Program::of(of, &node.input().schema()).map(Self),
            _ => Err("it is not the sum of all rows".into()),
        }
    }
}

/// Reads all batches. For each, a kernel adds to the sum on the device.
async fn sum(
    mut input: SendableDeviceStream,
    program: Program,
    schema: SchemaRef,
    queue: Queue,
) -> arrow_device::Result<DeviceRecordBatch> {
    let out = DeviceBufferMut::for_values::<i64>(&queue, 1)?;
    let (total, mut before) = (out.address(), 0);
    while let Some(batch) = input.try_next().await? {
        let (columns, rows) = (batch.columns().collect::<Vec<_>>(), batch.num_rows());
        let loans = columns.iter().map(|column| column.values_on::<i64>(&queue));
        let loans: Vec<_> = loans.collect::<arrow_device::Result<_>>()?;
        let from: Vec<_> = loans.iter().map(|loan| loan.address()).collect();
        let (program, is_first) = (program.clone(), before == 0);
        let kernel = move |memory: &mut SimMemory<'_>| {
            let columns = from.iter().map(|at| memory.slice::<i64>(*at, rows));
            let columns = columns.collect::<std::result::Result<Vec<_>, _>>()?;
            let first = if is_first { 0 } else { memory.slice::<i64>(total, 1)?[0] };
            let values = (0..rows).map(|row| program.run(&columns, row));
            memory.write(total, &[values.fold(first, i64::wrapping_add)])
        };
        // SAFETY: the kernel writes `out`, which only the kernels of this queue use before it is frozen.
        unsafe { queue.as_sim()?.launch(kernel)? };
        before += rows;
    }
    if before == 0 {
        let null = new_null_array(&DataType::Int64, 1);
        return queue.device().upload(&RecordBatch::try_new(schema, vec![null])?);
    }
    let sum = DeviceArray::from_values(DataType::Int64, 1, out.freeze()?, None)?;
    DeviceRecordBatch::try_new(schema, &[sum])
}

impl DeviceOperator for SumExec {
    fn name(&self) -> &str {
        "SumExec"
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let queue = task.device.new_queue().map_err(to_datafusion)?;
        let schema = task.node().schema(); // of the sum, and not that of the rows
        let sum = sum(task.input(0)?, self.0.clone(), schema, queue);
        Ok(task.stream(futures::stream::once(sum)))
    }
}

#[derive(Debug)]
struct Sums;

impl DevicePlugin for Sums {
    fn can_run(&self, node: &Arc<dyn ExecutionPlan>, _: &DeviceSpec) -> Verdict {
        let sum = node.downcast_ref::<AggregateExec>().map(SumExec::in_place_of);
        sum.map_or(Verdict::Unknown, |sum| sum.map_or_else(Verdict::stays, |_| Verdict::Runs))
    }

    fn replace(&self, node: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn DeviceOperator>> {
        let sum = node.downcast_ref::<AggregateExec>().ok_or_else(|| "no aggregate".to_owned());
        let sum = sum.and_then(SumExec::in_place_of).map_err(DataFusionError::Plan)?;
        Ok(Arc::new(sum))
    }
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let rule = DeviceRule::default().with_plugin(Arc::new(Sums));
    let state = SessionStateBuilder::new().with_default_features();
    let state = state.with_physical_optimizer_rule(Arc::new(rule));
    let context = SessionContext::new_with_state(state.build());
    for (name, rows) in [("t", 1000), ("empty", 0)] {
        let device = Devices::simulated()?;
        let fields = ["a", "b"].map(|name| Field::new(name, DataType::Int64, false));
        let schema = Arc::new(Schema::new(fields.to_vec()));
        let column = || Arc::new(Int64Array::from_iter_values(0..rows)) as _;
        let batch = RecordBatch::try_new(schema.clone(), vec![column(), column()])?;
        let batches = vec![device.upload(&batch)?, device.upload(&batch)?];
        let table = DeviceTable::from_batches(schema, device, vec![batches])?;
        context.register_table(name, Arc::new(table))?;
    }
    for (table, expected) in [("t", Some(2_997_000)), ("empty", None)] {
        let query = context.sql(&format!("SELECT sum(a * 2 + b) FROM {table}")).await?;
        let plan = query.clone().create_physical_plan().await?;
        let text = displayable(&*plan).indent(false).to_string();
        assert!(text.contains("SumExec: device=sim"), "{text}");
        let found = query.collect().await?;
        let sum = found[0].column(0).as_primitive::<Int64Type>();
        assert_eq!(sum.iter().next().flatten(), expected);
    }
    let others = context.sql("EXPLAIN SELECT max(a), sum(a - b) FROM t").await?.to_string().await?;
    assert!(others.contains("it is not one function"), "{others}");
    Ok(())
}
