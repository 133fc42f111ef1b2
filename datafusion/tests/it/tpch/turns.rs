//! Several queries on a device that has room for one.

use std::sync::Arc;
use std::task::ready;

use arrow_device::device::sim::SimConfig;
use arrow_device_datafusion::{DeviceOptions, DeviceRule};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::datasource::MemTable;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SessionStateBuilder;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::collect;
use datafusion::prelude::{SessionConfig, SessionContext};

use super::{TABLES, assert_same, host_session, plan};
use crate::kit::{Plan, Sim, fails};
use crate::operator::{Step, operator};

/// Puts an operator above each scan and join that has all rows of its partition on the device before it passes them on.
#[derive(Debug)]
struct Gather(arrow_device_datafusion::DeviceSpec);

impl PhysicalOptimizerRule for Gather {
    fn optimize(&self, plan: Plan, _: &ConfigOptions) -> Result<Plan> {
        let above = |node: Plan| {
            if !["DataSourceExec", "HashJoinExec"].contains(&node.name()) {
                return Ok(Transformed::no(node));
            }
            let gathered = operator("GatherExec", vec![node], self.0.clone(), |state, cx| {
                while let Some(batch) = ready!(state.next(cx)) {
                    state.batches.push(batch?);
                }
                let next = (!state.batches.is_empty()).then(|| Ok(state.batches.remove(0)));
                Step::Ready(next)
            });
            Ok(Transformed::yes(gathered))
        };
        Ok(plan.transform_up(above)?.data)
    }

    fn name(&self) -> &str {
        "Gather"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// A session whose queries gather on this device, as many at once.
fn session(sim: &Sim, memory: &str, queries: usize) -> Result<SessionContext> {
    let mut options = DeviceOptions::default();
    options.memory = memory.parse()?;
    options.queries = queries;
    // No query is overtaken because the machine is busy.
    options.idle_ms = 600_000;
    let config = SessionConfig::new().with_target_partitions(2);
    let state = SessionStateBuilder::new()
        .with_config(config.with_option_extension(options))
        .with_default_features()
        .with_physical_optimizer_rule(Arc::new(Gather(sim.into())))
        .with_physical_optimizer_rule(Arc::new(DeviceRule::default()));
    let context = SessionContext::new_with_state(state.build());
    for table in &*TABLES {
        let of = MemTable::try_new(table.schema.clone(), vec![table.batches.clone()])?;
        context.register_table(table.name, Arc::new(of))?;
    }
    Ok(context)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn queries_that_fit_alone_wait_for_each_other() -> Result<()> {
    const MEMORY: usize = 16 << 20;
    let sql = include_str!("../../queries/q18.sql");
    let host = host_session()?;
    let expected = collect(plan(&host, sql).await?, host.task_ctx()).await?;
    let sim = Sim::with(SimConfig {
        capacity_bytes: MEMORY,
        ..SimConfig::default()
    });
    let sessions: Vec<_> = (0..2)
        .map(|_| session(&sim, &MEMORY.to_string(), 1))
        .collect::<Result<_>>()?;
    let mut queries = Vec::new();
    for i in 0..8 {
        let context = sessions[i % 2].clone();
        let query = plan(&context, sql).await?;
        queries.push(tokio::spawn(collect(query, context.task_ctx())));
    }
    for query in queries {
        assert_same(&query.await.unwrap()?, &expected);
    }
    // One that never fits does not wait for anybody.
    let small = session(&sim, "1000000", 1)?;
    let found = collect(plan(&small, sql).await?, small.task_ctx()).await;
    // Which node is refused first, an upload or a download, depends on the order of the tasks.
    let error = fails(found, &["Exec, partition ", "bytes"]);
    let (text, nodes) = (error.to_string(), ["HostToDeviceExec", "DeviceToHostExec"]);
    assert!(nodes.iter().any(|node| text.contains(node)), "{text}");
    let root = error.find_root();
    assert!(
        matches!(root, DataFusionError::ResourcesExhausted(_)),
        "{error:?}"
    );
    Ok(())
}
