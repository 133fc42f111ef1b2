//! The sessions: which tables are on devices, and which nodes of plans.

use std::any::Any;

use arrow_device::Devices as All;
use datafusion::catalog::MemTable;
use datafusion::common::Result;

use crate::kit::*;
use crate::operator::{Backed, State, Step, operator};

/// A kind of session. Devices are numbers of [`Devices`].
pub(super) struct Kind {
    pub(super) name: &'static str,
    /// On which device the tables are that statements create.
    tables: Option<usize>,
    rule: bool,
    /// The devices of an operator above every node, in turn.
    operators: &'static [usize],
    /// Whether a plugin runs every node that it may, and merges what goes up for it.
    plugin: bool,
}

const CPU: usize = 2;

#[rustfmt::skip]
pub(super) const KINDS: [Kind; 8] = [
    Kind { name: "tables", tables: Some(0), rule: false, operators: &[], plugin: false },
    Kind { name: "tables, rule", tables: Some(0), rule: true, operators: &[], plugin: false },
    Kind { name: "operators", tables: Some(0), rule: true, operators: &[0], plugin: false },
    Kind { name: "operators on the CPU", tables: Some(CPU), rule: true, operators: &[CPU], plugin: false },
    Kind { name: "operators, host tables", tables: None, rule: true, operators: &[0], plugin: false },
    Kind { name: "devices in turn", tables: Some(0), rule: true, operators: &[0, 1, CPU], plugin: false },
    Kind { name: "plugin", tables: Some(0), rule: true, operators: &[], plugin: true },
    Kind { name: "plugin, host tables", tables: None, rule: true, operators: &[], plugin: true },
];

/// Two simulated devices and the CPU.
pub(super) struct Devices([Device; 3], [Sim; 2]);

impl Devices {
    pub(super) fn new() -> Self {
        let sims = [Sim::new(), Sim::new()];
        let [first, second] = sims.each_ref().map(|sim| sim.device.clone());
        Self([first, second, All::cpu()], sims)
    }

    /// Nothing was done wrong on them.
    pub(super) fn check(&self) {
        for sim in &self.1 {
            assert_eq!(sim.sim.report().violations, [""; 0]);
        }
    }

    /// A session of this kind, or a plain one.
    pub(super) fn session(&self, kind: Option<&Kind>) -> Session {
        let mut rules: Vec<Rule> = Vec::new();
        if let Some(kind) = kind.filter(|kind| !kind.operators.is_empty()) {
            let devices = kind.operators.iter().map(|&i| (&self.0[i]).into());
            rules.push(everywhere(devices.collect()));
        }
        if let Some(kind) = kind.filter(|kind| kind.rule) {
            let mut rule = DeviceRule::default();
            if kind.plugin {
                rule = rule.with_plugin(Arc::new(Everything));
            }
            if kind.tables.is_none() {
                rule = rule.with_uploads(&self.0[0], 0);
            }
            rules.push(Arc::new(rule));
        }
        let tables = kind.and_then(|kind| kind.tables);
        Session {
            // As in DataFusion's own runs of the files.
            ctx: session_of(of_partitions(4), rules),
            device: tables.map(|i| self.0[i].clone()),
        }
    }
}

/// A session, and the device of its tables.
pub(super) struct Session {
    pub(super) ctx: SessionContext,
    device: Option<Device>,
}

impl Session {
    /// The same session with rows in other batches and partitions.
    pub(super) fn divided(&self) -> Self {
        let config = self.ctx.copied_config();
        let config = config.with_batch_size(2).with_target_partitions(3);
        // Those of the session that it divides stay.
        let config = config.with_create_default_catalog_and_schema(false);
        let state = SessionStateBuilder::new_from_existing(self.ctx.state()).with_config(config);
        Self {
            ctx: SessionContext::new_with_state(state.build()),
            device: None,
        }
    }

    /// Moves the tables in memory that statements have created to the device.
    pub(super) async fn move_tables(&self) -> Result<()> {
        let (Some(device), Some(catalog)) = (&self.device, self.ctx.catalog("datafusion")) else {
            return Ok(());
        };
        let schemas = catalog.schema_names().into_iter();
        for schema in schemas.filter_map(|name| catalog.schema(&name)) {
            for name in schema.table_names() {
                let table = schema.table(&name).await?;
                let table = table.as_deref().map(|table| table as &dyn Any);
                let table = table.and_then(|table| table.downcast_ref::<MemTable>());
                // Tables of batches declare no constraints.
                let free = |table: &&MemTable| table.constraints().is_none_or(|c| c.is_empty());
                if let Some(table) = table.filter(free) {
                    let moved = Arc::new(moved(table, device).await?);
                    schema.deregister_table(&name)?;
                    schema.register_table(name, moved)?;
                }
            }
        }
        Ok(())
    }
}

async fn moved(table: &MemTable, device: &Device) -> Result<DeviceTable> {
    let mut partitions = Vec::new();
    for partition in &table.batches {
        let partition = partition.read().await;
        let up = partition.iter().map(|batch| device.upload(batch));
        let up = up.collect::<arrow_device::Result<_>>();
        partitions.push(up.map_err(to_datafusion)?);
    }
    let schema = table.schema();
    let fields = schema.fields().iter().map(|field| field.name());
    let default = |name: &String| Some((name.clone(), table.get_column_default(name)?.clone()));
    let defaults = fields.filter_map(default).collect();
    let moved = DeviceTable::from_batches(schema.clone(), device.clone(), partitions);
    Ok(moved.map_err(to_datafusion)?.with_column_defaults(defaults))
}

/// Runs every node that plans do not need as it is.
#[derive(Debug)]
struct Everything;

impl DevicePlugin for Everything {
    fn can_run(&self, node: &Plan, _: &DeviceSpec) -> Verdict {
        let stays = "AnalyzeExec CoalescePartitionsExec CooperativeExec DataSinkExec DeviceInsertExec DeviceToHostExec \
            InterleaveExec RecursiveQueryExec RepartitionExec SortPreservingMergeExec";
        match node.children().is_empty() || stays.split(' ').any(|name| name == node.name()) {
            true => Verdict::Unknown,
            false => Verdict::Runs,
        }
    }

    fn replace(&self, node: &Plan) -> Result<Arc<dyn DeviceOperator>> {
        Ok(Arc::new(Backed::new(node, true)))
    }

    fn merges_uploads(&self) -> bool {
        true
    }
}

/// Puts an operator above every node of a plan, on these devices in turn, from the leaves up.
fn everywhere(devices: Vec<DeviceSpec>) -> Rule {
    fn height(plan: &Plan) -> usize {
        let below = plan.children().into_iter().map(height);
        below.max().map_or(0, |below| below + 1)
    }
    transforming(move |child| {
        let device = devices[height(&child) % devices.len()].clone();
        Transformed::yes(operator("SlicesExec", vec![child], device, slices))
    })
}

/// Passes rows on, each batch as two slices if it has so many rows.
fn slices(state: &mut State, cx: &mut Context<'_>) -> Step {
    if let Some(rest) = state.batches.pop() {
        return Poll::Ready(Some(Ok(rest)));
    }
    let next = ready!(state.next(cx));
    Poll::Ready(next.map(|batch| {
        let batch = batch?;
        let (rows, first) = (batch.num_rows(), batch.num_rows().div_ceil(3));
        if rows > first {
            state.batches.push(batch.slice(first, rows - first)?);
        }
        batch.slice(0, first)
    }))
}
