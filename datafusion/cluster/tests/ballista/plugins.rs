//! Plugins and operators that panic.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use arrow_device::device::sim::SimConfig;
use arrow_device_cluster::ballista::{DeviceEngine, OnDeviceError};
use arrow_device_datafusion::{
    DeviceOperator, DevicePlugin, DeviceSpec, DeviceTask, SendableDeviceStream, Verdict,
};
use ballista_core::JobId;
use ballista_core::config::TaskSchedulingPolicy;
use ballista_executor::execution_engine::{ExecutionEngine, QueryStageExecutor};
use datafusion::error::Result;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::aggregates::{AggregateExec, AggregateMode};
use datafusion::prelude::SessionConfig;

use crate::cluster::*;

const SQL: &str = "SELECT count(*), sum(l_quantity) FROM lineitem WHERE l_quantity < 24";

/// A plugin that makes mistakes with partial aggregates, as long as it is told to.
struct Mistakes(Arc<AtomicBool>, &'static str);

impl fmt::Debug for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mistakes")
    }
}

impl Mistakes {
    fn maybe_panic(&self, place: &str) {
        assert_ne!(self.1, place, "no luck");
    }
}

impl DevicePlugin for Mistakes {
    fn can_run(&self, node: &Arc<dyn ExecutionPlan>, _: &DeviceSpec) -> Verdict {
        let mode = node.downcast_ref().map(AggregateExec::mode);
        match mode == Some(&AggregateMode::Partial) && self.0.load(SeqCst) {
            true => {
                self.maybe_panic("can_run");
                Verdict::Runs
            }
            false => Verdict::Unknown,
        }
    }

    fn replace(&self, _: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn DeviceOperator>> {
        self.maybe_panic("replace");
        Ok(Arc::new(Panics))
    }
}

/// A query fails with an error that has these words, and the next one succeeds.
async fn fails(policy: TaskSchedulingPolicy, place: &'static str, words: &[&str]) {
    let does = Arc::new(AtomicBool::new(true));
    let rule = plugin().with_plugin(Arc::new(Mistakes(does.clone(), place)));
    let worker = || Worker::with(SimConfig::default(), rule.clone(), OnDeviceError::Fail);
    let cluster = Cluster::start(policy, vec![worker(), worker()]).await;
    let client = cluster.client(true).await;
    let error = error(&client, SQL).await;
    for word in words {
        assert!(error.contains(word), "no {word:?} in: {error}");
    }
    does.store(false, SeqCst);
    let found = query(&client, SQL).await.unwrap();
    assert_same(&found, &expected(SQL).await, SQL);
    cluster.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_panics_fails_the_query_alone() {
    for (policy, place) in [(PUSH, "can_run"), (PULL, "replace")] {
        fails(policy, place, &["a plugin panicked", "no luck"]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_that_panics_fails_the_query_alone() {
    // Ballista says that its writer has ended early.
    fails(PUSH, "nowhere", &[]).await;
}

/// An engine and an operator that panic.
#[derive(Debug)]
struct Panics;

impl DeviceOperator for Panics {
    fn name(&self) -> &str {
        "Panics"
    }

    fn execute(&self, _: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        panic!("no luck")
    }
}

impl ExecutionEngine for Panics {
    fn create_query_stage_exec(
        &self,
        _: JobId,
        _: usize,
        _: usize,
        _: Vec<usize>,
        _: Arc<dyn ExecutionPlan>,
        _: &str,
        _: &SessionConfig,
    ) -> Result<Arc<dyn QueryStageExecutor>> {
        panic!("no luck")
    }
}

/// Alone it would end the executor's loop, and the query would hang.
#[tokio::test(flavor = "multi_thread")]
async fn a_panic_of_the_inner_engine_is_an_error() {
    let engine = DeviceEngine::over(Arc::new(Panics), plugin());
    let cluster = Cluster::start(PULL, vec![Worker::plain().running(engine)]).await;
    let client = cluster.client(true).await;
    for _ in 0..2 {
        let error = error(&client, SQL).await;
        assert!(error.contains("panicked"), "{error}");
    }
}
