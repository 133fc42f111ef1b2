//! Tables and sessions of the tests.

use datafusion::arrow::array::TimestampMicrosecondArray;

use crate::device_filter::FilterPlugin;
pub(crate) use crate::kit::*;
use crate::support::compare::same_batch;

pub(crate) const PARTITIONS: usize = 3;
pub(crate) const ROWS: usize = 300;

/// The rule with the plugin.
pub(crate) fn filters() -> DeviceRule {
    DeviceRule::default().with_plugin(Arc::new(FilterPlugin::whole()))
}

/// A session with the plugin and a table t.
pub(crate) fn session(table: Arc<dyn TableProvider>, partitions: usize) -> SessionContext {
    let context = session_of(of_partitions(partitions), [Arc::new(filters()) as _]);
    register(&context, "t", table);
    context
}

/// Columns of several types, with and without nulls.
pub(crate) fn batch(number: usize) -> RecordBatch {
    let ids = (number * ROWS) as i64..((number + 1) * ROWS) as i64;
    let signalling = f64::from_bits(0x7ff0_0000_0000_0001);
    let (subnormal, infinity) = (f64::MIN_POSITIVE / 2.0, f64::INFINITY);
    #[rustfmt::skip]
    let floats = [0.0, -0.0, 1.5, -1.5, infinity, -infinity, f64::NAN, -f64::NAN, signalling, subnormal, f64::MAX];
    #[rustfmt::skip]
    let texts = [
        "", "a", "b", "twelve bytes", "thirteen byte", "thirteen bytf", "ß", "a längerer text, which is too long for a view",
    ];
    let some = |id: i64, of: i64| id % of != 2;
    let each = || ids.clone();
    let x = each().map(|id| some(id, 7).then(|| floats[id as usize % floats.len()]));
    let a = each().map(|id| {
        some(id, 5).then_some(match id % 50 {
            0 => i64::MIN,
            1 => i64::MAX,
            n => n - 25,
        })
    });
    let n = each().map(|id| some(id, 11).then_some((id % 13 - 6) as i32));
    let d = each().map(|id| some(id, 3).then_some(id as i32 % 40));
    let ts = each().map(|id| some(id, 4).then_some(id));
    let s = each().map(|id| format!("row {id}"));
    // The same rows meet in every order.
    let text = |of: i64| {
        let text = |id: i64| texts.get((id / of % 9) as usize).copied();
        StringArray::from_iter(each().map(text))
    };
    let small = Int64Array::from_iter_values(each().map(|id| id % 10));
    let dictionary = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Int64));
    let list = DataType::new_list(DataType::Int64, true);
    let (u, l, v) = (text(1), text(3), text(7));
    let (l, v) = (
        cast(&l, &DataType::LargeUtf8),
        cast(&v, &DataType::Utf8View),
    );
    #[rustfmt::skip]
    let columns: [(_, ArrayRef, _); 13] = [
        ("id", Arc::new(Int64Array::from_iter_values(each())), false),
        ("a", Arc::new(Int64Array::from_iter(a)), true),
        ("x", Arc::new(Float64Array::from_iter(x)), true),
        ("n", Arc::new(Int32Array::from_iter(n)), true),
        ("d", Arc::new(Date32Array::from_iter(d)), true),
        ("ts", Arc::new(TimestampMicrosecondArray::from_iter(ts)), true),
        ("s", Arc::new(StringArray::from_iter_values(s)), false),
        ("u", Arc::new(u), true),
        ("l", l.unwrap(), true),
        ("v", v.unwrap(), true),
        ("dictionary", cast(&small, &dictionary).unwrap(), true),
        ("list", cast(&small, &list).unwrap(), true),
        ("nothing", Arc::new(NullArray::new(ROWS)), true),
    ];
    RecordBatch::try_from_iter_with_nullable(columns).unwrap()
}

/// So many partitions of batches with consecutive numbers.
pub(crate) fn numbered(
    partitions: usize,
    batches: usize,
    batch: impl Fn(usize) -> RecordBatch,
) -> Vec<Vec<RecordBatch>> {
    let partition = |p| (p * batches..(p + 1) * batches).map(&batch).collect();
    (0..partitions).map(partition).collect()
}

/// What partitions have of their batches, one after another: all of one, a slice that begins inside a byte of the masks, no rows, one row.
const CUTS: [(usize, usize); 4] = [(0, ROWS), (3, 201), (17, 0), (65, 1)];

/// The rows that are left of so many batches.
pub(crate) fn rows_left(batches: usize) -> usize {
    CUTS.iter()
        .cycle()
        .take(batches)
        .map(|(_, rows)| rows)
        .sum()
}

/// The same table in two sessions: on the host, and on the device with a rule.
pub(crate) struct Tables {
    pub(crate) host: SessionContext,
    pub(crate) device: SessionContext,
}

impl Tables {
    pub(crate) fn new(device: &Device, partitions: usize) -> Self {
        Self::of(device, &numbered(partitions, 5, batch), filters())
    }

    /// Batches of [`ROWS`] rows, of which a part is left.
    pub(crate) fn of(device: &Device, whole: &[Vec<RecordBatch>], rule: DeviceRule) -> Self {
        // On the device, too, they are cut where they are.
        let host = |((at, rows), batch): (_, &RecordBatch)| batch.slice(at, rows);
        let up = |((at, rows), batch): (_, &RecordBatch)| device.upload(batch)?.slice(at, rows);
        let cut = || {
            whole
                .iter()
                .map(|batches| CUTS.into_iter().cycle().zip(batches))
        };
        let on_host = cut().map(|batches| batches.map(host).collect());
        let on_device = cut().map(|batches| batches.map(up).collect::<Result<_, _>>().unwrap());
        let schema = whole[0][0].schema();
        let table = DeviceTable::from_batches(schema.clone(), device.clone(), on_device.collect());
        let memory = MemTable::try_new(schema, on_host.collect()).unwrap();
        let config = of_partitions(whole.len());
        let tables = Self {
            host: session_of(config.clone(), []),
            device: session_of(config, [Arc::new(rule) as _]),
        };
        register(&tables.host, "t", Arc::new(memory));
        register(&tables.device, "t", Arc::new(table.unwrap()));
        tables
    }

    /// What a query returns on the host.
    pub(crate) async fn expected(&self, sql: &str) -> Vec<RecordBatch> {
        rows(&self.host, plan(&self.host, sql).await).await
    }

    /// Compares the result of a query with the host's. Its plan, and how many rows.
    pub(crate) async fn check(&self, sql: &str) -> (Plan, usize) {
        let query = plan(&self.device, sql).await;
        let found = rows(&self.device, query.clone()).await;
        assert_same(&found, &self.expected(sql).await, sql);
        (query, row_count(&found))
    }
}

/// Partition by partition: each one's rows, in their order.
pub(crate) async fn rows(context: &SessionContext, plan: Plan) -> Vec<RecordBatch> {
    let schema = plan.schema();
    let partitions = collect_partitioned(plan, context.task_ctx()).await.unwrap();
    let one = |batches: Vec<_>| concat_batches(&schema, &batches).unwrap();
    partitions.into_iter().map(one).collect()
}

/// The same rows in each partition, bit by bit.
#[track_caller]
pub(crate) fn assert_same(found: &[RecordBatch], expected: &[RecordBatch], what: &str) {
    assert_eq!(found.len(), expected.len(), "partitions of {what}");
    for (found, expected) in found.iter().zip(expected) {
        same_batch(expected, found).unwrap_or_else(|e| panic!("{what}: {e}"));
    }
}

/// Whether a plan filters on the device, and not on the host.
pub(crate) fn is_on_device(plan: &Plan) -> bool {
    let shape = shape(plan, &[]);
    assert_eq!(shape.matches("Filter").count(), 1, "{shape}");
    count(plan, "DeviceFilterExec") > 0
}

/// The nodes of a plan with this name.
pub(crate) fn nodes(plan: &Plan, name: &str) -> Vec<Plan> {
    let mut nodes = Vec::new();
    let walked = plan.apply(|node| {
        nodes.extend((node.name() == name).then(|| node.clone()));
        Ok(TreeNodeRecursion::Continue)
    });
    walked.unwrap();
    nodes
}

/// How many nodes of a plan have this name.
pub(crate) fn count(plan: &Plan, name: &str) -> usize {
    nodes(plan, name).len()
}

/// The batches of a query on the device, what it cost until the last one, and how often this waited for the device, without which nothing
/// runs on a deferred one: after so many waits of queues, and whenever no poll can go on. No poll runs work itself.
pub(crate) async fn driven(
    context: &SessionContext,
    sim: &Sim,
    sql: &str,
    queue_waits: u64,
) -> (Vec<DeviceRecordBatch>, TransferStats, u64) {
    let (query, before) = (plan(context, sql).await, sim.stats());
    let is_deferred = queue_waits > 0;
    let stream = execute_on_device(query, context.task_ctx(), sim).unwrap();
    let mut found = Box::pin(stream.map(Result::unwrap).collect::<Vec<_>>());
    let mut waits = 0;
    for _ in 0..20_000 {
        let pending = sim.sim.report().pending_operations;
        let polled = (&mut found).now_or_never();
        let ran = is_deferred && sim.sim.report().pending_operations < pending;
        assert!(!ran, "work ran within a poll");
        let cost = sim.stats().since(&before);
        if let Some(found) = polled {
            return (found, cost, waits);
        }
        if cost.queue_waits >= queue_waits {
            sim.synchronize().unwrap();
            waits += 1;
        }
        // Whoever wakes the task does so from another thread.
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("no progress");
}
