//! Filters of tables on the host, whose rows go up.

use std::sync::Arc;

use arrow_device::Device;
use arrow_device::device::sim::SimMode;
use arrow_device_datafusion::DeviceTransitions;
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::compute::{concat_batches, sort_to_indices, take_record_batch};
use datafusion::common::config::ConfigOptions;
use datafusion::dataframe::DataFrameWriteOptions;
use datafusion::datasource::MemTable;
use datafusion::datasource::listing::ListingTableUrl;
use datafusion::execution::SessionStateBuilder;
use datafusion::object_store::memory::InMemory;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use datafusion::prelude::{ParquetReadOptions, SessionConfig, SessionContext};

use super::kit::*;
use crate::device_filter::PushFilterToDevice;

type Rule = Arc<dyn PhysicalOptimizerRule + Send + Sync>;

const FILES: i64 = 3;

/// The rules: filters of at least so many rows go up.
fn rules(device: &Device, min_rows: usize) -> Vec<Rule> {
    let uploads = PushFilterToDevice::uploads(device).with_min_rows(min_rows);
    vec![
        Arc::new(uploads),
        Arc::new(PushFilterToDevice::default()),
        Arc::new(DeviceTransitions),
    ]
}

fn apply(rules: &[Rule], plan: Arc<dyn ExecutionPlan>) -> Arc<dyn ExecutionPlan> {
    let options = ConfigOptions::default();
    let apply = |plan, rule: &Rule| rule.optimize(plan, &options).unwrap();
    rules.iter().fold(plan, apply)
}

/// A session over a Parquet table of 3 files of 600 rows each.
async fn parquet(rules: Vec<Rule>) -> SessionContext {
    parquet_with(rules, true).await
}

async fn parquet_with(rules: Vec<Rule>, statistics: bool) -> SessionContext {
    let config = SessionConfig::new()
        .with_target_partitions(PARTITIONS)
        .with_collect_statistics(statistics);
    let mut state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features();
    for rule in rules {
        state = state.with_physical_optimizer_rule(rule);
    }
    let context = SessionContext::new_with_state(state.build());
    let url = ListingTableUrl::parse("memory:///").unwrap();
    context.register_object_store(url.object_store().as_ref(), Arc::new(InMemory::new()));
    for file in 0..FILES {
        let batches = [batch(2 * file), batch(2 * file + 1)];
        let frame = context.read_batches(batches).unwrap();
        let path = format!("memory:///t/{file}.parquet");
        let options = DataFrameWriteOptions::new().with_single_file_output(true);
        frame.write_parquet(&path, options, None).await.unwrap();
    }
    let options = ParquetReadOptions::default();
    context
        .register_parquet("t", "memory:///t/", options)
        .await
        .unwrap();
    context
}

/// All partitions by their first column. Which of them reads which file is not the same each time.
fn ordered(partitions: &[RecordBatch]) -> RecordBatch {
    let all = concat_batches(&partitions[0].schema(), partitions).unwrap();
    let order = sort_to_indices(all.column(0), None, None).unwrap();
    take_record_batch(&all, &order).unwrap()
}

#[tokio::test]
async fn a_parquet_table_filters_on_the_device() {
    let (device, sim) = sim(SimMode::Async);
    let host = parquet(vec![]).await;
    let up = parquet(rules(&device, 1800)).await;
    for (sql, some) in [
        ("SELECT id, s, x FROM t WHERE a > 3 AND x < 1.5", true),
        ("SELECT s FROM t WHERE s = 'row 77'", true),
        ("SELECT * FROM t WHERE s <> 'row 77' AND d IS NULL", true),
        ("SELECT count(*), sum(a) FROM t WHERE n <> 0", true),
        (
            "SELECT id, s FROM t WHERE id >= 1000 ORDER BY id DESC LIMIT 7",
            true,
        ),
        ("SELECT id FROM t WHERE n = 5 AND a = 4 AND id = 0", false),
    ] {
        let query = plan(&up, sql).await;
        let shown = text(&query);
        assert!(
            shown.contains("DeviceFilterExec") && shown.contains("HostToDeviceExec"),
            "{shown}"
        );
        assert!(!shown.contains(" FilterExec"), "{shown}");
        let before = device.stats();
        let found = rows(&up, query).await;
        assert!(device.stats().since(&before).bytes_to_device > 0 || !some);
        let expected = rows(&host, plan(&host, sql).await).await;
        let (found, expected) = (ordered(&found), ordered(&expected));
        assert!(same(&found, &expected), "{sql}\n{found:?}\n{expected:?}");
        assert_eq!(found.num_rows() > 0, some, "{sql}");
    }
    drop(up);
    assert_done(&device, &sim);
}

/// Node for node: the same partitions and schema, and no more exchanges than before; once more changes nothing.
#[tokio::test]
async fn the_plan_keeps_its_shape() {
    let (device, _) = sim(SimMode::Async);
    let host = parquet(vec![]).await;
    let sql = "SELECT id, s FROM t WHERE a > 3";
    let before = plan(&host, sql).await;
    let rules = rules(&device, 0);
    let plugin = &rules[..2];
    let after = apply(plugin, before.clone());
    let shown = text(&after).replace(&device.id().to_string(), "sim");
    let lines: Vec<_> = shown.lines().collect();
    assert_eq!(lines.len(), text(&before).lines().count() + 1, "{shown}");
    assert_eq!(
        lines[0],
        "DeviceFilterExec: device=sim, a@1 > 3, projection=[id@0, s@2]"
    );
    assert_eq!(lines[1], "  HostToDeviceExec: device=sim");
    assert!(
        lines[2].starts_with("    DataSourceExec: file_groups={3 groups"),
        "{shown}"
    );
    assert_eq!(after.schema(), before.schema());
    let partitions = |plan: &Arc<dyn ExecutionPlan>| plan.output_partitioning().partition_count();
    assert_eq!(partitions(&after), partitions(&before));
    let again = apply(plugin, after.clone());
    assert!(Arc::ptr_eq(&again, &after), "{}", text(&again));
    let whole = apply(&rules, after.clone());
    let twice = apply(&rules, whole.clone());
    assert!(Arc::ptr_eq(&twice, &whole), "{}", text(&twice));
    assert!(
        text(&whole).starts_with("DeviceToHostExec"),
        "{}",
        text(&whole)
    );
    // Without transitions the result is the same. A scan's files are read once, so each time is planned anew.
    let expected = ordered(&rows(&host, before).await);
    assert!(expected.num_rows() > 0);
    for rules in [plugin, &rules] {
        let up = apply(rules, plan(&host, sql).await);
        assert_eq!(ordered(&rows(&host, up).await), expected);
    }
}

/// How many rows a scan has decides, if its statistics say so.
#[tokio::test]
async fn only_what_is_worth_it_goes_up() {
    let (device, _) = sim(SimMode::Async);
    let sql = "SELECT id, s FROM t WHERE a > 3";
    let moves = async |rules: Vec<Rule>| {
        let context = parquet(rules).await;
        text(&plan(&context, sql).await).contains("DeviceFilterExec")
    };
    assert!(moves(rules(&device, 1800)).await);
    assert!(!moves(rules(&device, 1801)).await);
    assert!(moves(rules(&device, 0)).await);
    assert!(
        !moves(rules(&device, 0).split_off(1)).await,
        "not without a device to go to"
    );
    let cpu = rules(&arrow_device::Devices::cpu(), 0);
    assert!(!moves(cpu).await, "a device without kernels");

    for (min_rows, moves) in [(1, false), (0, true)] {
        let unknown = parquet_with(rules(&device, min_rows), false).await;
        let shown = text(&plan(&unknown, sql).await);
        assert_eq!(shown.contains("DeviceFilterExec"), moves, "{shown}");
    }

    // Rows in memory are counted; of a join's and an aggregate's rows, nothing goes up.
    let table = MemTable::try_new(batch(0).schema(), vec![vec![batch(0), batch(1)]]).unwrap();
    let table = Arc::new(table);
    let host = session(table, 1, false);
    let moves = |plan, min_rows| {
        let plan = apply(&rules(&device, min_rows), plan);
        text(&plan).contains("DeviceFilterExec")
    };
    let known = plan(&host, sql).await;
    assert!(moves(known.clone(), 600) && !moves(known, 601));
    let join = "SELECT * FROM (SELECT l.id, sum(r.a) AS a FROM t l JOIN t r ON l.n = r.n GROUP BY l.id) WHERE a > 3";
    assert!(!moves(plan(&host, join).await, 0));
}
