//! Every node travels: it is the same there, and returns the same rows.

use std::sync::Arc;

use arrow_device::{ArrowDeviceType, DeviceId};
use arrow_device_cluster::codec::DeviceTables;
use arrow_device_datafusion::{
    DeviceCoalesceBatchesExec, DeviceExec, DeviceForm, DeviceRule, DeviceSpec, DeviceToDeviceExec,
    DeviceToHostExec, HostToDeviceExec,
};
use datafusion::logical_expr::TableProviderFilterPushDown;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::physical_expr::expressions::{Column, binary, col, lit};
use datafusion::physical_expr::{LexOrdering, PhysicalSortExpr};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::filter::{FilterExec, FilterExecBuilder};
use datafusion::physical_plan::limit::{GlobalLimitExec, LocalLimitExec};
use datafusion::physical_plan::projection::{ProjectionExec, ProjectionExpr};
use datafusion::physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion::physical_plan::union::UnionExec;

use crate::device_filter::FilterPlugin;
use crate::kit::{
    Made, SIM, bytes, host_rows, node, read, rows, scan, text, travel, worker, worker_with_t,
};

/// A node in its form on a device.
fn form(plan: impl ExecutionPlan + 'static) -> Arc<dyn ExecutionPlan> {
    DeviceForm::of(Arc::new(plan), SIM).unwrap().unwrap()
}

fn down(plan: Arc<dyn ExecutionPlan>) -> Arc<dyn ExecutionPlan> {
    Arc::new(DeviceToHostExec::new(plan))
}

/// Sends the download of a plan, and checks that it returns what it would have returned here.
async fn same(plan: Arc<dyn ExecutionPlan>, expected_rows: usize) {
    let (here, there) = (worker_with_t(), worker_with_t());
    let plan = down(plan);
    let sent = travel(plan.clone(), &there);
    let found = rows(sent, &there).await;
    assert_eq!(found.num_rows(), expected_rows);
    assert_eq!(found, rows(plan, &here).await);
}

#[tokio::test]
async fn downloads_and_scans() {
    same(scan(2), 200).await;
}

#[tokio::test]
async fn uploads() {
    same(HostToDeviceExec::default().above(host_rows(2), SIM), 200).await;
}

#[tokio::test]
async fn moves_between_devices() {
    let cpu = DeviceSpec::any(ArrowDeviceType::CPU);
    let moved = DeviceToDeviceExec::above(scan(2), cpu);
    assert!(text(&moved).contains("DeviceToDeviceExec: device=cpu"));
    same(moved, 200).await;
}

#[tokio::test]
async fn joined_batches() {
    let joined = DeviceCoalesceBatchesExec::new(1000).above(scan(2), SIM);
    assert!(text(&joined).contains("rows=1000"));
    same(joined, 200).await;
}

#[tokio::test]
async fn projections() {
    let columns = [("s", 2, "text"), ("id", 0, "id"), ("s", 2, "s")];
    let columns = columns.map(|(name, index, alias)| ProjectionExpr {
        expr: Arc::new(Column::new(name, index)),
        alias: alias.into(),
    });
    same(
        form(ProjectionExec::try_new(columns, scan(2)).unwrap()),
        200,
    )
    .await;
}

#[tokio::test]
async fn unions() {
    let union = UnionExec::try_new(vec![
        scan(2),
        HostToDeviceExec::default().above(host_rows(3), SIM),
    ]);
    same(DeviceForm::of(union.unwrap(), SIM).unwrap().unwrap(), 500).await;
}

#[tokio::test]
async fn limits() {
    same(form(LocalLimitExec::new(scan(2), 7)), 14).await;
    let one = || {
        form(CoalescePartitionsExec::new(
            HostToDeviceExec::default().above(host_rows(1), SIM),
        ))
    };
    same(form(GlobalLimitExec::new(one(), 3, Some(5))), 5).await;
    same(form(GlobalLimitExec::new(one(), 90, None)), 10).await;
}

#[tokio::test]
async fn exchanges() {
    let coalesced: Arc<dyn ExecutionPlan> = Arc::new(CoalescePartitionsExec::new(scan(2)));
    let first = coalesced.with_fetch(Some(9)).unwrap();
    let of = |plan| DeviceForm::of(plan, SIM).unwrap().unwrap();
    let there = worker_with_t();
    let sent = travel(down(of(coalesced)), &there);
    assert_eq!(rows(sent, &there).await.num_rows(), 200);
    let sent = travel(down(of(first)), &there);
    assert_eq!(rows(sent, &there).await.num_rows(), 9);
    let by = |name| PhysicalSortExpr::new_default(col(name, &scan(1).schema()).unwrap());
    let by = LexOrdering::new([by("id").desc().nulls_last(), by("s")]).unwrap();
    let up = HostToDeviceExec::default().above(host_rows(1), SIM);
    let merged = SortPreservingMergeExec::new(by, up).with_fetch(Some(11));
    same(form(merged), 11).await;
}

/// The plugin's filter, with everything that it has, through its codec.
#[tokio::test]
async fn operators_of_plugins() {
    let schema = scan(2).schema();
    let more = binary(
        col("id", &schema).unwrap(),
        datafusion::logical_expr::Operator::Gt,
        lit(30i64),
        &schema,
    );
    let filter = FilterExecBuilder::new(more.unwrap(), scan(2))
        .apply_projection(Some(vec![2, 0]))
        .unwrap()
        .with_fetch(Some(40));
    let filter: Arc<dyn ExecutionPlan> = Arc::new(filter.build().unwrap());
    let rule = DeviceRule::default().with_plugin(Arc::new(FilterPlugin::default()));
    let plan = rule.rewrite(filter, &Default::default()).unwrap();
    let shown = text(&plan);
    assert!(
        shown.contains("DeviceFilterExec: device=sim, id@0 > 30"),
        "{shown}"
    );
    assert!(
        shown.contains("projection=[s@2, id@0]") && shown.contains("fetch=40"),
        "{shown}"
    );
    let (here, there) = (worker_with_t(), worker_with_t());
    let sent = travel(plan.clone(), &there);
    let found = rows(sent, &there).await;
    assert_eq!(found.num_rows(), 80);
    assert_eq!(found, rows(plan, &here).await);
}

/// Columns, limit, filters and order of a scan.
#[tokio::test]
async fn scans_with_all_they_have() {
    let made = |filters: TableProviderFilterPushDown| {
        let made = Made {
            ordered: true,
            filters,
            ..Made::new(2)
        };
        made.table()
    };
    let exact = TableProviderFilterPushDown::Exact;
    let table = made(exact.clone()).with_name("sorted");
    let schema = table.source().schema();
    let more = binary(
        col("id", &schema).unwrap(),
        datafusion::logical_expr::Operator::GtEq,
        lit(95i64),
        &schema,
    );
    let scan = table.scan_on_device(Some(&[0, 2]), Some(20)).unwrap();
    let scan = scan.with_filters(vec![more.unwrap()]).unwrap();
    let plan = down(node(scan));
    let shown = text(&plan);
    for part in [
        "partitions=2, projection=[id, s], filters=[id@0 >= 95], fetch=20",
        "order=[id@0 ASC]",
    ] {
        assert!(shown.contains(part), "{shown}");
    }
    let of = |filters| DeviceTables::of([("sorted", made(filters))]);
    let there = worker(of(exact));
    let sent = travel(plan.clone(), &there);
    assert_eq!(rows(sent, &there).await.num_rows(), 5 + 20);
    // Nobody else applies the filter.
    let there = worker(of(TableProviderFilterPushDown::Inexact));
    let e = read(&bytes(&plan).unwrap(), &there.task_ctx()).unwrap_err();
    assert!(
        e.to_string()
            .contains("does not apply the filter id@0 >= 95 exactly"),
        "{e}"
    );
}

/// An `INSERT` goes into the table of the process that runs it.
#[tokio::test]
async fn inserts() {
    let device = crate::kit::sim();
    let schema = crate::kit::batch(0).schema();
    let memory = |rows| {
        let batches = vec![rows];
        arrow_device_datafusion::DeviceTable::from_batches(schema.clone(), device.clone(), batches)
    };
    let planned = memory(vec![]).unwrap().with_name("kept");
    let insert = planned
        .insert_on_device(host_rows(2), InsertOp::Append)
        .unwrap();
    let plan: Arc<dyn ExecutionPlan> = Arc::new(insert);
    let kept = memory(vec![crate::kit::upload(&crate::kit::batch(7), &device)]).unwrap();
    let there = worker(DeviceTables::of([("kept", kept.clone())]));
    let sent = read(&bytes(&plan).unwrap(), &there.task_ctx()).unwrap();
    assert_eq!(sent.name(), "DeviceInsertExec");
    let inserted = rows(sent, &there).await;
    assert_eq!(
        inserted.column(0).as_ref(),
        &datafusion::arrow::array::UInt64Array::from(vec![200])
    );
    let all = rows(down(node(kept.scan_on_device(None, None).unwrap())), &there).await;
    assert_eq!(all.num_rows(), 300);
    let none = rows(
        down(node(planned.scan_on_device(None, None).unwrap())),
        &there,
    )
    .await;
    assert_eq!(none.num_rows(), 0);
}

/// A description of an opened device means the device of its type and id on the other side.
#[tokio::test]
async fn descriptions_of_devices() {
    let device = crate::kit::sim();
    let up = HostToDeviceExec::default().above(host_rows(1), &device);
    let there = worker_with_t();
    let sent = travel(up, &there);
    let spec = DeviceExec::of(&sent).unwrap().device().clone();
    assert_eq!(spec, DeviceSpec::from(device.id()));
    assert_ne!(spec, DeviceSpec::from(&device));
    let absent = DeviceId::new(ArrowDeviceType::EXT_DEV, 123_456);
    let up = HostToDeviceExec::default().above(host_rows(1), absent);
    let sent = travel(down(up), &there);
    let e = sent.execute(0, there.task_ctx()).err().unwrap().to_string();
    let wanted = "HostToDeviceExec, partition 0, needs a device";
    assert!(
        e.contains(wanted) && e.contains("123456") && e.contains("the session offers"),
        "{e}"
    );
}

/// A node of DataFusion's between device nodes, and functions in expressions.
#[tokio::test]
async fn nodes_of_others() {
    let schema = scan(1).schema();
    let is = datafusion::physical_expr::expressions::is_not_null(col("s", &schema).unwrap());
    let filter: Arc<dyn ExecutionPlan> =
        Arc::new(FilterExec::try_new(is.unwrap(), down(scan(2))).unwrap());
    let up = HostToDeviceExec::default().above(filter, SIM);
    same(up, 171).await;
}
