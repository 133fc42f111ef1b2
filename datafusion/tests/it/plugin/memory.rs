//! What a filter reserves and keeps while its results wait for each other. Columns that are large and of which few rows pass.

use datafusion::error::{DataFusionError, Result};

use super::kit::*;
use crate::device_filter::FilterPlugin;

const MIB: usize = 1 << 20;
const BATCHES: usize = 24;
/// About this much of each batch is text.
const BATCH: usize = 16 * MIB;
/// Batches of 16 MiB and little more: three and not four of them wait within 64 MiB. Beside them is the one that did not fit, two
/// are being selected, and up to three are on their way up or were returned last.
const MOST: usize = 64 * MIB + (1 + 2 + 3) * BATCH;

fn large() -> RecordBatch {
    const ROWS: usize = 256;
    let texts = StringArray::from(vec!["x".repeat(BATCH / ROWS); ROWS]);
    let numbers = Int64Array::from_iter_values(0..ROWS as i64);
    RecordBatch::try_from_iter([("n", Arc::new(numbers) as _), ("s", Arc::new(texts) as _)])
        .unwrap()
}

/// The bytes in use. What was dropped goes once the device is done with it, so this waits until it is not more than expected,
/// for up to 2 seconds.
fn settled(sim: &SimDevice, expected: usize) -> usize {
    let end = Instant::now() + Duration::from_secs(2);
    loop {
        let live = sim.report().live_bytes;
        if live <= expected || Instant::now() > end {
            return live;
        }
        std::thread::yield_now();
    }
}

fn with_pool(
    device: &Device,
    pool: &Arc<dyn MemoryPool>,
    table: Arc<dyn TableProvider>,
) -> SessionContext {
    let pool = pool.clone();
    let pools = DevicePools::new(move |_| pool.clone());
    let config = of_partitions(1).with_extension(Arc::new(pools));
    let rule = DeviceRule::default().with_plugin(Arc::new(FilterPlugin::default()));
    let rule = rule.with_uploads(device, 0);
    let context = session_of(config, [Arc::new(rule) as _]);
    register(&context, "t", table);
    context
}

/// The rows of each batch of a query over uploads, of whose batches one row each passes. The bytes in use and those reserved whenever the
/// next batch was asked for.
async fn over_uploads(limit: usize) -> (Result<Vec<usize>>, Vec<(usize, usize)>) {
    let sim = Sim::new();
    let pool: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(limit));
    let (batch, used) = (large(), Arc::<Mutex<Vec<_>>>::default());
    let (device, of, seen) = (sim.sim.clone(), pool.clone(), used.clone());
    let (table, _) = host_stream_of(batch.schema(), move |i| {
        let reserved = of.reserved();
        let live = settled(&device, MOST.min(reserved + MIB));
        seen.lock().unwrap().push((live, reserved));
        (i < BATCHES).then(|| Ok(batch.clone()))
    });
    let context = with_pool(&sim, &pool, table);
    let query = plan(&context, "SELECT n, s FROM t WHERE n = 7").await;
    assert!(is_on_device(&query));
    let found = collect(query, context.task_ctx()).await;
    drop(context);
    assert_eq!(pool.reserved(), 0);
    let rows = found.map(|found| sizes(&found));
    sim.assert_done();
    (rows, used.lock().unwrap().clone())
}

#[tokio::test]
async fn what_waits_is_limited_and_reserved() {
    let (rows, used) = over_uploads(usize::MAX).await;
    assert_eq!(rows.unwrap(), [3; BATCHES / 3]);
    let most = used.iter().map(|(live, _)| *live).max().unwrap();
    assert!(most <= MOST, "{} MiB", most / MIB);
    assert!(most > 3 * BATCH, "they do wait: {} MiB", most / MIB);
    // Counts and literals are small, and sizes are rounded up.
    let unreserved = |(live, reserved): &(usize, usize)| *live > *reserved + MIB;
    assert!(!used.iter().any(unreserved), "{used:?}");
}

#[tokio::test]
async fn a_limit_of_memory_holds_for_what_waits() {
    // Enough for the upload of a few batches, not for those that wait for each other.
    let refused = fails(
        over_uploads(70 * MIB).await.0,
        &["DeviceFilterExec, partition 0: "],
    );
    assert!(matches!(refused, DataFusionError::ResourcesExhausted(_)));
    let (rows, _) = over_uploads(200 * MIB).await;
    assert_eq!(rows.unwrap(), [3; BATCHES / 3]);
}

/// What the filter allocates for batches that wait is reserved by the filter, and not by its node, too.
#[tokio::test]
async fn nothing_is_reserved_twice() {
    const ROWS: usize = 1 << 16;
    let sim = Sim::new();
    let table = device_table(&sim, &[vec![numbers(0, ROWS)]]);
    let pool: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(usize::MAX));
    let context = with_pool(&sim, &pool, table);
    let query = plan(&context, "SELECT a FROM t WHERE a = 7").await;
    let found = collect(query.clone(), context.task_ctx()).await.unwrap();
    assert_eq!(row_count(&found), 1);
    let most = metric(&query, "DeviceFilterExec", "peak_mem_used").unwrap();
    // The numbers, which rows pass, and their numbers; then the result.
    assert!((17 * ROWS..18 * ROWS).contains(&most), "{most} bytes");
    drop((context, query, found));
    sim.assert_done();
}
