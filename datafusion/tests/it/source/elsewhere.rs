//! Tables that other processes have, too: names, declarations and parts.

use std::sync::Arc;

use arrow_device::{ArrowDeviceType, Error};
use arrow_device_datafusion::{
    DeviceExec, DeviceScanExec, DeviceSpec, DeviceTable, DeviceToHostExec,
};
use datafusion::arrow::array::RecordBatch;
use datafusion::logical_expr::TableProviderFilterPushDown;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::physical_plan::statistics::{StatisticsArgs, StatisticsContext};
use datafusion::physical_plan::{ExecutionPlan, collect_partitioned, displayable};
use datafusion::prelude::SessionContext;

use super::requests::batches;
use super::watched::Watched;
use crate::kit::*;

fn down(scan: DeviceScanExec) -> Plan {
    let scan = Arc::new(DeviceExec::from(scan));
    Arc::new(DeviceToHostExec::new(scan))
}

/// The rows of each partition.
async fn counts(plan: Plan) -> Vec<usize> {
    let context = SessionContext::new();
    let found = collect_partitioned(plan, context.task_ctx()).await.unwrap();
    let rows = |partition: &Vec<_>| partition.iter().map(RecordBatch::num_rows).sum();
    found.iter().map(rows).collect()
}

/// Each partition is read by one of the parts, and a part's other partitions are not opened.
#[tokio::test]
async fn parts_of_a_table() {
    let sim = Sim::new();
    let source = Watched::new(&sim, &batches(5));
    let requests = source.requests.clone();
    let table = DeviceTable::new(Arc::new(source)).unwrap();
    let whole = table.scan_on_device(Some(&[0]), None).unwrap();
    assert_eq!(whole.part(), None);
    for (index, expected) in [(0, [48, 0, 48, 0, 48]), (1, [0, 48, 0, 48, 0])] {
        let part = whole.clone().with_part(index, 2).unwrap();
        assert_eq!(part.part(), Some((index, 2)));
        let shown = displayable(&*down(part.clone())).indent(false).to_string();
        assert!(shown.contains(&format!("part={index} of 2")), "{shown}");
        requests.take();
        assert_eq!(counts(down(part.clone())).await, expected);
        assert_eq!(
            requests.take().len(),
            expected.iter().filter(|n| **n > 0).count()
        );
        // A limit keeps the part.
        let limited = Arc::new(DeviceExec::from(part))
            .with_fetch(Some(10))
            .unwrap();
        let limited: Plan = Arc::new(DeviceToHostExec::new(limited));
        assert_eq!(counts(limited).await, expected.map(|rows| rows.min(10)));
    }
    let e = whole.with_part(2, 2).unwrap_err().to_string();
    assert!(e.contains("part 2 of 2"), "{e}");
}

/// Rows that are not read are not counted as if they were, and not missed.
#[tokio::test]
async fn parts_of_counted_tables() {
    let sim = Sim::new();
    let table = device_table(&sim, &batches(3));
    let whole = table.scan_on_device(None, None).unwrap();
    let plan = down(whole.with_part(1, 3).unwrap());
    let statistics = StatisticsContext::new().compute(&*plan, &StatisticsArgs::new());
    assert_eq!(statistics.unwrap().num_rows.is_exact(), Some(false));
    assert_eq!(counts(plan).await, [0, 48, 0]);
}

#[tokio::test]
async fn names() {
    let sim = Sim::new();
    let table = DeviceTable::clone(&device_table(&sim, &batches(2)));
    assert_eq!(
        (
            table.name(),
            table.scan_on_device(None, None).unwrap().table_name()
        ),
        (None, None)
    );
    let table = table.with_name("orders");
    assert_eq!(table.name(), Some("orders"));
    let scan = table.scan_on_device(Some(&[1]), None).unwrap();
    assert_eq!(scan.table_name(), Some("orders"));
    let input = down(table.scan_on_device(None, None).unwrap());
    let insert = table
        .insert_on_device(input.clone(), InsertOp::Append)
        .unwrap();
    assert_eq!(
        (insert.table_name(), insert.op()),
        (Some("orders"), InsertOp::Append)
    );
    assert!(Arc::ptr_eq(insert.input(), &input));
    let e = table
        .insert_on_device(input, InsertOp::Replace)
        .unwrap_err()
        .to_string();
    assert!(e.contains("does not support"), "{e}");
}

/// A filter that the source does not support is refused.
#[test]
fn filters() {
    let sim = Sim::new();
    let mut source = Watched::new(&sim, &batches(1));
    source.support = |_| TableProviderFilterPushDown::Inexact;
    let table = DeviceTable::new(Arc::new(source)).unwrap();
    let filter = datafusion::physical_expr::expressions::lit(true);
    let scan = table.scan_on_device(None, None).unwrap();
    assert_eq!(
        scan.with_filters(vec![filter.clone()])
            .unwrap()
            .filters()
            .len(),
        1
    );
    let table = device_table(&sim, &batches(1));
    let scan = table.scan_on_device(None, None).unwrap();
    let e = scan.with_filters(vec![filter]).unwrap_err().to_string();
    assert!(e.contains("does not support the filter true"), "{e}");
}

/// It can be planned with, and says why it cannot be read.
#[tokio::test]
async fn declared_tables() {
    let device = DeviceSpec::any(ArrowDeviceType::CPU);
    let table = DeviceTable::declared("orders", schema(), device.clone(), 3);
    assert_eq!(
        (table.name(), table.source().device()),
        (Some("orders"), &device)
    );
    let context = SessionContext::new();
    register(&context, "mine", Arc::new(table));
    let query = context.sql("SELECT a FROM mine WHERE a > 3").await.unwrap();
    let plan = query.create_physical_plan().await.unwrap();
    let shown = displayable(&*plan).indent(false).to_string();
    assert!(
        shown.contains("DeviceScanExec: device=cpu, partitions=3"),
        "{shown}"
    );
    let e = datafusion::physical_plan::collect(plan, context.task_ctx())
        .await
        .unwrap_err();
    let e = ours(&e);
    assert!(matches!(e, Error::NotSupported { .. }), "{e}");
    assert!(
        e.to_string()
            .contains("has only declared the table \"orders\""),
        "{e}"
    );
}
