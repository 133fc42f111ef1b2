//! Tables and sessions of the tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use arrow_device::{Device, DeviceRecordBatch, DeviceRecordBatches};
use arrow_device_datafusion::{DeviceRule, DeviceTable};
use datafusion::arrow::array::{
    ArrayRef, Date32Array, Float64Array, Int32Array, Int64Array, RecordBatch, StringArray,
    TimestampMicrosecondArray,
};
use datafusion::arrow::compute::concat_batches;
use datafusion::catalog::TableProvider;
use datafusion::common::tree_node::TreeNode;
use datafusion::datasource::MemTable;
use datafusion::execution::SessionStateBuilder;
use datafusion::physical_plan::collect_partitioned;
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::{StreamExt, stream};

use crate::device_filter::FilterPlugin;
pub(crate) use crate::kit::{Plan, Sim, fails, plan, row_count, says, shape};

pub(crate) const PARTITIONS: usize = 3;
pub(crate) const ROWS: i64 = 300;

/// Columns of several types, with and without nulls.
pub(crate) fn batch(number: i64) -> RecordBatch {
    let ids = number * ROWS..(number + 1) * ROWS;
    let floats = [
        0.0,
        -0.0,
        1.5,
        -1.5,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
        -f64::NAN,
        f64::from_bits(0x7ff0_0000_0000_0001), // a signalling NaN
        f64::MIN_POSITIVE / 2.0,
        f64::MAX,
    ];
    let some = |id: &i64, of: i64| id % of != 2;
    let x = |id: i64| some(&id, 7).then(|| floats[id as usize % floats.len()]);
    let a = |id: i64| {
        some(&id, 5).then_some(match id % 50 {
            0 => i64::MIN,
            1 => i64::MAX,
            n => n - 25,
        })
    };
    let n = |id: i64| some(&id, 11).then_some((id % 13 - 6) as i32);
    let ids: Vec<i64> = ids.collect();
    let each = || ids.iter().copied();
    let d = each().map(|id| some(&id, 3).then_some(id as i32 % 40));
    let ts = each().map(|id| some(&id, 4).then_some(id));
    let s = each().map(|id| format!("row {id}"));
    let columns: [(_, ArrayRef, _); 7] = [
        ("id", Arc::new(Int64Array::from(ids.clone())), false),
        ("a", Arc::new(each().map(a).collect::<Int64Array>()), true),
        ("x", Arc::new(each().map(x).collect::<Float64Array>()), true),
        ("n", Arc::new(each().map(n).collect::<Int32Array>()), true),
        ("d", Arc::new(Date32Array::from_iter(d)), true),
        (
            "ts",
            Arc::new(TimestampMicrosecondArray::from_iter(ts)),
            true,
        ),
        ("s", Arc::new(StringArray::from_iter_values(s)), false),
    ];
    RecordBatch::try_from_iter_with_nullable(columns).unwrap()
}

/// What each partition has of the batches: all of one, a slice that begins inside a byte of the
/// masks, no rows.
pub(crate) fn cut<T>(number: i64, whole: T, slice: impl Fn(&T, usize, usize) -> T) -> T {
    match number % 4 {
        1 => slice(&whole, 3, 201),
        2 => slice(&whole, 17, 0),
        3 => slice(&whole, 65, 1),
        _ => whole,
    }
}

pub(crate) struct Tables {
    pub(crate) host: SessionContext,
    pub(crate) device: SessionContext,
}

/// As many partitions as the table has.
/// The rule with the plugin.
pub(crate) fn filters() -> DeviceRule {
    DeviceRule::default().with_plugin(Arc::new(FilterPlugin::whole()))
}

pub(crate) fn session(
    table: Arc<dyn TableProvider>,
    partitions: usize,
    plugin: bool,
) -> SessionContext {
    let config = SessionConfig::new().with_target_partitions(partitions);
    let mut state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features();
    if plugin {
        state = state.with_physical_optimizer_rule(Arc::new(filters()));
    }
    let context = SessionContext::new_with_state(state.build());
    context.register_table("t", table).unwrap();
    context
}

impl Tables {
    pub(crate) fn new(device: &Device, partitions: usize) -> Self {
        let numbers = |p: usize| (0..5).map(move |i| (p * 5 + i) as i64);
        let host = |p| numbers(p).map(|n| cut(n, batch(n), RecordBatch::slice));
        let host: Vec<Vec<_>> = (0..partitions).map(|p| host(p).collect()).collect();
        let up = |n| device.upload(&batch(n)).unwrap();
        let slice = |batch: &DeviceRecordBatch, at, rows| batch.slice(at, rows).unwrap();
        let up = |p| numbers(p).map(|n| cut(n, up(n), slice)).collect();
        let schema = host[0][0].schema();
        let batches = (0..partitions).map(up).collect();
        let table = DeviceTable::from_batches(schema.clone(), device.clone(), batches).unwrap();
        let host = MemTable::try_new(schema, host).unwrap();
        Self {
            host: session(Arc::new(host), partitions, false),
            device: session(Arc::new(table), partitions, true),
        }
    }
}

/// Partition by partition: each one's rows, in their order.
pub(crate) async fn rows(context: &SessionContext, plan: Plan) -> Vec<RecordBatch> {
    let schema = plan.schema();
    let partitions = collect_partitioned(plan, context.task_ctx()).await.unwrap();
    let one = |batches: Vec<_>| concat_batches(&schema, &batches).unwrap();
    partitions.into_iter().map(one).collect()
}

/// The buffers: `==` of arrays would do for values, but says nothing of a NaN's bits.
pub(crate) fn same(found: &RecordBatch, expected: &RecordBatch) -> bool {
    let bits = |batch: &RecordBatch| -> Vec<Vec<Option<u64>>> {
        let float = |column: &ArrayRef| {
            let floats = column.as_any().downcast_ref::<Float64Array>();
            floats.map(|floats| floats.iter().map(|x| x.map(f64::to_bits)).collect())
        };
        batch.columns().iter().filter_map(float).collect()
    };
    found == expected && found.schema() == expected.schema() && bits(found) == bits(expected)
}

/// Whether a plan filters on the device, and not on the host.
pub(crate) fn is_on_device(plan: &Plan) -> bool {
    let shape = shape(plan, &[]);
    assert_eq!(shape.matches("Filter").count(), 1, "{shape}");
    plan.exists(|node| Ok(node.name() == "DeviceFilterExec"))
        .unwrap()
}

/// On the device, and the same as on the host. How many rows.
pub(crate) async fn check(tables: &Tables, sql: &str) -> usize {
    let device = plan(&tables.device, sql).await;
    assert!(is_on_device(&device), "{sql}");
    let found = rows(&tables.device, device).await;
    let expected = rows(&tables.host, plan(&tables.host, sql).await).await;
    assert_eq!(found.len(), expected.len(), "{sql}");
    for (found, expected) in found.iter().zip(&expected) {
        assert!(same(found, expected), "{sql}\n{found:?}\n{expected:?}");
    }
    row_count(&found)
}

/// A table of one partition, batch by batch as asked for; how many were. After the last one it says
/// nothing more.
pub(crate) fn endless(device: &Device, batches: usize) -> (SessionContext, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let up = device.upload(&batch(0)).unwrap();
    let (schema, device_type) = (up.schema(), device.id().device_type);
    let (of, counter) = (schema.clone(), asked.clone());
    let open = move |_| {
        let (up, asked) = (up.clone(), counter.clone());
        let batches = stream::repeat(up).take(batches).inspect(move |_| {
            asked.fetch_add(1, SeqCst);
        });
        let batches = batches.map(Ok).chain(stream::pending());
        let stream = DeviceRecordBatches::from_stream(batches, of.clone(), device_type);
        async move { Ok(stream) }
    };
    let table = DeviceTable::from_streams(schema, device.clone(), 1, open);
    (session(Arc::new(table), 1, true), asked)
}
