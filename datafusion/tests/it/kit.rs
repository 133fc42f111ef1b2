//! Devices, tables, readers, operators and sessions of the tests.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use arrow_device::device::sim::{SimConfig, SimDevice, SimMode};
use arrow_device::{ArrowDeviceType, Device, DeviceRecordBatch, DeviceRecordBatchReader};
use arrow_device_datafusion::{
    DeviceExec, DeviceOptions, DeviceSpec, DeviceTable, DeviceToHostExec, DeviceTransitions,
};
use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::catalog::TableProvider;
use datafusion::catalog::streaming::StreamingTable;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::common::{DataFusionError, Result};
use datafusion::datasource::MemTable;
use datafusion::execution::{SendableRecordBatchStream, SessionStateBuilder, TaskContext};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::PartitionStream;
use datafusion::physical_plan::{ExecutionPlan, displayable};
use datafusion::prelude::{SessionConfig, SessionContext};

pub(crate) use crate::operator::{double, map};

pub(crate) type Plan = Arc<dyn ExecutionPlan>;

/// How long anything may take.
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// A device and its backend.
pub(crate) struct Sim {
    pub(crate) device: Device,
    pub(crate) sim: Arc<SimDevice>,
}

impl std::ops::Deref for Sim {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

impl From<&Sim> for DeviceSpec {
    fn from(sim: &Sim) -> Self {
        Self::from(&sim.device)
    }
}

impl Sim {
    pub(crate) fn new() -> Self {
        Self::with(SimConfig::default())
    }

    /// Nothing runs until somebody waits for it.
    pub(crate) fn deferred() -> Self {
        Self::with(SimConfig::default().with_mode(SimMode::Deferred))
    }

    pub(crate) fn with(config: SimConfig) -> Self {
        let sim = SimDevice::new(config).unwrap();
        let device = Device::new(sim.clone()).unwrap();
        Self { device, sim }
    }

    /// Everything was dropped: waits until all of it has gone, and checks that nothing was done
    /// wrong.
    #[track_caller]
    pub(crate) fn assert_done(&self) {
        self.assert_left(0);
    }

    /// As `assert_done`, with this many device allocations left.
    #[track_caller]
    pub(crate) fn assert_left(&self, allocations: usize) {
        let end = Instant::now() + LONG;
        loop {
            let failed = self.device.synchronize().is_err();
            self.device.trim();
            let (report, stats) = (self.sim.report(), self.device.stats());
            assert_eq!(report.violations, [""; 0]);
            let host = report.live_host_allocations + report.live_events;
            let freed = stats.allocations == stats.frees + allocations as u64;
            let quiet = report.live_allocations == allocations && freed;
            if quiet && (host == 0 || allocations > 0) {
                let error = self.device.take_drop_error();
                assert!(failed || error.is_none(), "{error:?}");
                return;
            }
            assert!(Instant::now() < end, "{stats:?} {report:#?}");
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// Waits for what another thread does.
#[track_caller]
pub(crate) fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !happened() {
        assert!(Instant::now() < end, "never happened: {what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// a and b are numbers, s is text.
pub(crate) fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("a", DataType::Int64, false),
        Field::new("b", DataType::Int64, false),
        Field::new("s", DataType::Utf8, true),
    ]))
}

/// Rows from `first`: a counts, b is a % 10, s is the text of a; none for every seventh.
pub(crate) fn rows(first: i64, rows: usize) -> RecordBatch {
    let a = first..first + rows as i64;
    let texts: StringArray = a
        .clone()
        .map(|i| (i % 7 != 0).then(|| i.to_string()))
        .collect();
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(a.clone())),
        Arc::new(Int64Array::from_iter_values(a.map(|i| i % 10))),
        Arc::new(texts),
    ];
    RecordBatch::try_new(schema(), columns).unwrap()
}

/// One column of numbers from `first`, and no other.
pub(crate) fn numbers(first: i64, rows: usize) -> RecordBatch {
    self::rows(first, rows).project(&[0]).unwrap()
}

/// A device table of these partitions.
pub(crate) fn device_table(device: &Device, partitions: &[Vec<RecordBatch>]) -> Arc<DeviceTable> {
    let up = |batch: &RecordBatch| device.upload(batch).unwrap();
    let partitions = partitions.iter().map(|p| p.iter().map(up).collect());
    let partitions = partitions.collect::<Vec<Vec<_>>>();
    let schema = partitions
        .iter()
        .flatten()
        .next()
        .map_or_else(schema, |b| b.schema());
    Arc::new(DeviceTable::from_batches(schema, device.clone(), partitions).unwrap())
}

pub(crate) fn host_table(partitions: &[Vec<RecordBatch>]) -> Arc<MemTable> {
    let schema = partitions
        .iter()
        .flatten()
        .next()
        .map_or_else(schema, RecordBatch::schema);
    Arc::new(MemTable::try_new(schema, partitions.to_vec()).unwrap())
}

/// Rows of the sessions' batches and of their uploads. [`rows`] and [`numbers`] make batches of 16, which uploads do not
/// join.
const BATCH_SIZE: usize = 32;

/// Options with which uploads join batches to so many rows.
pub(crate) fn joined_to(rows: usize) -> DeviceOptions {
    let mut options = DeviceOptions::default();
    options.upload_rows = rows;
    options
}

/// A session with `DeviceTransitions`.
pub(crate) fn session() -> SessionContext {
    session_with(1, 0)
}

/// The same with a rule that puts `doubles` device operators above each device scan.
pub(crate) fn session_with(target_partitions: usize, doubles: usize) -> SessionContext {
    let config = SessionConfig::new()
        .with_target_partitions(target_partitions)
        .with_batch_size(BATCH_SIZE)
        .with_option_extension(joined_to(BATCH_SIZE));
    let state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features()
        .with_physical_optimizer_rule(Arc::new(DoubleScans(doubles)))
        .with_physical_optimizer_rule(Arc::new(DeviceTransitions));
    SessionContext::new_with_state(state.build())
}

/// A session that knows nothing of devices.
pub(crate) fn session_without_rule(target_partitions: usize) -> SessionContext {
    let config = SessionConfig::new().with_target_partitions(target_partitions);
    SessionContext::new_with_config(config)
}

pub(crate) fn register(ctx: &SessionContext, name: &str, table: Arc<dyn TableProvider>) {
    ctx.register_table(name, table).unwrap();
}

/// A session with one table "t".
pub(crate) fn over(table: Arc<dyn TableProvider>) -> SessionContext {
    let ctx = session();
    register(&ctx, "t", table);
    ctx
}

pub(crate) async fn plan(ctx: &SessionContext, sql: &str) -> Plan {
    let frame = ctx.sql(sql).await.unwrap();
    frame.create_physical_plan().await.unwrap()
}

/// The plan of a table's scan.
pub(crate) async fn scan(table: Arc<dyn TableProvider>) -> Plan {
    let state = SessionContext::new().state();
    table.scan(&state, None, &[], None).await.unwrap()
}

/// What the rule makes of a plan.
pub(crate) fn with_transitions(plan: Plan) -> Plan {
    let config = ConfigOptions::default();
    DeviceTransitions.optimize(plan, &config).unwrap()
}

pub(crate) async fn query(ctx: &SessionContext, sql: &str) -> Result<Vec<RecordBatch>> {
    ctx.sql(sql).await?.collect().await
}

/// The only column of numbers, in the order of the batches.
pub(crate) fn numbers_of(batches: &[RecordBatch]) -> Vec<i64> {
    let mut found = Vec::new();
    for batch in batches {
        let column = batch.column(0).as_any().downcast_ref::<Int64Array>();
        found.extend(column.unwrap().values());
    }
    found
}

pub(crate) fn sorted(mut numbers: Vec<i64>) -> Vec<i64> {
    numbers.sort_unstable();
    numbers
}

pub(crate) async fn numbers_in(ctx: &SessionContext, sql: &str) -> Vec<i64> {
    numbers_of(&query(ctx, sql).await.unwrap())
}

/// A plan as text, its devices called `A`, `B`, ... in the order given.
pub(crate) fn text(plan: &Plan, devices: &[&Device]) -> String {
    let mut text = displayable(plan.as_ref()).indent(false).to_string();
    // The longest ids first: one may begin like another.
    let mut names: Vec<_> = (b'A'..).zip(devices).collect();
    names.sort_by_key(|(_, device)| std::cmp::Reverse(device.id().to_string().len()));
    for (name, device) in names {
        text = text.replace(
            &format!("device={}", device.id()),
            &format!("device={}", char::from(name)),
        );
    }
    text
}

#[track_caller]
pub(crate) fn assert_plan(plan: &Plan, devices: &[&Device], expected: &str) {
    let lines = expected.trim_matches('\n').lines();
    let indent = expected
        .lines()
        .find(|l| !l.trim().is_empty())
        .map_or(0, |l| l.len() - l.trim_start().len());
    let expected: String = lines
        .map(|l| format!("{}\n", l.get(indent..).unwrap_or("")))
        .collect();
    let found = text(plan, devices);
    assert!(
        found.trim_end() == expected.trim_end(),
        "\n--- expected\n{expected}\n--- found\n{found}"
    );
}

/// This crate's error in another, its deepest.
#[track_caller]
pub(crate) fn ours(e: &DataFusionError) -> arrow_device::Error {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(e);
    let mut found = None;
    while let Some(e) = source {
        found = e.downcast_ref::<arrow_device::Error>().cloned().or(found);
        source = e.source();
    }
    found.unwrap_or_else(|| panic!("none of ours: {e:?}"))
}

/// Puts operators above device scans, with transitions in between that are of no use.
#[derive(Debug)]
struct DoubleScans(usize);

impl PhysicalOptimizerRule for DoubleScans {
    fn optimize(&self, plan: Plan, _: &ConfigOptions) -> Result<Plan> {
        let double_scan = |node: Plan| {
            let device = match DeviceExec::of(&node) {
                Some(scan) if node.children().is_empty() && self.0 > 0 => scan.device().clone(),
                _ => return Ok(Transformed::no(node)),
            };
            let doubled = (0..self.0).fold(node, |child, _| {
                double(Arc::new(DeviceToHostExec::new(child)), device.clone())
            });
            Ok(Transformed::yes(doubled))
        };
        Ok(plan.transform_up(double_scan)?.data)
    }

    fn name(&self) -> &str {
        "DoubleScans"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// A reader that uploads what a closure gives, and counts how often it was asked.
pub(crate) struct Reader {
    device: Device,
    schema: SchemaRef,
    next: Box<dyn FnMut(usize) -> Option<arrow_device::Result<RecordBatch>> + Send>,
    pub(crate) asked: Arc<AtomicUsize>,
}

impl Reader {
    pub(crate) fn new(
        device: &Device,
        schema: SchemaRef,
        next: impl FnMut(usize) -> Option<arrow_device::Result<RecordBatch>> + Send + 'static,
    ) -> Self {
        Self {
            device: device.clone(),
            schema,
            next: Box::new(next),
            asked: Arc::default(),
        }
    }
}

impl Iterator for Reader {
    type Item = arrow_device::Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let i = self.asked.fetch_add(1, SeqCst);
        let batch = (self.next)(i)?;
        Some(batch.and_then(|batch| self.device.upload(&batch)))
    }
}

impl DeviceRecordBatchReader for Reader {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device.id().device_type
    }
}

/// A table of one partition of such readers, and how often they were asked.
pub(crate) fn reader_table(
    device: &Device,
    next: impl Fn(usize) -> Option<arrow_device::Result<RecordBatch>> + Clone + Send + Sync + 'static,
) -> (Arc<DeviceTable>, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let (device_of, counts) = (device.clone(), asked.clone());
    let schema = numbers(0, 1).schema();
    let of = schema.clone();
    let open = move |_| {
        let mut reader = Reader::new(&device_of, of.clone(), next.clone());
        reader.asked = counts.clone();
        Ok(reader)
    };
    let table = DeviceTable::from_readers(schema, device.clone(), 1, open);
    (Arc::new(table), asked)
}

/// Says when it is dropped.
struct Dropped(Arc<AtomicBool>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// More batches than any test reads: one that should be stopped fails, and does not hang.
pub(crate) const MANY: usize = 100_000;

/// A table of an endless reader, how often it was asked, and whether it was let go.
pub(crate) fn watched(sim: &Sim) -> (Arc<DeviceTable>, Arc<AtomicUsize>, Arc<AtomicBool>) {
    let (asked, gone) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let (counts, flag, device) = (asked.clone(), gone.clone(), sim.device.clone());
    let open = move |_| {
        let dropped = Dropped(flag.clone());
        let next = move |i| {
            let _ = &dropped;
            (i < MANY).then(|| Ok(numbers(i as i64 * 16, 16)))
        };
        let mut reader = Reader::new(&device, numbers(0, 1).schema(), next);
        reader.asked = counts.clone();
        Ok(reader)
    };
    let schema = numbers(0, 1).schema();
    let table = DeviceTable::from_readers(schema, sim.device.clone(), 1, open);
    (Arc::new(table), asked, gone)
}

/// A table of numbers on the host whose only partition consists of what a closure returns, and how
/// often it was asked.
pub(crate) fn host_stream(
    next: impl Fn(usize) -> Option<Result<RecordBatch>> + Send + Sync + 'static,
) -> (Arc<StreamingTable>, Arc<AtomicUsize>) {
    host_stream_of(numbers(0, 1).schema(), next)
}

/// The same with another schema.
pub(crate) fn host_stream_of(
    schema: SchemaRef,
    next: impl Fn(usize) -> Option<Result<RecordBatch>> + Send + Sync + 'static,
) -> (Arc<StreamingTable>, Arc<AtomicUsize>) {
    type Next = dyn Fn(usize) -> Option<Result<RecordBatch>> + Send + Sync;

    struct Partition(SchemaRef, Arc<Next>, Arc<AtomicUsize>);

    impl fmt::Debug for Partition {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Partition")
        }
    }

    impl PartitionStream for Partition {
        fn schema(&self) -> &SchemaRef {
            &self.0
        }

        fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
            let (next, asked) = (self.1.clone(), self.2.clone());
            let batches = std::iter::from_fn(move || next(asked.fetch_add(1, SeqCst)));
            let batches = futures::stream::iter(batches);
            Box::pin(RecordBatchStreamAdapter::new(self.0.clone(), batches))
        }
    }

    let asked = Arc::new(AtomicUsize::new(0));
    let partition = Partition(schema.clone(), Arc::new(next), asked.clone());
    let table = StreamingTable::try_new(schema, vec![Arc::new(partition)]).unwrap();
    (Arc::new(table), asked)
}

/// A metric of the nodes of this name, all partitions together; `None` if no node has it.
pub(crate) fn metric(plan: &Plan, node: &str, metric: &str) -> Option<usize> {
    let mut sum = None;
    plan.apply(|plan| {
        if plan.name() == node {
            let metrics = plan.metrics().unwrap();
            let value = metrics
                .sum(|m| m.value().name() == metric)
                .map(|value| value.as_usize());
            if let Some(value) = value {
                *sum.get_or_insert(0) += value;
            }
        }
        Ok(datafusion::common::tree_node::TreeNodeRecursion::Continue)
    })
    .unwrap();
    sum
}
