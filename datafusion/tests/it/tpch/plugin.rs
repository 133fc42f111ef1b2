//! The queries with the worked plugin's filter: over device tables and over Parquet tables, in one partition and in four, with
//! `DeviceRule` and without. The results are those over tables in host memory.

use std::sync::{Arc, LazyLock};

use arrow_device::Device;
use arrow_device_datafusion::DeviceRule;
use datafusion::arrow::array::RecordBatch;
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

use super::{TABLES, assert_same, plan, table_on};
use crate::device_filter::FilterPlugin;
use crate::kit::{Plan, Sim};

/// How many files a table has, if it has so many batches.
const FILES: usize = 3;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tables {
    Device,
    Parquet,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rules {
    Plugin,
    /// Batches come down, and DataFusion filters.
    None,
}

/// Which tables and rules each query runs with, and in how many partitions.
const RUNS: [(Tables, Rules, usize); 5] = [
    (Tables::Device, Rules::Plugin, 1),
    (Tables::Parquet, Rules::Plugin, 1),
    (Tables::Device, Rules::Plugin, 4),
    (Tables::Device, Rules::None, 4),
    (Tables::Parquet, Rules::Plugin, 4),
];

pub(super) async fn check(sql: &str, filters: usize, expected: &[RecordBatch]) -> Result<()> {
    let sim = Sim::new();
    let used: Vec<_> = TABLES.iter().filter(|t| sql.contains(t.name)).collect();
    for (tables, rules, partitions) in RUNS {
        // Without a filter there is nothing else to see than without the plugin.
        if filters == 0 && rules != Rules::Plugin {
            continue;
        }
        let context = session(tables, rules, partitions, &sim);
        for table in &used {
            if tables == Tables::Parquet {
                let options = ParquetReadOptions::default();
                let path = format!("memory:///{}/", table.name);
                context.register_parquet(table.name, path, options).await?;
            } else {
                let on_device = table_on(table, &sim, partitions)?;
                context.register_table(table.name, Arc::new(on_device))?;
            }
        }
        let query = plan(&context, sql).await?;
        let shown = displayable(&*query).indent(false).to_string();
        let wanted = if rules == Rules::None { 0 } else { filters };
        let downloaded = is_any_downloaded(&query);
        assert_eq!(downloaded, rules == Rules::Plugin && filters > 0, "{shown}");
        let result = collect(query.clone(), context.task_ctx()).await?;
        assert_same(&result, expected);
        let found = (filters_of(&query), filters_that_ran(&query));
        assert_eq!(found, (wanted, wanted), "{rules:?}, {partitions}\n{shown}");
    }
    sim.assert_done();
    Ok(())
}

/// How many filters of a plan are the device's.
fn filters_of(plan: &Plan) -> usize {
    count(plan, |_| true)
}

/// How many of the device's filters have counted their rows, as they do once they run.
fn filters_that_ran(plan: &Plan) -> usize {
    count(plan, |filter| {
        let metrics = filter.metrics();
        metrics.is_some_and(|metrics| metrics.output_rows().is_some())
    })
}

/// Whether a node downloads what a device's filter returns. A table on a device downloads its own batches.
fn is_any_downloaded(plan: &Plan) -> bool {
    let is = |node: &Plan| {
        let from_scan = || node.children()[0].name() == "DeviceScanExec";
        Ok(node.name() == "DeviceToHostExec" && !from_scan() && filters_of(node) > 0)
    };
    plan.exists(is).unwrap()
}

fn count(plan: &Plan, is: impl Fn(&dyn ExecutionPlan) -> bool) -> usize {
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
    if rules == Rules::Plugin {
        let rule = DeviceRule::default().with_plugin(Arc::new(FilterPlugin::default()));
        state = state.with_physical_optimizer_rule(Arc::new(rule.with_uploads(device, 0)));
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
