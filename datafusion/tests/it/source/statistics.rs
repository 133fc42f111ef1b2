//! Statistics of sources: DataFusion answers from them, so they are checked.

use arrow_device::Error;
use arrow_device_datafusion::DeviceTable;
use datafusion::common::Statistics;
use datafusion::common::stats::Precision;
use datafusion::logical_expr::TableProviderFilterPushDown::Exact;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::statistics::StatisticsArgs;

use super::requests::batches;
use super::watched::Watched;
use crate::kit::*;

/// A source that says how many rows it has: of all partitions, and of each.
fn promising(
    sim: &Sim,
    partitions: usize,
    all: Precision<usize>,
    each: Precision<usize>,
) -> Watched {
    let mut source = Watched::new(sim, &batches(partitions));
    source.statistics = Box::new(move |partition| {
        let rows = if partition.is_some() { each } else { all };
        Statistics::new_unknown(&schema()).with_num_rows(rows)
    });
    source
}

#[tokio::test]
async fn a_wrong_number_of_rows_is_refused() {
    let sim = Sim::new();
    for (promised, sql, right) in [
        (48, "SELECT a FROM t", true),
        (47, "SELECT a FROM t", false),
        (49, "SELECT a FROM t", false),
        (0, "SELECT a FROM t", false),
        // No more than the limit can be checked.
        (20, "SELECT a FROM t LIMIT 20", true),
        (100, "SELECT a FROM t LIMIT 20", true),
        (15, "SELECT a FROM t LIMIT 20", false),
        (60, "SELECT a FROM t LIMIT 60", false),
    ] {
        let source = promising(&sim, 1, Precision::Exact(promised), Precision::Absent);
        let found = query(&over(source.table()), sql).await;
        if right {
            assert!(found.is_ok(), "{promised} {sql}: {found:?}");
            continue;
        }
        let error = found.unwrap_err();
        assert!(
            matches!(ours(&error), Error::InvalidArgument(_)),
            "{error:?}"
        );
        for text in [
            "DeviceScanExec",
            "partition 0",
            &format!("exactly {}", promised.min(60)),
        ] {
            assert!(
                error.to_string().contains(text),
                "{promised} {sql}: {error}"
            );
        }
    }
    sim.assert_done();
}

#[tokio::test]
async fn each_partition_is_checked_against_its_own() {
    let sim = Sim::new();
    let source = promising(&sim, 3, Precision::Exact(144), Precision::Exact(48));
    let ctx = session_with(3, 0);
    register(&ctx, "t", source.table());
    assert_eq!(numbers_in(&ctx, "SELECT a FROM t").await.len(), 144);
    let source = promising(&sim, 3, Precision::Exact(144), Precision::Exact(47));
    let ctx = session_with(3, 0);
    register(&ctx, "t", source.table());
    let error = query(&ctx, "SELECT a FROM t").await.unwrap_err();
    assert!(error.to_string().contains("exactly 47"), "{error}");
}

/// Inexact ones promise nothing, nor do those of all rows when the source filters.
#[tokio::test]
async fn what_is_not_promised_is_not_checked() {
    let sim = Sim::new();
    let source = promising(&sim, 1, Precision::Inexact(7), Precision::Inexact(7));
    assert_eq!(
        numbers_in(&over(source.table()), "SELECT a FROM t")
            .await
            .len(),
        48
    );
    let mut source = promising(&sim, 1, Precision::Exact(48), Precision::Exact(48));
    source.support = |_| Exact;
    let table = source.table();
    let ctx = over(table.clone());
    assert_eq!(
        numbers_in(&ctx, "SELECT a FROM t WHERE b = 3").await.len(),
        5
    );
    // And count(*) of filtered rows is counted.
    assert_eq!(
        numbers_in(&ctx, "SELECT count(*) FROM t WHERE b = 3").await,
        [5]
    );
}

/// Without opening anything.
#[tokio::test]
async fn counts_are_answered_from_exact_statistics() {
    let sim = Sim::new();
    let source = promising(&sim, 3, Precision::Exact(144), Precision::Absent);
    let requests = source.requests.clone();
    let ctx = over(source.table());
    assert_eq!(numbers_in(&ctx, "SELECT count(*) FROM t").await, [144]);
    assert_eq!(requests.take(), [""; 0]);
}

#[tokio::test]
async fn a_scan_knows_its_partitions() {
    let sim = Sim::new();
    let rows = |partition, table: &DeviceTable, fetch| {
        let scan = table.scan_on_device(Some(&[1]), fetch).unwrap();
        let args = StatisticsArgs::new().with_partition(partition);
        scan.statistics_from_inputs(&[], &args).unwrap().num_rows
    };
    let table = promising(&sim, 3, Precision::Exact(144), Precision::Exact(48)).table();
    assert_eq!(rows(None, &table, None), Precision::Exact(144));
    assert_eq!(rows(Some(2), &table, None), Precision::Exact(48));
    assert_eq!(rows(Some(2), &table, Some(10)), Precision::Exact(10));
    assert_eq!(rows(None, &table, Some(10)), Precision::Inexact(144));
    // Those of batches.
    let table = device_table(
        &sim,
        &[vec![rows_of(3)], vec![rows_of(4), rows_of(5)], vec![]],
    );
    assert_eq!(rows(None, &table, None), Precision::Exact(12));
    for (partition, expected) in [3, 9, 0].into_iter().enumerate() {
        assert_eq!(
            rows(Some(partition), &table, None),
            Precision::Exact(expected)
        );
    }
}

fn rows_of(count: usize) -> datafusion::arrow::array::RecordBatch {
    crate::kit::rows(0, count)
}
