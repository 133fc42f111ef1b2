//! What this crate costs in a query: scanning a device table that the host can read, the rule in
//! planning a TPC-H query, partitions side by side, and what DataFusion's nodes that need no kernel move on the simulated
//! device. Sides are measured alternately, and the median of the ratios is printed, with its quartiles.
//!
//! `--gate`: a ratio beyond its limit by more than a margin for the dev profile and a busy machine is an error.
//! `--lines`: prints tab-separated lines for the report.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_device::{Device, DeviceRecordBatch, Devices, TransferStats};
use arrow_device_datafusion::{
    DeviceCoalesceBatchesExec, DeviceExec, DeviceForm, DeviceRule, DeviceTable, DeviceToHostExec,
    HostToDeviceExec, execute_on_device, to_datafusion,
};
use datafusion::arrow::array::{
    Float64Array, Int64Array, RecordBatch, RecordBatchReader, StringArray,
};
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::catalog::TableProvider;
use datafusion::catalog::streaming::StreamingTable;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::datasource::MemTable;
use datafusion::error::Result;
use datafusion::execution::{SendableRecordBatchStream, SessionStateBuilder, TaskContext};
use datafusion::physical_expr::expressions::col;
use datafusion::physical_expr::{LexOrdering, PhysicalSortExpr};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::limit::LocalLimitExec;
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::PartitionStream;
use datafusion::physical_plan::union::UnionExec;
use datafusion::physical_plan::{
    ExecutionPlan, ExecutionPlanProperties, collect, displayable, execute_stream,
};
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::StreamExt;

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
        state = state.with_physical_optimizer_rule(Arc::new(DeviceRule::default()));
    }
    SessionContext::new_with_state(state.build())
}

async fn plan(context: &SessionContext, sql: &str) -> Result<Arc<dyn ExecutionPlan>> {
    context.sql(sql).await?.create_physical_plan().await
}

/// Ratios of times, in ascending order.
struct Ratios(Vec<f64>);

impl Ratios {
    /// Measures both sides in each round. The first rounds warm up.
    async fn of(mut round: impl AsyncFnMut() -> Result<(Duration, Duration)>) -> Result<Self> {
        let mut ratios = Vec::new();
        for i in 0..ROUNDS + 2 {
            let (ours, other) = round().await?;
            if i > 1 {
                ratios.push(ours.as_secs_f64() / other.as_secs_f64());
            }
        }
        ratios.sort_by(f64::total_cmp);
        Ok(Self(ratios))
    }

    /// The value that this part of the rounds is below.
    fn at(&self, part: f64) -> f64 {
        self.0[((self.0.len() - 1) as f64 * part).round() as usize]
    }
}

/// The time of a query over the second table as a multiple of that over the first.
async fn scan() -> Result<Ratios> {
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
    Ratios::of(async || {
        let (other, expected) = run(&host).await?;
        let (ours, result) = run(&device).await?;
        assert_eq!(expected, result, "the same query");
        Ok((ours, other))
    })
    .await
}

/// The share of the rule, which has not seen the plan before, in the time of planning a join of six tables, with a device limit
/// above each scan. With `inserts`, the plan lacks its downloads, so that DataFusion makes all nodes above the scans again.
async fn rule(inserts: bool) -> Result<Ratios> {
    let sql = include_str!("../tests/queries/q05.sql");
    let context = session(false);
    let tables = tables();
    for (name, schema) in &tables {
        let empty = vec![Vec::new()];
        let table = DeviceTable::from_batches(schema.clone(), Devices::cpu(), empty);
        context.register_table(*name, Arc::new(table.map_err(to_datafusion)?))?;
    }
    let downloads = |plan: &Arc<dyn ExecutionPlan>| {
        let text = displayable(plan.as_ref()).indent(false).to_string();
        text.matches("DeviceToHostExec").count()
    };
    Ratios::of(async || {
        let start = Instant::now();
        let planned = plan(&context, sql).await?;
        let planning = start.elapsed();
        let planned = planned.transform_up(|node| limited(node, !inserts))?.data;
        let expected = if inserts { 0 } else { tables.len() };
        assert_eq!(downloads(&planned), expected);
        let state = context.state();
        let start = Instant::now();
        let ruled = DeviceRule::default().optimize(planned, state.config_options())?;
        let rule = start.elapsed();
        assert_eq!(downloads(&ruled), tables.len());
        Ok((rule, planning + rule))
    })
    .await
}

/// Planning a join of six tables on a device, beside that of tables of the host.
async fn planning() -> Result<Ratios> {
    let sql = include_str!("../tests/queries/q05.sql");
    let (host, device) = (session(false), session(true));
    for (name, schema) in tables() {
        let empty = vec![Vec::new()];
        let on_host = MemTable::try_new(schema.clone(), vec![Vec::new()])?;
        host.register_table(name, Arc::new(on_host))?;
        let on_device = DeviceTable::from_batches(schema, Devices::cpu(), empty);
        device.register_table(name, Arc::new(on_device.map_err(to_datafusion)?))?;
    }
    let time = async |context: &SessionContext| -> Result<Duration> {
        let start = Instant::now();
        plan(context, sql).await?;
        Ok(start.elapsed())
    };
    Ratios::of(async || Ok((time(&device).await?, time(&host).await?))).await
}

/// Puts a limit on the device above a scan, with a download or without.
fn limited(
    node: Arc<dyn ExecutionPlan>,
    below: bool,
) -> Result<Transformed<Arc<dyn ExecutionPlan>>> {
    if node.name() != "DeviceScanExec" {
        return Ok(Transformed::no(node));
    }
    let limit = LocalLimitExec::new(node, 1 << 30);
    let form = DeviceForm::of(Arc::new(limit), Devices::cpu())?;
    let limit = form.expect("a node with a device form");
    Ok(Transformed::yes(match below {
        true => Arc::new(DeviceToHostExec::new(limit)),
        false => limit,
    }))
}

/// A partition of a plan on the host that computes for about 2 ms before each of its batches.
#[derive(Debug)]
struct Busy(RecordBatch);

impl PartitionStream for Busy {
    fn schema(&self) -> &SchemaRef {
        self.0.schema_ref()
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        let batch = self.0.clone();
        let batches = futures::stream::iter(0..16u64).map(move |seed| {
            let numbers = (0..400_000u64).map(|i| (i ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            std::hint::black_box(numbers.fold(0, |a: u64, b| a.rotate_left(5) ^ b));
            Ok(batch.clone())
        });
        let schema = self.0.schema();
        Box::pin(RecordBatchStreamAdapter::new(schema, batches))
    }
}

/// The time that a device stream of four busy partitions takes as a multiple of DataFusion's own
/// stream of them.
async fn parallel() -> Result<Ratios> {
    let batch = batches().swap_remove(0);
    let schema = batch.schema();
    let partition = |_| -> Arc<dyn PartitionStream> { Arc::new(Busy(batch.clone())) };
    let partitions = (0..4).map(partition).collect();
    let table = StreamingTable::try_new(schema, partitions)?;
    let context = session(false);
    let plan = table.scan(&context.state(), None, &[], None).await?;
    let (cpu, rows) = (Devices::cpu(), 4 * 16 * batch.num_rows());
    Ratios::of(async || {
        let start = Instant::now();
        let mut found = 0;
        let mut ours = execute_on_device(plan.clone(), context.task_ctx(), &cpu)?;
        while let Some(batch) = ours.next().await {
            found += batch.map_err(to_datafusion)?.num_rows();
        }
        let ours = start.elapsed();
        let start = Instant::now();
        let mut other = execute_stream(plan.clone(), context.task_ctx())?;
        while let Some(batch) = other.next().await {
            found += batch?.num_rows();
        }
        let other = start.elapsed();
        assert_eq!(found, 2 * rows);
        Ok((ours, other))
    })
    .await
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

/// What a plan costs the device whose batches it reads and returns.
async fn cost(plan: Arc<dyn ExecutionPlan>, device: &Device) -> Result<TransferStats> {
    let context = SessionContext::new().task_ctx();
    let node = DeviceExec::of(&plan).expect("a device operator");
    let before = device.stats();
    for partition in 0..plan.output_partitioning().partition_count() {
        let mut stream = node.execute_device(partition, context.clone())?;
        while let Some(batch) = stream.next().await {
            batch.map_err(to_datafusion)?;
        }
    }
    Ok(device.stats().since(&before))
}

/// A count of a device operator, the count on the host, and the most that it may be.
struct Count {
    name: &'static str,
    what: &'static str,
    here: u64,
    host: u64,
    limit: u64,
}

impl Count {
    fn new(name: &'static str, what: &'static str, here: u64, host: u64, limit: u64) -> Self {
        Self {
            name,
            what,
            here,
            host,
            limit,
        }
    }

    /// Prints the count. Returns whether its limit holds.
    fn print(&self, lines: bool) -> bool {
        let Self {
            name,
            what,
            here,
            host,
            limit,
        } = self;
        match lines {
            true => println!("DF3\t{name}: {what} (on the host {host})\t{here}\t{limit}"),
            false => println!(
                "{name} between device operators, {what}: {here}, limit {limit}, on the host {host}"
            ),
        }
        here <= limit
    }
}

/// Waits, queued ones and the host's.
fn waits(cost: &TransferStats) -> u64 {
    cost.queue_waits + cost.host_waits
}

/// Bytes between the host and the device.
fn over_the_bus(cost: &TransferStats) -> u64 {
    cost.bytes_to_device + cost.bytes_to_host
}

/// What DataFusion's nodes that need no kernel cost between device operators: in their device form, and on the host.
async fn forms() -> Result<Vec<Count>> {
    let device = Devices::open("sim:1").map_err(to_datafusion)?;
    let up = |batch: &RecordBatch| device.upload(batch);
    let on_device: Vec<_> = batches()[..8]
        .iter()
        .map(up)
        .collect::<Result<_, _>>()
        .map_err(to_datafusion)?;
    let schema = on_device[0].schema();
    let scan = |partitions: usize| {
        let parts = on_device.chunks(on_device.len() / partitions);
        let parts = parts.map(<[_]>::to_vec).collect();
        device_scan(schema.clone(), &device, parts)
    };
    let project = |child: Arc<dyn ExecutionPlan>| {
        let column = |name: &str| Ok((col(name, &schema)?, name.to_owned()));
        let columns = ["name", "id"]
            .map(column)
            .into_iter()
            .collect::<Result<Vec<_>>>()?;
        Ok(Arc::new(ProjectionExec::try_new(columns, child)?) as _)
    };
    type Make<'a> = &'a dyn Fn(Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>>;
    let makes: [(&str, usize, Make<'_>); 5] = [
        ("projection", 2, &project),
        ("union", 2, &|child| {
            UnionExec::try_new(vec![child.clone(), child])
        }),
        ("limit", 2, &|child| {
            Ok(Arc::new(LocalLimitExec::new(child, 10_000)))
        }),
        ("coalesce partitions", 2, &|child| {
            Ok(Arc::new(CoalescePartitionsExec::new(child)))
        }),
        ("sort-preserving merge", 1, &|child| {
            let by = LexOrdering::new([PhysicalSortExpr::new_default(col("id", &schema)?)]);
            let by = by.expect("one expression");
            Ok(Arc::new(SortPreservingMergeExec::new(by, child)))
        }),
    ];
    let mut found = Vec::new();
    for (name, partitions, make) in makes {
        let form = DeviceForm::of(make(scan(partitions)?)?, &device)?;
        let form = form.expect("a node with a device form");
        let here = cost(form, &device).await?;
        let host = make(Arc::new(DeviceToHostExec::new(scan(partitions)?)))?;
        let up = HostToDeviceExec::default().above(host, &device);
        let host = cost(up, &device).await?;
        let bytes = |cost: &TransferStats| over_the_bus(cost) + cost.bytes_on_device;
        found.extend([
            Count::new(name, "copies", here.copies, host.copies, 0),
            Count::new(name, "waits", waits(&here), waits(&host), 0),
            Count::new(name, "bytes", bytes(&here), bytes(&host), 0),
        ]);
    }
    found.extend(joins(&device).await?);
    Ok(found)
}

/// Joining small batches of numbers copies them once, on the device. On the host, they come down, and go up joined.
async fn joins(device: &Device) -> Result<[Count; 4]> {
    const SMALL: usize = 128;
    let rows = batches().swap_remove(0).project(&[0])?;
    let small = |i| device.upload(&rows.slice(i * SMALL, SMALL));
    let small = (0..rows.num_rows() / SMALL).map(small);
    let small = small
        .collect::<Result<Vec<_>, _>>()
        .map_err(to_datafusion)?;
    let bytes = (rows.num_rows() * size_of::<i64>()) as u64;
    let scan = device_scan(rows.schema(), device, vec![small])?;
    let joined = DeviceCoalesceBatchesExec::new(rows.num_rows()).above(scan.clone(), device);
    let here = cost(joined, device).await?;
    let up = HostToDeviceExec::default().above(Arc::new(DeviceToHostExec::new(scan)), device);
    let host = cost(up, device).await?;
    let name = "coalesce batches";
    let on_device = "bytes on the device";
    Ok([
        Count::new(name, "allocations", here.allocations, host.allocations, 1),
        Count::new(name, "host waits", here.host_waits, host.host_waits, 0),
        Count::new(
            name,
            "bytes over the bus",
            over_the_bus(&here),
            over_the_bus(&host),
            0,
        ),
        Count::new(
            name,
            on_device,
            here.bytes_on_device,
            host.bytes_on_device,
            bytes,
        ),
    ])
}

/// A scan of these batches.
fn device_scan(
    schema: SchemaRef,
    device: &Device,
    partitions: Vec<Vec<DeviceRecordBatch>>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let table = DeviceTable::from_batches(schema, device.clone(), partitions);
    let scan = table.map_err(to_datafusion)?.scan_on_device(None, None)?;
    Ok(Arc::new(DeviceExec::from(scan)))
}

/// A row of the report: its name, what it compares, its limit, and the gate's.
type Row = (&'static str, &'static str, f64, f64);

const SCAN: Row = (
    "DF1",
    "aggregates over a host-readable device table / MemTable",
    1.02,
    1.10,
);
const RULE: Row = ("DF2", "DeviceRule / all of planning TPC-H 5", 0.01, 0.05);
const PLANNING: Row = (
    "DF2",
    "planning TPC-H 5 over device tables / MemTables",
    1.05,
    1.3,
);
/// Told only: making the nodes again is DataFusion's work.
const INSERTS: Row = (
    "DF2",
    "DeviceRule with 6 missing downloads / all of planning",
    f64::INFINITY,
    f64::INFINITY,
);
const PARALLEL: Row = (
    "DF4",
    "device stream of four busy partitions / execute_stream",
    1.1,
    1.5,
);

/// Prints a row. Returns whether the gate holds.
fn print((id, what, limit, gate): Row, ratios: &Ratios, lines: bool) -> bool {
    let [median, first, third, best] = [0.5, 0.25, 0.75, 0.0].map(|part| ratios.at(part));
    let word = match median <= limit {
        _ if limit.is_infinite() => "told only",
        true => "holds",
        false => "missed",
    };
    match lines {
        true => println!("{id}\t{what}\t{median}\t{limit}\t{first}\t{third}\t{best}"),
        false => {
            println!("{what:<60} {median:>8.4} ({first:.4} to {third:.4})  limit {limit}  {word}")
        }
    }
    median <= gate
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<()> {
    let has = |name: &str| std::env::args().any(|arg| arg == name);
    let (gate, lines) = (has("--gate"), has("--lines"));
    let mut holds = print(SCAN, &scan().await?, lines);
    holds &= print(RULE, &rule(false).await?, lines);
    holds &= print(PLANNING, &planning().await?, lines);
    holds &= print(INSERTS, &rule(true).await?, lines);
    for count in forms().await? {
        holds &= count.print(lines);
    }
    holds &= print(PARALLEL, &parallel().await?, lines);
    if gate && !holds {
        eprintln!("a row is beyond its gate");
        std::process::exit(1);
    }
    Ok(())
}
