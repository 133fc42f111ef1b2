//! Statistics of sources: DataFusion answers from them, so they are checked.

use datafusion::common::stats::Precision::{self, Absent, Exact, Inexact};

use super::batches;
use super::watched::{Seen, declaring};
use crate::kit::*;

/// A source of 48 rows a partition that says how many it has: of all partitions, and of each.
fn promising(
    sim: &Sim,
    partitions: usize,
    promised: [Precision<usize>; 2],
) -> (Arc<DeviceTable>, Seen) {
    declaring(sim, &batches(partitions), |source| {
        let unknown = Statistics::new_unknown(&schema());
        source.statistics = promised.map(|rows| unknown.clone().with_num_rows(rows));
        source.support = |_| TableProviderFilterPushDown::Exact;
    })
}

const ALL: &str = "SELECT a FROM t";
const LIMITED: &str = "SELECT a FROM t LIMIT 20";

/// What a query that fails has begun elsewhere ends with its tasks.
#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_number_of_rows_is_refused() {
    let sim = Sim::new();
    // Partitions, what is promised of all and of each, a query, and its rows or what is refused.
    for (partitions, all, each, sql, expected) in [
        (1, Exact(48), Absent, ALL, Ok(48)),
        (1, Exact(47), Absent, ALL, Err("exactly 47")),
        (1, Exact(49), Absent, ALL, Err("exactly 49")),
        (1, Exact(0), Absent, ALL, Err("exactly 0")),
        // No more than the limit can be checked.
        (1, Exact(20), Absent, LIMITED, Ok(20)),
        (1, Exact(100), Absent, LIMITED, Ok(20)),
        (1, Exact(15), Absent, LIMITED, Err("exactly 15")),
        // Each partition is checked against its own.
        (3, Exact(144), Exact(48), ALL, Ok(144)),
        (3, Exact(144), Exact(47), ALL, Err("exactly 47")),
        // Inexact ones promise nothing, nor do those of all rows when the source filters.
        (1, Inexact(7), Inexact(7), ALL, Ok(48)),
        (
            1,
            Exact(48),
            Exact(48),
            "SELECT a FROM t WHERE b = 3",
            Ok(5),
        ),
    ] {
        let ctx = session_with(partitions, 0);
        register(&ctx, "t", promising(&sim, partitions, [all, each]).0);
        let found = query(&ctx, sql).await;
        let Err(text) = expected else {
            assert_eq!(found.map(|rows| row_count(&rows)).ok(), expected.ok());
            continue;
        };
        let error = ours(&fails(found, &["DeviceScanExec", "partition ", text]));
        assert!(matches!(error, Error::InvalidArgument(_)), "{error:?}");
    }
    sim.assert_done();
}

/// From exact statistics without opening anything, but not of rows that are filtered.
#[tokio::test]
async fn counts_are_answered_from_statistics() {
    let sim = Sim::new();
    let (table, seen) = promising(&sim, 3, [Exact(144), Absent]);
    let ctx = over(table);
    assert_eq!(numbers_in(&ctx, "SELECT count(*) FROM t").await, [144]);
    assert_eq!(seen.requests(), [""; 0]);
    let filtered = "SELECT count(*) FROM t WHERE b = 3";
    assert_eq!(numbers_in(&ctx, filtered).await, [15]);
    assert_eq!(seen.requests().len(), 3);
}

#[tokio::test]
async fn a_scan_knows_its_partitions() {
    let sim = Sim::new();
    let promised = promising(&sim, 3, [Exact(144), Exact(48)]).0;
    let parts = [vec![rows(0, 3)], vec![rows(0, 4), rows(0, 5)], vec![]];
    let of_batches = device_table(&sim, &parts);
    for (table, partition, fetch, expected) in [
        (&promised, None, None, Exact(144)),
        (&promised, Some(2), None, Exact(48)),
        (&promised, Some(2), Some(10), Exact(10)),
        (&promised, None, Some(10), Inexact(144)),
        (&of_batches, None, None, Exact(12)),
        (&of_batches, Some(0), None, Exact(3)),
        (&of_batches, Some(1), None, Exact(9)),
        (&of_batches, Some(2), None, Exact(0)),
    ] {
        let scan = table.scan_on_device(Some(&[1]), fetch).unwrap();
        let args = StatisticsArgs::new().with_partition(partition);
        let found = scan.statistics_from_inputs(&[], &args).unwrap().num_rows;
        assert_eq!(found, expected, "{partition:?}, {fetch:?}");
    }
}
