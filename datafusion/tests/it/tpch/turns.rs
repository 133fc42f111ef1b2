//! Several queries on a device that has room for one.

use datafusion::error::Result;

use super::{answer, on_host, used};
use crate::kit::*;
use crate::operator::{Step, operator};

const SQL: &str = include_str!("../../queries/q18.sql");
const MEMORY: usize = 16 << 20;

/// Puts an operator above each scan and join that has all rows of its partition on the device before it passes them on.
fn gather(device: DeviceSpec) -> Rule {
    transforming(move |node| {
        if !["DataSourceExec", "HashJoinExec"].contains(&node.name()) {
            return Transformed::no(node);
        }
        let gathered = operator("GatherExec", vec![node], device.clone(), |state, cx| {
            while let Some(batch) = ready!(state.next(cx)) {
                state.batches.push(batch?);
            }
            let next = (!state.batches.is_empty()).then(|| Ok(state.batches.remove(0)));
            Step::Ready(next)
        });
        Transformed::yes(gathered)
    })
}

/// A session whose queries gather on this device, one at a time.
fn session(sim: &Sim, memory: usize) -> SessionContext {
    let mut options = DeviceOptions::default();
    options.memory = memory.to_string().parse().unwrap();
    options.queries = 1;
    // No query is overtaken because the machine is busy.
    options.idle_ms = 600_000;
    let config = of_partitions(2).with_option_extension(options);
    let rules: [Rule; 2] = [gather(sim.into()), Arc::new(DeviceRule::default())];
    let context = session_of(config, rules);
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
