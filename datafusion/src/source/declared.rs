//! What a source declares: its checks, and what is left of it after a projection.

use std::sync::Arc;

use arrow_device::{Error, Result};
use arrow_schema::{DataType, SchemaRef};
use datafusion_common::stats::Precision;
use datafusion_common::{Constraint, ScalarValue, Statistics};
use datafusion_physical_expr::equivalence::ProjectionMapping;
use datafusion_physical_expr::expressions::UnKnownColumn;
use datafusion_physical_expr::utils::collect_columns;
use datafusion_physical_expr::{EquivalenceProperties, Partitioning, PhysicalExpr};
use datafusion_physical_plan::PlanProperties;
use datafusion_physical_plan::execution_plan::{EmissionType, SchedulingType};

use super::contract::DeviceSource;

/// Checks what a source declares against its schema.
pub(super) fn check(source: &dyn DeviceSource) -> Result<()> {
    let partitions = match source.partitioning() {
        Partitioning::Hash(expressions, count) => {
            expressions
                .iter()
                .try_for_each(|e| check_expression(source, "partitioning", e))?;
            count
        }
        Partitioning::Range(range) => {
            let mut by = range.ordering().iter();
            by.try_for_each(|e| check_expression(source, "partitioning", &e.expr))?;
            range.partition_count()
        }
        other => other.partition_count(),
    };
    for order in source.orderings() {
        let mut by = order.iter();
        by.try_for_each(|e| check_expression(source, "an order", &e.expr))?;
    }
    let columns = source.schema().fields().len();
    for constraint in source.constraints().into_iter().flat_map(|c| c.iter()) {
        let (Constraint::PrimaryKey(of) | Constraint::Unique(of)) = constraint;
        if let Some(column) = of.iter().find(|column| **column >= columns) {
            return Err(declares(
                source,
                format!("a constraint on column {column} of {columns}"),
            ));
        }
    }
    check_statistics(source, &source.statistics(None))?;
    (0..partitions).try_for_each(|i| check_statistics(source, &source.statistics(Some(i))))
}

fn check_expression(
    source: &dyn DeviceSource,
    what: &str,
    expression: &Arc<dyn PhysicalExpr>,
) -> Result<()> {
    let schema = source.schema();
    let is_there =
        |name: &str, index: usize| schema.fields().get(index).is_some_and(|f| f.name() == name);
    match collect_columns(expression)
        .into_iter()
        .find(|c| !is_there(c.name(), c.index()))
    {
        None => Ok(()),
        Some(column) => Err(declares(
            source,
            format!("{what} by {expression}, but has no column {column}"),
        )),
    }
}

/// Checks the number of columns, and the types of their values.
fn check_statistics(source: &dyn DeviceSource, statistics: &Statistics) -> Result<()> {
    let schema = source.schema();
    let (found, columns) = (statistics.column_statistics.len(), schema.fields().len());
    if found != columns {
        let what = format!("statistics of {found} columns for a table of {columns} columns");
        return Err(declares(source, what));
    }
    for (field, column) in schema.fields().iter().zip(&statistics.column_statistics) {
        for (name, value) in [("min", &column.min_value), ("max", &column.max_value)] {
            if let Some(found) = other_type(value, field.data_type()) {
                let (name_of, expected) = (field.name(), field.data_type());
                return Err(declares(
                    source,
                    format!("a {name} of type {found} for column {name_of} of type {expected}"),
                ));
            }
        }
    }
    Ok(())
}

fn other_type(value: &Precision<ScalarValue>, expected: &DataType) -> Option<DataType> {
    let found = value.get_value()?.data_type();
    (found != *expected).then_some(found)
}

fn declares(source: &dyn DeviceSource, what: String) -> Error {
    let device = source.device();
    Error::InvalidArgument(
        format!("the source of a DeviceTable on {device} declares {what}").into(),
    )
}

/// The properties of a scan of these columns.
pub(super) fn properties(
    source: &dyn DeviceSource,
    schema: SchemaRef,
    projection: &[usize],
) -> datafusion_common::Result<PlanProperties> {
    let table = source.schema();
    let mapping = ProjectionMapping::from_indices(projection, &table)?;
    let of_table = EquivalenceProperties::new_with_orderings(table, source.orderings());
    let partitioning = source.partitioning().project(&mapping, &of_table);
    let partitioning = match partitioning {
        // By a column that is not returned, nothing above can be distributed.
        Partitioning::Hash(by, count) if by.iter().any(|e| e.is::<UnKnownColumn>()) => {
            Partitioning::UnknownPartitioning(count)
        }
        other => other,
    };
    // Not with `of_table`, whose projection would keep the table's column numbers.
    let constraints = source.constraints().and_then(|c| c.project(projection));
    let of_scan = of_table.project(&mapping, schema);
    Ok(PlanProperties::new(
        of_scan.with_constraints(constraints.unwrap_or_default()),
        partitioning,
        EmissionType::Incremental,
        source.boundedness(),
    )
    .with_scheduling_type(SchedulingType::Cooperative))
}

/// The statistics of a scan of these columns.
pub(super) fn project(statistics: Statistics, projection: Option<&Arc<[usize]>>) -> Statistics {
    match projection {
        None => statistics,
        Some(_) => Statistics {
            total_byte_size: Precision::Absent,
            ..statistics.project(projection)
        },
    }
}
