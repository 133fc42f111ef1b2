//! Filters on their way to a source.

use std::sync::Arc;

use arrow_schema::SchemaRef;
use datafusion_common::tree_node::{Transformed, TreeNode};
use datafusion_common::{DFSchema, Result, internal_datafusion_err};
use datafusion_expr::execution_props::ExecutionProps;
use datafusion_expr::expr_rewriter::unnormalize_col;
use datafusion_expr::physical_planning_context::PhysicalPlanningContext;
use datafusion_expr::{Expr, TableProviderFilterPushDown};
use datafusion_physical_expr::expressions::Column;
use datafusion_physical_expr::{PhysicalExpr, create_physical_expr};

use super::contract::DeviceSource;

/// The filter over the table's columns.
fn over_table(
    filter: &Expr,
    schema: &SchemaRef,
    properties: &ExecutionProps,
) -> Result<Arc<dyn PhysicalExpr>> {
    let filter = unnormalize_col(filter.clone());
    let schema = DFSchema::try_from(schema.clone())?;
    create_physical_expr(
        &filter,
        &schema,
        properties,
        &PhysicalPlanningContext::default(),
    )
}

/// How the source would apply each filter.
pub(super) fn supported(
    source: &dyn DeviceSource,
    filters: &[&Expr],
) -> Vec<TableProviderFilterPushDown> {
    let (schema, properties) = (source.schema(), ExecutionProps::new());
    let supported = |filter: &&Expr| match over_table(filter, &schema, &properties) {
        Ok(filter) => source.supports_filter(&filter),
        // The plan's own filter evaluates it, or reports why it cannot.
        Err(_) => TableProviderFilterPushDown::Unsupported,
    };
    filters.iter().map(supported).collect()
}

/// The filters over the table's columns.
pub(super) fn over_columns(
    source: &dyn DeviceSource,
    filters: &[Expr],
    properties: &ExecutionProps,
) -> Result<Vec<Arc<dyn PhysicalExpr>>> {
    let schema = source.schema();
    let over_table = |filter| over_table(filter, &schema, properties);
    filters.iter().map(over_table).collect()
}

/// A filter over the columns of a scan, over those of its table.
pub(super) fn of_projected(
    filter: &Arc<dyn PhysicalExpr>,
    projection: Option<&[usize]>,
) -> Result<Arc<dyn PhysicalExpr>> {
    let Some(projection) = projection else {
        return Ok(filter.clone());
    };
    let renumbered = filter.clone().transform_down(|expression| {
        let Some(column) = expression.downcast_ref::<Column>() else {
            return Ok(Transformed::no(expression));
        };
        let index = projection.get(column.index()).ok_or_else(|| {
            let columns = projection.len();
            internal_datafusion_err!("{column} of a scan of {columns} columns")
        })?;
        let column = Column::new(column.name(), *index);
        Ok(Transformed::yes(Arc::new(column) as Arc<dyn PhysicalExpr>))
    })?;
    Ok(renumbered.data)
}
