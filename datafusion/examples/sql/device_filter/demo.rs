//! A table on a device, and SQL queries over it.

use std::sync::Arc;

use arrow_device::{Device, DeviceRecordBatch};
use arrow_device_datafusion::{DeviceTable, DeviceTransitions, to_datafusion};
use datafusion::arrow::array::{Float64Array, Int64Array, RecordBatch, StringArray};
use datafusion::arrow::compute::concat_batches;
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::datasource::{MemTable, TableProvider};
use datafusion::error::Result;
use datafusion::execution::SessionStateBuilder;
use datafusion::physical_plan::display::DisplayableExecutionPlan;
use datafusion::physical_plan::{ExecutionPlan, collect_partitioned, displayable};
use datafusion::prelude::{SessionConfig, SessionContext};

use super::PushFilterToDevice;

const PARTITIONS: usize = 2;
const BATCHES: i64 = 16;
const ROWS: i64 = 10_000;
/// The most rows of a result that are printed.
const SHOWN: usize = 5;

const QUERIES: [&str; 4] = [
    "SELECT id, price FROM orders WHERE price > 4990 AND quantity <= 3",
    "SELECT count(*), sum(quantity) FROM orders WHERE price < 2500.5 AND id >= 100000",
    "SELECT id, price FROM orders WHERE quantity <> 7 AND price >= 10 ORDER BY price DESC, id LIMIT 5",
    // Text has no fixed width, so DataFusion's own filter runs.
    "SELECT item FROM orders WHERE id = 123456",
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

/// A session with the table `orders`, with the plugin or without it.
fn session(orders: Arc<dyn TableProvider>, plugin: bool) -> Result<SessionContext> {
    let config = SessionConfig::new().with_target_partitions(PARTITIONS);
    let mut state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features();
    if plugin {
        state = state
            .with_physical_optimizer_rule(Arc::new(PushFilterToDevice::default()))
            .with_physical_optimizer_rule(Arc::new(DeviceTransitions));
    }
    let context = SessionContext::new_with_state(state.build());
    context.register_table("orders", orders)?;
    Ok(context)
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

/// Runs queries over a table on `device` and prints their plans and results. Returns whether the
/// results are those of DataFusion over the same table on the host.
///
/// # Errors
/// Returns the error of a query.
pub(crate) async fn run(device: &Device) -> Result<bool> {
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

    let host = session(Arc::new(MemTable::try_new(schema, on_host)?), false)?;
    let before = session(table.clone(), false)?;
    let after = session(table, true)?;
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
    Ok(all_same)
}
