//! Several queries on a device that has room for one.

use std::slice::from_ref;
use std::sync::Arc;
use std::task::ready;

use arrow_device::device::sim::SimConfig;
use arrow_device_datafusion::{DeviceOptions, DeviceRule, DeviceSpec};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::error::{DataFusionError, Result};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::prelude::SessionContext;

use super::{answer, on_host, used};
use crate::kit::{Plan, Sim, fails, host_table, plan, register};
use crate::operator::{Step, operator};
use crate::plugin::kit::{context, of_partitions};

const SQL: &str = include_str!("../../queries/q18.sql");
const MEMORY: usize = 16 << 20;

/// Puts an operator above each scan and join that has all rows of its partition on the device before it passes them on.
#[derive(Debug)]
struct Gather(DeviceSpec);

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

/// A session whose queries gather on this device, one at a time.
fn session(sim: &Sim, memory: usize) -> SessionContext {
    let mut options = DeviceOptions::default();
    options.memory = memory.to_string().parse().unwrap();
    options.queries = 1;
    // No query is overtaken because the machine is busy.
    options.idle_ms = 600_000;
    let config = of_partitions(2).with_option_extension(options);
    let gather = Arc::new(Gather(sim.into()));
    let context = context(config, [gather as _, Arc::new(DeviceRule::default()) as _]);
    for table in used(SQL) {
        register(&context, table.name, host_table(from_ref(&table.batches)));
    }
    context
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn queries_that_fit_alone_wait_for_each_other() -> Result<()> {
    let (expected, _) = on_host(SQL).await?;
    let sim = Sim::with(SimConfig {
        capacity_bytes: MEMORY,
        ..SimConfig::default()
    });
    let sessions = [session(&sim, MEMORY), session(&sim, MEMORY)];
    let run = |context: SessionContext| {
        tokio::spawn(async move { answer(&context, &plan(&context, SQL).await).await })
    };
    let queries: Vec<_> = (0..8).map(|i| run(sessions[i % 2].clone())).collect();
    for query in queries {
        assert_eq!(query.await.unwrap()?, expected);
    }
    // One that never fits does not wait for anybody.
    let small = session(&sim, 1_000_000);
    let found = answer(&small, &plan(&small, SQL).await).await;
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
