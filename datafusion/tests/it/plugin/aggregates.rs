//! The worked plugin's aggregates, whole and in halves, against DataFusion's own, on values that look random.

use datafusion::arrow::array::Decimal128Array;
use datafusion::error::Result;
use datafusion::physical_plan::aggregates::{AggregateExec, AggregateInputMode};

use super::kit::*;
use crate::device_filter::FilterPlugin;

/// Of each partition.
const BATCHES: usize = 20;

/// Every function of every type, and arithmetic.
const FUNCTIONS: &str = "count(*), count(a), count(x), count(s), sum(a), sum(d), sum(e), avg(d), min(d), max(d), min(a), max(a), \
    min(n), max(n), min(t), max(t), sum(d * (1 - e)), sum(d * (1 - e) * (1 + e)), avg(d - e), max(d + CAST('0.125' AS DECIMAL(4, 3))), count(d * e)";

/// Keys, and how many groups there are at least.
#[rustfmt::skip]
const GROUPS: [(&str, usize); 7] = [("s", 6), ("v", 6), ("s, n", 20), ("n, v, t", 80), ("a", 7), ("d", 400), ("id", 2000)];

/// Aggregates that stay, whose states or results would not be DataFusion's, and why.
#[rustfmt::skip]
const STAYING: [(&str, &str); 11] = [
    ("sum(x) FROM t", "there are no kernels for sum(t.x)"),
    ("avg(x) FROM t", "there are no kernels for avg(t.x)"),
    ("min(x) FROM t", "there are no kernels for min(t.x)"),
    ("count(DISTINCT n), count(a) FROM t", "there are no kernels for count(DISTINCT t.n)"),
    ("sum(a + 1) FROM t", "the kernels do not compute sum(t.a + Int64(1))"),
    ("sum(d) FILTER (WHERE n > 0) FROM t", "it has filters, grouping sets or a limit"),
    ("avg(CAST(d AS DECIMAL(30, 2))) FROM t", ""),
    ("max(v) FROM t", "there are no kernels for max(t.v)"),
    ("count(*) AS c FROM t GROUP BY x ORDER BY c", "the kernels have no key like x"),
    ("count(*) AS c FROM t GROUP BY a + 1 ORDER BY c", "the kernels have no key like"),
    ("count(*) AS c FROM t GROUP BY GROUPING SETS ((s), (n)) ORDER BY c", "grouping sets"),
];

/// A number for each row of a batch, the same each time.
fn random(batch: usize, column: u64) -> impl Iterator<Item = u64> {
    let rows = (batch * ROWS) as u64..((batch + 1) * ROWS) as u64;
    rows.map(move |row| ((row << 8) + column + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .map(|n| (n ^ (n >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93) >> 32)
}

fn random_batch(number: usize) -> RecordBatch {
    /// One of these values, or null, for each row.
    fn some<T: Copy>(batch: usize, column: u64, of: &[T]) -> Vec<Option<T>> {
        let pick = |n: u64| of.get(n as usize % (of.len() + of.len() / 5 + 1)).copied();
        random(batch, column).map(pick).collect()
    }
    let decimal = |values: Vec<Option<i128>>| -> ArrayRef {
        let values = Decimal128Array::from(values);
        Arc::new(values.with_precision_and_scale(15, 2).unwrap())
    };
    let ids = Int64Array::from_iter_values(random(number, 0).map(|n| (n % 100_000) as i64));
    let texts = ["", "A", "N", "R", "a text that is longer than a view"];
    let (s, v) = (some(number, 1, &texts), some(number, 2, &texts));
    let wide = [i64::MAX, i64::MIN, -14, -7, 0, 7, 14, 21];
    let small = [-2, -1, 0, 1];
    let floats = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0];
    let most = 999_999_999_999_999;
    let large: Vec<_> = (-500..500).chain([most; 500]).chain([-most; 500]).collect();
    let fractions: Vec<_> = (0..11).collect();
    #[rustfmt::skip]
    let columns: [(_, ArrayRef, _); 9] = [
        ("id", Arc::new(ids), false),
        ("s", Arc::new(StringArray::from(s)), true),
        ("v", Arc::new(StringViewArray::from(v)), true),
        ("a", Arc::new(Int64Array::from(some(number, 3, &wide))), true),
        ("n", Arc::new(Int32Array::from(some(number, 4, &small))), true),
        ("t", Arc::new(Date32Array::from(some(number, 5, &small))), true),
        ("x", Arc::new(Float64Array::from(some(number, 6, &floats))), true),
        ("d", decimal(some(number, 7, &large)), true),
        ("e", decimal(some(number, 8, &fractions)), true),
    ];
    RecordBatch::try_from_iter_with_nullable(columns).unwrap()
}

fn tables(sim: &Sim, partitions: usize, rule: DeviceRule) -> Tables {
    Tables::of(sim, &numbered(partitions, BATCHES, random_batch), rule)
}

/// How many aggregates of a plan run on the device, and on the host.
fn aggregates(plan: &Plan) -> (usize, usize) {
    (
        count(plan, "DeviceAggregateExec"),
        count(plan, "AggregateExec"),
    )
}

#[tokio::test]
async fn they_are_datafusions() {
    for (partitions, parts) in [(1, (1, 0)), (PARTITIONS, (2, 0))] {
        let sim = Sim::new();
        let tables = tables(&sim, partitions, filters());
        for (predicate, some) in [("", true), (" WHERE n > 0", true), (" WHERE id < 0", false)] {
            let sql = format!("SELECT {FUNCTIONS} FROM t{predicate}");
            let (query, rows) = tables.check(&sql).await;
            assert_eq!((rows, aggregates(&query)), (1, parts), "{sql}");
            for (keys, groups) in GROUPS {
                let by = format!("GROUP BY {keys} ORDER BY {keys}");
                let sql = format!("SELECT {keys}, {FUNCTIONS} FROM t{predicate} {by}");
                let (query, rows) = tables.check(&sql).await;
                assert_eq!(aggregates(&query), parts, "{sql}");
                assert!(rows >= groups || !predicate.is_empty(), "{sql}: {rows}");
                assert_eq!(rows > 0, some, "{sql}");
            }
        }
        drop(tables);
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
    // The second half alone is not worth an upload.
    for (first, parts) in [(true, (1, 1)), (false, (0, 2))] {
        let sim = Sim::new();
        let plugin = FilterPlugin::whole();
        // The rows between the halves are on the host, and go up again.
        let rule = DeviceRule::default().with_plugin(Arc::new(Half { plugin, first }));
        let tables = tables(&sim, PARTITIONS, rule.with_uploads(&sim.device, 0));
        for sql in [
            format!("SELECT {FUNCTIONS} FROM t"),
            format!("SELECT {FUNCTIONS} FROM t WHERE id < 0"),
            format!("SELECT s, n, {FUNCTIONS} FROM t GROUP BY s, n ORDER BY s, n"),
        ] {
            let (query, _) = tables.check(&sql).await;
            assert_eq!(aggregates(&query), parts, "{sql}");
        }
    }
}

#[tokio::test]
async fn what_is_not_exact_stays() {
    let sim = Sim::new();
    let tables = tables(&sim, 1, filters());
    for (rest, why) in STAYING {
        let (query, _) = tables.check(&format!("SELECT {rest}")).await;
        assert_eq!(aggregates(&query).0, 0, "{rest}");
        let declined = declined(&query, &filters(), &DeviceSpec::from(&sim.device)).unwrap();
        says(&format!("{declined:?}"), &[why]);
    }
}

/// What has more than 128 bits fails, as it does on the host, wherever it is computed.
#[tokio::test]
async fn overflows_are_errors() {
    let sim = Sim::new();
    let tables = tables(&sim, 1, filters());
    for (sql, node) in [
        ("SELECT sum(d * d * d) FROM t", "DeviceAggregateExec"),
        (
            "SELECT n, sum(d * d * d) FROM t GROUP BY n",
            "DeviceAggregateExec",
        ),
        (
            "SELECT d * d * d FROM t WHERE n > 0",
            "DeviceArithmeticExec",
        ),
    ] {
        for (context, node) in [(&tables.host, ""), (&tables.device, node)] {
            let query = plan(context, sql).await;
            says(&text(&query, &[]), &[node]);
            fails(collect(query, context.task_ctx()).await, &["verflow"]);
        }
    }
    drop(tables);
    sim.assert_done();
}
