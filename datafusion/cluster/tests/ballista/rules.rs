//! Rules and operators that panic or break their promises.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use arrow_device::device::sim::SimConfig;
use arrow_device::{ArrowDeviceType, Device};
use arrow_device_cluster::ballista::{DeviceEngine, OnDeviceError};
use arrow_device_datafusion::{
    DeviceExec, DevicePlan, DeviceSpec, SendableDeviceStream, execute_child,
};
use ballista_core::JobId;
use ballista_core::config::TaskSchedulingPolicy;
use ballista_executor::execution_engine::{ExecutionEngine, QueryStageExecutor};
use datafusion::common::config::ConfigOptions;
use datafusion::error::Result;
use datafusion::execution::TaskContext;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::metrics::MetricsSet;
use datafusion::physical_plan::{ExecutionPlan, PlanProperties};
use datafusion::prelude::SessionConfig;

use crate::cluster::*;

const SQL: &str = "SELECT count(*), sum(l_quantity) FROM lineitem WHERE l_quantity < 24";

type Plan = Arc<dyn ExecutionPlan>;

/// Does something to a plan, as long as it is told to.
struct Does(Arc<AtomicBool>, fn(Plan) -> Result<Plan>);

impl fmt::Debug for Does {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Does")
    }
}

impl PhysicalOptimizerRule for Does {
    fn optimize(&self, plan: Plan, _: &ConfigOptions) -> Result<Plan> {
        match self.0.load(SeqCst) {
            true => (self.1)(plan),
            false => Ok(plan),
        }
    }

    fn name(&self) -> &str {
        "Does"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// A query fails with an error that has these words, and the next one succeeds.
async fn fails(policy: TaskSchedulingPolicy, rule: fn(Plan) -> Result<Plan>, words: &[&str]) {
    let does = Arc::new(AtomicBool::new(true));
    let mut rules = plugin();
    rules.push(Arc::new(Does(does.clone(), rule)));
    let worker = || Worker::with(SimConfig::default(), rules.clone(), OnDeviceError::Fail);
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
async fn a_rule_that_panics_fails_the_query_alone() {
    for policy in [PUSH, PULL] {
        fails(
            policy,
            |_| panic!("no luck"),
            &["rule Does", "panicked", "no luck"],
        )
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_that_changes_partitions_fails_the_query_alone() {
    let merge = |plan: Plan| -> Result<Plan> { Ok(Arc::new(CoalescePartitionsExec::new(plan))) };
    let words = ["rule Does", "number of partitions"];
    fails(PUSH, merge, &words).await;
}

/// Passes its child's batches on, unless it panics.
#[derive(Clone, Debug)]
struct Passes {
    child: Plan,
    device: DeviceSpec,
    panics_in: &'static str,
}

impl Passes {
    fn above(child: Plan, panics_in: &'static str) -> Result<Plan> {
        let device = DeviceSpec::any(ArrowDeviceType::EXT_DEV);
        Ok(Arc::new(DeviceExec::new(Arc::new(Self {
            child,
            device,
            panics_in,
        }))))
    }

    fn maybe_panic(&self, place: &str) {
        assert_ne!(self.panics_in, place, "an operator panics");
    }
}

impl DevicePlan for Passes {
    fn name(&self) -> &str {
        "Passes"
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.child.properties()
    }

    fn children(&self) -> Vec<&Plan> {
        vec![&self.child]
    }

    fn with_children(&self, children: Vec<Plan>) -> Result<Arc<dyn DevicePlan>> {
        let (child, own) = (children[0].clone(), self.clone());
        Ok(Arc::new(Self { child, ..own }))
    }

    fn execute_device(
        &self,
        partition: usize,
        device: &Device,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        self.maybe_panic("execute");
        execute_child(&self.child, partition, device, context)
    }

    fn metrics(&self) -> Option<MetricsSet> {
        self.maybe_panic("metrics");
        None
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_that_panics_fails_the_query_alone() {
    // Ballista says that its writer has ended early.
    fails(PUSH, |plan| Passes::above(plan, "execute"), &[]).await;
    fails(PULL, |plan| Passes::above(plan, "metrics"), &["panicked"]).await;
}

/// More nodes than the scheduler knows of, which is not what a rule should do, but loses no rows.
#[tokio::test(flavor = "multi_thread")]
async fn more_nodes_than_before_lose_no_rows() {
    let mut rules = plugin();
    let yes = Arc::new(AtomicBool::new(true));
    rules.push(Arc::new(Does(yes, |plan| Passes::above(plan, "nothing"))));
    let more = Worker::with(SimConfig::default(), rules, OnDeviceError::Fail);
    let cluster = Cluster::start(PUSH, vec![more, Worker::plain()]).await;
    let client = cluster.client(true).await;
    for (name, sql) in crate::mixed::few() {
        let found = query(&client, sql).await.unwrap();
        assert_same(&found, &expected(sql).await, name);
    }
    cluster.assert_clean();
}

/// An engine that panics.
struct Panics;

impl ExecutionEngine for Panics {
    fn create_query_stage_exec(
        &self,
        _: JobId,
        _: usize,
        _: usize,
        _: Vec<usize>,
        _: Plan,
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
