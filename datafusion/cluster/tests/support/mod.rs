//! Tables, and results that are compared.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use arrow_device::Device;
use arrow_device::device::sim::SimDevice;
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::row::{RowConverter, SortField};
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::error::{DataFusionError, Result};
use datafusion::prelude::{SessionConfig, SessionContext};
use tempfile::TempDir;
use tokio::sync::OnceCell;

use crate::data;

/// How long a query may take. More than enough, on a slow machine with other work.
pub(crate) const LONG: Duration = Duration::from_secs(90);

/// The queries with filters that the worked plugin's kernels support. The filters of the others are `LIKE` (9, 13, 16), `IN`, `OR` and
/// comparisons of columns (12, 19, 22), or compare sums (18).
pub(crate) const ON_DEVICES: [&str; 15] = [
    "q01", "q02", "q03", "q04", "q05", "q06", "q07", "q08", "q10", "q11", "q14", "q15", "q17",
    "q20", "q21",
];

/// The tables, written once.
pub(crate) fn tables() -> &'static Path {
    static TABLES: LazyLock<TempDir> = LazyLock::new(|| {
        let dir = tempfile::tempdir().unwrap();
        data::write(dir.path()).unwrap();
        dir
    });
    TABLES.path()
}

pub(crate) fn sql(name: &str) -> &'static str {
    let mut queries = data::QUERIES.iter();
    queries.find(|(known, _)| *known == name).unwrap().1
}

pub(crate) async fn query(context: &SessionContext, sql: &str) -> Result<Vec<RecordBatch>> {
    let work = async { context.sql(sql).await?.collect().await };
    let hangs = |_| DataFusionError::Internal(format!("no end after {LONG:?}: {sql}"));
    tokio::time::timeout(LONG, work).await.map_err(hangs)?
}

/// The text of a query's error, which must not be that it hangs.
pub(crate) async fn error(context: &SessionContext, sql: &str) -> String {
    let error = query(context, sql).await.unwrap_err().to_string();
    assert!(!error.contains("no end after"), "{error}");
    error
}

/// A query's result in one process, without devices. Each is computed once.
pub(crate) async fn expected(sql: &str) -> Arc<Vec<RecordBatch>> {
    type Results = Mutex<HashMap<String, Arc<OnceCell<Arc<Vec<RecordBatch>>>>>>;
    static RESULTS: LazyLock<Results> = LazyLock::new(Results::default);
    let cell = RESULTS
        .lock()
        .unwrap()
        .entry(sql.to_owned())
        .or_default()
        .clone();
    let compute = async || {
        let config = SessionConfig::new().with_target_partitions(4);
        let context = SessionContext::new_with_config(config);
        data::register(&context, tables()).await.unwrap();
        Arc::new(query(&context, sql).await.unwrap())
    };
    cell.get_or_init(compute).await.clone()
}

/// The same rows, in any order. Values are compared exactly, floats by their bits.
#[track_caller]
pub(crate) fn assert_same(found: &[RecordBatch], expected: &[RecordBatch], what: &str) {
    let rows = |batches: &[RecordBatch]| {
        let Some(first) = batches.first() else {
            return Vec::new();
        };
        let types = first.columns().iter();
        let types = types.map(|c| SortField::new(c.data_type().clone()));
        let converter = RowConverter::new(types.collect()).unwrap();
        let mut rows = Vec::new();
        for batch in batches {
            let batch = converter.convert_columns(batch.columns()).unwrap();
            rows.extend(batch.iter().map(|row| row.owned()));
        }
        rows.sort();
        rows
    };
    let types = |batches: &[RecordBatch]| -> Vec<_> {
        let columns = batches.first().map(|batch| batch.schema().fields().clone());
        let columns = columns.iter().flatten();
        columns
            .map(|f| (f.name().clone(), f.data_type().clone()))
            .collect()
    };
    assert_eq!(types(found), types(expected), "{what}");
    let same = rows(found) == rows(expected);
    let text = |batches| pretty_format_batches(batches).unwrap();
    assert!(
        same,
        "{what}\n{}\ninstead of\n{}",
        text(found),
        text(expected)
    );
}

/// Waits until nothing is left on a device, and checks that nothing was done wrong there.
#[track_caller]
pub(crate) fn assert_clean(device: &Device, sim: &SimDevice) {
    let end = Instant::now() + LONG;
    loop {
        // An injected failure may be what it reports.
        let _ = device.synchronize();
        device.trim();
        let (stats, report) = (device.stats(), sim.report());
        assert_eq!(report.violations, [""; 0]);
        if stats.allocations == stats.frees && report.is_clean() {
            return assert_eq!(stats.drop_errors, 0);
        }
        assert!(Instant::now() < end, "{stats:?}\n{report:#?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
