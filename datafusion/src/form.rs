//! [`DeviceForm`]: DataFusion's nodes that need no kernel, on a device.

use std::collections::HashSet;
use std::sync::Arc;
use std::task::{Poll, ready};

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{DeviceRecordBatch, Result as DeviceResult};
use arrow_schema::SchemaRef;
use datafusion_common::{DataFusionError, Result};
use datafusion_physical_expr::expressions::{CastExpr, Column};
use datafusion_physical_expr::{Partitioning, PhysicalExpr};
use datafusion_physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion_physical_plan::limit::{GlobalLimitExec, LocalLimitExec};
use datafusion_physical_plan::projection::ProjectionExec;
use datafusion_physical_plan::repartition::RepartitionExec;
use datafusion_physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion_physical_plan::union::UnionExec;
use datafusion_physical_plan::{
    ExecutionPlan, ExecutionPlanProperties, replace_children_if_necessary,
};
use futures::StreamExt;
use futures::stream::poll_fn;

use super::exec::DeviceExec;
use super::inputs::merged;
use super::plugin::{DeviceOperator, DevicePlugin, DeviceTask, Verdict};
use super::spec::DeviceSpec;
use super::stream::{SendableDeviceStream, device_stream};
use super::transitions::below::operator;
use super::upload::with_types;

/// One of DataFusion's nodes that needs no kernel, as an operator on a device, which passes on batches that stay there.
///
/// | DataFusion's node | this operator | what it does |
/// | --- | --- | --- |
/// | `ProjectionExec` of columns: dropped, reordered, renamed, repeated | `DeviceProjectionExec` | shares the columns |
/// | `UnionExec` | `DeviceUnionExec` | passes batches on |
/// | `GlobalLimitExec`, `LocalLimitExec` | `DeviceLimitExec` | slices the first and the last batch that it returns |
/// | `CoalescePartitionsExec` | `DeviceCoalescePartitionsExec` | runs each of several partitions on a task of its own, one batch ahead; passes the batches of a single one on |
/// | `SortPreservingMergeExec` over one partition | `DeviceSortPreservingMergeExec` | passes batches on |
///
/// Nothing is copied and no device memory is allocated, nothing waits, and no device work is queued, as long as the children are on
/// the same device. (Otherwise they are moved.)
///
/// [`DeviceRule`](crate::DeviceRule) makes these operators of nodes that stand between operators on one device. They can be made by hand, too:
///
/// ```
/// # use std::sync::Arc;
/// # use arrow_device::Devices;
/// use arrow_device_datafusion::{DeviceExec, DeviceForm, DeviceTable};
/// # use datafusion::physical_plan::{ExecutionPlan, limit::LocalLimitExec};
/// # fn main() -> datafusion::error::Result<()> {
/// # let batch = arrow_array::record_batch!(("a", Int64, [1, 2, 3])).unwrap();
/// # let device = Devices::cpu();
/// # let table = DeviceTable::from_batches(batch.schema(), device.clone(), vec![vec![device.upload(&batch).unwrap()]]).unwrap();
/// let scan = Arc::new(DeviceExec::from(table.scan_on_device(None, None)?));
/// let limit: Arc<dyn ExecutionPlan> = Arc::new(LocalLimitExec::new(scan, 2));
/// let limit = DeviceForm::of(limit, device)?.expect("a limit needs no kernel");
/// assert_eq!(limit.name(), "DeviceLimitExec");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DeviceForm {
    kind: Kind,
    name: String,
}

/// Which of DataFusion's nodes may become operators on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Forms {
    All,
    /// Those that move no rows between partitions.
    WithoutExchanges,
}

#[derive(Debug)]
enum Kind {
    Projection(Arc<[usize]>),
    Union,
    /// After so many rows.
    Limit(usize),
    Gather,
}

impl Kind {
    fn of(node: &Arc<dyn ExecutionPlan>) -> Option<Self> {
        Some(if let Some(projection) = node.downcast_ref() {
            Self::Projection(columns(projection)?)
        } else if node.is::<UnionExec>() {
            Self::Union
        } else if let Some(limit) = node.downcast_ref::<GlobalLimitExec>() {
            Self::Limit(limit.skip())
        } else if node.is::<LocalLimitExec>() {
            Self::Limit(0)
        } else if node.is::<CoalescePartitionsExec>() {
            Self::Gather
        } else {
            let merge = node.downcast_ref::<SortPreservingMergeExec>()?;
            let one = merge.input().output_partitioning().partition_count() == 1;
            one.then_some(Self::Gather)?
        })
    }
}

/// The columns of a projection that has no other expressions. DataFusion's unions put casts to another field of the same type
/// above columns, for its name, metadata, and nulls.
fn columns(projection: &ProjectionExec) -> Option<Arc<[usize]>> {
    let input = projection.input().schema();
    let column = |expression: &Arc<dyn PhysicalExpr>| {
        let column = match expression.downcast_ref::<CastExpr>() {
            Some(cast) => {
                let column = cast.expr().downcast_ref::<Column>()?;
                let field = input.fields().get(column.index())?;
                let same = field.data_type() == cast.cast_type();
                let nulls = cast.target_nullable() == Some(false) && field.is_nullable();
                (same && !nulls).then_some(column)
            }
            None => expression.downcast_ref::<Column>(),
        }?;
        (column.index() < input.fields().len()).then_some(column.index())
    };
    let expressions = projection.expr().iter();
    expressions.map(|one| column(&one.expr)).collect()
}

/// Whether a projection has fewer columns than its input and none twice, and no other expressions.
pub(super) fn drops_columns(projection: &ProjectionExec) -> bool {
    columns(projection).is_some_and(|columns| {
        let distinct: HashSet<_> = columns.iter().collect();
        distinct.len() == columns.len()
            && columns.len() < projection.input().schema().fields().len()
    })
}

/// Whether a node's rows stay in the partitions in which they are, so that it may be below or above a round-robin repartition.
pub(super) fn keeps_partitions(node: &Arc<dyn ExecutionPlan>) -> bool {
    matches!(Kind::of(node), Some(Kind::Projection(_) | Kind::Union))
}

/// A round-robin repartition without an order to keep, which gives rows to any partition.
pub(super) fn round_robin(plan: &Arc<dyn ExecutionPlan>) -> Option<&RepartitionExec> {
    let repartition = plan.downcast_ref::<RepartitionExec>()?;
    let round_robin = matches!(repartition.partitioning(), Partitioning::RoundRobinBatch(_));
    (round_robin && !repartition.preserve_order()).then_some(repartition)
}

/// The operator that `plan` is on a device, if its rows come from that device and only nodes that may take their forms stand
/// between.
pub(super) fn lifted(
    plan: &Arc<dyn ExecutionPlan>,
    device: &DeviceSpec,
    forms: Forms,
) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    let operator = operator(plan);
    if let Some(node) = DeviceExec::of(operator) {
        return Ok((node.device() == device).then(|| operator.clone()));
    }
    match Kind::of(operator) {
        Some(kind) if forms == Forms::All || !matches!(kind, Kind::Gather) => {}
        _ => return Ok(None),
    }
    let children = operator.children().into_iter();
    let children = children.map(|child| lifted(child, device, forms));
    let Some(children) = children.collect::<Result<Option<_>>>()? else {
        return Ok(None);
    };
    let node = replace_children_if_necessary(operator.clone(), children)?;
    DeviceForm::bare(node, device.clone())
}

/// Returns the device from which the rows of `plan` come, if they are there or could stay there: between `plan` and the device
/// operators below it there are only transitions and nodes that have a form. `None` for rows of the host, and of several devices.
pub(super) fn device_of(plan: &Arc<dyn ExecutionPlan>) -> Option<DeviceSpec> {
    let node = operator(plan);
    if let Some(node) = DeviceExec::of(node) {
        return Some(node.device().clone());
    }
    Kind::of(node)?;
    let mut of = node.children().into_iter().map(device_of);
    let first = of.next()??;
    of.all(|other| other.as_ref() == Some(&first))
        .then_some(first)
}

impl DeviceForm {
    /// Returns the form of a node on a device, with the node's children, or `None` if the node has none.
    ///
    /// Children that are such nodes themselves, over operators on that device, take their forms, too. Other children stay as
    /// they are.
    ///
    /// # Errors
    /// Returns an error if a node does not accept such children.
    pub fn of(
        node: Arc<dyn ExecutionPlan>,
        device: impl Into<DeviceSpec>,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        let device = device.into();
        let children = node.children().into_iter();
        let children =
            children.map(|c| Ok(lifted(c, &device, Forms::All)?.unwrap_or_else(|| c.clone())));
        let children = children.collect::<Result<_>>()?;
        Self::bare(replace_children_if_necessary(node, children)?, device)
    }

    /// The form of a node over the children that it has.
    fn bare(
        node: Arc<dyn ExecutionPlan>,
        device: DeviceSpec,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        if Kind::of(&node).is_none() {
            return Ok(None);
        }
        let forms: Arc<dyn DevicePlugin> = Arc::new(All);
        let mut form = DeviceExec::in_place_of(node, device, &forms)?;
        form.passes_on = true;
        Ok(Some(Arc::new(form)))
    }
}

/// What makes the forms.
#[derive(Debug)]
struct All;

impl DevicePlugin for All {
    fn can_run(&self, node: &Arc<dyn ExecutionPlan>, _: &DeviceSpec) -> Verdict {
        Kind::of(node).map_or(Verdict::Unknown, |_| Verdict::RunsThere)
    }

    fn replace(&self, node: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn DeviceOperator>> {
        let name = node.name();
        let kind = Kind::of(node)
            .ok_or_else(|| DataFusionError::Plan(format!("no device form of this {name}")))?;
        let name = match kind {
            Kind::Limit(_) => "DeviceLimitExec".to_owned(),
            _ => format!("Device{name}"),
        };
        Ok(Arc::new(DeviceForm { kind, name }))
    }
}

impl DeviceOperator for DeviceForm {
    fn name(&self) -> &str {
        &self.name
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let internal = |what: &str| DataFusionError::Internal(format!("{}: {what}", self.name()));
        let (schema, fetch) = (task.node().schema(), task.node().fetch());
        match &self.kind {
            Kind::Projection(columns) => Ok(with_columns(task.input(0)?, schema, columns.clone())),
            Kind::Union => {
                let mut own = task.partition;
                for (i, child) in task.node().children().iter().enumerate() {
                    let partitions = child.output_partitioning().partition_count();
                    if own < partitions {
                        let all = (0..schema.fields().len()).collect();
                        return Ok(with_columns(task.input_partition(i, own)?, schema, all));
                    }
                    own -= partitions;
                }
                Err(internal("a partition of no child"))
            }
            Kind::Limit(skip) => {
                let partitions = task.node().output_partitioning().partition_count();
                match task.child(0)?.output_partitioning().partition_count() == partitions {
                    true => Ok(limited(task.input(0)?, *skip, fetch)),
                    false => Err(internal("a limit over several partitions")),
                }
            }
            Kind::Gather => {
                let child = task.child(0)?;
                let stream = match child.output_partitioning().partition_count() {
                    1 => task.input(0)?,
                    _ => merged(child, task.device, task.context, Some(task.target.clone()))?,
                };
                Ok(limited(stream, 0, fetch))
            }
        }
    }
}

/// A stream of some of the columns, perhaps renamed. Nothing is moved.
fn with_columns(
    stream: SendableDeviceStream,
    schema: SchemaRef,
    columns: Arc<[usize]>,
) -> SendableDeviceStream {
    let (device_type, from) = (stream.device_type(), stream.schema());
    // In the types that they have on the device.
    let schema = with_types(&schema, |i, _| {
        let field = from.fields().get(*columns.get(i)?)?;
        Some(field.data_type().clone())
    });
    let own = schema.clone();
    let of = move |batch: DeviceRecordBatch| {
        if columns.iter().copied().eq(0..batch.num_columns()) && *batch.schema_ref() == own {
            return Ok(batch);
        }
        let columns = columns.iter().map(|&i| batch.column(i));
        let columns = columns.collect::<DeviceResult<Vec<_>>>()?;
        let (device, rows) = (batch.device(), batch.num_rows());
        DeviceRecordBatch::try_new_with_rows(device, own.clone(), &columns, rows)
    };
    let batches = stream.map(move |batch| batch.and_then(&of));
    device_stream(batches, schema, device_type)
}

/// A stream without its first `skip` rows, and with at most `fetch` of those that follow; batches without such rows are left out. Once enough rows
/// have come, their producer ends. Nothing is moved.
pub(super) fn limited(
    stream: SendableDeviceStream,
    mut skip: usize,
    fetch: Option<usize>,
) -> SendableDeviceStream {
    if (skip, fetch) == (0, None) {
        return stream;
    }
    let (schema, device_type) = (stream.schema(), stream.device_type());
    let mut left = fetch.unwrap_or(usize::MAX);
    let mut stream = Some(stream).filter(|_| left > 0);
    let batches = poll_fn(move |cx| {
        while let Some(own) = &mut stream {
            let Some(batch) = ready!(own.poll_next_unpin(cx)?) else {
                break;
            };
            let rows = batch.num_rows();
            let skipped = skip.min(rows);
            skip -= skipped;
            let wanted = left.min(rows - skipped);
            left -= wanted;
            if left == 0 {
                stream = None;
            }
            match wanted {
                0 => {}
                all if all == rows => return Poll::Ready(Some(Ok(batch))),
                _ => return Poll::Ready(Some(batch.slice(skipped, wanted))),
            }
        }
        Poll::Ready(None)
    });
    device_stream(batches, schema, device_type)
}
