//! `rewrite`: what a rule may do to the plan of a task.

use std::fmt;
use std::sync::Arc;

use arrow_device_datafusion::{DeviceResolver, DeviceUploads, rewrite};
use datafusion::arrow::compute::SortOptions;
use datafusion::common::Result;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::error::DataFusionError;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::expressions::col;
use datafusion::physical_expr::{LexOrdering, PhysicalExpr, PhysicalSortExpr};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::empty::EmptyExec;
use datafusion::physical_plan::execution_plan::ReplaceChildrenOptions;
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties, collect_partitioned, displayable,
};
use datafusion::prelude::{SessionConfig, SessionContext};

use crate::kit::*;
use crate::ops::{project, round_robin};
use crate::plans::{computed, host_scan, on_host};
use crate::uploads::{DoubleFilters, any_sim, filter, is_filter};

type Rule = Arc<dyn PhysicalOptimizerRule + Send + Sync>;

/// A rule of a closure.
struct Does<F>(F);

impl<F> fmt::Debug for Does<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Does")
    }
}

impl<F: Fn(Plan) -> Result<Plan> + 'static> PhysicalOptimizerRule for Does<F> {
    fn optimize(&self, plan: Plan, _: &ConfigOptions) -> Result<Plan> {
        (self.0)(plan)
    }

    fn name(&self) -> &str {
        "Does"
    }

    fn schema_check(&self) -> bool {
        false
    }
}

fn does(rule: impl Fn(Plan) -> Result<Plan> + Send + Sync + 'static) -> Rule {
    Arc::new(Does(rule))
}

/// The rules of a plugin that supports filters.
fn plugin() -> [Rule; 2] {
    let uploads = DeviceUploads::new(any_sim(), is_filter);
    [Arc::new(uploads), Arc::new(DoubleFilters)]
}

fn rewritten(plan: &Plan, rules: &[Rule]) -> Result<Plan> {
    rewrite(plan.clone(), rules, &ConfigOptions::default())
}

fn sorted_scan(child: Plan) -> Plan {
    let by = PhysicalSortExpr::new(col("a", &child.schema()).unwrap(), SortOptions::default());
    Arc::new(SortExec::new(LexOrdering::new([by]).unwrap(), child))
}

/// A node of an engine: the crate knows nothing of it.
#[derive(Debug)]
struct EngineExec(Plan);

impl DisplayAs for EngineExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineExec")
    }
}

impl ExecutionPlan for EngineExec {
    fn name(&self) -> &str {
        "EngineExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.0.properties()
    }

    fn children(&self) -> Vec<&Plan> {
        vec![&self.0]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn replace_children(
        self: Arc<Self>,
        children: Vec<Plan>,
        _: ReplaceChildrenOptions,
    ) -> Result<Plan> {
        Ok(Arc::new(Self(children[0].clone())))
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Plan>) -> Result<Plan> {
        Ok(Arc::new(Self(children[0].clone())))
    }

    fn execute(&self, p: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        self.0.execute(p, context)
    }
}

#[tokio::test]
async fn operators_move_to_the_device_and_the_rest_stays() {
    let task: Plan = Arc::new(EngineExec(filter(host_scan().await)));
    let plan = rewritten(&task, &plugin()).unwrap();
    let expected = "
        EngineExec
          DeviceToHostExec: device=sim
            MapExec: device=sim
              HostToDeviceExec: device=sim
                DataSourceExec: partitions=1, partition_sizes=[1]
    ";
    assert_plan(&plan, &[], expected);
    // The engine's node keeps its place between two operators, too: it may not be lifted to the device.
    let task = filter(Arc::new(EngineExec(filter(host_scan().await))));
    let plan = rewritten(&task, &plugin()).unwrap();
    let expected = "
        DeviceToHostExec: device=sim
          MapExec: device=sim
            HostToDeviceExec: device=sim
              EngineExec
                DeviceToHostExec: device=sim
                  MapExec: device=sim
                    HostToDeviceExec: device=sim
                      DataSourceExec: partitions=1, partition_sizes=[1]
    ";
    assert_plan(&plan, &[], expected);
}

/// Nodes that keep rows in their partitions may go to the device, those that do not stay.
#[tokio::test]
async fn exchanges_stay_on_the_host() {
    let lifted = "DeviceProjectionExec";
    let columns = |plan: Plan| project(plan, &[(0, "a"), (1, "b"), (2, "s")]);
    let by = |plan: &Plan| {
        let by = PhysicalSortExpr::new(col("a", &plan.schema()).unwrap(), SortOptions::default());
        LexOrdering::new([by]).unwrap()
    };
    let merge = |plan: Plan| Arc::new(SortPreservingMergeExec::new(by(&plan), plan)) as Plan;
    let spread = |plan: Plan| round_robin(plan, 3);
    let between: [(&dyn Fn(Plan) -> Plan, &str); 4] = [
        (&columns, lifted),
        (&spread, "RepartitionExec"),
        (&on_host, "CoalescePartitionsExec"),
        (&merge, "SortPreservingMergeExec"),
    ];
    for (node, name) in between {
        // The tests' operator keeps no order, so nothing above may have one.
        let task = computed(filter(node(filter(host_scan().await))));
        let plan = rewritten(&task, &plugin()).unwrap();
        let shown = text(&plan, &[]);
        let line = shown.lines().map(str::trim_start);
        let found = line.filter(|line| line.starts_with(name)).count();
        assert_eq!(found, 1, "{name}\n{shown}");
        let downloads = shown.matches("DeviceToHostExec").count();
        assert_eq!(downloads, if name == lifted { 1 } else { 2 }, "{shown}");
        // `DeviceTransitions` would take them all.
        let all = text(&with_transitions(plan), &[]);
        assert_eq!(all.matches("DeviceToHostExec").count(), 1, "{all}");
    }
}

#[tokio::test]
async fn the_result_is_as_good_as_new() {
    // Nothing to do: the same plan.
    for plan in [host_scan().await, computed(host_scan().await)] {
        assert!(Arc::ptr_eq(&rewritten(&plan, &plugin()).unwrap(), &plan));
        assert!(Arc::ptr_eq(&rewritten(&plan, &[]).unwrap(), &plan));
    }
    // Too few rows: the same plan.
    let uploads = DeviceUploads::new(any_sim(), is_filter).with_min_rows(11);
    let task = filter(host_scan().await);
    let plan = rewritten(&task, &[Arc::new(uploads), Arc::new(DoubleFilters)]).unwrap();
    assert!(Arc::ptr_eq(&plan, &task));
    // Done already: the same plan. Two operators in a row have one upload.
    let task = computed(filter(filter(host_scan().await)));
    let plan = rewritten(&task, &plugin()).unwrap();
    let again = rewritten(&plan, &plugin()).unwrap();
    assert!(Arc::ptr_eq(&again, &plan), "{}", text(&again, &[]));
    let shown = text(&plan, &[]);
    let count = |name| shown.matches(name).count();
    let found = (
        count("HostToDevice"),
        count("MapExec"),
        count("DeviceToHost"),
    );
    assert_eq!(found, (1, 2, 1), "{shown}");
    // The plugin does not replace what it said it would: no upload is left.
    let plan = rewritten(&task, &plugin()[..1]).unwrap();
    assert_eq!(text(&plan, &[]), text(&task, &[]));
}

#[tokio::test]
async fn it_runs() {
    let sim = Sim::new();
    let devices = DeviceResolver::of([sim.device.clone()]);
    let config = SessionConfig::new().with_extension(Arc::new(devices));
    let context = SessionContext::new_with_config(config);
    for partitions in 0..3 {
        let input: Plan = match partitions {
            0 => Arc::new(EmptyExec::new(numbers(0, 1).schema()).with_partitions(0)),
            _ => scan(host_table(&vec![vec![numbers(0, 16)]; partitions])).await,
        };
        let task = filter(input);
        let plan = rewritten(&task, &plugin()).unwrap();
        let count = |plan: &Plan| plan.properties().output_partitioning().partition_count();
        assert_eq!((count(&task), count(&plan)), (partitions, partitions));
        let found = collect_partitioned(plan, context.task_ctx()).await.unwrap();
        assert_eq!(found.len(), partitions);
        for batches in found {
            let doubled: Vec<i64> = (0..16).map(|n| n * 2).collect();
            assert_eq!(numbers_of(&batches), doubled);
        }
    }
    drop(context);
    sim.assert_done();
}

#[track_caller]
fn refused(result: Result<Plan>, words: &[&str]) {
    let error = match result {
        Ok(plan) => panic!("{}", displayable(&*plan).indent(false)),
        Err(e) => e.to_string(),
    };
    for word in [&["rule Does"], words].concat() {
        assert!(error.contains(word), "no {word:?} in: {error}");
    }
}

#[tokio::test]
async fn a_rule_that_breaks_its_promise_is_refused() {
    let task = host_scan().await;
    let narrow = does(|plan| Ok(project(plan, &[(0, "a")])));
    let changed = ["schema", "\"s\""];
    refused(rewritten(&task, &[narrow]), &changed);
    let spread = does(|plan| Ok(round_robin(plan, 3)));
    let changed = ["number of partitions", "from 1 to 3"];
    refused(rewritten(&task, &[spread]), &changed);
    // What a node needs need not be what the task promises.
    let unsorted = does(|plan| Ok(plan.children()[0].clone()));
    let ordered = sorted_scan(host_scan().await);
    let changed = ["order", "from a@0 ASC", "to none"];
    refused(
        rewritten(&ordered, std::slice::from_ref(&unsorted)),
        &changed,
    );
    let unordered = on_host(host_scan().await);
    rewritten(&unordered, &[unsorted]).unwrap();
    // More order than before is fine.
    rewritten(&task, &[does(|plan| Ok(sorted_scan(plan)))]).unwrap();
    // Later rules do not hide what an earlier one did.
    let back = does(|plan| Ok(on_host(plan)));
    let spread = does(|plan| Ok(round_robin(plan, 3)));
    refused(rewritten(&task, &[spread, back]), &["from 1 to 3"]);
}

#[tokio::test]
async fn a_rule_that_panics_or_fails_is_an_error() {
    let task = filter(host_scan().await);
    refused(
        rewritten(&task, &[does(|_| panic!("no luck"))]),
        &["panicked", "no luck"],
    );
    let n = 7;
    refused(
        rewritten(&task, &[does(move |_| panic!("no {n}"))]),
        &["panicked", "no 7"],
    );
    let odd = does(|_| std::panic::panic_any(7));
    refused(rewritten(&task, &[odd]), &["panicked"]);
    let fails = does(|_| Err(DataFusionError::ResourcesExhausted("no luck".into())));
    let result = rewritten(&task, &[fails]);
    let root = result.as_ref().unwrap_err().find_root();
    assert!(
        matches!(root, DataFusionError::ResourcesExhausted(_)),
        "{root:?}"
    );
    refused(result, &["no luck"]);
    // The rules before and after are as they were.
    let plan = rewritten(&task, &plugin()).unwrap();
    assert!(text(&plan, &[]).contains("MapExec"));
}
