//! Filters of tables on the host, whose rows go up.

use std::sync::Arc;

use arrow_device::Device;
use arrow_device::device::sim::SimMode;
use arrow_device_datafusion::{DeviceSpec, DeviceTransitions};
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::compute::{concat_batches, sort_to_indices, take_record_batch};
use datafusion::dataframe::DataFrameWriteOptions;
use datafusion::datasource::MemTable;
use datafusion::datasource::listing::ListingTableUrl;
use datafusion::execution::SessionStateBuilder;
use datafusion::object_store::memory::InMemory;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use datafusion::prelude::{ParquetReadOptions, SessionConfig, SessionContext};

use crate::device_filter::{PushFilterToDevice, Uploads, When};
use crate::kit::*;

const FILES: i64 = 3;

fn rule(device: &Device, when: When) -> PushFilterToDevice {
    PushFilterToDevice::with_uploads(Uploads {
        device: DeviceSpec::from(device),
        when,
    })
}

/// A session over a Parquet table of 3 files of 600 rows each.
async fn parquet(rule: Option<PushFilterToDevice>) -> SessionContext {
    parquet_with(rule, true).await
}

async fn parquet_with(rule: Option<PushFilterToDevice>, statistics: bool) -> SessionContext {
    let config = SessionConfig::new()
        .with_target_partitions(PARTITIONS)
        .with_collect_statistics(statistics);
    let mut state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features();
    if let Some(rule) = rule {
        state = state
            .with_physical_optimizer_rule(Arc::new(rule))
            .with_physical_optimizer_rule(Arc::new(DeviceTransitions));
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
    let host = parquet(None).await;
    let up = parquet(Some(rule(&device, When::Rows(1800)))).await;
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
    let host = parquet(None).await;
    let sql = "SELECT id, s FROM t WHERE a > 3";
    let before = plan(&host, sql).await;
    let rule = rule(&device, When::Always);
    let state = host.state();
    let options = state.config_options();
    let after = rule.optimize(before.clone(), options).unwrap();
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
    let again = rule.optimize(after.clone(), options).unwrap();
    assert_eq!(text(&again), text(&after));
    let whole = DeviceTransitions.optimize(after.clone(), options).unwrap();
    let twice = rule.optimize(whole.clone(), options).unwrap();
    let twice = DeviceTransitions.optimize(twice, options).unwrap();
    assert_eq!(text(&twice), text(&whole));
    assert!(
        text(&whole).starts_with("DeviceToHostExec"),
        "{}",
        text(&whole)
    );
    // Without transitions the result is the same. A scan's files are read once, so each time is planned anew.
    let expected = ordered(&rows(&host, before).await);
    assert!(expected.num_rows() > 0);
    for transitions in [false, true] {
        let mut up = rule.optimize(plan(&host, sql).await, options).unwrap();
        if transitions {
            up = DeviceTransitions.optimize(up, options).unwrap();
        }
        assert_eq!(ordered(&rows(&host, up).await), expected);
    }
}

/// How many rows a scan has decides, if its statistics say so.
#[tokio::test]
async fn only_what_is_worth_it_goes_up() {
    let (device, _) = sim(SimMode::Async);
    let sql = "SELECT id, s FROM t WHERE a > 3";
    let moves = async |rule: PushFilterToDevice| {
        let context = parquet(Some(rule)).await;
        text(&plan(&context, sql).await).contains("DeviceFilterExec")
    };
    assert!(moves(rule(&device, When::Rows(1800))).await);
    assert!(!moves(rule(&device, When::Rows(1801))).await);
    assert!(moves(rule(&device, When::Always)).await);
    assert!(
        !moves(PushFilterToDevice::default()).await,
        "not without a device to go to"
    );
    let cpu = rule(&arrow_device::Devices::cpu(), When::Always);
    assert!(!moves(cpu).await, "a device without kernels");

    for (when, moves) in [(When::Rows(1), false), (When::Always, true)] {
        let unknown = parquet_with(Some(rule(&device, when)), false).await;
        let shown = text(&plan(&unknown, sql).await);
        assert_eq!(shown.contains("DeviceFilterExec"), moves, "{shown}");
    }

    // Rows in memory are counted; of a join's and an aggregate's rows, nothing goes up.
    let table = MemTable::try_new(batch(0).schema(), vec![vec![batch(0), batch(1)]]).unwrap();
    let table = Arc::new(table);
    let host = session(table, 1, false);
    let state = host.state();
    let options = state.config_options();
    let rules = |plan, when| {
        let plan = rule(&device, when).optimize(plan, options).unwrap();
        text(&plan).contains("DeviceFilterExec")
    };
    let known = plan(&host, sql).await;
    assert!(rules(known.clone(), When::Rows(600)) && !rules(known, When::Rows(601)));
    let join = "SELECT * FROM (SELECT l.id, sum(r.a) AS a FROM t l JOIN t r ON l.n = r.n GROUP BY l.id) WHERE a > 3";
    assert!(!rules(plan(&host, join).await, When::Always));
}
