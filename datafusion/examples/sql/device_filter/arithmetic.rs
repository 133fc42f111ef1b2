//! Arithmetic of decimals, in projections and in the arguments of aggregates.

use std::future::ready;
use std::sync::Arc;

use arrow_device::{
    DeviceArray, DeviceBufferMut, DeviceRecordBatch, Error, Queue, Result, Validity,
};
use arrow_device_datafusion::{DeviceOperator, DeviceTask, SendableDeviceStream, to_datafusion};
use datafusion::arrow::array::cast::AsArray;
use datafusion::arrow::datatypes::{DataType, Schema, UInt64Type};
use datafusion::arrow::error::ArrowError;
use datafusion::common::ScalarValue;
use datafusion::error::Result as DataFusionResult;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::{BinaryExpr, Column, Literal};
use datafusion::physical_plan::projection::ProjectionExec;
use futures::{StreamExt, TryStreamExt};

use super::cache::KernelCache;
use super::column::{Format, Input};
use super::kernels::{Launcher, to, word};

/// What the kernels compute of the columns of a batch.
#[derive(Clone, Debug)]
pub(crate) enum Expression {
    Column(usize),
    /// Of operands, or of literals in their places.
    Decimal(Formula, Box<[Option<Expression>; 2]>),
}

/// Arithmetic of decimals of 128 bits.
#[derive(Clone, Debug)]
pub(crate) struct Formula {
    /// `+`, `-`, `*` or `/`, by its number.
    pub(crate) operation: u64,
    /// What the operands are multiplied by, which brings them to the scale of the result, or literals of that scale.
    pub(crate) numbers: [i128; 2],
    /// The largest result.
    pub(crate) most: i128,
    pub(crate) data_type: DataType,
}

impl Expression {
    /// Returns `None` for what the kernels do not compute.
    pub(crate) fn of(expression: &Arc<dyn PhysicalExpr>, schema: &Schema) -> Option<Self> {
        if let Some(column) = expression.downcast_ref::<Column>() {
            let field = schema.fields().get(column.index())?;
            return Format::of(field.data_type()).map(|_| Self::Column(column.index()));
        }
        let binary = expression.downcast_ref::<BinaryExpr>()?;
        let operation = match binary.op() {
            Operator::Plus => 0,
            Operator::Minus => 1,
            Operator::Multiply => 2,
            _ => return None,
        };
        let scale = |of: &Arc<dyn PhysicalExpr>| match of.data_type(schema) {
            Ok(DataType::Decimal128(_, scale)) => Some(scale),
            _ => None,
        };
        let of_result = scale(expression)?;
        let operand = |of: &Arc<dyn PhysicalExpr>| {
            let steps = u32::try_from(of_result - scale(of)?).ok()?;
            let factor = 10i128.checked_pow(if operation == 2 { 0 } else { steps })?;
            match of.downcast_ref::<Literal>().map(Literal::value) {
                None => Some((factor, Some(Self::of(of, schema)?))),
                Some(ScalarValue::Decimal128(Some(literal), ..)) => {
                    Some((literal.checked_mul(factor)?, None))
                }
                Some(_) => None,
            }
        };
        let ((a, of_a), (b, of_b)) = (operand(binary.left())?, operand(binary.right())?);
        let formula = Formula {
            operation,
            numbers: [a, b],
            // DataFusion looks at the digits of averages only.
            most: i128::MAX,
            data_type: expression.data_type(schema).ok()?,
        };
        Some(Self::Decimal(formula, Box::new([of_a, of_b])))
    }

    /// Queues the kernels, which set `overflow` if a result is too large.
    pub(crate) fn evaluate(
        &self,
        batch: &DeviceRecordBatch,
        launcher: &Launcher,
        overflow: &Overflow,
    ) -> Result<DeviceArray> {
        let (formula, operands) = match self {
            Self::Column(column) => return batch.column(*column),
            Self::Decimal(formula, operands) => (formula, operands),
        };
        let input = |of: &Option<Self>| match of {
            Some(of) => {
                Input::new(of.evaluate(batch, launcher, overflow)?, &launcher.queue).map(Some)
            }
            None => Ok(None),
        };
        let [a, b] = operands.each_ref().map(input);
        formula.compute([a?, b?], batch.num_rows(), launcher, overflow)
    }
}

impl Formula {
    /// Queues the kernel. The operands are decimals of 128 bits, or unsigned numbers of 64 bits.
    pub(crate) fn compute(
        &self,
        operands: [Option<Input>; 2],
        rows: usize,
        launcher: &Launcher,
        overflow: &Overflow,
    ) -> Result<DeviceArray> {
        let queue = &launcher.queue;
        let column = |of: &Option<Input>| of.as_ref().map(|of| of.column).unwrap_or_default();
        let columns = operands.each_ref().map(column);
        let mut out = DeviceBufferMut::for_values::<i128>(queue, rows)?;
        let mut bits = None;
        if columns.iter().any(|column| column.bits != 0) {
            bits = Some(launcher.zeros(rows.div_ceil(8))?);
        }
        let (n, valid) = (rows as u64, bits.as_mut().map_or(0, to));
        let most = [self.operation, n, low(self.most), high(self.most)];
        let mut words = [&most[..], &[to(&mut out), valid, overflow.at()]].concat();
        for (c, number) in columns.iter().zip(self.numbers) {
            let (low, high) = (low(number), high(number));
            words.extend([c.family, c.width, c.values, low, high, c.bits, c.bit]);
        }
        // SAFETY: these are the kernel's parameters. It reads numbers that are lent, and writes as many, and words of as many bits, to memory that
        // is not frozen and has room for them, and a number that nothing else uses before it is frozen.
        unsafe { launcher.launch("decimal", n, &words) }?;
        let bits = bits.map(|bits| Validity::new(bits.freeze()?, 0, rows));
        let (data_type, out) = (self.data_type.clone(), out.freeze()?);
        DeviceArray::from_values(data_type, rows, out, bits.transpose()?)
    }
}

/// The words of a number.
pub(crate) fn low(number: i128) -> u64 {
    number as u64
}

pub(crate) fn high(number: i128) -> u64 {
    (number >> 64) as u64
}

/// A number in device memory, which kernels set if a result does not fit.
#[derive(Clone)]
pub(crate) struct Overflow(Arc<DeviceBufferMut>);

impl Overflow {
    pub(crate) fn new(launcher: &Launcher) -> Result<Self> {
        Ok(Self(Arc::new(launcher.zeros(size_of::<u64>())?)))
    }

    pub(crate) fn at(&self) -> u64 {
        word(self.0.address())
    }

    /// Returns an error if it is set once the kernels have run that were queued so far. Nothing else has it any more.
    pub(crate) async fn check(self, queue: Queue) -> Result<()> {
        let ended = || Error::InvalidArgument("kernels may still be queued".into());
        let number = Arc::into_inner(self.0).ok_or_else(ended)?.freeze()?;
        let number = DeviceArray::from_values(DataType::UInt64, 1, number, None)?;
        let number = number.start_to_host(&queue)?.await?;
        match number.as_primitive::<UInt64Type>().value(0) {
            0 => Ok(()),
            _ => Err(ArrowError::ArithmeticOverflow("a decimal has too many digits".into()).into()),
        }
    }
}

/// A projection of columns and decimal arithmetic, in the place of DataFusion's.
#[derive(Debug)]
pub(crate) struct DeviceArithmeticExec {
    expressions: Arc<[Expression]>,
    kernels: Arc<KernelCache>,
}

impl DeviceArithmeticExec {
    /// Returns `None` if the kernels do not compute what `host` does.
    pub(crate) fn new(host: &ProjectionExec, kernels: Arc<KernelCache>) -> Option<Self> {
        let schema = host.input().schema();
        let expressions = host.expr().iter();
        let expressions = expressions.map(|one| Expression::of(&one.expr, &schema));
        let expressions = expressions.collect::<Option<_>>()?;
        Some(Self {
            expressions,
            kernels,
        })
    }
}

impl DeviceOperator for DeviceArithmeticExec {
    fn name(&self) -> &str {
        "DeviceArithmeticExec"
    }

    fn execute(&self, task: &DeviceTask<'_>) -> DataFusionResult<SendableDeviceStream> {
        let launcher = self.kernels.launcher(task.device).map_err(to_datafusion)?;
        let (expressions, schema) = (self.expressions.clone(), task.node().schema());
        let compute = move |batch: Result<DeviceRecordBatch>| {
            let (batch, overflow) = (batch?, Overflow::new(&launcher)?);
            let lent = launcher.lend(batch.as_struct())?;
            let of = |one: &Expression| one.evaluate(&batch, &launcher, &overflow);
            let columns = expressions.iter().map(of).collect::<Result<Vec<_>>>()?;
            drop(lent);
            let batch = DeviceRecordBatch::try_new(schema.clone(), &columns)?;
            Ok::<_, Error>((batch, overflow.check(launcher.queue.clone())))
        };
        let some = |batch: &DeviceRecordBatch| ready(batch.num_rows() > 0);
        let input = task.input(0)?.try_filter(some);
        let computed = input.map(compute).map(async |computed| {
            let (batch, check) = computed?;
            check.await.map(|()| batch)
        });
        Ok(task.stream(computed.buffered(2)))
    }
}
