//! [`Shape`]: the metrics of a task in the shape that the scheduler expects.

use std::sync::Arc;

use arrow_device_datafusion::{
    DeviceCoalesceBatchesExec, DeviceExec, DeviceToDeviceExec, DeviceToHostExec, HostToDeviceExec,
};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::coop::CooperativeExec;
use datafusion::physical_plan::metrics::{MetricValue, MetricsSet};

/// Which set of metrics of the scheduler's plan each of the executed plan's belongs to.
///
/// A task sends a list of sets, one for each node that has metrics, the parents first. All tasks of a stage must send equally
/// many: the scheduler takes the first list as it is, and where a later one is shorter or longer, it forgets that task's rows, or never
/// ends the query. Tasks of executors with and without devices belong to one stage, so the sets are those of the plan before device
/// operators were put into it.
#[derive(Debug)]
pub(super) struct Shape {
    to: Vec<Set>,
    count: usize,
}

/// Where a set goes.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Set {
    Node(usize),
    /// Counts of bytes and copies of a transition go to the node below it. That node counts the rows, and the time.
    Transition(usize),
    Nowhere,
}

impl Shape {
    /// `before` is the plan that the scheduler sent, `after` the one that runs, both with the shuffle writer.
    pub(super) fn new(before: &Arc<dyn ExecutionPlan>, after: &Arc<dyn ExecutionPlan>) -> Self {
        let mut shape = Self {
            to: Vec::new(),
            count: 0,
        };
        shape.walk(before, after);
        shape
    }

    /// The sets of the executed plan as those of the plan before. The number of the result is always the same.
    pub(super) fn fit(&self, sets: &[MetricsSet]) -> Vec<MetricsSet> {
        let mut fitted = vec![MetricsSet::new(); self.count];
        if sets.len() != self.to.len() {
            return fitted;
        }
        for (set, to) in sets.iter().zip(&self.to) {
            let (Set::Node(at) | Set::Transition(at)) = *to else {
                continue;
            };
            let Some(fitted) = fitted.get_mut(at) else {
                continue;
            };
            for metric in set.iter() {
                let goes = match metric.value() {
                    // Ballista cannot send it, and would send none of the task's metrics.
                    MetricValue::Custom { .. } => false,
                    MetricValue::Count { .. } => true,
                    _ => matches!(to, Set::Node(_)),
                };
                if goes {
                    fitted.push(metric.clone());
                }
            }
        }
        fitted
    }

    fn walk(&mut self, before: &Arc<dyn ExecutionPlan>, after: &Arc<dyn ExecutionPlan>) {
        // It stands where DataFusion wants it, but not above device operators.
        if let Some(only) = below_cooperative(before) {
            self.count += usize::from(before.metrics().is_some());
            return self.walk(only, after);
        }
        let own = before.metrics().map(|_| self.count);
        let mut operator = after;
        while let Some(below) = below_transition(operator).or_else(|| below_cooperative(operator)) {
            if operator.metrics().is_some() {
                self.to.push(own.map_or(Set::Nowhere, Set::Transition));
            }
            operator = below;
        }
        let (old, new) = (before.children(), operator.children());
        if old.len() != new.len() {
            // A rule has replaced several nodes by one, or one by several.
            self.count += count(before);
            self.to.extend(vec![Set::Nowhere; count(operator)]);
            return;
        }
        if operator.metrics().is_some() {
            self.to.push(own.map_or(Set::Nowhere, Set::Node));
        }
        self.count += usize::from(own.is_some());
        for (old, new) in old.into_iter().zip(new) {
            self.walk(old, new);
        }
    }
}

/// The number of sets of a plan.
fn count(plan: &Arc<dyn ExecutionPlan>) -> usize {
    let below: usize = plan.children().into_iter().map(count).sum();
    usize::from(plan.metrics().is_some()) + below
}

fn below_cooperative(plan: &Arc<dyn ExecutionPlan>) -> Option<&Arc<dyn ExecutionPlan>> {
    plan.downcast_ref().map(CooperativeExec::input)
}

fn below_transition(plan: &Arc<dyn ExecutionPlan>) -> Option<&Arc<dyn ExecutionPlan>> {
    let down = plan.downcast_ref().map(DeviceToHostExec::input);
    let up = || DeviceExec::operator::<HostToDeviceExec>(plan).map(|_| plan.children()[0]);
    let between = || DeviceExec::operator::<DeviceToDeviceExec>(plan).map(|_| plan.children()[0]);
    let joined =
        || DeviceExec::operator::<DeviceCoalesceBatchesExec>(plan).map(|_| plan.children()[0]);
    down.or_else(up).or_else(between).or_else(joined)
}
