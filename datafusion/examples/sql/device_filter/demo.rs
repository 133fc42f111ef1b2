//! A table on a device and a Parquet table, and SQL queries over them.

use std::sync::Arc;

use arrow_device::{Device, DeviceRecordBatch};
use arrow_device_datafusion::{DeviceRule, DeviceTable, to_datafusion};
use datafusion::arrow::array::{Float64Array, Int64Array, RecordBatch, StringArray};
use datafusion::arrow::compute::concat_batches;
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::datasource::listing::ListingTableUrl;
use datafusion::datasource::{MemTable, TableProvider};
use datafusion::error::Result;
use datafusion::execution::SessionStateBuilder;
use datafusion::object_store::memory::InMemory;
use datafusion::object_store::path::Path;
use datafusion::object_store::{ObjectStoreExt, PutPayload};
use datafusion::parquet::arrow::ArrowWriter;
use datafusion::physical_plan::display::DisplayableExecutionPlan;
use datafusion::physical_plan::{ExecutionPlan, collect_partitioned, displayable};
use datafusion::prelude::{ParquetReadOptions, SessionConfig, SessionContext};

use super::FilterPlugin;

const PARTITIONS: usize = 2;
const BATCHES: i64 = 16;
const ROWS: i64 = 10_000;
/// The most rows of a result that are printed.
const SHOWN: usize = 5;

/// `orders` is on the device, `archive` has the same rows in Parquet files.
const QUERIES: [&str; 6] = [
    "SELECT id, price FROM orders WHERE price > 4990 AND quantity <= 3",
    "SELECT count(*), sum(quantity) FROM orders WHERE price < 2500.5 AND id >= 100000",
    "SELECT id, item FROM orders WHERE item = 'item 77' AND price IS NOT NULL ORDER BY id LIMIT 5",
    // The kernels know no patterns, so DataFusion's own filter runs.
    "SELECT item FROM orders WHERE item LIKE '%99' AND id < 1000",
    "SELECT id, item, price FROM archive WHERE quantity = 7 AND item <> 'item 77' AND id > 300000 ORDER BY id",
    "SELECT count(*), max(price) FROM archive WHERE item <> 'item 77' AND price < 10",
];

/// Orders. Some prices are null, and prices are not in the order of the ids.
fn batch(number: i64) -> Result<RecordBatch> {
    let ids = number * ROWS..(number + 1) * ROWS;
    let price = |id| (id % 11 != 3).then_some((id * 7919 % 50_000) as f64 / 10.0);
    let prices: Float64Array = ids.clone().map(price).collect();
    let quantities = Int64Array::from_iter_values(ids.clone().map(|id| id * 31 % 23));
    let items = StringArray::from_iter_values(ids.clone().map(|id| format!("item {}", id % 997)));
    Ok(RecordBatch::try_from_iter([
        ("id", Arc::new(Int64Array::from_iter_values(ids)) as _),
        ("price", Arc::new(prices) as _),
        ("quantity", Arc::new(quantities) as _),
        ("item", Arc::new(items) as _),
    ])?)
}

/// A session with the table `orders` and the archive, with the rule or without.
async fn session(
    orders: Arc<dyn TableProvider>,
    archive: Arc<InMemory>,
    rule: Option<DeviceRule>,
) -> Result<SessionContext> {
    let config = SessionConfig::new().with_target_partitions(PARTITIONS);
    let mut state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features();
    if let Some(rule) = rule {
        state = state.with_physical_optimizer_rule(Arc::new(rule));
    }
    let context = SessionContext::new_with_state(state.build());
    context.register_table("orders", orders)?;
    let url = ListingTableUrl::parse("memory:///")?;
    context.register_object_store(url.object_store().as_ref(), archive);
    let options = ParquetReadOptions::default();
    context
        .register_parquet("archive", "memory:///archive/", options)
        .await?;
    Ok(context)
}

/// A Parquet file of each list of batches, in memory.
async fn write_parquet(files: &[Vec<RecordBatch>]) -> Result<InMemory> {
    let store = InMemory::new();
    for (number, batches) in files.iter().enumerate() {
        let mut file = Vec::new();
        let mut writer = ArrowWriter::try_new(&mut file, batches[0].schema(), None)?;
        for batch in batches {
            writer.write(batch)?;
        }
        writer.close()?;
        let path = Path::from(format!("archive/{number}.parquet"));
        store.put(&path, PutPayload::from(file)).await?;
    }
    Ok(store)
}

async fn plan(context: &SessionContext, sql: &str) -> Result<Arc<dyn ExecutionPlan>> {
    context.sql(sql).await?.create_physical_plan().await
}

/// All partitions, in order, as one batch.
async fn collect(plan: Arc<dyn ExecutionPlan>, context: &SessionContext) -> Result<RecordBatch> {
    let schema = plan.schema();
    let batches = collect_partitioned(plan, context.task_ctx())
        .await?
        .concat();
    Ok(concat_batches(&schema, &batches)?)
}

/// Runs queries over a table on `device` and over Parquet files, and prints their plans and results. Filters of the
/// files move to the device if these have at least `uploads` rows, and never without a number. Returns whether the results are those of DataFusion over the same tables on the host.
///
/// # Errors
/// Returns the error of a query.
pub(crate) async fn run(device: &Device, uploads: Option<usize>) -> Result<bool> {
    let numbers = (0..PARTITIONS as i64).map(|i| i * BATCHES..(i + 1) * BATCHES);
    let on_host: Vec<Vec<_>> = numbers
        .map(|n| n.map(batch).collect())
        .collect::<Result<_>>()?;
    let up =
        |batches: &Vec<RecordBatch>| batches.iter().map(|batch| device.upload(batch)).collect();
    let on_device: Vec<Vec<DeviceRecordBatch>> = on_host
        .iter()
        .map(up)
        .collect::<arrow_device::Result<_>>()
        .map_err(to_datafusion)?;
    let schema = on_host[0][0].schema();
    let table = DeviceTable::from_batches(schema.clone(), device.clone(), on_device)
        .map_err(to_datafusion)?;
    let table: Arc<dyn TableProvider> = Arc::new(table);

    let plugin = Arc::new(FilterPlugin::default());
    let mut rule = DeviceRule::default().with_plugin(plugin.clone());
    if let Some(min_rows) = uploads {
        rule = rule.with_uploads(device, min_rows);
    }
    let archive = Arc::new(write_parquet(&on_host).await?);
    let on_host = Arc::new(MemTable::try_new(schema, on_host)?);
    let host = session(on_host, archive.clone(), None).await?;
    let before = session(table.clone(), archive.clone(), None).await?;
    let after = session(table, archive, Some(rule)).await?;
    let mut all_same = true;
    for sql in QUERIES {
        println!("{sql}\n\nBefore the rule:");
        println!("{}", displayable(&*plan(&before, sql).await?).indent(false));
        println!("After the rule:");
        let plan_after = plan(&after, sql).await?;
        println!("{}", displayable(&*plan_after).indent(false));
        let result = collect(plan_after.clone(), &after).await?;
        let expected = collect(plan(&host, sql).await?, &host).await?;
        let same = result == expected;
        all_same &= same;
        println!("Metrics of the operators:");
        let measured = DisplayableExecutionPlan::with_metrics(&*plan_after);
        let measured = measured.indent(false).to_string();
        for line in measured.lines().filter(|line| line.contains("device=")) {
            println!("{}", line.trim_start());
        }
        let shown = result.slice(0, result.num_rows().min(SHOWN));
        let verdict = if same {
            "the same as"
        } else {
            "DIFFERENT FROM"
        };
        println!("\n{}", pretty_format_batches(&[shown])?);
        println!(
            "{} rows, {verdict} DataFusion's own result\n",
            result.num_rows()
        );
    }
    let (loads, devices) = (plugin.kernels().loads(), plugin.kernels().len());
    println!("Kernels were loaded {loads} time(s), for {devices} device(s).");
    Ok(all_same)
}
