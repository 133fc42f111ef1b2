//! `rewrite`: what a rule may do to the plan of a task.

use std::fmt;
use std::sync::Arc;

use arrow_device_datafusion::{DeviceUploads, rewrite};
use datafusion::common::Result;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::error::DataFusionError;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::empty::EmptyExec;
use datafusion::physical_plan::execution_plan::ReplaceChildrenOptions;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties, collect_partitioned,
};

use crate::kit::*;
use crate::nodes::*;
use crate::uploads::{DoubleFilters, is_filter};

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
    let expected = "Engine < Down < Map < Up < DataSource";
    assert_eq!(shape(&plan, &[]), expected);
    // The engine's node keeps its place between two operators, too: it may not be lifted to the device.
    let task = filter(Arc::new(EngineExec(filter(host_scan().await))));
    let plan = rewritten(&task, &plugin()).unwrap();
    let expected = "Down < Map < Up < Engine < Down < Map < Up < DataSource";
    assert_eq!(shape(&plan, &[]), expected);
}

/// Nodes that keep rows in their partitions may go to the device, those that do not stay.
#[tokio::test]
async fn exchanges_stay_on_the_host() {
    let lifted = "Down < Map < Projection < Map < Up < DataSource";
    let columns = |plan: Plan| project(plan, &[(0, "a"), (1, "b"), (2, "s")]);
    type Between = (fn(Plan) -> Plan, &'static str);
    let between: [Between; 4] = [
        (columns, "Projection"),
        (|plan| round_robin(plan, 3), "Repartition"),
        (on_host, "CoalescePartitions"),
        (|plan| merge(plan, None), "SortPreservingMerge"),
    ];
    for (node, name) in between {
        // The tests' operator keeps no order, so nothing above may have one.
        let task = computed(filter(node(filter(host_scan().await))));
        let plan = rewritten(&task, &plugin()).unwrap();
        let stays = format!("Down < Map < Up < {name} < Down < Map < Up < DataSource");
        let expected = if name == "Projection" { lifted } else { &stays };
        assert_eq!(shape(&plan, &[]), format!("Projection < {expected}"));
        // `DeviceTransitions` would take them all.
        let all = shape(&with_transitions(plan), &[]);
        assert_eq!(
            all,
            format!(
                "Projection < {}",
                lifted.replace("< Projection", &format!("< {name}"))
            )
        );
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
    let expected = "Projection < Down < Map < Map < Up < DataSource";
    assert_eq!(shape(&plan, &[]), expected);
    // The plugin does not replace what it said it would: no upload is left.
    let plan = rewritten(&task, &plugin()[..1]).unwrap();
    assert_eq!(text(&plan, &[]), text(&task, &[]));
}

#[tokio::test]
async fn it_runs() {
    let sim = Sim::new();
    let context = offering([&sim]);
    for partitions in 0..3 {
        let input: Plan = match partitions {
            0 => Arc::new(EmptyExec::new(numbers(0, 1).schema()).with_partitions(0)),
            _ => scan(host_table(&vec![vec![numbers(0, 16)]; partitions])).await,
        };
        let task = filter(input);
        let plan = rewritten(&task, &plugin()).unwrap();
        let count = |plan: &Plan| plan.properties().output_partitioning().partition_count();
        assert_eq!((count(&task), count(&plan)), (partitions, partitions));
        let found = collect_partitioned(plan, context.clone()).await.unwrap();
        assert_eq!(found.len(), partitions);
        for batches in found {
            assert_eq!(numbers_of(&batches), multiples(16, 2));
        }
    }
    drop(context);
    sim.assert_done();
}

#[track_caller]
fn refused(result: Result<Plan>, words: &[&str]) {
    fails(result, &[&["rule Does"], words].concat());
}

#[tokio::test]
async fn a_rule_that_breaks_its_promise_is_refused() {
    let task = host_scan().await;
    let narrow = does(|plan| Ok(project(plan, &[(0, "a")])));
    refused(rewritten(&task, &[narrow]), &["schema", "\"s\""]);
    let spread = does(|plan| Ok(round_robin(plan, 3)));
    let changed = ["number of partitions", "from 1 to 3"];
    refused(rewritten(&task, std::slice::from_ref(&spread)), &changed);
    // What a node needs need not be what the task promises.
    let unsorted = does(|plan| Ok(plan.children()[0].clone()));
    let (ordered, unordered) = (sort(task.clone()), on_host(task.clone()));
    rewritten(&unordered, std::slice::from_ref(&unsorted)).unwrap();
    let changed = ["order", "from a@0 ASC", "to none"];
    refused(rewritten(&ordered, &[unsorted]), &changed);
    // More order than before is fine.
    rewritten(&task, &[does(|plan| Ok(sort(plan)))]).unwrap();
    // Later rules do not hide what an earlier one did.
    let back = does(|plan| Ok(on_host(plan)));
    refused(rewritten(&task, &[spread, back]), &["from 1 to 3"]);
}

#[tokio::test]
async fn a_rule_that_panics_or_fails_is_an_error() {
    let task = filter(host_scan().await);
    let n = 7;
    for (rule, words) in [
        (does(|_| panic!("no luck")), &["panicked", "no luck"][..]),
        (does(move |_| panic!("no {n}")), &["panicked", "no 7"]),
        (does(|_| std::panic::panic_any(7)), &["panicked"]),
    ] {
        refused(rewritten(&task, &[rule]), words);
    }
    let failing = does(|_| Err(DataFusionError::ResourcesExhausted("no luck".into())));
    let error = fails(rewritten(&task, &[failing]), &["rule Does", "no luck"]);
    let root = error.find_root();
    assert!(matches!(root, DataFusionError::ResourcesExhausted(_)));
    // The rules before and after are as they were.
    let plan = rewritten(&task, &plugin()).unwrap();
    assert!(text(&plan, &[]).contains("MapExec"));
}
