//! The queries with the worked plugin's filter: over device tables and over Parquet tables, in one partition and in four, with
//! `DeviceRule` and without. The results are those over tables in host memory.

use std::sync::{Arc, LazyLock};

use arrow_device::Device;
use arrow_device_datafusion::{DeviceExec, DeviceRule};
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

use super::{TABLES, assert_same, host_session, plan, table_on};
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

/// Queries 1 and 6 run on the device from the scan to the result, whose few rows come down and are sorted.
#[tokio::test]
async fn two_queries_run_on_the_device_alone() -> Result<()> {
    let host = host_session()?;
    for sql in [
        include_str!("../../queries/q01.sql"),
        include_str!("../../queries/q06.sql"),
    ] {
        let expected = collect(plan(&host, sql).await?, host.task_ctx()).await?;
        for partitions in [1, 4] {
            let sim = Sim::new();
            let context = session(Tables::Device, Rules::Plugin, partitions, &sim);
            let lineitem = TABLES
                .iter()
                .find(|table| table.name == "lineitem")
                .unwrap();
            let on_device = table_on(lineitem, &sim, partitions)?;
            context.register_table("lineitem", Arc::new(on_device))?;
            let query = plan(&context, sql).await?;
            let shown = displayable(&*query).indent(false).to_string();
            let mut below = &query;
            while below.name() != "DeviceToHostExec" {
                let above = [
                    "SortPreservingMergeExec",
                    "SortExec",
                    "ProjectionExec",
                    "RepartitionExec",
                ];
                assert!(above.contains(&below.name()), "{shown}");
                below = below.children()[0];
            }
            let mut names = Vec::new();
            while let [child] = below.children()[..] {
                assert!(DeviceExec::of(child).is_some(), "{shown}");
                names.push(child.name());
                below = child;
            }
            assert_eq!(names.last(), Some(&"DeviceScanExec"), "{shown}");
            let halves = names
                .iter()
                .filter(|name| **name == "DeviceAggregateExec")
                .count();
            assert_eq!(halves, if partitions == 1 { 1 } else { 2 }, "{shown}");
            let before = sim.stats();
            let result = collect(query.clone(), context.task_ctx()).await?;
            assert_same(&result, &expected);
            let moved = sim.stats().since(&before);
            // Counts, and the result: a scan's columns are more than 100 times as large.
            assert!(
                moved.bytes_to_host < 20_000 && moved.bytes_to_device == 0,
                "{moved:?}"
            );
            assert_eq!(moved.host_waits, 0);
            drop((query, result, context));
            sim.assert_done();
        }
    }
    Ok(())
}

/// How many filters of a plan are the device's. Those of aggregates run where these do, which is not the same everywhere.
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
        let is_filter =
            node.name() == "DeviceFilterExec" && node.children()[0].name() != "DeviceAggregateExec";
        n += usize::from(is_filter && is(&**node));
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
        let rule = DeviceRule::default().with_plugin(Arc::new(FilterPlugin::whole()));
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
