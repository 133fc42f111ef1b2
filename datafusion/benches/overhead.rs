//! The overhead of this crate in a query: of scanning a device table that the host can read, and of
//! the rule in planning a TPC-H query. The sides are measured alternately, and the median of the
//! ratios is printed. With `--gate`, a ratio above its limit is an error.

use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_device::Devices;
use arrow_device_datafusion::{DeviceTable, DeviceTransitions, to_datafusion};
use datafusion::arrow::array::{
    Float64Array, Int64Array, RecordBatch, RecordBatchReader, StringArray,
};
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::datasource::MemTable;
use datafusion::error::Result;
use datafusion::execution::SessionStateBuilder;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::{ExecutionPlan, collect};
use datafusion::prelude::{SessionConfig, SessionContext};

/// Rounds, in each of which each side is measured once.
const ROUNDS: usize = 30;
const BATCHES: i64 = 64;
const ROWS: i64 = 8192;

/// Half a million rows.
fn batches() -> Vec<RecordBatch> {
    let batch = |i: i64| {
        let ids = (i * ROWS..(i + 1) * ROWS).collect::<Vec<_>>();
        let prices = Float64Array::from_iter(
            ids.iter()
                .map(|id| (id % 7 != 0).then_some(*id as f64 / 3.0)),
        );
        let names =
            StringArray::from_iter_values(ids.iter().map(|id| format!("customer {}", id % 1000)));
        let columns = [
            ("id", Arc::new(Int64Array::from(ids)) as _),
            ("price", Arc::new(prices) as _),
            ("name", Arc::new(names) as _),
        ];
        RecordBatch::try_from_iter(columns).unwrap()
    };
    (0..BATCHES).map(batch).collect()
}

fn session(rule: bool) -> SessionContext {
    let config = SessionConfig::new().with_target_partitions(1);
    let mut state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features();
    if rule {
        state = state.with_physical_optimizer_rule(Arc::new(DeviceTransitions));
    }
    SessionContext::new_with_state(state.build())
}

async fn plan(context: &SessionContext, sql: &str) -> Result<Arc<dyn ExecutionPlan>> {
    context.sql(sql).await?.create_physical_plan().await
}

fn median(mut ratios: Vec<f64>) -> f64 {
    ratios.sort_by(f64::total_cmp);
    ratios[ratios.len() / 2]
}

/// The time of a query over the second table as a multiple of that over the first.
async fn scan() -> Result<f64> {
    let batches = batches();
    let schema = batches[0].schema();
    let cpu = Devices::cpu();
    let on_device = batches
        .iter()
        .map(|batch| cpu.upload(batch))
        .collect::<Result<_, _>>()
        .map_err(to_datafusion)?;
    let (host, device) = (session(false), session(true));
    let table = MemTable::try_new(schema.clone(), vec![batches])?;
    host.register_table("t", Arc::new(table))?;
    let table = DeviceTable::from_batches(schema, cpu, vec![on_device]).map_err(to_datafusion)?;
    device.register_table("t", Arc::new(table))?;
    let sql = "SELECT sum(id), sum(price), min(price), count(name), max(name) FROM t";
    let run = async |context: &SessionContext| -> Result<(Duration, Vec<RecordBatch>)> {
        let plan = plan(context, sql).await?;
        let start = Instant::now();
        let result = collect(plan, context.task_ctx()).await?;
        Ok((start.elapsed(), result))
    };
    let mut ratios = Vec::new();
    for round in 0..ROUNDS + 2 {
        let (first, expected) = run(&host).await?;
        let (second, result) = run(&device).await?;
        assert_eq!(expected, result, "the same query");
        // The first rounds warm up.
        if round > 1 {
            ratios.push(second.as_secs_f64() / first.as_secs_f64());
        }
    }
    Ok(median(ratios))
}

/// The rule's share of the time of planning a join of six tables.
async fn rule() -> Result<f64> {
    let sql = include_str!("../tests/queries/q05.sql");
    let context = session(true);
    for (name, schema) in tables() {
        let empty = vec![Vec::new()];
        let table =
            DeviceTable::from_batches(schema, Devices::cpu(), empty).map_err(to_datafusion)?;
        context.register_table(name, Arc::new(table))?;
    }
    let mut ratios = Vec::new();
    for round in 0..ROUNDS + 2 {
        let start = Instant::now();
        let planned = plan(&context, sql).await?;
        let all = start.elapsed();
        let start = Instant::now();
        let again = DeviceTransitions.optimize(planned, context.state().config_options())?;
        let rule = start.elapsed();
        std::hint::black_box(again);
        if round > 1 {
            ratios.push(rule.as_secs_f64() / all.as_secs_f64());
        }
    }
    Ok(median(ratios))
}

/// The tables of TPC-H that the query joins.
fn tables() -> Vec<(&'static str, SchemaRef)> {
    use tpchgen::generators::*;
    use tpchgen_arrow::*;
    macro_rules! schema {
        ($reader:ident, $generator:ident) => {
            $reader::new($generator::new(0.001, 1, 1)).schema()
        };
    }
    vec![
        ("region", schema!(RegionArrow, RegionGenerator)),
        ("nation", schema!(NationArrow, NationGenerator)),
        ("supplier", schema!(SupplierArrow, SupplierGenerator)),
        ("customer", schema!(CustomerArrow, CustomerGenerator)),
        ("orders", schema!(OrderArrow, OrderGenerator)),
        ("lineitem", schema!(LineItemArrow, LineItemGenerator)),
    ]
}

fn report(what: &str, measured: f64, limit: f64, unit: impl Display) -> bool {
    let holds = measured <= limit;
    let word = if holds { "holds" } else { "missed" };
    println!("{what:<60} {measured:>8.4}  limit {limit}{unit}  {word}");
    holds
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let gate = std::env::args().any(|arg| arg == "--gate");
    let scan = scan().await?;
    let rule = rule().await?;
    let a = report(
        "aggregates over a host-readable device table / MemTable",
        scan,
        1.10,
        "x",
    );
    let b = report(
        "DeviceTransitions / all of planning TPC-H 5",
        rule,
        0.05,
        "",
    );
    if gate && !(a && b) {
        std::process::exit(1);
    }
    Ok(())
}
