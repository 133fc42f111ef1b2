//! The predicates that the kernels support: `column <op> literal AND ...`.

use std::sync::Arc;

use datafusion::arrow::datatypes::{DataType, Schema};
use datafusion::common::ScalarValue;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{BinaryExpr, Column, Literal};
use datafusion::physical_expr::{PhysicalExpr, split_conjunction};

/// How the kernels interpret the values of a column.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Int32,
    Int64,
    Float64,
}

impl Kind {
    /// Returns `None` for types that the kernels do not support, such as text, whose rows have no
    /// fixed width.
    pub(crate) fn of(data_type: &DataType) -> Option<Self> {
        match data_type {
            DataType::Int32 | DataType::Date32 => Some(Self::Int32),
            DataType::Int64 | DataType::Date64 | DataType::Timestamp(_, _) => Some(Self::Int64),
            DataType::Float64 => Some(Self::Float64),
            _ => None,
        }
    }

    /// Bytes of a value.
    pub(crate) fn width(self) -> usize {
        match self {
            Self::Int32 => 4,
            Self::Int64 | Self::Float64 => 8,
        }
    }
}

/// A row passes if the column is not null and its comparison with the literal has one of these
/// results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Condition {
    pub(crate) column: usize,
    /// The results that pass: 1 for less, 2 for equal, 4 for greater.
    pub(crate) passing: u8,
    /// The literal: an integer itself, or the [`float_key`] of a float.
    pub(crate) literal: i64,
}

/// An integer that orders floats as DataFusion does: both zeros are equal, and NaNs are beyond the
/// infinities.
pub(crate) fn float_key(value: f64) -> i64 {
    let bits = if value == 0.0 {
        0
    } else {
        value.to_bits().cast_signed()
    };
    bits ^ ((bits >> 63) & i64::MAX)
}

/// Returns a predicate as conditions that must all hold, or `None` if it has another form.
pub(crate) fn conditions(
    predicate: &Arc<dyn PhysicalExpr>,
    schema: &Schema,
) -> Option<Arc<[Condition]>> {
    let parts = split_conjunction(predicate);
    parts
        .into_iter()
        .map(|part| condition(part, schema))
        .collect()
}

fn condition(part: &Arc<dyn PhysicalExpr>, schema: &Schema) -> Option<Condition> {
    let comparison = part.downcast_ref::<BinaryExpr>()?;
    let (left, right) = (comparison.left(), comparison.right());
    let (column, op, literal) = match left.downcast_ref::<Column>() {
        Some(column) => (column, *comparison.op(), right),
        None => (
            right.downcast_ref::<Column>()?,
            comparison.op().swap()?,
            left,
        ),
    };
    let passing = match op {
        Operator::Lt => 1,
        Operator::Eq => 2,
        Operator::LtEq => 3,
        Operator::Gt => 4,
        Operator::NotEq => 5,
        Operator::GtEq => 6,
        _ => return None,
    };
    let value = literal.downcast_ref::<Literal>()?.value();
    // DataFusion has ensured this; a kernel could not detect it.
    if value.data_type() != *schema.field(column.index()).data_type() {
        return None;
    }
    let literal = match *value {
        ScalarValue::Int32(Some(value)) | ScalarValue::Date32(Some(value)) => value.into(),
        ScalarValue::Int64(Some(value)) => value,
        ScalarValue::Float64(Some(value)) => float_key(value),
        _ => return None,
    };
    Some(Condition {
        column: column.index(),
        passing,
        literal,
    })
}
