//! Queries 1 and 6 of TPC-H on a device, beside DataFusion alone: how long each part takes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_device::Device;
use arrow_device_datafusion::{DeviceRule, DeviceTable, to_datafusion};
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::compute::concat_batches;
use datafusion::catalog::TableProvider;
use datafusion::datasource::MemTable;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SessionStateBuilder;
use datafusion::prelude::{SessionConfig, SessionContext};
use tpchgen::generators::LineItemGenerator;
use tpchgen_arrow::LineItemArrow;

use crate::device_filter::FilterPlugin;

const QUERIES: [(&str, &str); 2] = [
    ("TPC-H 1", include_str!("../../tests/queries/q01.sql")),
    ("TPC-H 6", include_str!("../../tests/queries/q06.sql")),
];
/// What the two read.
const COLUMNS: [&str; 7] = [
    "l_quantity",
    "l_extendedprice",
    "l_discount",
    "l_tax",
    "l_returnflag",
    "l_linestatus",
    "l_shipdate",
];
/// Rows of a batch: an operator's cost for each must not count.
const BATCH_ROWS: usize = 512_000;
/// Times of which the median is printed; the first run of each is not one of them.
const RUNS: usize = 5;

/// Generates `lineitem` at a scale, uploads it, and runs the queries over it on the host, on the device, and sent up by the rule.
/// Returns whether the results are the host's.
///
/// # Errors
/// Returns the error of a query.
pub(crate) async fn run(device: &Device, scale: f64) -> Result<bool> {
    let partitions = std::thread::available_parallelism().map_or(1, usize::from);
    let start = Instant::now();
    let parts = std::thread::scope(|scope| {
        let part = |i| scope.spawn(move || generated(scale, i, partitions));
        let parts: Vec<_> = (1..=partitions).map(part).collect();
        let join = |part: std::thread::ScopedJoinHandle<'_, _>| {
            let panicked = |_| DataFusionError::Internal("the generator panicked".into());
            part.join().map_err(panicked)?
        };
        parts.into_iter().map(join).collect::<Result<Vec<_>>>()
    })?;
    let batches = || parts.iter().flatten();
    let rows: usize = batches().map(RecordBatch::num_rows).sum();
    let bytes: usize = batches().map(RecordBatch::get_array_memory_size).sum();
    println!(
        "lineitem at scale {scale}: {rows} rows, {} MB in the {} columns of the queries, {partitions} partitions, made in {:.1} s",
        bytes / 1_000_000,
        COLUMNS.len(),
        start.elapsed().as_secs_f64()
    );

    let start = Instant::now();
    let up = |batches: &Vec<_>| batches.iter().map(|batch| device.upload(batch)).collect();
    let uploaded: arrow_device::Result<Vec<Vec<_>>> = parts.iter().map(up).collect();
    let uploaded = uploaded.map_err(to_datafusion)?;
    device.synchronize().map_err(to_datafusion)?;
    let took = start.elapsed();
    println!(
        "uploaded to {device} in {}, {:.1} GB/s\n",
        milliseconds(took),
        bytes as f64 / took.as_secs_f64() / 1e9
    );

    let first = parts.iter().flatten().next();
    let none = || DataFusionError::Configuration(format!("lineitem has no rows at scale {scale}"));
    let schema = first.ok_or_else(none)?.schema();
    let on_device = DeviceTable::from_batches(schema.clone(), device.clone(), uploaded);
    let on_device = Arc::new(on_device.map_err(to_datafusion)?);
    let on_host = Arc::new(MemTable::try_new(schema, parts)?);
    let plugin = || DeviceRule::default().with_plugin(Arc::new(FilterPlugin::whole()));
    let ways = [
        (
            "DataFusion alone",
            session(on_host.clone(), DeviceRule::default(), partitions)?,
        ),
        (
            "table on the device",
            session(on_device, plugin(), partitions)?,
        ),
        (
            "sent up for each query",
            session(on_host, plugin().with_uploads(device, 0), partitions)?,
        ),
    ];
    println!("| query | way | median | up | down |\n| --- | --- | ---: | ---: | ---: |");
    let mut all_same = true;
    for (query, sql) in QUERIES {
        let mut expected = None;
        for (way, context) in &ways {
            let before = device.stats();
            let result = collect(context, sql).await?;
            let moved = device.stats().since(&before);
            let mut times = Vec::new();
            for _ in 0..RUNS {
                let start = Instant::now();
                collect(context, sql).await?;
                times.push(start.elapsed());
            }
            times.sort_unstable();
            let same = *expected.get_or_insert_with(|| result.clone()) == result;
            all_same &= same;
            println!(
                "| {query} | {way}{} | {} | {} kB | {} kB |",
                if same { "" } else { ", DIFFERENT ROWS" },
                milliseconds(times[RUNS / 2]),
                moved.bytes_to_device / 1000,
                moved.bytes_to_host / 1000
            );
        }
    }
    Ok(all_same)
}

fn milliseconds(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}

/// A part of the table, without the columns that nobody reads.
fn generated(scale: f64, part: usize, parts: usize) -> Result<Vec<RecordBatch>> {
    let rows = LineItemGenerator::new(scale, part as i32, parts as i32);
    let batches = LineItemArrow::new(rows).with_batch_size(BATCH_ROWS);
    let batches = batches.map(|batch| {
        let batch = batch?;
        let schema = batch.schema();
        let columns = COLUMNS.map(|name| schema.index_of(name));
        let columns = columns.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(batch.project(&columns)?)
    });
    batches.collect()
}

fn session(
    lineitem: Arc<dyn TableProvider>,
    rule: DeviceRule,
    partitions: usize,
) -> Result<SessionContext> {
    let config = SessionConfig::new().with_target_partitions(partitions);
    let state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features()
        .with_physical_optimizer_rule(Arc::new(rule));
    let context = SessionContext::new_with_state(state.build());
    context.register_table("lineitem", lineitem)?;
    Ok(context)
}

async fn collect(context: &SessionContext, sql: &str) -> Result<RecordBatch> {
    let plan = context.sql(sql).await?.create_physical_plan().await?;
    let schema = plan.schema();
    let batches = datafusion::physical_plan::collect(plan, context.task_ctx()).await?;
    Ok(concat_batches(&schema, &batches)?)
}
