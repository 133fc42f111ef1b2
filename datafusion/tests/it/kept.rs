//! What the rule must keep of a plan when a plugin runs some of its nodes: orders, partitions, values, and itself.

use std::sync::Arc;

use arrow_device_datafusion::{
    DeviceOperator, DeviceOptions, DevicePlugin, DeviceRule, DeviceSpec, DeviceTask,
    SendableDeviceStream, Verdict,
};
use datafusion::arrow::array::{ArrayRef, DictionaryArray, Int64Array, RecordBatch, StringArray};
use datafusion::arrow::datatypes::DataType::{self, *};
use datafusion::arrow::datatypes::{Field, Int8Type, Schema};
use datafusion::arrow::error::ArrowError;
use datafusion::common::Result;
use datafusion::common::config::ConfigOptions;
use datafusion::datasource::MemTable;
use datafusion::execution::SessionStateBuilder;
use datafusion::physical_expr::expressions::lit;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::{ExecutionPlan, collect};
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::StreamExt;

use crate::kit::*;
use crate::nodes::*;

/// Runs nodes of these names.
#[derive(Debug, Clone, Copy, Default)]
struct Runs {
    names: &'static [&'static str],
    there: &'static [&'static str],
    merges: bool,
    small: bool,
}

/// Runs its node on the host, and uploads what that returns.
#[derive(Debug)]
pub(crate) struct Backed {
    name: String,
    has_small_batches: bool,
}

impl Backed {
    pub(crate) fn new(node: &Plan, has_small_batches: bool) -> Self {
        let name = format!("My{}", node.name());
        Self {
            name,
            has_small_batches,
        }
    }
}

impl DevicePlugin for Runs {
    fn can_run(&self, node: &Plan, _: &DeviceSpec) -> Verdict {
        match node.name() {
            name if self.names.contains(&name) => Verdict::Runs,
            name if self.there.contains(&name) => Verdict::RunsThere,
            _ => Verdict::Unknown,
        }
    }

    fn replace(&self, node: &Plan) -> Result<Arc<dyn DeviceOperator>> {
        Ok(Arc::new(Backed::new(node, self.small)))
    }

    fn merges_uploads(&self) -> bool {
        self.merges
    }
}

impl DeviceOperator for Backed {
    fn name(&self) -> &str {
        &self.name
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let rows = task.node().execute(task.partition, task.context.clone())?;
        let device = task.device.clone();
        let batches = rows.map(move |batch| {
            let batch = batch
                .map_err(|e| arrow_device::Error::from(ArrowError::ExternalError(Box::new(e))))?;
            device.upload(&batch)
        });
        Ok(task.stream(batches))
    }

    fn has_small_batches(&self, _: &dyn ExecutionPlan) -> bool {
        self.has_small_batches
    }
}

fn rule_of(plugin: Runs) -> DeviceRule {
    DeviceRule::default().with_plugin(Arc::new(plugin))
}

fn session_of(rule: Option<DeviceRule>, partitions: usize) -> SessionContext {
    let config = SessionConfig::new()
        .with_target_partitions(partitions)
        .with_batch_size(32)
        .with_option_extension(DeviceOptions::default());
    let mut state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features();
    if let Some(rule) = rule {
        state = state.with_physical_optimizer_rule(Arc::new(rule));
    }
    SessionContext::new_with_state(state.build())
}

fn optimized(rule: &DeviceRule, plan: &Plan) -> Plan {
    rule.optimize(plan.clone(), &ConfigOptions::default())
        .unwrap()
}

/// The plan after one run, and whether a second run leaves it as it is.
fn twice(rule: &DeviceRule, plan: &Plan) -> (Plan, bool) {
    let once = optimized(rule, plan);
    let again = optimized(rule, &once);
    let same = text(&once, &[]) == text(&again, &[]);
    (once, same)
}

fn shuffled(first: i64, n: i64) -> Vec<RecordBatch> {
    (0..n)
        .map(|i| rows(first + ((i * 7) % n) * 16, 16))
        .collect()
}

/// Filter and sort by a plugin, over a device table of two partitions, four tasks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sort_above_a_filter_keeps_its_order() {
    let sim = Sim::new();
    let rule = rule_of(Runs {
        names: &["FilterExec", "SortExec"],
        ..Default::default()
    });
    let ctx = session_of(Some(rule), 4);
    register(
        &ctx,
        "t",
        device_table(&sim, &[shuffled(0, 20), shuffled(100, 20)]),
    );
    let sql = "SELECT a FROM t WHERE b < 8 ORDER BY a";
    let found = numbers_in(&ctx, sql).await;
    assert!(found.is_sorted(), "{found:?}");
}

/// A union of ordered partitions below a merge.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_union_of_ordered_partitions_keeps_its_order() {
    let sim = Sim::new();
    let rule = rule_of(Runs {
        names: &["SortExec"],
        ..Default::default()
    });
    let leaf = |first| device_table(&sim, &[shuffled(first, 20)]);
    let one = round_robin(sort(device_leaf(leaf(0)).await), 4);
    let two = round_robin(sort(device_leaf(leaf(50)).await), 4);
    let plan = merge(union([one, two]), None);
    let before = numbers_of(&collect(plan.clone(), session().task_ctx()).await.unwrap());
    assert!(before.is_sorted());
    let plan = optimized(
        &rule,
        &datafusion::physical_plan::execution_plan::reset_plan_states(plan).unwrap(),
    );
    let found = numbers_of(&collect(plan, session().task_ctx()).await.unwrap());
    assert!(found.is_sorted(), "{found:?}");
}

/// What stands between an operator with small batches and its input.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_input_of_an_operator_with_small_batches_is_lifted() {
    let sim = Sim::new();
    let rule = rule_of(Runs {
        names: &["FilterExec"],
        small: true,
        ..Default::default()
    });
    let leaf = device_leaf(device_table(&sim, &[shuffled(0, 4)])).await;
    let renamed = project(leaf.clone(), &[(0, "a"), (1, "b"), (2, "s")]);
    let (_, same) = twice(&rule, &filter(renamed));
    let (_, same2) = twice(&rule, &filter(union([leaf.clone(), leaf])));
    assert!(same && same2);
}

/// The first plugin declines, the second runs.
#[derive(Debug)]
struct Stays;
impl DevicePlugin for Stays {
    fn can_run(&self, node: &Plan, _: &DeviceSpec) -> Verdict {
        match node.is::<FilterExec>() {
            true => Verdict::stays("not mine"),
            false => Verdict::Unknown,
        }
    }
    fn replace(&self, _: &Plan) -> Result<Arc<dyn DeviceOperator>> {
        unreachable!()
    }
}

#[tokio::test]
async fn a_node_that_another_plugin_runs_is_not_declined() {
    let sim = Sim::new();
    let rule = DeviceRule::default()
        .with_plugin(Arc::new(Stays))
        .with_plugin(Arc::new(Runs {
            names: &["FilterExec"],
            ..Default::default()
        }));
    let leaf = device_leaf(device_table(&sim, &[shuffled(0, 4)])).await;
    let (once, same) = twice(&rule, &computed(filter(leaf)));
    assert!(!text(&once, &[]).contains("declined"));
    assert!(same);
}

/// Up(Down(scan)) inside of what goes up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_goes_up_did_not_come_down() {
    let sim = Sim::new();
    let rule = rule_of(Runs {
        names: &["FilterExec"],
        there: &["UnionExec"],
        ..Default::default()
    })
    .with_uploads(&sim, 0);
    let leaf = device_leaf(device_table(&sim, &[shuffled(0, 4)])).await;
    let host = scan(host_table(&[shuffled(0, 4)])).await;
    let (_, same) = twice(&rule, &filter(union([leaf, host])));
    assert!(same);
}

/// Passes on what it gets, in decoded types.
#[derive(Debug)]
struct Decoded;
impl DevicePlugin for Decoded {
    fn can_run(&self, node: &Plan, _: &DeviceSpec) -> Verdict {
        match node.is::<FilterExec>() {
            true => Verdict::Runs,
            false => Verdict::Unknown,
        }
    }
    fn replace(&self, _: &Plan) -> Result<Arc<dyn DeviceOperator>> {
        Ok(Arc::new(Decoded))
    }
    fn upload_type(&self, data_type: &DataType) -> Option<DataType> {
        match data_type {
            Dictionary(_, values) => Some((**values).clone()),
            _ => None,
        }
    }
}
impl DeviceOperator for Decoded {
    fn name(&self) -> &str {
        "DecodedExec"
    }
    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let input = task.input(0)?;
        Ok(task.stream_of(input.schema(), input))
    }
    fn has_small_batches(&self, _: &dyn ExecutionPlan) -> bool {
        false
    }
}

fn pass(child: Plan) -> Plan {
    Arc::new(FilterExec::try_new(lit(true), child).unwrap())
}

/// 100 values each, others in each batch, with keys of one byte.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dictionaries_with_small_keys_come_down_again() {
    let batch = |first: i64| {
        let values = StringArray::from_iter_values((first..first + 100).map(|i| i.to_string()));
        let keys = datafusion::arrow::array::Int8Array::from_iter_values(0..100);
        let d: ArrayRef = Arc::new(DictionaryArray::<Int8Type>::new(keys, Arc::new(values)));
        let schema = Schema::new(vec![Field::new("d", d.data_type().clone(), true)]);
        RecordBatch::try_new(Arc::new(schema), vec![d]).unwrap()
    };
    let host = pass(scan(host_table(&[vec![batch(0), batch(100)]])).await);
    let rule = DeviceRule::default()
        .with_plugin(Arc::new(Decoded))
        .with_uploads(any_sim(), 0);
    let plan = optimized(&rule, &host);
    let found = collect(plan, SessionContext::new().task_ctx())
        .await
        .unwrap();
    assert_eq!(row_count(&found), 200);
}

/// Two orders of a table on the host, each partition in both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn merged_uploads_keep_all_orders() {
    use datafusion::prelude::col;
    let schema = Arc::new(Schema::new(vec![
        Field::new("a", Int64, false),
        Field::new("b", Int64, false),
    ]));
    let batch = |a: Vec<i64>, b: Vec<i64>| {
        let columns: Vec<ArrayRef> =
            vec![Arc::new(Int64Array::from(a)), Arc::new(Int64Array::from(b))];
        RecordBatch::try_new(schema.clone(), columns).unwrap()
    };
    let one = batch((0..100).map(|i| i * 2).collect(), (0..100).collect());
    let two = batch(
        (0..100).map(|i| i * 2 + 1).collect(),
        (1000..1100).collect(),
    );
    for merges in [false, true] {
        let rule = rule_of(Runs {
            names: &["FilterExec"],
            merges,
            ..Default::default()
        })
        .with_uploads(any_sim(), 0);
        let ctx = session_of(Some(rule), 2);
        let table =
            MemTable::try_new(schema.clone(), vec![vec![one.clone()], vec![two.clone()]]).unwrap();
        let table = table.with_sort_order(vec![
            vec![col("a").sort(true, false)],
            vec![col("b").sort(true, false)],
        ]);
        register(&ctx, "t", Arc::new(table));
        let sql = "SELECT b FROM t WHERE a >= 0 ORDER BY b";
        let found = numbers_in(&ctx, sql).await;
        assert!(
            found.is_sorted() && found.len() == 200,
            "merges: {merges}: {found:?}"
        );
    }
}

/// Joins of two filtered tables, one of which goes up, whose files are in partitions by a column.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn merged_uploads_keep_declared_partitions() {
    let dir = std::env::temp_dir().join(format!("review-{}", std::process::id()));
    let write = SessionContext::new();
    register(&write, "t", host_table(&[vec![rows(0, 100)]]));
    for name in ["x", "y"] {
        let sql = format!(
            "COPY (SELECT a, b FROM t) TO '{}/{name}/' STORED AS PARQUET PARTITIONED BY (b)",
            dir.display()
        );
        query(&write, &sql).await.unwrap();
    }
    let mut all = Vec::new();
    for merges in [false, true] {
        let rule = rule_of(Runs {
            names: &["FilterExec"],
            merges,
            ..Default::default()
        })
        .with_uploads(any_sim(), 10);
        let ctx = session_of(Some(rule), 3);
        for set in [
            "datafusion.optimizer.preserve_file_partitions = 1",
            "datafusion.optimizer.hash_join_single_partition_threshold = 0",
            "datafusion.optimizer.hash_join_single_partition_threshold_rows = 0",
            "datafusion.optimizer.enable_dynamic_filter_pushdown = false",
            "datafusion.execution.parquet.pushdown_filters = false",
        ] {
            query(&ctx, &format!("SET {set}")).await.unwrap();
        }
        for name in ["x", "y"] {
            let sql = format!(
                "CREATE EXTERNAL TABLE {name} (a BIGINT, b BIGINT) STORED AS PARQUET PARTITIONED BY (b) LOCATION '{}/{name}/'",
                dir.display()
            );
            query(&ctx, &sql).await.unwrap();
        }
        // Only one of the two has a filter that goes up.
        let sql = "SELECT count(*) FROM (SELECT * FROM x WHERE a + 0 >= 0) x JOIN y ON x.b = y.b";
        all.push(numbers_in(&ctx, sql).await);
    }
    std::fs::remove_dir_all(dir).unwrap();
    assert_eq!(all[0], [1000]);
    assert_eq!(all[1], [1000]);
}

/// A join's partition whose device cannot be opened, beside one whose device can.
#[derive(Debug)]
struct Nothing;
impl DevicePlugin for Nothing {
    fn can_run(&self, node: &Plan, _: &DeviceSpec) -> Verdict {
        match node.name() == "HashJoinExec" {
            true => Verdict::Runs,
            false => Verdict::Unknown,
        }
    }
    fn replace(&self, _: &Plan) -> Result<Arc<dyn DeviceOperator>> {
        Ok(Arc::new(Nothing))
    }
}
impl DeviceOperator for Nothing {
    fn name(&self) -> &str {
        "NothingExec"
    }
    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        // It reads all that it has, and finds nothing.
        let inputs = task.input(0)?.chain(task.input(1)?);
        Ok(task.stream(inputs.filter(|batch| std::future::ready(batch.is_err()))))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_partition_of_a_join_falls_back() {
    let dir = std::env::temp_dir().join(format!("review-join-{}", std::process::id()));
    let write = SessionContext::new();
    register(&write, "t", host_table(&[vec![rows(0, 100)]]));
    for i in 0..2 {
        let sql = format!(
            "COPY (SELECT a, b FROM t WHERE a % 2 = {i}) TO '{}/x/{i}.parquet' STORED AS PARQUET",
            dir.display()
        );
        query(&write, &sql).await.unwrap();
    }
    let sim = Sim::new();
    let device = sim.device.clone();
    let resolver =
        arrow_device_datafusion::DeviceResolver::new(move |spec, partition| match partition {
            0 => Ok(device.clone()),
            _ => Err(arrow_device::Error::DeviceNotAvailable {
                device: arrow_device::DeviceId::new(spec.device_type(), 9),
                reason: "gone".into(),
            }),
        });
    let mut options = DeviceOptions::default();
    options.fallback = true;
    let config = SessionConfig::new()
        .with_target_partitions(2)
        .with_option_extension(options)
        .with_extension(Arc::new(resolver));
    let rule = DeviceRule::default()
        .with_plugin(Arc::new(Nothing))
        .with_uploads(any_sim(), 0);
    let state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features()
        .with_physical_optimizer_rule(Arc::new(rule));
    let ctx = SessionContext::new_with_state(state.build());
    for set in [
        "datafusion.optimizer.hash_join_single_partition_threshold = 0",
        "datafusion.optimizer.hash_join_single_partition_threshold_rows = 0",
        "datafusion.execution.parquet.pushdown_filters = true",
    ] {
        query(&ctx, &format!("SET {set}")).await.unwrap();
    }
    let sql = format!(
        "CREATE EXTERNAL TABLE x STORED AS PARQUET LOCATION '{}/x/'",
        dir.display()
    );
    query(&ctx, &sql).await.unwrap();
    let sql = "SELECT x.a, y.b FROM x JOIN x y ON x.a = y.a";
    let run = tokio::time::timeout(std::time::Duration::from_secs(10), query(&ctx, sql));
    let run = run.await;
    std::fs::remove_dir_all(dir).unwrap();
    assert!(run.is_ok(), "hangs");
}

/// A projection that drops the key of its input's hash partitioning.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn merged_uploads_below_a_projection_without_the_key() {
    for merges in [false, true] {
        let rule = rule_of(Runs {
            names: &["ProjectionExec", "AggregateExec"],
            merges,
            ..Default::default()
        });
        let ctx = session_of(Some(rule.with_uploads(any_sim(), 0)), 2);
        register(&ctx, "t", host_table(&[shuffled(0, 4), shuffled(50, 4)]));
        let sql = "SELECT sum(a) FROM t GROUP BY b";
        let found = query(&ctx, sql).await;
        assert_eq!(
            found
                .map(|found| row_count(&found))
                .map_err(|e| e.to_string()),
            Ok(10),
            "merges: {merges}"
        );
    }
}

/// What `EXPLAIN FORMAT TREE` shows of a declined node.
#[tokio::test]
async fn declined_in_a_tree() {
    let sim = Sim::new();
    let ctx = session_of(Some(DeviceRule::default().with_plugin(Arc::new(Stays))), 1);
    register(&ctx, "t", device_table(&sim, &[shuffled(0, 4)]));
    let found = query(&ctx, "EXPLAIN FORMAT TREE SELECT a + 1 FROM t WHERE b < 8")
        .await
        .unwrap();
    let shown = datafusion::arrow::util::pretty::pretty_format_batches(&found)
        .unwrap()
        .to_string();
    assert!(!shown.contains(", declined"), "a key with a comma");
}
