//! What a source declares: its checks, and what is left of it after a projection.

use arrow_device::{Error, Result};
use arrow_schema::SchemaRef;
use datafusion_common::{Constraint, ScalarValue, Statistics};
use datafusion_physical_expr::equivalence::ProjectionMapping;
use datafusion_physical_expr::expressions::{Column, UnKnownColumn};
use datafusion_physical_expr::utils::collect_columns;
use datafusion_physical_expr::{EquivalenceProperties, Partitioning};
use datafusion_physical_plan::PlanProperties;
use datafusion_physical_plan::execution_plan::{EmissionType, SchedulingType};

use super::contract::DeviceSource;

/// Checks what a source declares against its schema.
pub(super) fn check(source: &dyn DeviceSource) -> Result<()> {
    let (schema, partitioning) = (source.schema(), source.partitioning());
    let by = match &partitioning {
        Partitioning::Hash(by, _) => by.clone(),
        Partitioning::Range(range) => range.ordering().iter().map(|e| e.expr.clone()).collect(),
        _ => Vec::new(),
    };
    let orders = source.orderings();
    let orders = orders.iter().flat_map(|order| order.iter());
    let by = by.iter().map(|e| ("partitioning", e));
    for (what, expression) in by.chain(orders.map(|e| ("an order", &e.expr))) {
        let field = |column: &Column| schema.fields().get(column.index());
        let is_there = |c: &Column| field(c).is_some_and(|field| field.name() == c.name());
        let mut columns = collect_columns(expression).into_iter();
        if let Some(column) = columns.find(|column| !is_there(column)) {
            let what = format!("{what} by {expression}, but has no column {column}");
            return declares(source, what);
        }
    }
    let columns = schema.fields().len();
    for constraint in source.constraints().into_iter().flat_map(|c| c.iter()) {
        let (Constraint::PrimaryKey(of) | Constraint::Unique(of)) = constraint;
        if let Some(column) = of.iter().find(|column| **column >= columns) {
            return declares(
                source,
                format!("a constraint on column {column} of {columns}"),
            );
        }
    }
    check_statistics(source, &source.statistics(None))?;
    let mut partitions = 0..partitioning.partition_count();
    partitions.try_for_each(|i| check_statistics(source, &source.statistics(Some(i))))
}

/// Checks the number of columns, and the types of their values.
fn check_statistics(source: &dyn DeviceSource, statistics: &Statistics) -> Result<()> {
    let schema = source.schema();
    let (found, columns) = (statistics.column_statistics.len(), schema.fields().len());
    if found != columns {
        let what = format!("statistics of {found} columns for a table of {columns} columns");
        return declares(source, what);
    }
    for (field, column) in schema.fields().iter().zip(&statistics.column_statistics) {
        for (name, value) in [("min", &column.min_value), ("max", &column.max_value)] {
            let (name_of, expected) = (field.name(), field.data_type());
            let found = value.get_value().map(ScalarValue::data_type);
            if let Some(found) = found.filter(|found| found != expected) {
                let what =
                    format!("a {name} of type {found} for column {name_of} of type {expected}");
                return declares(source, what);
            }
        }
    }
    Ok(())
}

fn declares(source: &dyn DeviceSource, what: String) -> Result<()> {
    let device = source.device();
    let what = format!("the source of a DeviceTable on {device} declares {what}");
    Err(Error::InvalidArgument(what.into()))
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
