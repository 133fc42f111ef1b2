//! What a filter reserves and keeps while its results wait for each other. Columns that are large and of which few rows pass.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use arrow_device::Device;
use arrow_device::device::sim::SimDevice;
use arrow_device_datafusion::{DevicePools, DeviceTable};
use datafusion::arrow::array::{Int64Array, RecordBatch, StringArray};
use datafusion::catalog::TableProvider;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SessionStateBuilder;
use datafusion::execution::memory_pool::{GreedyMemoryPool, MemoryPool};
use datafusion::physical_plan::collect;
use datafusion::prelude::{SessionConfig, SessionContext};

use super::kit::*;
use crate::kit::host_stream_of;

const MIB: usize = 1 << 20;
const BATCHES: usize = 24;
const ROWS: i64 = 256;
/// About this much of each batch is text.
const BATCH: usize = 16 * MIB;
/// Batches of 16 MiB and little more: three and not four of them wait within 64 MiB. Beside them is the one that did not fit, two
/// are being selected, and up to three are on their way up or were returned last.
const MOST: usize = 64 * MIB + (1 + 2 + 3) * BATCH;
/// Of each batch a row passes.
const SQL: &str = "SELECT n, s FROM t WHERE n = 7";

fn large() -> RecordBatch {
    let text = "x".repeat(BATCH / ROWS as usize);
    let texts = StringArray::from_iter_values((0..ROWS).map(|_| &text));
    RecordBatch::try_from_iter([
        ("n", Arc::new(Int64Array::from_iter_values(0..ROWS)) as _),
        ("s", Arc::new(texts) as _),
    ])
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
    let config = SessionConfig::new().with_target_partitions(1);
    let state = SessionStateBuilder::new()
        .with_config(config.with_extension(Arc::new(pools)))
        .with_default_features()
        .with_physical_optimizer_rule(Arc::new(filters().with_uploads(device, 0)));
    let context = SessionContext::new_with_state(state.build());
    context.register_table("t", table).unwrap();
    context
}

/// The numbers of rows of each batch of the result.
async fn run(context: &SessionContext) -> Result<Vec<usize>> {
    let query = plan(context, SQL).await;
    assert!(is_on_device(&query));
    let found = collect(query, context.task_ctx()).await?;
    Ok(found.iter().map(RecordBatch::num_rows).collect())
}

/// What a query over uploads used.
struct Used {
    result: Result<Vec<usize>>,
    most: usize,
    unreserved: Vec<(usize, usize)>,
}

async fn over_uploads(limit: usize) -> Used {
    let sim = Sim::new();
    let pool: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(limit));
    let batch = large();
    let (most, unreserved) = (
        Arc::<AtomicUsize>::default(),
        Arc::<Mutex<Vec<_>>>::default(),
    );
    let (device, of, peak, seen) = (
        sim.sim.clone(),
        pool.clone(),
        most.clone(),
        unreserved.clone(),
    );
    // Whenever the next batch is asked for, it looks at what is in use.
    let (table, _) = host_stream_of(batch.schema(), move |i| {
        // Counts and literals are small, and sizes are rounded up.
        let reserved = of.reserved();
        let live = settled(&device, MOST.min(reserved + MIB));
        peak.fetch_max(live, SeqCst);
        if live > reserved + MIB {
            seen.lock().unwrap().push((live, reserved));
        }
        (i < BATCHES).then(|| Ok(batch.clone()))
    });
    let context = with_pool(&sim, &pool, table);
    let result = run(&context).await;
    drop(context);
    assert_eq!(pool.reserved(), 0);
    sim.assert_done();
    let unreserved = unreserved.lock().unwrap().clone();
    Used {
        result,
        most: most.load(SeqCst),
        unreserved,
    }
}

#[tokio::test]
async fn what_waits_is_limited_and_reserved() {
    let used = over_uploads(usize::MAX).await;
    assert_eq!(used.result.unwrap(), [3; BATCHES / 3]);
    let (used, unreserved) = (used.most, used.unreserved);
    assert!(used <= MOST, "{} MiB", used / MIB);
    assert!(used > 3 * BATCH, "they do wait: {} MiB", used / MIB);
    assert!(unreserved.is_empty(), "{unreserved:?}");
}

#[tokio::test]
async fn a_limit_of_memory_holds_for_what_waits() {
    // Enough for the upload of a few batches, not for those that wait for each other.
    let refused = over_uploads(70 * MIB).await.result.unwrap_err();
    assert!(matches!(refused, DataFusionError::ResourcesExhausted(_)));
    says(&refused, &["DeviceFilterExec, partition 0: "]);
    let enough = over_uploads(200 * MIB).await;
    assert_eq!(enough.result.unwrap(), [3; BATCHES / 3]);
}

/// What the filter allocates for batches that wait is reserved by the filter, and not by its node, too.
#[tokio::test]
async fn nothing_is_reserved_twice() {
    const ROWS: usize = 1 << 16;
    let sim = Sim::new();
    let numbers = Int64Array::from_iter_values(0..ROWS as i64);
    let batch = RecordBatch::try_from_iter([("n", Arc::new(numbers) as _)]).unwrap();
    let up = vec![vec![sim.upload(&batch).unwrap()]];
    let table = DeviceTable::from_batches(batch.schema(), sim.device.clone(), up).unwrap();
    let pool: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(usize::MAX));
    let context = with_pool(&sim, &pool, Arc::new(table));
    let query = plan(&context, "SELECT n FROM t WHERE n = 7").await;
    let found = collect(query.clone(), context.task_ctx()).await.unwrap();
    assert_eq!(found.iter().map(RecordBatch::num_rows).sum::<usize>(), 1);
    let mut filter = &query;
    while filter.name() != "DeviceFilterExec" {
        filter = filter.children()[0];
    }
    let metrics = filter.metrics().unwrap();
    let most = metrics.sum(|metric| metric.value().name() == "peak_mem_used");
    let most = most.unwrap().as_usize();
    // The numbers, which rows pass, and their numbers; then the result.
    assert!((17 * ROWS..18 * ROWS).contains(&most), "{most} bytes");
    drop((context, query, found));
    sim.assert_done();
}
