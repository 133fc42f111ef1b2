//! Nodes of plans.

use std::sync::Arc;

use arrow_device::Device;
use arrow_device_datafusion::{
    DeviceCoalesceBatchesExec, DeviceForm, DeviceSpec, DeviceTable, DeviceToHostExec,
    HostToDeviceExec,
};
use datafusion::arrow::compute::SortOptions;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{Column, binary, col, lit};
use datafusion::physical_expr::{LexOrdering, Partitioning, PhysicalExpr, PhysicalSortExpr};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::projection::{ProjectionExec, ProjectionExpr};
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion::physical_plan::union::UnionExec;

use crate::kit::*;

pub(crate) fn up(child: Plan, device: &Device) -> Plan {
    HostToDeviceExec::default().above(child, device.clone())
}

pub(crate) fn down(child: Plan) -> Plan {
    Arc::new(DeviceToHostExec::new(child))
}

/// A node on the host.
pub(crate) fn on_host(child: Plan) -> Plan {
    Arc::new(CoalescePartitionsExec::new(child))
}

/// A device scan, and nothing above it.
pub(crate) async fn device_leaf(table: Arc<DeviceTable>) -> Plan {
    scan(table).await.children()[0].clone()
}

/// One of ten rows.
pub(crate) async fn device_scan(device: &Device) -> Plan {
    device_leaf(device_table(device, &[vec![rows(0, 10)]])).await
}

pub(crate) async fn host_scan() -> Plan {
    scan(host_table(&[vec![rows(0, 10)]])).await
}

/// The device form of a node, as a node.
pub(crate) fn form(node: Plan, device: impl Into<DeviceSpec>) -> Plan {
    DeviceForm::of(node, device).unwrap().expect("a form")
}

pub(crate) fn joining(child: Plan, device: &Sim, rows: usize) -> Plan {
    DeviceCoalesceBatchesExec::new(rows).above(child, device)
}

pub(crate) fn projected(child: Plan, expr: Arc<dyn PhysicalExpr>) -> Plan {
    let alias = "x".to_owned();
    let expr = ProjectionExpr { expr, alias };
    Arc::new(ProjectionExec::try_new([expr], child).unwrap())
}

/// A node on the host that has no form on a device.
pub(crate) fn computed(child: Plan) -> Plan {
    let schema = child.schema();
    let (b, one) = (col("b", &schema).unwrap(), lit(1i64));
    projected(child, binary(b, Operator::Plus, one, &schema).unwrap())
}

/// Columns by number, with new names.
pub(crate) fn project(child: Plan, columns: &[(usize, &str)]) -> Plan {
    let schema = child.schema();
    let expr = columns.iter().map(|(i, name)| ProjectionExpr {
        expr: Arc::new(Column::new(schema.field(*i).name(), *i)),
        alias: (*name).to_owned(),
    });
    Arc::new(ProjectionExec::try_new(expr, child).unwrap())
}

pub(crate) fn union(children: impl Into<Vec<Plan>>) -> Plan {
    UnionExec::try_new(children.into()).unwrap()
}

pub(crate) fn round_robin(child: Plan, outputs: usize) -> Plan {
    let to = Partitioning::RoundRobinBatch(outputs);
    Arc::new(RepartitionExec::try_new(child, to).unwrap())
}

/// A host operator that the tests' plugin supports.
pub(crate) fn filter(child: Plan) -> Plan {
    let schema = child.schema();
    let predicate = binary(col("a", &schema).unwrap(), Operator::Lt, lit(5i64), &schema);
    Arc::new(FilterExec::try_new(predicate.unwrap(), child).unwrap())
}

fn by_a(plan: &Plan) -> LexOrdering {
    let a = col("a", &plan.schema()).unwrap();
    LexOrdering::new([PhysicalSortExpr::new(a, SortOptions::default())]).unwrap()
}

pub(crate) fn sort(child: Plan) -> Plan {
    Arc::new(SortExec::new(by_a(&child), child))
}

pub(crate) fn merge(child: Plan, fetch: Option<usize>) -> Plan {
    Arc::new(SortPreservingMergeExec::new(by_a(&child), child).with_fetch(fetch))
}
