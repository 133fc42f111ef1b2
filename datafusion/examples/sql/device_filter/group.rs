//! The aggregate: groups rows, and keeps a state for each group. A batch's groups are selected as a filter's rows are, and the
//! states of several batches become those of one.

use std::future::ready;
use std::pin::pin;
use std::sync::Arc;

use arrow_device::{DeviceArray, DeviceBufferMut, DeviceRecordBatch, Result, Validity};
use arrow_device_datafusion::{
    DeviceOperator, DeviceReservation, DeviceTask, SendableDeviceStream, to_datafusion,
};
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::error::Result as DataFusionResult;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::aggregates::AggregateExec;
use futures::{Stream, StreamExt, TryStreamExt, stream};

use super::aggregate::{Aggregate, Change, Outcome, State, Why};
use super::arithmetic::{Overflow, high, low};
use super::cache::KernelCache;
use super::chunks::chunks;
use super::column::Input;
use super::held::Held;
use super::kernels::{Lent, to};
use super::select::{Choice, Selected, Selector};

/// An aggregate, whole or a half of one, in the place of DataFusion's.
#[derive(Debug)]
pub(crate) struct DeviceAggregateExec {
    aggregate: Arc<Aggregate>,
    kernels: Arc<KernelCache>,
}

impl DeviceAggregateExec {
    pub(crate) fn new(host: &AggregateExec, kernels: Arc<KernelCache>) -> Result<Self, Why> {
        let aggregate = Arc::new(Aggregate::new(host)?);
        Ok(Self { aggregate, kernels })
    }
}

impl DeviceOperator for DeviceAggregateExec {
    fn name(&self) -> &str {
        "DeviceAggregateExec"
    }

    fn execute(&self, task: &DeviceTask<'_>) -> DataFusionResult<SendableDeviceStream> {
        let launcher = self.kernels.launcher(task.device).map_err(to_datafusion)?;
        let (aggregate, schema) = (self.aggregate.clone(), self.aggregate.schema.clone());
        let running = Running {
            overflow: Overflow::new(&launcher).map_err(to_datafusion)?,
            selector: Selector { launcher, schema },
            aggregate,
            memory: Arc::new(task.reservation()),
        };
        let (of, schema) = (running.clone(), task.node().schema());
        let choices = chunks(task, move |batch| {
            let lent = of.selector.launcher.lend(batch.as_struct())?;
            of.choose(&batch, Some(lent), &of.aggregate.keys, &of.aggregate.states)
        })?;
        let batch = stream::once(running.result(choices, schema));
        Ok(task.stream(batch.filter_map(|batch| ready(batch.transpose()))))
    }

    /// It has one batch.
    fn has_small_batches(&self, _: &dyn ExecutionPlan) -> bool {
        false
    }
}

#[derive(Clone)]
struct Running {
    aggregate: Arc<Aggregate>,
    overflow: Overflow,
    /// Of keys and states.
    selector: Selector,
    memory: Arc<DeviceReservation>,
}

impl Running {
    /// The result, once no number is known to be too large, if there are groups. Without keys all rows are a group, even if there are none.
    async fn result(
        self,
        choices: impl Stream<Item = Result<Vec<(Choice, Held)>>> + Send,
        schema: SchemaRef,
    ) -> Result<Option<DeviceRecordBatch>> {
        let keys: Vec<usize> = (0..self.aggregate.keys.len()).collect();
        let groups = self.groups(choices, &keys).await?;
        let states = if !groups.is_empty() {
            self.selector.gather(groups)?
        } else if keys.is_empty() {
            let states = self.aggregate.states.iter().enumerate();
            let columns = states.map(|(i, state)| self.state(i, state, None, 1, 0));
            let columns: Vec<_> = columns.collect::<Result<_>>()?;
            DeviceRecordBatch::try_new(self.selector.schema.clone(), &columns)?
        } else {
            return Ok(None);
        };
        let results = self.aggregate.results.iter();
        let columns = results.map(|one| self.outcome(one, &states));
        let columns: Vec<_> = columns.collect::<Result<_>>()?;
        let batch = DeviceRecordBatch::try_new(schema, &columns)?;
        self.overflow.check(self.selector.launcher.queue).await?;
        Ok(Some(batch))
    }

    /// The groups of all rows, and their states.
    async fn groups(
        &self,
        choices: impl Stream<Item = Result<Vec<(Choice, Held)>>> + Send,
        keys: &[usize],
    ) -> Result<Vec<Selected>> {
        let mut selected = pin!(self.selector.counted(choices));
        let merged = self.aggregate.merged();
        let mut groups = Vec::new();
        while let Some(more) = selected.try_next().await? {
            groups.extend(more);
            if groups.len() > 1 {
                let states = self.selector.gather(groups)?;
                let choice = self.choose(&states, None, keys, &merged)?;
                groups = self.selector.select(vec![choice])?.await?;
            }
        }
        Ok(groups)
    }

    /// Queues the kernels that find the groups of a batch, which is lent or was made on the queue. A row of each group is chosen, and has
    /// its states.
    fn choose(
        &self,
        batch: &DeviceRecordBatch,
        lent: Option<Lent>,
        keys: &[usize],
        states: &[State],
    ) -> Result<(Choice, Held)> {
        let (rows, queue) = (batch.num_rows(), &self.selector.launcher.queue);
        // For each row its group, four places in the table, and a number of 128 bits for each state.
        let of_row = self.selector.bytes_of_row() + 8 + 32 + 16 * states.len();
        let needed = batch.get_array_memory_size() + rows * of_row;
        let held = Held::new(&self.memory, needed, lent)?;
        let input = |array: Result<_>| Input::new(array?, queue).map(Arc::new);
        let columns = keys.iter().map(|key| input(batch.column(*key)));
        let mut columns = columns.collect::<Result<Vec<_>>>()?;
        let (mut leaders, passing) = self.lead(&columns, rows)?;
        let leaders = to(&mut leaders);
        for (i, state) in states.iter().enumerate() {
            columns.push(input(self.state(i, state, Some(batch), rows, leaders))?);
        }
        Ok((Choice { columns, passing }, held))
    }

    /// Queues the kernels that write for each row the number of a row that has the same keys, and whether it is this one.
    fn lead(&self, keys: &[Arc<Input>], rows: usize) -> Result<(DeviceBufferMut, DeviceBufferMut)> {
        let (launcher, queue) = (&self.selector.launcher, &self.selector.launcher.queue);
        // Half of the places stay empty.
        let places = (2 * rows).next_power_of_two();
        let mut leaders = launcher.zeros(rows * size_of::<u64>())?;
        let mut passing = DeviceBufferMut::allocate(queue, rows)?;
        // No keys are one of no bytes.
        for key in keys.iter().map(Some).chain(keys.is_empty().then_some(None)) {
            let c = key.map(|key| key.column).unwrap_or_default();
            let mut table = launcher.zeros(places * size_of::<u64>())?;
            let mut own = DeviceBufferMut::for_values::<u64>(queue, rows)?;
            let (before, table, n) = (to(&mut leaders), to(&mut table), rows as u64);
            let written = [before, table, places as u64, to(&mut own), to(&mut passing)];
            let column = [c.layout, c.width, c.values, c.data, c.bits, c.bit];
            let words = [&written[..], &column, &[n]].concat();
            // SAFETY: these are the kernel's parameters. It reads rows of a valid column, which is lent, and a number for each row, and writes
            // numbers and bytes for the rows and the places, to memory that is not frozen and has room for them.
            unsafe { launcher.launch("group", n, &words) }?;
            leaders = own;
        }
        Ok((leaders, passing))
    }

    /// Queues the kernels that compute state `i` of the groups of a batch, in the rows of their leaders. Without a batch it is that of no rows.
    fn state(
        &self,
        i: usize,
        state: &State,
        batch: Option<&DeviceRecordBatch>,
        rows: usize,
        leaders: u64,
    ) -> Result<DeviceArray> {
        let (launcher, queue) = (&self.selector.launcher, &self.selector.launcher.queue);
        let field = self.selector.schema.field(self.aggregate.keys.len() + i);
        let width = field.data_type().primitive_width().unwrap_or(0);
        let (start, n) = (rows.div_ceil(8).next_multiple_of(64), rows as u64);
        let mut cells = launcher.zeros(rows * size_of::<i128>())?;
        // Bits, and then the values.
        let mut out = launcher.zeros(start + rows * width)?;
        let of = state.of.as_ref().zip(batch);
        let array = of.map(|(of, batch)| of.evaluate(batch, launcher, &self.overflow));
        let input = array.map(|array| Input::new(array?, queue)).transpose()?;
        let c = input.as_ref().map(|of| of.column).unwrap_or_default();
        let (steps, mask, values) = match state.change {
            Change::Count => (0..1, 0, 0),
            Change::Add => (0..1, 0, c.values),
            // First the higher words are compared, then the lower words of values with the same ones.
            Change::Most(mask) => (1..3, mask, c.values),
        };
        for step in steps.filter(|_| batch.is_some()) {
            let written = [to(&mut cells), to(&mut out)];
            let changed = [step, low(mask), high(mask), leaders];
            let column = [c.family, c.width, values, c.bits, c.bit, n];
            let words = [&changed[..], &written, &column].concat();
            // SAFETY: these are the kernel's parameters. It reads rows of a valid column, which is lent, and the numbers of their leaders,
            // and changes cells and bits of as many rows, which are not frozen.
            unsafe { launcher.launch("accumulate", n, &words) }?;
        }
        let cells = [to(&mut cells), n, low(mask), high(mask)];
        let words = [&cells[..], &[width as u64, to(&mut out) + start as u64]].concat();
        // SAFETY: these are the kernel's parameters. It reads as many cells, and writes as many values of this width to memory that is not frozen.
        unsafe { launcher.launch("finish", n, &words) }?;
        let out = out.freeze()?;
        let seen = Validity::new(out.clone(), 0, rows)?;
        let seen = field.is_nullable().then_some(seen);
        let values = out.slice(start, rows * width)?;
        DeviceArray::from_values(field.data_type().clone(), rows, values, seen)
    }

    fn outcome(&self, outcome: &Outcome, states: &DeviceRecordBatch) -> Result<DeviceArray> {
        let (column, Some(average)) = outcome else {
            return states.column(outcome.0);
        };
        let launcher = &self.selector.launcher;
        let input = |column| Input::new(states.column(column)?, &launcher.queue).map(Some);
        let operands = [input(column + 1)?, input(*column)?];
        average.compute(operands, states.num_rows(), launcher, &self.overflow)
    }
}
