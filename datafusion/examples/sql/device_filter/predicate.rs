//! The predicates that the kernels support: conjunctions of tests of single columns.
//!
//! | test | of columns of |
//! | --- | --- |
//! | `column <op> literal`, `literal <op> column`, with `=`, `<>`, `<`, `<=`, `>`, `>=` | integers, floats, decimals, dates, times, timestamps, durations, intervals; text and binary of all layouts, fixed-size binary too |
//! | `column`, `NOT column`, `column <op> literal` | booleans |
//! | `column IS NULL`, `column IS NOT NULL` | all types that the filter keeps ([`Format`](super::column::Format)) |
//!
//! The literal has the column's type, which DataFusion's planner has ensured, and is not null. Everything else stays with
//! DataFusion's own filter: `OR`, `IN`, `LIKE`, `IS DISTINCT FROM`, casts, arithmetic and other functions, comparisons of two
//! columns, and dynamic filters.

use std::sync::Arc;

use datafusion::arrow::array::Array;
use datafusion::arrow::datatypes::{DataType, Schema};
use datafusion::common::ScalarValue;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{
    BinaryExpr, Column, IsNotNullExpr, IsNullExpr, Literal, NotExpr,
};
use datafusion::physical_expr::{PhysicalExpr, split_conjunction};

use super::column::Format;
use super::key::{Key, Kind};

/// A test of a column that a row must pass.
#[derive(Clone, Debug)]
pub(crate) struct Condition {
    pub(crate) column: usize,
    pub(crate) test: Test,
}

/// Nulls pass [`Test::IsNull`] and no other test.
#[derive(Clone, Debug)]
pub(crate) enum Test {
    IsNull,
    IsNotNull,
    /// Whether `false` passes, and `true`.
    Boolean {
        passes: [bool; 2],
    },
    /// A value passes if its comparison with the literal has one of these results: 1 for less, 2 for equal, 4 for greater.
    Compare {
        passing: u8,
        literal: Key,
    },
    /// As [`Test::Compare`], byte by byte.
    Bytes {
        passing: u8,
        literal: Arc<[u8]>,
    },
}

/// Returns a predicate as conditions that must all hold, or `None` if it has another form.
pub(crate) fn conditions(
    predicate: &Arc<dyn PhysicalExpr>,
    schema: &Schema,
) -> Option<Vec<Condition>> {
    let parts = split_conjunction(predicate).into_iter();
    parts.map(|part| condition(part, schema)).collect()
}

fn condition(part: &Arc<dyn PhysicalExpr>, schema: &Schema) -> Option<Condition> {
    let (column, test) = if let Some(comparison) = part.downcast_ref::<BinaryExpr>() {
        compare(comparison, schema)?
    } else if let Some(null) = part.downcast_ref::<IsNullExpr>() {
        (column(null.arg(), schema)?, Test::IsNull)
    } else if let Some(null) = part.downcast_ref::<IsNotNullExpr>() {
        (column(null.arg(), schema)?, Test::IsNotNull)
    } else {
        let not = part.downcast_ref::<NotExpr>();
        let column = column(not.map_or(part, NotExpr::arg), schema)?;
        let passes = [not.is_some(), not.is_none()];
        let test = Test::Boolean { passes };
        let boolean = *schema.field(column).data_type() == DataType::Boolean;
        (column, boolean.then_some(test)?)
    };
    Some(Condition { column, test })
}

/// The column that an expression is, of a type that the kernels support.
fn column(expression: &Arc<dyn PhysicalExpr>, schema: &Schema) -> Option<usize> {
    let index = expression.downcast_ref::<Column>()?.index();
    let field = schema.fields().get(index)?;
    Format::of(field.data_type()).map(|_| index)
}

fn compare(comparison: &BinaryExpr, schema: &Schema) -> Option<(usize, Test)> {
    let (left, right) = (comparison.left(), comparison.right());
    let (column, op, literal) = match column(left, schema) {
        Some(column) => (column, *comparison.op(), right),
        None => (column(right, schema)?, comparison.op().swap()?, left),
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
    let literal = literal.downcast_ref::<Literal>()?.value();
    let data_type = schema.field(column).data_type();
    if literal.is_null() || literal.data_type() != *data_type {
        return None;
    }
    let test = if let Some(kind) = Kind::of(data_type) {
        // The literal as the only value of an array has the bytes that values of a column have.
        let array = literal.to_array().ok()?.to_data();
        let at = array.offset() * kind.width;
        let value = array.buffers()[0].get(at..at + kind.width)?;
        let literal = kind.key(value);
        Test::Compare { passing, literal }
    } else if let ScalarValue::Boolean(Some(literal)) = literal {
        let passes = |value: bool| passing >> (value.cmp(literal) as i8 + 1) & 1 == 1;
        let passes = [passes(false), passes(true)];
        Test::Boolean { passes }
    } else {
        let literal = bytes(literal)?.into();
        Test::Bytes { passing, literal }
    };
    Some((column, test))
}

/// The bytes of text or binary.
fn bytes(literal: &ScalarValue) -> Option<&[u8]> {
    use ScalarValue::*;
    match literal {
        Binary(bytes) | LargeBinary(bytes) | BinaryView(bytes) | FixedSizeBinary(_, bytes) => {
            bytes.as_deref()
        }
        text => text.try_as_str()?.map(str::as_bytes),
    }
}
