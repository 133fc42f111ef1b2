//! Devices, tables, readers, operators and sessions of the tests.

use arrow_device::ImportOptions;
use arrow_device::device::sim::SimMode;
use datafusion::arrow::array::RecordBatchOptions;
use datafusion::common::Result;

pub(crate) use crate::operator::{double, map};
pub(crate) use crate::prelude::*;
pub(crate) use crate::readers::*;

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
        Self::set(|_| ())
    }

    /// Nothing runs until somebody waits for it.
    pub(crate) fn deferred() -> Self {
        Self::set(|config| config.mode = SimMode::Deferred)
    }

    pub(crate) fn set(change: impl FnOnce(&mut SimConfig)) -> Self {
        let mut config = SimConfig::default();
        change(&mut config);
        Self::with(config)
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
        let end = Instant::now() + LONG;
        loop {
            let failed = self.device.synchronize().is_err();
            self.device.trim();
            let (report, stats) = (self.sim.report(), self.device.stats());
            assert_eq!(report.violations, [""; 0]);
            let host = report.live_host_allocations + report.live_events;
            let freed = stats.allocations == stats.frees;
            if report.live_allocations + host == 0 && freed {
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

/// No columns, and so many rows.
pub(crate) fn no_columns(rows: usize) -> RecordBatch {
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(Arc::new(Schema::empty()), vec![], &options).unwrap()
}

/// `n` batches of 16 numbers from `first`: 128 bytes each.
pub(crate) fn batches(first: i64, n: i64) -> Vec<RecordBatch> {
    (0..n).map(|i| numbers(first + i * 16, 16)).collect()
}

/// The first `n` multiples, of 0 times and more.
pub(crate) fn multiples(n: i64, of: i64) -> Vec<i64> {
    (0..n).map(|i| i * of).collect()
}

pub(crate) fn row_count(batches: &[RecordBatch]) -> usize {
    batches.iter().map(RecordBatch::num_rows).sum()
}

/// The rows of each batch.
pub(crate) fn sizes(batches: &[RecordBatch]) -> Vec<usize> {
    batches.iter().map(RecordBatch::num_rows).collect()
}

pub(crate) fn rows_of(batches: &[DeviceRecordBatch]) -> Vec<usize> {
    batches.iter().map(DeviceRecordBatch::num_rows).collect()
}

fn schema_of(partitions: &[Vec<RecordBatch>]) -> SchemaRef {
    let first = partitions.iter().flatten().next();
    first.map_or_else(schema, RecordBatch::schema)
}

/// A device table of these partitions.
pub(crate) fn device_table(device: &Device, partitions: &[Vec<RecordBatch>]) -> Arc<DeviceTable> {
    device_table_of(device, schema_of(partitions), partitions)
}

pub(crate) fn device_table_of(
    device: &Device,
    schema: SchemaRef,
    partitions: &[Vec<RecordBatch>],
) -> Arc<DeviceTable> {
    let up = |batch: &RecordBatch| device.upload(batch).unwrap();
    let partitions = partitions.iter().map(|p| p.iter().map(up).collect());
    let table = DeviceTable::from_batches(schema, device.clone(), partitions.collect());
    Arc::new(table.unwrap())
}

pub(crate) fn host_table(partitions: &[Vec<RecordBatch>]) -> Arc<MemTable> {
    let table = MemTable::try_new(schema_of(partitions), partitions.to_vec());
    Arc::new(table.unwrap())
}

/// Rows of the sessions' batches and of their uploads. [`rows`] and [`numbers`] make batches of 16, which uploads do not
/// join.
const BATCH_SIZE: usize = 32;

/// A configuration with options of devices: uploads join batches to [`BATCH_SIZE`] rows, however long that takes.
pub(crate) fn config(set: impl FnOnce(&mut DeviceOptions)) -> SessionConfig {
    let mut options = DeviceOptions::default();
    options.upload_rows = BATCH_SIZE;
    options.upload_wait_ms = 3_600_000;
    set(&mut options);
    SessionConfig::new().with_option_extension(options)
}

/// A task of a session with this configuration.
pub(crate) fn task(config: SessionConfig) -> Arc<TaskContext> {
    SessionContext::new_with_config(config).task_ctx()
}

pub(crate) type Rule = Arc<dyn PhysicalOptimizerRule + Send + Sync>;

/// A session with these rules after DataFusion's own.
pub(crate) fn session_of(
    config: SessionConfig,
    rules: impl IntoIterator<Item = Rule>,
) -> SessionContext {
    let state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features();
    let state = rules.into_iter().fold(state, |state, rule| {
        state.with_physical_optimizer_rule(rule)
    });
    SessionContext::new_with_state(state.build())
}

/// A session with `DeviceRule`.
pub(crate) fn session() -> SessionContext {
    session_with(1, 0)
}

/// The same with a rule that puts `doubles` device operators above each device scan.
pub(crate) fn session_with(target_partitions: usize, doubles: usize) -> SessionContext {
    let config = config(|_| ())
        .with_target_partitions(target_partitions)
        .with_batch_size(BATCH_SIZE);
    let rules: [Rule; 2] = [double_scans(doubles), Arc::new(DeviceRule::default())];
    session_of(config, rules)
}

pub(crate) fn of_partitions(partitions: usize) -> SessionConfig {
    SessionConfig::new().with_target_partitions(partitions)
}

/// A session that knows nothing of devices.
pub(crate) fn session_without_rule(target_partitions: usize) -> SessionContext {
    SessionContext::new_with_config(of_partitions(target_partitions))
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

/// The plan of a table's scan, on the host.
pub(crate) async fn scan(table: Arc<dyn TableProvider>) -> Plan {
    let state = SessionContext::new().state();
    let scan = table.scan(&state, None, &[], None).await.unwrap();
    match DeviceExec::of(&scan) {
        Some(_) => Arc::new(DeviceToHostExec::new(scan)),
        None => scan,
    }
}

pub(crate) fn any_sim() -> DeviceSpec {
    DeviceSpec::any(ArrowDeviceType::EXT_DEV)
}

/// A task of a session that offers these devices.
pub(crate) fn offering<const N: usize>(devices: [&Sim; N]) -> Arc<TaskContext> {
    let resolver = DeviceResolver::of(devices.map(|sim| sim.device.clone()));
    task(SessionConfig::new().with_extension(Arc::new(resolver)))
}

/// What the rule makes of a plan.
pub(crate) fn with_transitions(plan: Plan) -> Plan {
    let config = ConfigOptions::default();
    DeviceRule::default().optimize(plan, &config).unwrap()
}

pub(crate) async fn query(ctx: &SessionContext, sql: &str) -> Result<Vec<RecordBatch>> {
    ctx.sql(sql).await?.collect().await
}

/// Runs a plan as it is.
pub(crate) async fn run(plan: &Plan) -> Result<Vec<RecordBatch>> {
    collect(plan.clone(), session().task_ctx()).await
}

/// Its column of numbers.
pub(crate) async fn numbers_from(plan: &Plan) -> Vec<i64> {
    numbers_of(&run(plan).await.unwrap())
}

/// Starts the first partition of a plan as it is.
pub(crate) fn started(plan: &Plan) -> SendableRecordBatchStream {
    plan.execute(0, session().task_ctx()).unwrap()
}

/// Starts a plan whose result is wanted on a device.
pub(crate) fn started_on(plan: &Plan, device: &Device) -> SendableDeviceStream {
    execute_on_device(plan.clone(), session().task_ctx(), device).unwrap()
}

/// The plan's result on a device.
pub(crate) async fn on_device(
    plan: &Plan,
    device: &Device,
) -> arrow_device::Result<Vec<DeviceRecordBatch>> {
    started_on(plan, device).try_collect().await
}

pub(crate) fn to_host(batches: &[DeviceRecordBatch]) -> Vec<RecordBatch> {
    batches.iter().map(|b| b.to_host().unwrap()).collect()
}

pub(crate) fn numbers_on(batches: &[DeviceRecordBatch]) -> Vec<i64> {
    numbers_of(&to_host(batches))
}

/// Reads a C stream of this crate's, whose batches are on the device.
pub(crate) fn reader(
    stream: FFI_ArrowDeviceArrayStream,
    device: &Device,
) -> DeviceRecordBatchStreamReader {
    // SAFETY: the stream is this crate's, and nobody else has it.
    unsafe { DeviceRecordBatchStreamReader::new(stream, imports(device)) }.unwrap()
}

/// Imports that know the device.
pub(crate) fn imports(device: &Device) -> ImportOptions {
    let devices = Devices::new();
    devices.add(device.clone()).unwrap();
    ImportOptions {
        devices: Some(devices),
        ..Default::default()
    }
}

pub(crate) fn export(
    plan: Plan,
    context: Arc<TaskContext>,
    sim: &Sim,
) -> FFI_ArrowDeviceArrayStream {
    let options = ExportOptions::new(SyncPolicy::Event);
    export_plan(plan, context, sim, options).unwrap()
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

/// Rows as text.
pub(crate) fn lines(batches: &[RecordBatch]) -> Vec<String> {
    let options = FormatOptions::default().with_null("null");
    let mut lines = Vec::new();
    for batch in batches {
        let columns = batch.columns().iter();
        let columns = columns.map(|column| ArrayFormatter::try_new(column, &options).unwrap());
        let columns: Vec<_> = columns.collect();
        for row in 0..batch.num_rows() {
            let values = columns.iter().map(|column| column.value(row).to_string());
            lines.push(values.collect::<Vec<_>>().join("|"));
        }
    }
    lines
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

/// The plan is this text, which is indented as the tests are.
#[track_caller]
pub(crate) fn assert_plan(plan: &Plan, devices: &[&Device], expected: &str) {
    let expected = expected.replace("\n        ", "\n");
    let (found, expected) = (text(plan, devices), expected.trim());
    assert!(found.trim() == expected, "{found}\nis not\n{expected}");
}

/// A plan as one line: each node above its child, and several children in brackets. Devices are called as in [`text`];
/// `Down`, `Up` and `Move` are the transitions.
pub(crate) fn shape(plan: &Plan, devices: &[&Device]) -> String {
    let children: Vec<_> = plan.children().iter().map(|c| shape(c, devices)).collect();
    let name = plan.name().split('(').next().unwrap();
    let name = name.trim_end_matches("Exec");
    let name = match name {
        "DeviceToHost" => "Down",
        "HostToDevice" => "Up",
        "DeviceToDevice" => "Move",
        other => other.trim_start_matches("Device"),
    };
    let on = DeviceExec::of(plan).map(|node| node.device());
    let on = on.and_then(|spec| devices.iter().position(|device| spec.fits(device)));
    let on = on.map_or(String::new(), |i| format!(" {}", ["A", "B"][i]));
    match &children[..] {
        [] => format!("{name}{on}"),
        [child] => format!("{name}{on} < {child}"),
        more => format!("{name}{on} < ({})", more.join(", ")),
    }
}

/// An error's text has all these parts.
#[track_caller]
pub(crate) fn says(error: &impl fmt::Display, parts: &[&str]) {
    let error = error.to_string();
    for part in parts {
        assert!(error.contains(part), "no {part:?} in: {error}");
    }
}

/// It is an error, whose text has all these parts.
#[track_caller]
pub(crate) fn fails<T, E: fmt::Display>(result: Result<T, E>, parts: &[&str]) -> E {
    let Err(error) = result else {
        panic!("no error that says {parts:?}");
    };
    says(&error, parts);
    error
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

/// Puts so many operators above device scans, with transitions in between that are of no use.
fn double_scans(doubles: usize) -> Rule {
    transforming(move |node| {
        let scan = DeviceExec::of(&node).filter(|_| node.children().is_empty() && doubles > 0);
        let Some(device) = scan.map(|scan| scan.device().clone()) else {
            return Transformed::no(node);
        };
        Transformed::yes((0..doubles).fold(node, |child, _| {
            double(Arc::new(DeviceToHostExec::new(child)), device.clone())
        }))
    })
}

/// A rule that transforms the nodes of a plan, from its leaves up.
pub(crate) fn transforming(
    node: impl Fn(Plan) -> Transformed<Plan> + Send + Sync + 'static,
) -> Rule {
    Arc::new(Transforming(node))
}

struct Transforming<F>(F);

impl<F> fmt::Debug for Transforming<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transforming")
    }
}

impl<F> PhysicalOptimizerRule for Transforming<F>
where
    F: Fn(Plan) -> Transformed<Plan> + Send + Sync + 'static,
{
    fn optimize(&self, plan: Plan, _: &ConfigOptions) -> Result<Plan> {
        Ok(plan.transform_up(|node| Ok((self.0)(node)))?.data)
    }

    fn name(&self) -> &str {
        "Transforming"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// A metric of the nodes of this name, all partitions together; `None` if no node has it.
pub(crate) fn metric(plan: &Plan, node: &str, metric: &str) -> Option<usize> {
    let below = plan.children().into_iter();
    let below = below.filter_map(|child| self::metric(child, node, metric));
    let own = plan.metrics().filter(|_| plan.name() == node);
    let own = own.and_then(|all| all.sum(|one| one.value().name() == metric));
    below
        .chain(own.map(|value| value.as_usize()))
        .reduce(|a, b| a + b)
}
