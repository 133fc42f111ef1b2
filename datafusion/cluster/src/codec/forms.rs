//! DataFusion's nodes that have a form on devices.

use std::sync::Arc;

use arrow_device_datafusion::DeviceForm;
use datafusion::arrow::compute::SortOptions;
use datafusion::error::{DataFusionError, Result};
use datafusion::physical_expr::{LexOrdering, PhysicalSortExpr};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::limit::{GlobalLimitExec, LocalLimitExec};
use datafusion::physical_plan::projection::{ProjectionExec, ProjectionExpr};
use datafusion::physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion::physical_plan::union::UnionExec;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};

use super::operator::{PlanDecoder, PlanEncoder};
use super::unreadable;
use super::values::{number, optional, read_schema, schema_message};
use super::wire::{self, Form};

/// The message of a form, without its device and children.
pub(super) fn message(node: &Arc<dyn ExecutionPlan>, encoder: &PlanEncoder<'_>) -> Result<Form> {
    Ok(
        if let Some(projection) = node.downcast_ref::<ProjectionExec>() {
            let column = |column: &ProjectionExpr| -> Result<_> {
                Ok(wire::Column {
                    expression: encoder.expression(&column.expr)?,
                    name: column.alias.clone(),
                })
            };
            let columns = projection
                .expr()
                .iter()
                .map(column)
                .collect::<Result<_>>()?;
            let schema = Some(schema_message(&projection.schema())?);
            Form::Projection(wire::Projection { columns, schema })
        } else if node.is::<UnionExec>() {
            Form::Union(wire::Union {})
        } else if let Some(limit) = node.downcast_ref::<GlobalLimitExec>() {
            Form::GlobalLimit(wire::GlobalLimit {
                skip: limit.skip() as u64,
                fetch: limit.fetch().map(|rows| rows as u64),
            })
        } else if let Some(limit) = node.downcast_ref::<LocalLimitExec>() {
            let fetch = limit.fetch() as u64;
            Form::LocalLimit(wire::LocalLimit { fetch })
        } else if node.is::<CoalescePartitionsExec>() {
            let fetch = node.fetch().map(|rows| rows as u64);
            Form::CoalescePartitions(wire::CoalescePartitions { fetch })
        } else if let Some(merge) = node.downcast_ref::<SortPreservingMergeExec>() {
            let by = |by: &PhysicalSortExpr| -> Result<_> {
                Ok(wire::SortBy {
                    expression: encoder.expression(&by.expr)?,
                    descending: by.options.descending,
                    nulls_first: by.options.nulls_first,
                })
            };
            Form::Merge(wire::Merge {
                order: merge.expr().iter().map(by).collect::<Result<_>>()?,
                fetch: merge.fetch().map(|rows| rows as u64),
            })
        } else {
            return Err(DataFusionError::NotImplemented(format!(
                "this release of arrow-device-cluster does not know the form of {} on a device, which cannot travel",
                node.name()
            )));
        },
    )
}

/// The form of a message.
pub(super) fn read(
    form: Option<Form>,
    decoder: &PlanDecoder<'_>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let form = form.ok_or_else(|| unreadable("an empty form"))?;
    let input = || decoder.only_child().cloned();
    let node: Arc<dyn ExecutionPlan> = match form {
        Form::Projection(projection) => read_projection(&projection, decoder)?,
        Form::Union(_) => {
            let children = decoder.children().to_vec();
            let columns = |plan: &Arc<dyn ExecutionPlan>| plan.schema().fields().len();
            if children
                .windows(2)
                .any(|two| columns(&two[0]) != columns(&two[1]))
            {
                return Err(unreadable("a union of different numbers of columns"));
            }
            UnionExec::try_new(children)?
        }
        Form::GlobalLimit(limit) => {
            let (skip, fetch) = (number(limit.skip)?, optional(limit.fetch)?);
            Arc::new(GlobalLimitExec::new(input()?, skip, fetch))
        }
        Form::LocalLimit(limit) => Arc::new(LocalLimitExec::new(input()?, number(limit.fetch)?)),
        Form::CoalescePartitions(coalesce) => {
            let node: Arc<dyn ExecutionPlan> = Arc::new(CoalescePartitionsExec::new(input()?));
            match optional(coalesce.fetch)? {
                None => node,
                fetch => node.with_fetch(fetch).ok_or_else(|| {
                    DataFusionError::Internal("CoalescePartitionsExec takes no limit".into())
                })?,
            }
        }
        Form::Merge(merge) => {
            let input = input()?;
            if input.output_partitioning().partition_count() != 1 {
                return Err(unreadable("a merge of several partitions on a device"));
            }
            let by = |by: &wire::SortBy| -> Result<_> {
                Ok(PhysicalSortExpr {
                    expr: decoder.expression(&by.expression, &input.schema())?,
                    options: SortOptions {
                        descending: by.descending,
                        nulls_first: by.nulls_first,
                    },
                })
            };
            let order = merge.order.iter().map(by).collect::<Result<Vec<_>>>()?;
            let order = LexOrdering::new(order).ok_or_else(|| unreadable("a merge by nothing"))?;
            let fetch = optional(merge.fetch)?;
            Arc::new(SortPreservingMergeExec::new(order, input).with_fetch(fetch))
        }
    };
    let name = node.name().to_owned();
    match DeviceForm::of(node, decoder.device().clone())? {
        Some(form) => Ok(form),
        None => Err(unreadable(format!("a {name} that has no form on a device"))),
    }
}

fn read_projection(
    projection: &wire::Projection,
    decoder: &PlanDecoder<'_>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let input = decoder.only_child()?;
    let schema = input.schema();
    let column = |column: &wire::Column| -> Result<_> {
        let expr = decoder.expression(&column.expression, &schema)?;
        let alias = column.name.clone();
        Ok(ProjectionExpr { expr, alias })
    };
    let columns = projection
        .columns
        .iter()
        .map(column)
        .collect::<Result<Vec<_>>>()?;
    let node = ProjectionExec::try_new(columns, input.clone())?;
    let (found, written) = (node.schema(), read_schema(&projection.schema)?);
    match found == written {
        true => Ok(Arc::new(node)),
        false => Err(unreadable(format!(
            "a projection whose rows have the schema {found} instead of {written}"
        ))),
    }
}
