//! Where the nodes of a plan run.

use std::sync::Arc;

use datafusion_common::Result;
use datafusion_common::config::ConfigOptions;
use datafusion_common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion_physical_expr::{Distribution, Partitioning};
use datafusion_physical_plan::aggregates::{AggregateExec, AggregateMode};
use datafusion_physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion_physical_plan::limit::{GlobalLimitExec, LocalLimitExec};
use datafusion_physical_plan::repartition::RepartitionExec;
use datafusion_physical_plan::statistics::{StatisticsArgs, StatisticsContext};
use datafusion_physical_plan::{
    ExecutionPlan, ExecutionPlanProperties, replace_children_if_necessary,
};

use super::coalesce::DeviceCoalesceBatchesExec;
use super::exec::DeviceExec;
use super::form::{
    DeviceForm, Forms, device_of, drops_columns, keeps_partitions, lifted, round_robin,
};
use super::plugin::{DevicePlugin, Verdict};
use super::source::insert::DeviceInsertExec;
use super::spec::DeviceSpec;
use super::transitions::below::{is_transition, operator};
use super::transitions::to_device::{DeviceToDeviceExec, HostToDeviceExec};
use super::transitions::to_host::DeviceToHostExec;

type Plan = Arc<dyn ExecutionPlan>;

/// The names of nodes that stay on the host, and why.
type Reasons = Vec<(String, String)>;

/// When rows of the host go up.
#[derive(Clone, Debug)]
pub(super) struct Uploads {
    pub(super) device: DeviceSpec,
    /// 0: whatever their number, even if it is unknown.
    pub(super) min_rows: usize,
}

/// A run of the rule.
pub(super) struct Placing<'a> {
    plugins: &'a [Arc<dyn DevicePlugin>],
    uploads: Option<&'a Uploads>,
    forms: Forms,
    batch_size: usize,
}

impl<'a> Placing<'a> {
    pub(super) fn new(
        plugins: &'a [Arc<dyn DevicePlugin>],
        uploads: Option<&'a Uploads>,
        forms: Forms,
        options: &ConfigOptions,
    ) -> Self {
        Self {
            plugins,
            uploads,
            forms,
            batch_size: options.execution.batch_size.get(),
        }
    }

    /// The plan with its output on the host.
    pub(super) fn optimize(&self, plan: Plan) -> Result<Plan> {
        let placed = self.below_root(plan)?;
        if self.forms != Forms::All || self.plugins.is_empty() {
            return Ok(on_host(placed));
        }
        let note = |(node, why)| format!("{node}: {why}");
        let declined: Vec<_> = self.staying(&placed, None)?.into_iter().map(note).collect();
        Ok(match placed.downcast_ref::<DeviceToHostExec>() {
            _ if declined.is_empty() => on_host(placed),
            Some(down) if down.declined == declined => placed,
            _ => DeviceToHostExec::noting(on_host(placed), declined),
        })
    }

    /// Which nodes of a plan stay on the host, and why, as the plugins answer for this device; without one, for the device of a node's rows, or
    /// that of uploads.
    pub(super) fn staying(&self, plan: &Plan, device: Option<&DeviceSpec>) -> Result<Reasons> {
        let mut found = Vec::new();
        plan.apply(|node| {
            let own = node.children().into_iter().find_map(device_of);
            let host = DeviceExec::of(node).is_none() && !is_transition(node);
            let uploads = self.uploads.map(|uploads| &uploads.device);
            let device = device.or(own.as_ref()).or(uploads).filter(|_| host);
            for (plugin, device) in self.plugins.iter().flat_map(|one| Some((one, device?))) {
                let why = match plugin.can_run(node, device) {
                    Verdict::Stays(why) => Some(why.into_owned()),
                    _ if node.children().is_empty() => None,
                    Verdict::RunsThere => Some("not all of its rows are on the device".into()),
                    Verdict::Runs if own.is_none() => self.too_few(node, &runs(plugin, device)),
                    _ => None,
                };
                let one = why.map(|why| (node.name().to_owned(), why));
                found.extend(one.filter(|one| !found.contains(one)));
            }
            Ok(TreeNodeRecursion::Continue)
        })?;
        Ok(found)
    }

    /// Puts operators and transitions everywhere but above the root.
    pub(super) fn below_root(&self, plan: Plan) -> Result<Plan> {
        let placed = plan.transform_up(|node| {
            let placed = self.place(&node)?;
            Ok(placed.map_or_else(|| Transformed::no(node), Transformed::yes))
        });
        Ok(placed?.data)
    }

    /// Where a node and its children run, if that is to change. Below the children all is done.
    fn place(&self, node: &Plan) -> Result<Option<Plan>> {
        // A transition reads the other side. Whether it is needed is decided for its parent.
        if is_transition(node) {
            return Ok(None);
        }
        if let Some(placed) = self.below_round_robin(node)? {
            return Ok(Some(placed));
        }
        if let Some(placed) = self.below_hash(node)? {
            return Ok(Some(placed));
        }
        let mut new = self.replaced(node)?;
        let is_new = new.is_some();
        let placed = new.as_ref().unwrap_or(node);
        let device = DeviceExec::of(placed).map(DeviceExec::device);
        let plugin = DeviceExec::of(placed).and_then(DeviceExec::plugin).cloned();
        let up = HostToDeviceExec::for_plugin(plugin);
        // It is on the host, and reads the device.
        let insert = placed.downcast_ref::<DeviceInsertExec>();
        let device = device.or(insert.map(DeviceInsertExec::device)).cloned();
        let mut changed = false;
        let mut wanted = Vec::new();
        let gathers = insert.is_some() || is_gathering(placed) && self.forms == Forms::All;
        for child in placed.children() {
            let read = if gathers {
                without_round_robin(child)
            } else {
                child
            };
            let own = match &device {
                Some(device) => on_device(read, device, self.forms, up.clone())?,
                None => on_host(read.clone()),
            };
            changed |= !Arc::ptr_eq(&own, child);
            wanted.push(own);
        }
        if changed {
            new = Some(replace_children_if_necessary(placed.clone(), wanted)?);
        }
        if is_new {
            new = new.map(|new| self.joined(new));
        }
        Ok(below_the_download(new.as_ref().unwrap_or(node))?.or(new))
    }

    /// The operator in place of a node, if a plugin runs it.
    fn replaced(&self, node: &Plan) -> Result<Option<Plan>> {
        if self.plugins.is_empty() || DeviceExec::of(node).is_some() {
            return Ok(None);
        }
        let of: Vec<_> = node.children().into_iter().map(device_of).collect();
        let (device, rows_there) = match (of.iter().flatten().next(), self.uploads) {
            (Some(device), _) => (device, of.iter().all(|one| one.as_ref() == Some(device))),
            (None, Some(uploads)) => (&uploads.device, false),
            (None, None) => return Ok(None),
        };
        for plugin in self.plugins {
            match plugin.can_run(node, device) {
                Verdict::Runs if of.iter().all(Option::is_none) => {
                    // Its rows may still go up for a node above it.
                    if self.too_few(node, &runs(plugin, device)).is_some() {
                        continue;
                    }
                    let merges = self.merges(node, device, plugin);
                    let up = self.uploaded(node, device, plugin, merges)?;
                    let by = node.output_partitioning().partition_count();
                    if up.output_partitioning().partition_count() == by {
                        return Ok(Some(up));
                    }
                    // As those of the node were.
                    return distributed(up, Partitioning::RoundRobinBatch(by)).map(Some);
                }
                Verdict::RunsThere if !rows_there => {}
                Verdict::Runs | Verdict::RunsThere => {
                    let exec = DeviceExec::in_place_of(node.clone(), device.clone(), plugin)?;
                    return Ok(Some(Arc::new(exec)));
                }
                Verdict::Stays(_) | Verdict::Unknown => {}
            }
        }
        Ok(None)
    }

    /// The operator with its small batches joined, if it has such.
    fn joined(&self, plan: Plan) -> Plan {
        let small = DeviceExec::of(&plan).filter(|exec| exec.has_small_batches());
        match small.map(|exec| exec.device().clone()) {
            Some(device) => DeviceCoalesceBatchesExec::new(self.batch_size).above(plan, device),
            None => plan,
        }
    }

    /// Whether the rows of the host that go up for `node` may be one partition, and the plugin wants that. The partitions of a worker's task may be
    /// started apart; rows that are distributed by their values, or have an order, stay as they are.
    fn merges(&self, node: &Plan, device: &DeviceSpec, plugin: &Arc<dyn DevicePlugin>) -> bool {
        let by = node.output_partitioning();
        let any = !matches!(by, Partitioning::Hash(..) | Partitioning::Range(_));
        let fits = |child: &Plan| match runs(plugin, device)(child) {
            true => self.merges(child, device, plugin),
            false => child.output_ordering().is_none(),
        };
        let wanted = self.forms == Forms::All && plugin.merges_uploads();
        wanted && any && node.children().into_iter().all(fits)
    }

    /// The operator over rows of the host, with what the plugin runs below it.
    fn uploaded(
        &self,
        node: &Plan,
        device: &DeviceSpec,
        plugin: &Arc<dyn DevicePlugin>,
        merges: bool,
    ) -> Result<Plan> {
        let up = |child: &Plan| match runs(plugin, device)(child) {
            true => {
                let up = self.uploaded(child, device, plugin, merges)?;
                Ok(self.joined(up))
            }
            false => {
                let several = child.output_partitioning().partition_count() > 1;
                let child = match merges && several && device_of(child).is_none() {
                    true => Arc::new(CoalescePartitionsExec::new(child.clone())),
                    false => child.clone(),
                };
                let up = HostToDeviceExec::for_plugin(plugin.clone());
                on_device(&child, device, self.forms, up)
            }
        };
        let children = node.children().into_iter().map(up);
        let node = replace_children_if_necessary(node.clone(), children.collect::<Result<_>>()?)?;
        let exec = DeviceExec::in_place_of(node, device.clone(), plugin)?;
        Ok(Arc::new(exec))
    }

    /// Why the rows of the host that a node reads, or those that run below it, do not go up, if they are too few.
    fn too_few(&self, node: &Plan, runs: &dyn Fn(&Plan) -> bool) -> Option<String> {
        let min = self.uploads?.min_rows;
        match rows_up(node, runs) {
            Some(rows) if rows >= min => None,
            Some(rows) => Some(format!("it reads {rows} rows; uploads begin at {min}")),
            None if min == 0 => None,
            None => Some(format!("nobody knows whether it reads {min} rows")),
        }
    }

    /// A node whose rows DataFusion has distributed over its tasks, so that they share its work: above a device's batches that belongs after the
    /// device's work.
    fn below_round_robin(&self, node: &Plan) -> Result<Option<Plan>> {
        let children = node.children();
        let inputs = children.iter().map(|child| without_round_robin(child));
        let inputs: Vec<_> = inputs.cloned().collect();
        let are_there = inputs.iter().all(|input| device_of(input).is_some());
        if !are_there || inputs.iter().zip(&children).all(|(a, b)| Arc::ptr_eq(a, b)) {
            return Ok(None);
        }
        let needs = node.input_distribution_requirements();
        let mut needs = needs.per_child_distributions();
        // A limit holds for each partition.
        if node.fetch().is_some()
            || needs.any(|needs| !matches!(needs, Distribution::UnspecifiedDistribution))
        {
            return Ok(None);
        }
        let partitions = |plan: &Plan| plan.output_partitioning().partition_count();
        let before = partitions(node);
        let after: usize = inputs.iter().map(partitions).sum();
        let below = replace_children_if_necessary(node.clone(), inputs)?;
        // Rows of several partitions would lose the order that the nodes above count on.
        if after > 1 && below.output_ordering().is_some() {
            return Ok(None);
        }
        let below = self.place(&below)?.unwrap_or(below);
        let stays = DeviceExec::of(&below).is_some() || keeps_partitions(node);
        if !stays || partitions(&below) != after {
            return Ok(None);
        }
        distributed(below, Partitioning::RoundRobinBatch(before)).map(Some)
    }

    /// The second half of an aggregate whose first half runs on a device, if it runs there, too: over all partitions of the first half at once. Its
    /// groups are distributed after it. A device has no use for more partitions, and its results are only as many rows as there are groups.
    fn below_hash(&self, node: &Plan) -> Result<Option<Plan>> {
        let half = node.downcast_ref::<AggregateExec>();
        let half = half.filter(|half| *half.mode() == AggregateMode::FinalPartitioned);
        let exchange = half.and_then(|half| half.input().downcast_ref::<RepartitionExec>());
        let (Some(half), Some(exchange), Forms::All) = (half, exchange, self.forms) else {
            return Ok(None);
        };
        let (first, by) = (operator(exchange.input()), node.output_partitioning());
        let is_hash = matches!(by, Partitioning::Hash(..));
        if DeviceExec::of(first).is_none() || exchange.preserve_order() || !is_hash {
            return Ok(None);
        }
        let whole = AggregateExec::try_new(
            AggregateMode::Final,
            half.group_expr().clone(),
            half.aggr_expr().to_vec(),
            half.filter_expr().to_vec(),
            Arc::new(CoalescePartitionsExec::new(first.clone())),
            half.input_schema(),
        )?;
        let whole: Plan = Arc::new(whole.with_limit_options(half.limit_options()));
        if whole.schema() != half.schema() {
            return Ok(None);
        }
        let placed = self.place(&whole)?;
        match placed.filter(|placed| DeviceExec::of(placed).is_some()) {
            Some(placed) => distributed(placed, by.clone()).map(Some),
            None => Ok(None),
        }
    }
}

/// Whether a plugin has an operator for a node.
fn runs(plugin: &Arc<dyn DevicePlugin>, device: &DeviceSpec) -> impl Fn(&Plan) -> bool {
    let has = |verdict| matches!(verdict, Verdict::Runs | Verdict::RunsThere);
    move |node| has(plugin.can_run(node, device))
}

/// How many rows of the host a node reads, and those that run below it, if that is known.
fn rows_up(node: &Plan, runs: &dyn Fn(&Plan) -> bool) -> Option<usize> {
    let rows = |input: &Plan| {
        // A leaf that the plugin runs reads them itself, and so does the node above it.
        if runs(input) && !input.children().is_empty() {
            return rows_up(input, runs);
        }
        if input.boundedness().is_unbounded() {
            return None;
        }
        // Statistics that cannot be computed are unknown. What computes them knows nodes by their addresses, so it is not kept.
        let known = StatisticsContext::new().compute(&**input, &StatisticsArgs::new());
        known.ok()?.num_rows.get_value().copied()
    };
    node.children().into_iter().map(rows).sum()
}

/// The rows of a plan, on the host, in these partitions.
fn distributed(plan: Plan, by: Partitioning) -> Result<Plan> {
    let distributed = RepartitionExec::try_new(on_host(plan), by)?;
    Ok(Arc::new(distributed))
}

/// As the rule, for a plan whose output is wanted on a device.
pub(super) fn with_output_on(plan: Plan, device: &DeviceSpec) -> Result<Plan> {
    let placing = Placing::new(&[], None, Forms::All, &ConfigOptions::default());
    let plan = placing.below_root(plan)?;
    let plan = without_round_robin(&plan);
    on_device(plan, device, Forms::All, HostToDeviceExec::default())
}

/// Whether a node reads all partitions, in any order.
fn is_gathering(plan: &Plan) -> bool {
    let node = DeviceExec::of(plan).map_or(plan, DeviceExec::node);
    node.is::<CoalescePartitionsExec>()
}

/// What a round-robin repartition reads from a device, for a node that reads all partitions.
fn without_round_robin(plan: &Plan) -> &Plan {
    let input = round_robin(operator(plan)).map(RepartitionExec::input);
    input
        .filter(|input| device_of(input).is_some())
        .unwrap_or(plan)
}

/// The download of what `plan` makes of a download, if that is less: `plan` is a limit, or a projection that drops columns.
fn below_the_download(plan: &Plan) -> Result<Option<Plan>> {
    let limits = plan.is::<GlobalLimitExec>() || plan.is::<LocalLimitExec>();
    if !limits && !plan.downcast_ref().is_some_and(drops_columns) {
        return Ok(None);
    }
    let down: Option<&DeviceToHostExec> = plan.children()[0].downcast_ref();
    let device = down.and_then(|down| DeviceExec::of(down.input()));
    let Some(device) = device.map(|node| node.device().clone()) else {
        return Ok(None);
    };
    Ok(DeviceForm::of(plan.clone(), device)?.map(on_host))
}

/// The plan with its output on the host. A plan that needs no change stays the same node.
fn on_host(plan: Plan) -> Plan {
    let operator = operator(&plan);
    if DeviceExec::of(operator).is_none() {
        return operator.clone();
    }
    match plan.downcast_ref::<DeviceToHostExec>() {
        Some(down) if Arc::ptr_eq(down.input(), operator) => plan,
        _ => Arc::new(DeviceToHostExec::new(operator.clone())),
    }
}

/// The plan with its output on a device, where rows of the host go up as `to_device` says. A plan that needs no change stays the same node.
fn on_device(
    plan: &Plan,
    device: &DeviceSpec,
    forms: Forms,
    to_device: HostToDeviceExec,
) -> Result<Plan> {
    if let Some(there) = lifted(plan, device, forms)? {
        return Ok(there);
    }
    let operator = operator(plan);
    let of = DeviceExec::of(operator);
    let up: Option<&HostToDeviceExec> = DeviceExec::operator(plan);
    // The transition that is needed is there.
    let fits = match of {
        Some(_) => DeviceExec::operator::<DeviceToDeviceExec>(plan).is_some(),
        None => up.is_some(),
    };
    let above = DeviceExec::of(plan).filter(|above| fits && above.device() == device);
    if above.is_some_and(|above| Arc::ptr_eq(above.children()[0], operator)) {
        return Ok(plan.clone());
    }
    let (input, device) = (operator.clone(), device.clone());
    Ok(match of {
        Some(_) => DeviceToDeviceExec::above(input, device),
        // What was wanted of the batches is wanted of them there, too.
        None => up.cloned().unwrap_or(to_device).above(input, device),
    })
}
