//! Tables that other processes have, too: names, declarations and parts.

use arrow_device_datafusion::DeviceScanExec;
use datafusion::logical_expr::TableProviderFilterPushDown::Inexact;

use super::batches;
use super::watched::declaring;
use crate::kit::*;
use crate::nodes::down;

fn on_host(scan: DeviceScanExec) -> Plan {
    down(Arc::new(DeviceExec::from(scan)))
}

/// The rows of each partition.
async fn counts(plan: Plan) -> Vec<usize> {
    let found = collect_partitioned(plan, session().task_ctx()).await;
    found.unwrap().iter().map(|rows| row_count(rows)).collect()
}

/// Each partition is read by one of the parts, and a part's other partitions are not opened.
#[tokio::test]
async fn parts_of_a_table() {
    let sim = Sim::new();
    let (table, seen) = declaring(&sim, &batches(5), |_| {});
    let whole = table.scan_on_device(Some(&[0]), None).unwrap();
    assert_eq!(whole.part(), None);
    for (index, expected, opened) in [(0, [48, 0, 48, 0, 48], 3), (1, [0, 48, 0, 48, 0], 2)] {
        let part = whole.clone().with_part(index, 2).unwrap();
        assert_eq!(part.part(), Some((index, 2)));
        let plan = on_host(part);
        says(&text(&plan, &[]), &[&format!("part={index} of 2")]);
        assert_eq!(counts(plan.clone()).await, expected);
        assert_eq!(seen.requests().len(), opened);
        // A limit keeps the part.
        let limited = down(plan.children()[0].with_fetch(Some(10)).unwrap());
        assert_eq!(counts(limited).await, expected.map(|rows| rows.min(10)));
        seen.requests();
    }
    fails(whole.with_part(2, 2), &["part 2 of 2"]);
    // Rows that are not read are not counted as if they were, and not missed.
    let table = device_table(&sim, &batches(3));
    let whole = table.scan_on_device(None, None).unwrap();
    let plan = on_host(whole.with_part(1, 3).unwrap());
    let statistics = StatisticsContext::new().compute(&*plan, &StatisticsArgs::new());
    assert_eq!(statistics.unwrap().num_rows.is_exact(), Some(false));
    assert_eq!(counts(plan).await, [0, 48, 0]);
}

#[tokio::test]
async fn names() {
    let sim = Sim::new();
    let table = DeviceTable::clone(&device_table(&sim, &batches(2)));
    let scan = table.scan_on_device(None, None).unwrap();
    assert_eq!((table.name(), scan.table_name()), (None, None));
    let table = table.with_name("orders");
    let scan = table.scan_on_device(Some(&[1]), None).unwrap();
    let (name, input) = (Some("orders"), on_host(scan.clone()));
    assert_eq!((table.name(), scan.table_name()), (name, name));
    let all = on_host(table.scan_on_device(None, None).unwrap());
    let insert = table.insert_on_device(all.clone(), InsertOp::Append);
    let insert = insert.unwrap();
    assert_eq!((insert.table_name(), insert.op()), (name, InsertOp::Append));
    assert!(Arc::ptr_eq(insert.input(), &all));
    let replace = table.insert_on_device(input, InsertOp::Replace);
    fails(replace, &["does not support"]);
}

/// A filter that the source does not support is refused.
#[test]
fn filters() {
    let sim = Sim::new();
    let (table, _) = declaring(&sim, &batches(1), |source| source.support = |_| Inexact);
    let scan = table.scan_on_device(None, None).unwrap();
    let scan = scan.with_filters(vec![lit(true)]).unwrap();
    assert_eq!(scan.filters().len(), 1);
    let table = device_table(&sim, &batches(1));
    let scan = table.scan_on_device(None, None).unwrap();
    let refused = scan.with_filters(vec![lit(true)]);
    fails(refused, &["does not support the filter true"]);
}

/// It can be planned with, and says why it cannot be read.
#[tokio::test]
async fn declared_tables() {
    let device = DeviceSpec::any(ArrowDeviceType::CPU);
    let table = DeviceTable::declared("orders", schema(), device.clone(), 3);
    let found = (table.name(), table.source().device());
    assert_eq!(found, (Some("orders"), &device));
    let plan = plan(&over(Arc::new(table)), "SELECT a FROM t WHERE a > 3").await;
    let scan = "DeviceScanExec: device=cpu, partitions=3";
    says(&text(&plan, &[]), &[scan]);
    let why = "has only declared the table \"orders\"";
    let e = ours(&fails(run(&plan).await, &[why]));
    assert!(matches!(e, Error::NotSupported { .. }), "{e}");
}
