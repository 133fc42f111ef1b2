//! The worked plugin's aggregates, whole and in halves, against DataFusion's own, on random values.

use std::sync::Arc;

use arrow_device::{Device, DeviceRecordBatch};
use arrow_device_datafusion::{
    DeviceOperator, DevicePlugin, DeviceRule, DeviceSpec, DeviceTable, Verdict, declined,
};
use datafusion::arrow::array::{
    ArrayRef, Date32Array, Decimal128Array, Float64Array, Int32Array, Int64Array, RecordBatch,
    StringArray, StringViewArray,
};
use datafusion::arrow::compute::concat_batches;
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::datasource::MemTable;
use datafusion::error::Result;
use datafusion::execution::SessionStateBuilder;
use datafusion::physical_plan::aggregates::{AggregateExec, AggregateInputMode};
use datafusion::physical_plan::collect;
use datafusion::prelude::{SessionConfig, SessionContext};

use super::kit::{PARTITIONS, Plan, Sim, cut, fails, plan, session};
use crate::device_filter::FilterPlugin;

const ROWS: usize = 300;
/// Of each partition.
const BATCHES: usize = 20;

/// Every function of every type, and arithmetic.
const FUNCTIONS: &str = "count(*), count(a), count(x), count(s), sum(a), sum(d), sum(e), avg(d), min(d), max(d), min(a), max(a), \
    min(n), max(n), min(t), max(t), sum(d * (1 - e)), sum(d * (1 - e) * (1 + e)), avg(d - e), max(d + CAST('0.125' AS DECIMAL(4, 3))), count(d * e)";

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }

    fn some<T>(&mut self, value: T) -> Option<T> {
        (self.below(5) != 0).then_some(value)
    }

    fn rows<T>(&mut self, one: impl Fn(&mut Self) -> T) -> Vec<T> {
        (0..ROWS).map(|_| one(self)).collect()
    }
}

fn batch(number: usize) -> RecordBatch {
    let mut random = Random(number as u64 + 1);
    let text = |r: &mut Random| {
        let texts = ["", "A", "N", "R", "a text that is longer than a view"];
        let text = texts[r.below(5) as usize];
        r.some(text)
    };
    let decimal = |values: Vec<Option<i128>>, precision, scale| {
        let values = Decimal128Array::from(values);
        Arc::new(values.with_precision_and_scale(precision, scale).unwrap()) as ArrayRef
    };
    let large = |r: &mut Random| {
        let value = match r.below(4) {
            0 => 999_999_999_999_999,
            1 => -999_999_999_999_999,
            _ => i128::from(r.below(1000)) - 500,
        };
        r.some(value)
    };
    let wide = |r: &mut Random| {
        let value = match r.below(8) {
            0 => i64::MAX,
            1 => i64::MIN,
            n => (n as i64 - 4) * 7,
        };
        r.some(value)
    };
    let many = |r: &mut Random| r.below(100_000) as i64;
    let small = |r: &mut Random| {
        let value = r.below(4) as i32 - 2;
        r.some(value)
    };
    let float = |r: &mut Random| {
        let value = r.below(7) as f64 / 2.0;
        r.some(value)
    };
    let fraction = |r: &mut Random| {
        let value = i128::from(r.below(11));
        r.some(value)
    };
    let columns: [(_, ArrayRef, _); 9] = [
        ("id", Arc::new(Int64Array::from(random.rows(many))), false),
        ("s", Arc::new(StringArray::from(random.rows(text))), true),
        (
            "v",
            Arc::new(StringViewArray::from(random.rows(text))),
            true,
        ),
        ("a", Arc::new(Int64Array::from(random.rows(wide))), true),
        ("n", Arc::new(Int32Array::from(random.rows(small))), true),
        ("t", Arc::new(Date32Array::from(random.rows(small))), true),
        ("x", Arc::new(Float64Array::from(random.rows(float))), true),
        ("d", decimal(random.rows(large), 15, 2), true),
        ("e", decimal(random.rows(fraction), 15, 2), true),
    ];
    RecordBatch::try_from_iter_with_nullable(columns).unwrap()
}

/// Sessions with the table on the host, and on the device with a rule.
fn sessions(device: &Device, partitions: usize, rule: DeviceRule) -> [SessionContext; 2] {
    let numbers = |p: usize| (p * BATCHES..(p + 1) * BATCHES).map(|n| (n, batch(n)));
    let host = |p| numbers(p).map(|(n, batch)| cut(n as i64, batch, RecordBatch::slice));
    let host: Vec<Vec<_>> = (0..partitions).map(|p| host(p).collect()).collect();
    let slice = |batch: &DeviceRecordBatch, at, rows| batch.slice(at, rows).unwrap();
    let up = |(n, batch)| cut(n as i64, device.upload(&batch).unwrap(), slice);
    let up = (0..partitions)
        .map(|p| numbers(p).map(up).collect())
        .collect();
    let schema = host[0][0].schema();
    let table = DeviceTable::from_batches(schema.clone(), device.clone(), up).unwrap();
    let state = SessionStateBuilder::new()
        .with_config(SessionConfig::new().with_target_partitions(partitions))
        .with_default_features()
        .with_physical_optimizer_rule(Arc::new(rule));
    let on_device = SessionContext::new_with_state(state.build());
    on_device.register_table("t", Arc::new(table)).unwrap();
    let host = Arc::new(MemTable::try_new(schema, host).unwrap());
    [session(host, partitions, false), on_device]
}

fn rule() -> DeviceRule {
    DeviceRule::default().with_plugin(Arc::new(FilterPlugin::whole()))
}

/// How many aggregates of a plan run on the device, and on the host.
fn aggregates(plan: &Plan) -> (usize, usize) {
    let (mut device, mut host) = (0, 0);
    let walked = plan.apply(|node| {
        device += usize::from(node.name() == "DeviceAggregateExec");
        host += usize::from(node.name() == "AggregateExec");
        Ok(TreeNodeRecursion::Continue)
    });
    walked.unwrap();
    (device, host)
}

async fn run(context: &SessionContext, query: Plan) -> Result<RecordBatch> {
    let schema = query.schema();
    let batches = collect(query, context.task_ctx()).await?;
    Ok(concat_batches(&schema, &batches)?)
}

/// The result of a query, which both sessions give, and where its aggregates ran.
async fn check([host, device]: &[SessionContext; 2], sql: &str) -> (RecordBatch, (usize, usize)) {
    let expected = run(host, plan(host, sql).await).await.unwrap();
    let query = plan(device, sql).await;
    let found = run(device, query.clone()).await.unwrap();
    assert_eq!(found, expected, "{sql}");
    assert_eq!(found.schema(), expected.schema(), "{sql}");
    (found, aggregates(&query))
}

#[tokio::test]
async fn they_are_datafusions() {
    for partitions in [1, PARTITIONS] {
        let sim = Sim::new();
        let sessions = sessions(&sim, partitions, rule());
        let parts = if partitions == 1 { (1, 0) } else { (2, 0) };
        for (predicate, some) in [("", true), (" WHERE n > 0", true), (" WHERE id < 0", false)] {
            let sql = format!("SELECT {FUNCTIONS} FROM t{predicate}");
            let (found, ran) = check(&sessions, &sql).await;
            assert_eq!((found.num_rows(), ran), (1, parts), "{sql}");
            for (keys, groups) in [
                ("s", 6),
                ("v", 6),
                ("s, n", 20),
                ("n, v, t", 80),
                ("a", 7),
                ("d", 400),
                ("id", 2000),
            ] {
                let sql = format!(
                    "SELECT {keys}, {FUNCTIONS} FROM t{predicate} GROUP BY {keys} ORDER BY {keys}"
                );
                let (found, ran) = check(&sessions, &sql).await;
                let rows = found.num_rows();
                assert_eq!(ran, parts, "{sql}");
                assert!(rows >= groups || !predicate.is_empty(), "{sql}: {rows}");
                assert_eq!(rows > 0, some, "{sql}");
            }
        }
        drop(sessions);
        sim.assert_done();
    }
}

/// The plugin, which takes one half of each aggregate only.
#[derive(Debug)]
struct Half {
    plugin: FilterPlugin,
    first: bool,
}

impl DevicePlugin for Half {
    fn can_run(&self, node: &Plan, device: &DeviceSpec) -> Verdict {
        match node.downcast_ref::<AggregateExec>() {
            Some(half) if (half.mode().input_mode() == AggregateInputMode::Raw) != self.first => {
                Verdict::stays("the other half")
            }
            _ => self.plugin.can_run(node, device),
        }
    }

    fn replace(&self, node: &Plan) -> Result<Arc<dyn DeviceOperator>> {
        self.plugin.replace(node)
    }
}

/// Either half may run on the host: their states are the same.
#[tokio::test]
async fn halves_fit_those_of_the_host() {
    for first in [true, false] {
        let sim = Sim::new();
        let plugin = Half {
            plugin: FilterPlugin::whole(),
            first,
        };
        // The rows between the halves are on the host, and go up again.
        let rule = DeviceRule::default().with_plugin(Arc::new(plugin));
        let sessions = sessions(&sim, PARTITIONS, rule.with_uploads(&sim.device, 0));
        for sql in [
            format!("SELECT {FUNCTIONS} FROM t"),
            format!("SELECT {FUNCTIONS} FROM t WHERE id < 0"),
            format!("SELECT s, n, {FUNCTIONS} FROM t GROUP BY s, n ORDER BY s, n"),
        ] {
            let (_, ran) = check(&sessions, &sql).await;
            // The second half alone is not worth an upload.
            assert_eq!(ran, if first { (1, 1) } else { (0, 2) }, "{sql}");
        }
    }
}

#[tokio::test]
async fn what_is_not_exact_stays() {
    let sim = Sim::new();
    let sessions = sessions(&sim, 1, rule());
    for (functions, why) in [
        ("sum(x)", "there are no kernels for sum(t.x)"),
        ("avg(x)", "there are no kernels for avg(t.x)"),
        ("min(x)", "there are no kernels for min(t.x)"),
        (
            "count(DISTINCT n), count(a)",
            "there are no kernels for count(DISTINCT t.n)",
        ),
        (
            "sum(a + 1)",
            "the kernels do not compute sum(t.a + Int64(1))",
        ),
        (
            "sum(d) FILTER (WHERE n > 0)",
            "it has filters, grouping sets or a limit",
        ),
        ("avg(CAST(d AS DECIMAL(30, 2)))", "the sum"),
        ("max(v)", "there are no kernels for max(t.v)"),
    ] {
        let sql = format!("SELECT {functions} FROM t");
        let (_, ran) = check(&sessions, &sql).await;
        assert_eq!(ran, (0, 1), "{sql}");
        let query = plan(&sessions[1], &sql).await;
        let declined = declined(&query, &rule(), &DeviceSpec::from(&sim.device)).unwrap();
        let declined = format!("{declined:?}");
        assert!(
            why == "the sum" || declined.contains(why),
            "{sql}: {declined}"
        );
    }
    for keys in ["x", "a + 1", "GROUPING SETS ((s), (n))"] {
        let sql = format!("SELECT count(*) AS c FROM t GROUP BY {keys} ORDER BY c");
        let (_, ran) = check(&sessions, &sql).await;
        assert_eq!(ran.0, 0, "{sql}");
    }
}

/// What has more than 128 bits fails, as it does on the host, wherever it is computed.
#[tokio::test]
async fn overflows_are_errors() {
    let sim = Sim::new();
    let sessions = sessions(&sim, 1, rule());
    for sql in [
        "SELECT sum(d * d * d) FROM t",
        "SELECT n, sum(d * d * d) FROM t GROUP BY n",
        "SELECT d * d * d AS p FROM t WHERE n > 0",
    ] {
        let host = plan(&sessions[0], sql).await;
        fails(collect(host, sessions[0].task_ctx()).await, &["verflow"]);
        let query = plan(&sessions[1], sql).await;
        let shown = crate::kit::text(&query, &[]);
        assert!(
            shown.contains("DeviceAggregateExec") || shown.contains("DeviceArithmeticExec"),
            "{shown}"
        );
        fails(collect(query, sessions[1].task_ctx()).await, &["verflow"]);
    }
    drop(sessions);
    sim.assert_done();
}
