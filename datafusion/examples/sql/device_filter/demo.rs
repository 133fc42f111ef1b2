//! A table on a device and a table on the host, and SQL queries over them.

use std::sync::Arc;

use arrow_device::Device;
use arrow_device_datafusion::{DeviceRule, DeviceTable, to_datafusion};
use datafusion::arrow::array::{
    Decimal128Array, Float64Array, Int64Array, RecordBatch, StringArray,
};
use datafusion::arrow::compute::concat_batches;
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::datasource::{MemTable, TableProvider};
use datafusion::error::Result;
use datafusion::execution::SessionStateBuilder;
use datafusion::physical_plan::display::DisplayableExecutionPlan;
use datafusion::physical_plan::{ExecutionPlan, collect_partitioned, displayable};
use datafusion::prelude::{SessionConfig, SessionContext};

use super::FilterPlugin;

const PARTITIONS: usize = 2;
const BATCHES: i64 = 16;
const ROWS: i64 = 10_000;
/// So many rows are worth an upload.
const ENOUGH_ROWS: usize = 100_000;

/// `orders` is on the device, `archive` has the same rows on the host.
const QUERIES: [&str; 7] = [
    "SELECT id, price FROM orders WHERE price > 4990 AND quantity <= 3",
    "SELECT count(*), sum(quantity) FROM orders WHERE price < 2500.5 AND id >= 100000",
    "SELECT id, item FROM orders WHERE item = 'item 77' AND price IS NOT NULL ORDER BY id LIMIT 5",
    "SELECT quantity, count(*), max(id), avg(cost), sum(cost * (1 - cost)) FROM orders WHERE id > 99 GROUP BY quantity ORDER BY quantity LIMIT 5",
    // The kernels know no patterns, so DataFusion's own filter runs.
    "SELECT item FROM orders WHERE item LIKE '%99' AND id < 1000",
    "SELECT id, item, price FROM archive WHERE quantity = 7 AND item <> 'item 77' AND id > 300000 ORDER BY id",
    "SELECT count(*), max(quantity) FROM archive WHERE item <> 'item 77' AND price < 10",
];

/// Orders. Some prices are null, and prices are not in the order of the ids.
fn batch(number: i64) -> Result<RecordBatch> {
    let ids = number * ROWS..(number + 1) * ROWS;
    let price = |id| (id % 11 != 3).then_some((id * 7919 % 50_000) as f64 / 10.0);
    let prices: Float64Array = ids.clone().map(price).collect();
    let quantities = Int64Array::from_iter_values(ids.clone().map(|id| id * 31 % 23));
    let costs = Decimal128Array::from_iter_values(ids.clone().map(|id| i128::from(id % 999)));
    let items = StringArray::from_iter_values(ids.clone().map(|id| format!("item {}", id % 997)));
    Ok(RecordBatch::try_from_iter([
        ("id", Arc::new(Int64Array::from_iter_values(ids)) as _),
        ("price", Arc::new(prices) as _),
        ("quantity", Arc::new(quantities) as _),
        ("cost", Arc::new(costs.with_precision_and_scale(9, 2)?) as _),
        ("item", Arc::new(items) as _),
    ])?)
}

/// A session with the table `orders`, and with the archive on the host.
fn session(
    orders: Arc<dyn TableProvider>,
    archive: Arc<MemTable>,
    rule: DeviceRule,
) -> Result<SessionContext> {
    let config = SessionConfig::new().with_target_partitions(PARTITIONS);
    let state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features()
        .with_physical_optimizer_rule(Arc::new(rule));
    let context = SessionContext::new_with_state(state.build());
    context.register_table("orders", orders)?;
    context.register_table("archive", archive)?;
    Ok(context)
}

async fn plan(context: &SessionContext, sql: &str) -> Result<Arc<dyn ExecutionPlan>> {
    context.sql(sql).await?.create_physical_plan().await
}

/// All partitions, in order, as one batch.
async fn collect(plan: Arc<dyn ExecutionPlan>, context: &SessionContext) -> Result<RecordBatch> {
    let schema = plan.schema();
    let batches = collect_partitioned(plan, context.task_ctx()).await?;
    Ok(concat_batches(&schema, &batches.concat())?)
}

/// Runs queries over a table on `device` and one on the host, and prints their plans and results. Aggregates over the latter move to the device,
/// with their filters, if it has enough rows. Returns whether the results are those of DataFusion over tables on the host.
///
/// # Errors
/// Returns the error of a query.
pub(crate) async fn run(device: &Device) -> Result<bool> {
    let numbers = (0..PARTITIONS as i64).map(|i| i * BATCHES..(i + 1) * BATCHES);
    let on_host = numbers.map(|n| n.map(batch).collect());
    let on_host: Vec<Vec<RecordBatch>> = on_host.collect::<Result<_>>()?;
    let up = |batches: &Vec<_>| batches.iter().map(|batch| device.upload(batch)).collect();
    let on_device: arrow_device::Result<Vec<Vec<_>>> = on_host.iter().map(up).collect();
    let schema = on_host[0][0].schema();
    let on_host = Arc::new(MemTable::try_new(schema.clone(), on_host)?);
    let table = on_device.and_then(|up| DeviceTable::from_batches(schema, device.clone(), up));
    let table = Arc::new(table.map_err(to_datafusion)?);
    // No kernel waits for the uploads, whose time is not that of a query.
    device.synchronize().map_err(to_datafusion)?;

    let plugin = Arc::new(FilterPlugin::whole());
    let rule = DeviceRule::default().with_plugin(plugin.clone());
    let rule = rule.with_uploads(device, ENOUGH_ROWS);
    let host = session(on_host.clone(), on_host.clone(), DeviceRule::default())?;
    let with_rule = session(table, on_host, rule)?;
    let mut all_same = true;
    for sql in QUERIES {
        println!("{sql}\n\nOn the host:");
        let on_host = plan(&host, sql).await?;
        println!("{}With the rule:", displayable(&*on_host).indent(false));
        let on_device = plan(&with_rule, sql).await?;
        let result = collect(on_device.clone(), &with_rule).await?;
        let same = result == collect(on_host, &host).await?;
        all_same &= same;
        let measured = DisplayableExecutionPlan::with_metrics(&*on_device);
        print!("{}", measured.indent(false));
        let shown = result.slice(0, result.num_rows().min(5));
        println!("\n{}", pretty_format_batches(&[shown])?);
        let verdict = ["DIFFERENT FROM", "the same as"][usize::from(same)];
        let rows = result.num_rows();
        println!("{rows} rows, {verdict} DataFusion's own result\n");
    }
    let (loads, devices) = (plugin.kernels().loads(), plugin.kernels().len());
    println!("Kernels were loaded {loads} time(s), for {devices} device(s).");
    Ok(all_same)
}
