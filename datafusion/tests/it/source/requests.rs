//! What reaches a source: columns, limit, and the device.

use std::sync::Arc;

use arrow_device::Error;
use arrow_device_datafusion::DeviceTable;
use datafusion::arrow::array::RecordBatch;
use datafusion::catalog::TableProvider;

use super::watched::Watched;
use crate::kit::*;
use crate::nodes::*;
use crate::queries::same_as_on_host;

pub(super) fn batches(partitions: usize) -> Vec<Vec<RecordBatch>> {
    let partition = |p: usize| (0..3).map(|i| rows((p * 3 + i) as i64 * 16, 16)).collect();
    (0..partitions).map(partition).collect()
}

/// Runs a query over a source and over the same rows on the host, with the rule and without.
pub(super) async fn same_as_host(
    table: Arc<DeviceTable>,
    partitions: &[Vec<RecordBatch>],
    sql: &str,
) {
    let others: [Arc<dyn TableProvider>; 1] = [table];
    same_as_on_host(host_table(partitions), &others, &[partitions.len()], sql).await;
}

#[tokio::test]
async fn columns_and_limit_are_what_the_query_asks_for() {
    let sim = Sim::new();
    for (sql, expected) in [
        ("SELECT * FROM t", "None filters=[] fetch=None"),
        ("SELECT s, a FROM t", "Some([2, 0]) filters=[] fetch=None"),
        (
            "SELECT count(b) AS n FROM t",
            "Some([1]) filters=[] fetch=None",
        ),
        (
            "SELECT b FROM t LIMIT 5 OFFSET 20",
            "Some([1]) filters=[] fetch=Some(25)",
        ),
        (
            "SELECT a FROM t WHERE b < 3 LIMIT 2",
            "Some([0, 1]) filters=[] fetch=None",
        ),
    ] {
        for projects in [true, false] {
            let mut source = Watched::new(&sim, &batches(1));
            source.projects = projects;
            let requests = source.requests.clone();
            same_as_host(source.table(), &batches(1), sql).await;
            let expected = format!("0: columns={expected}");
            // With the rule and without.
            assert_eq!(requests.take(), [expected.clone(), expected], "{sql}");
        }
    }
    sim.assert_done();
}

/// Only the columns that are asked for are on the device at all, and no batch after the last one that is needed.
#[tokio::test]
async fn a_source_that_projects_uploads_no_more() {
    let sim = Sim::new();
    let source = Watched::new(&sim, &batches(1));
    let uploaded = source.uploaded.clone();
    let ctx = over(source.table());
    let before = sim.stats();
    let found = numbers_in(&ctx, "SELECT b FROM t LIMIT 20").await;
    assert_eq!(found, (0..20).map(|i| i % 10).collect::<Vec<_>>());
    let moved = sim.stats().since(&before);
    assert_eq!(*uploaded.lock().unwrap(), [16, 16]);
    assert_eq!(moved.bytes_to_device, 2 * 16 * 8);
    assert_eq!(moved.bytes_to_host, 20 * 8);
    drop(ctx);
    sim.assert_done();
}

/// A projection above the scan narrows it.
#[tokio::test]
async fn a_projection_that_drops_columns_becomes_the_scans() {
    let sim = Sim::new();
    let source = Watched::new(&sim, &batches(1));
    let requests = source.requests.clone();
    let scan = device_leaf(source.table()).await;
    let narrowed = |plan: &Plan, columns: &[(usize, &str)]| {
        let above = project(plan.clone(), columns);
        let narrow = plan.try_swapping_with_projection(above.downcast_ref().unwrap());
        let narrow = narrow.unwrap().unwrap();
        assert_eq!(narrow.schema().fields(), above.schema().fields());
        assert_eq!(shape(&narrow, &[&sim]), "Scan A");
        narrow
    };
    // Twice: the columns are the scan's.
    let last = narrowed(&narrowed(&scan, &[(2, "s"), (0, "a")]), &[(1, "a")]);
    let found = on_device(&last, &sim).await.unwrap();
    assert_eq!(numbers_on(&found), multiples(48, 1));
    let expected = "0: columns=Some([0]) filters=[] fetch=None";
    assert_eq!(requests.take(), [expected]);
}

/// What comes is checked, and the error says what was wrong.
#[tokio::test]
async fn batches_on_another_device_or_of_another_schema_are_refused() {
    let (a, b) = (Sim::new(), Sim::new());
    let elsewhere = b.upload(&numbers(0, 16)).unwrap();
    let other = a.upload(&rows(0, 16)).unwrap();
    let (id_a, id_b) = (a.id().to_string(), b.id().to_string());
    for (wrong, parts) in [
        (elsewhere, ["DeviceScanExec", &id_a, &id_b]),
        (other, ["DeviceScanExec", "schema", "\"s\": nullable Utf8"]),
    ] {
        let table = streams_table(&a, 1, move |_| futures::stream::iter([Ok(wrong.clone())]));
        let error = fails(query(&over(table), "SELECT a FROM t").await, &parts);
        let error = ours(&error);
        assert!(matches!(error, Error::InvalidArgument(_)), "{error:?}");
    }
}
