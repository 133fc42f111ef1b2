//! The queries with the worked plugin's filter: over device tables and over Parquet tables, in one partition and in four, with
//! `DeviceTransitions` and without. The results are those over tables in host memory.

use std::sync::{Arc, LazyLock};

use arrow_device::Device;
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device_datafusion::{DeviceTransitions, to_datafusion};
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::datasource::listing::ListingTableUrl;
use datafusion::error::Result;
use datafusion::execution::SessionStateBuilder;
use datafusion::object_store::memory::InMemory;
use datafusion::object_store::path::Path;
use datafusion::object_store::{ObjectStoreExt, PutPayload};
use datafusion::parquet::arrow::ArrowWriter;
use datafusion::physical_plan::{ExecutionPlan, collect, displayable};
use datafusion::prelude::{ParquetReadOptions, SessionConfig, SessionContext};

use super::{TABLES, assert_nothing_left, assert_same, device_table, host_session, plan};
use crate::device_filter::PushFilterToDevice;

/// How many files a table has, if it has so many batches.
const FILES: usize = 3;

macro_rules! queries {
    ($($name:ident: $filters:literal,)*) => {
        $(
            #[tokio::test]
            async fn $name() -> Result<()> {
                check(include_str!(concat!("../../queries/", stringify!($name), ".sql")), $filters).await
            }
        )*
    };
}

// How many filters of each run on the device, over either sort of tables and with any number of partitions. 15 of the 22 queries
// have some. The filters of the others are of forms that stay with DataFusion: `LIKE` (9, 13, 16), `IN`, `OR` and comparisons of columns
// (12, 19, 22), or they compare sums (18).
queries! {
    q01: 1, q02: 2, q03: 3, q04: 1, q05: 2, q06: 1, q07: 1, q08: 3, q09: 0, q10: 2, q11: 2,
    q12: 0, q13: 0, q14: 1, q15: 2, q16: 0, q17: 1, q18: 0, q19: 0, q20: 2, q21: 2, q22: 0,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tables {
    Device,
    Parquet,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rules {
    Both,
    /// Batches are uploaded and come down within the nodes that read them.
    OnlyPlugin,
    /// Batches come down, and DataFusion filters.
    None,
}

/// Which tables and rules each query runs with, and in how many partitions. The tests beside this module have device tables in
/// one partition without rules.
const RUNS: [(Tables, Rules, usize); 8] = [
    (Tables::Device, Rules::Both, 1),
    (Tables::Device, Rules::OnlyPlugin, 1),
    (Tables::Parquet, Rules::Both, 1),
    (Tables::Parquet, Rules::OnlyPlugin, 1),
    (Tables::Device, Rules::Both, 4),
    (Tables::Device, Rules::None, 4),
    (Tables::Parquet, Rules::Both, 4),
    (Tables::Parquet, Rules::OnlyPlugin, 4),
];

async fn check(sql: &str, filters: usize) -> Result<()> {
    let host = host_session()?;
    let expected = collect(plan(&host, sql).await?, host.task_ctx()).await?;
    for partitions in [1, 4] {
        let sim = SimDevice::new(SimConfig::default()).map_err(to_datafusion)?;
        let device = Device::new(sim.clone()).map_err(to_datafusion)?;
        {
            let used = TABLES.iter().filter(|table| sql.contains(table.name));
            let up = |table| Ok((table, Arc::new(device_table(table, &device, partitions)?)));
            let up: Vec<_> = used.map(up).collect::<Result<_>>()?;
            for (tables, rules, _) in RUNS.into_iter().filter(|run| run.2 == partitions) {
                let context = session(tables, rules, partitions, &device);
                for (table, on_device) in &up {
                    if tables == Tables::Parquet {
                        let options = ParquetReadOptions::default();
                        let path = format!("memory:///{}/", table.name);
                        context.register_parquet(table.name, path, options).await?;
                    } else {
                        context.register_table(table.name, on_device.clone())?;
                    }
                }
                let query = plan(&context, sql).await?;
                let shown = displayable(&*query).indent(false).to_string();
                let wanted = match rules {
                    Rules::None => 0,
                    _ => filters,
                };
                let downloaded = is_any_downloaded(&query);
                assert_eq!(downloaded, rules == Rules::Both && filters > 0, "{shown}");
                let result = collect(query.clone(), context.task_ctx()).await?;
                assert_same(&result, &expected);
                let found = (filters_of(&query), filters_that_ran(&query));
                let run = (tables, rules, partitions);
                assert_eq!(found, (wanted, wanted), "{run:?}\n{shown}");
            }
        }
        assert_nothing_left(&device, &sim);
    }
    Ok(())
}

/// How many filters of a plan are the device's.
fn filters_of(plan: &Arc<dyn ExecutionPlan>) -> usize {
    count(plan, |_| true)
}

/// How many of the device's filters have counted their rows, as they do once they run.
fn filters_that_ran(plan: &Arc<dyn ExecutionPlan>) -> usize {
    count(plan, |filter| {
        let metrics = filter.metrics();
        metrics.is_some_and(|metrics| metrics.output_rows().is_some())
    })
}

/// Whether a node downloads what a device's filter returns. A table on a device downloads its own batches.
fn is_any_downloaded(plan: &Arc<dyn ExecutionPlan>) -> bool {
    let is = |node: &Arc<dyn ExecutionPlan>| {
        let from_scan = || node.children()[0].name() == "DeviceScanExec";
        Ok(node.name() == "DeviceToHostExec" && !from_scan() && filters_of(node) > 0)
    };
    plan.exists(is).unwrap()
}

fn count(plan: &Arc<dyn ExecutionPlan>, is: impl Fn(&dyn ExecutionPlan) -> bool) -> usize {
    let mut n = 0;
    let walked = plan.apply(|node| {
        n += usize::from(node.name() == "DeviceFilterExec" && is(&**node));
        Ok(TreeNodeRecursion::Continue)
    });
    walked.unwrap();
    n
}

fn session(tables: Tables, rules: Rules, partitions: usize, device: &Device) -> SessionContext {
    let config = SessionConfig::new().with_target_partitions(partitions);
    let mut state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features();
    if rules != Rules::None {
        let uploads = PushFilterToDevice::uploads(device);
        state = state
            .with_physical_optimizer_rule(Arc::new(uploads))
            .with_physical_optimizer_rule(Arc::new(PushFilterToDevice::default()));
    }
    if rules == Rules::Both {
        state = state.with_physical_optimizer_rule(Arc::new(DeviceTransitions));
    }
    let context = SessionContext::new_with_state(state.build());
    if tables == Tables::Parquet {
        let url = ListingTableUrl::parse("memory:///").unwrap();
        let url = url.object_store();
        context.register_object_store(url.as_ref(), PARQUET.clone());
    }
    context
}

/// The tables as Parquet files.
static PARQUET: LazyLock<Arc<InMemory>> = LazyLock::new(|| {
    let store = InMemory::new();
    for table in &*TABLES {
        let of_file = table.batches.len().div_ceil(FILES);
        for (number, batches) in table.batches.chunks(of_file).enumerate() {
            let mut file = Vec::new();
            let mut writer = ArrowWriter::try_new(&mut file, table.schema.clone(), None).unwrap();
            for batch in batches {
                writer.write(batch).unwrap();
            }
            writer.close().unwrap();
            let path = Path::from(format!("{}/{number}.parquet", table.name));
            let put = store.put(&path, PutPayload::from(file));
            futures::executor::block_on(put).unwrap();
        }
    }
    Arc::new(store)
});
