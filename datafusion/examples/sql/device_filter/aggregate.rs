//! Aggregates of DataFusion, whole or in two halves, as states that kernels fill.
//!
//! | function | of | state |
//! | --- | --- | --- |
//! | `count` | rows, columns and decimal arithmetic | a number |
//! | `sum` | 64-bit integers, decimals of 128 bits | a sum |
//! | `min`, `max` | integers, decimals, dates and times of at most 128 bits | a value |
//! | `avg` | decimals of 128 bits, of at most 25 digits | a number and a sum |
//!
//! Keys of groups are columns of these types, or of text or binary. Everything else stays with DataFusion, such as floats, whose sum
//! depends on the order of the rows. States are those of DataFusion's own halves, so that one of them may run on the host.

use std::borrow::Cow;
use std::sync::Arc;

use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::functions_aggregate::{average, count, min_max, sum};
use datafusion::logical_expr::AggregateUDF;
use datafusion::physical_expr::expressions::{Column, Literal};
use datafusion::physical_plan::InputOrderMode;
use datafusion::physical_plan::aggregates::{
    AggregateExec, AggregateInputMode, AggregateOutputMode,
};
use datafusion::physical_plan::udaf::AggregateFunctionExpr;

use super::arithmetic::{Expression, Formula};
use super::column::Format;
use super::key::{Kind, SIGNED, UNSIGNED};

/// Why an aggregate stays on the host.
pub(crate) type Why = Cow<'static, str>;

/// What to do with each batch, and in the end.
#[derive(Debug)]
pub(crate) struct Aggregate {
    /// The columns of the input that are keys.
    pub(crate) keys: Vec<usize>,
    /// What becomes of the input.
    pub(crate) states: Vec<State>,
    /// The columns of keys and states.
    pub(crate) schema: SchemaRef,
    /// What becomes of keys and states.
    pub(crate) results: Vec<Outcome>,
}

/// How the state of a group changes with a row.
#[derive(Clone, Debug)]
pub(crate) struct State {
    /// A column that is not null. Without one, all rows count.
    pub(crate) of: Option<Expression>,
    pub(crate) change: Change,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    /// 1 is added.
    Count,
    /// The value is added.
    Add,
    /// The largest is kept of the values with these bits inverted.
    Most(i128),
}

/// A column of the result: one of keys and states, or the average of a number that is there and a sum that is in the next one.
pub(crate) type Outcome = (usize, Option<Formula>);

impl Aggregate {
    pub(crate) fn new(host: &AggregateExec) -> Result<Self, Why> {
        let (group, input) = (host.group_expr(), host.input().schema());
        let is_plain = host.filter_expr().iter().all(Option::is_none) && group.is_single();
        if !is_plain || host.limit_options().is_some() {
            return Err("it has filters, grouping sets or a limit".into());
        }
        if *host.input_order_mode() != InputOrderMode::Linear {
            return Err("its rows are sorted by group".into());
        }
        let mut keys = Vec::new();
        for (key, name) in group.expr() {
            let column = key.downcast_ref::<Column>().map(Column::index);
            let column = column.filter(|column| is_key(input.field(*column).data_type()));
            keys.push(column.ok_or_else(|| format!("the kernels have no key like {name}"))?);
        }
        let failed = |_| Why::from("it has no states");
        let is_raw = matches!(host.mode().input_mode(), AggregateInputMode::Raw);
        let groups = group.group_schema(&input).map_err(failed)?;
        let mut fields: Vec<_> = groups.fields().iter().cloned().collect();
        let mut results: Vec<_> = (0..keys.len()).map(|key| (key, None)).collect();
        let mut states = Vec::new();
        for function in host.aggr_expr() {
            let of_function = function.state_fields().map_err(failed)?;
            results.push((fields.len(), average_of(function, &of_function)?));
            let of = match is_raw {
                true => argument(function, &input)?,
                false => None,
            };
            for change in changes(function, &of_function)? {
                let of = of.clone();
                states.push(State { of, change });
            }
            fields.extend(of_function);
        }
        let mut types = input.fields().iter().zip(&fields);
        if !is_raw && types.any(|(own, field)| own.data_type() != field.data_type()) {
            return Err("its states are of other types".into());
        }
        if matches!(host.mode().output_mode(), AggregateOutputMode::Partial) {
            results = (0..fields.len()).map(|column| (column, None)).collect();
        }
        let mut new = Self {
            keys,
            states,
            schema: Arc::new(Schema::new(fields)),
            results,
        };
        new.states = if is_raw { new.states } else { new.merged() };
        Ok(new)
    }

    /// How states change with states of other rows, which come after as many keys.
    pub(crate) fn merged(&self) -> Vec<State> {
        let state = |(i, state): (usize, &State)| State {
            of: Some(Expression::Column(self.keys.len() + i)),
            change: match state.change {
                Change::Count => Change::Add,
                change => change,
            },
        };
        self.states.iter().enumerate().map(state).collect()
    }
}

fn is_integer(data_type: &DataType) -> bool {
    let integer = |kind: Kind| matches!(kind.family, SIGNED | UNSIGNED) && kind.width <= 16;
    Kind::of(data_type).is_some_and(integer)
}

fn is_key(data_type: &DataType) -> bool {
    is_integer(data_type) || Format::of(data_type).is_some_and(Format::is_text)
}

/// What the states of a function count, add or compare; `None` for all rows.
fn argument(function: &AggregateFunctionExpr, input: &Schema) -> Result<Option<Expression>, Why> {
    let arguments = function.expressions();
    let literal = arguments.first().and_then(|one| one.downcast_ref());
    let is_count = *function.fun() == *count::count_udaf();
    if is_count && literal.is_some_and(|one: &Literal| !one.value().is_null()) {
        return Ok(None);
    }
    let only = arguments.first().filter(|_| arguments.len() == 1);
    let only = only.and_then(|one| Expression::of(one, input));
    let why = || format!("the kernels do not compute {}", function.name());
    only.map(Some).ok_or_else(|| why().into())
}

fn changes(function: &AggregateFunctionExpr, states: &[Arc<Field>]) -> Result<Vec<Change>, Why> {
    let is = |other: Arc<AggregateUDF>| *function.fun() == *other;
    let is_plain = !function.is_distinct() && function.order_bys().is_empty();
    // Of an average, the last one is the sum.
    let last = states.last().map(|state| state.data_type());
    let data_type = last.unwrap_or(&DataType::Null);
    let is_decimal = matches!(data_type, DataType::Decimal128(..));
    let is_sum = is_decimal || matches!(data_type, DataType::Int64 | DataType::UInt64);
    Ok(match is_plain && !function.ignore_nulls() {
        true if is(count::count_udaf()) => vec![Change::Count],
        true if is(sum::sum_udaf()) && is_sum => vec![Change::Add],
        true if is(average::avg_udaf()) && is_decimal => vec![Change::Count, Change::Add],
        // The sign is the highest bit.
        true if is(min_max::max_udaf()) && is_integer(data_type) => vec![Change::Most(i128::MIN)],
        true if is(min_max::min_udaf()) && is_integer(data_type) => vec![Change::Most(i128::MAX)],
        _ => return Err(format!("there are no kernels for {}", function.name()).into()),
    })
}

/// The average of two states, if there are two.
fn average_of(
    function: &AggregateFunctionExpr,
    states: &[Arc<Field>],
) -> Result<Option<Formula>, Why> {
    let data_type = function.field().data_type().clone();
    let [_, sum] = states else { return Ok(None) };
    match (sum.data_type(), &data_type) {
        (DataType::Decimal128(_, of_sum), DataType::Decimal128(precision, scale)) => {
            Ok(Some(Formula {
                operation: 3,
                numbers: [10i128.pow((scale - of_sum).unsigned_abs().into()), 1],
                most: 10i128.pow((*precision).into()) - 1,
                data_type,
            }))
        }
        _ => Err(format!("there are no kernels for {}", function.name()).into()),
    }
}
