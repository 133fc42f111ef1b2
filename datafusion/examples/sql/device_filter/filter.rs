//! The filter: keeps the rows that pass, and some of their columns. No value is copied to the host.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::future::ready;
use std::sync::Arc;

use arrow_device::{DeviceBuffer, DeviceBufferMut, DeviceRecordBatch, Result};
use arrow_device_datafusion::{DeviceOperator, DeviceTask, SendableDeviceStream, to_datafusion};
use datafusion::error::Result as DataFusionResult;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::filter::FilterExec;
use futures::{StreamExt, TryStreamExt, stream};

use super::cache::KernelCache;
use super::chunks::chunks;
use super::column::{Column, Format, Input, upload_text};
use super::held::Held;
use super::kernels::{Launcher, to, word};
use super::predicate::{Condition, Test, conditions};
use super::select::{Choice, Selector};

/// A filter with a projection on a device, in the place of DataFusion's.
#[derive(Debug)]
pub(crate) struct DeviceFilterExec {
    conditions: Arc<[Condition]>,
    /// The columns to keep, in this order.
    columns: Arc<[usize]>,
    kernels: Arc<KernelCache>,
}

impl DeviceFilterExec {
    /// Returns `None` if the kernels do not support what `host` does.
    pub(crate) fn new(host: &FilterExec, kernels: Arc<KernelCache>) -> Option<Self> {
        let (input, schema) = (host.input().schema(), host.schema());
        let mut fields = schema.fields().iter();
        let all_fit = fields.all(|field| Format::of(field.data_type()).is_some());
        let conditions = conditions(host.predicate(), &input).filter(|_| all_fit)?;
        let columns = match host.projection() {
            Some(projection) => projection.iter().copied().collect(),
            None => (0..input.fields().len()).collect(),
        };
        Some(Self {
            conditions: conditions.into(),
            columns,
            kernels,
        })
    }
}

impl DeviceOperator for DeviceFilterExec {
    fn name(&self) -> &str {
        "DeviceFilterExec"
    }

    fn execute(&self, task: &DeviceTask<'_>) -> DataFusionResult<SendableDeviceStream> {
        let launcher = self.kernels.launcher(task.device).map_err(to_datafusion)?;
        let queue = &launcher.queue;
        let literal = |condition: &Condition| match &condition.test {
            Test::Bytes { literal, .. } => upload_text(literal, queue),
            _ => Ok(None),
        };
        let literals = self.conditions.iter().map(literal).collect::<Result<_>>();
        let literals: Vec<_> = literals.map_err(to_datafusion)?;
        let schema = task.node().schema();
        let selector = Selector { launcher, schema };
        // The node reserves for the next batch only, but batches wait for each other.
        let memory = Arc::new(task.reservation());
        let (conditions, columns) = (self.conditions.clone(), self.columns.clone());
        let (launcher, of_row) = (selector.launcher.clone(), selector.bytes_of_row());
        let choices = chunks(task, move |batch| {
            // Its own bytes, also those that are a table's for ever, which cannot be told from others.
            let needed = batch.get_array_memory_size() + batch.num_rows() * of_row;
            let held = Held::new(&memory, needed, Some(launcher.lend(batch.as_struct())?))?;
            let choice = choose(&launcher, &conditions, &literals, &columns, &batch)?;
            Ok((choice, held))
        })?;
        let selected = selector.counted(choices);
        let selected = selected.try_filter(|selected| ready(!selected.is_empty()));
        let left = task.node().fetch().unwrap_or(usize::MAX);
        let start = (selected.boxed(), selector, left);
        // What comes after the last row that is wanted is not read.
        let batches = stream::try_unfold(start, |(mut selected, selector, left)| async move {
            let next = match left {
                0 => None,
                _ => selected.try_next().await?,
            };
            let Some(next) = next else { return Ok(None) };
            let batch = selector.gather(next)?;
            let batch = batch.slice(0, batch.num_rows().min(left))?;
            let left = left - batch.num_rows();
            Ok(Some((batch, (selected, selector, left))))
        });
        Ok(task.stream(batches))
    }

    /// It joins them itself.
    fn has_small_batches(&self, _: &dyn ExecutionPlan) -> bool {
        false
    }
}

/// Queues the kernels that test a batch, which is lent.
fn choose(
    launcher: &Launcher,
    conditions: &[Condition],
    literals: &[Option<DeviceBuffer>],
    columns: &[usize],
    batch: &DeviceRecordBatch,
) -> Result<Choice> {
    let queue = &launcher.queue;
    let tested = conditions.iter().map(|condition| condition.column);
    let mut inputs = BTreeMap::new();
    for column in tested.chain(columns.iter().copied()) {
        if let Entry::Vacant(entry) = inputs.entry(column) {
            entry.insert(Arc::new(Input::new(batch.column(column)?, queue)?));
        }
    }
    let mut passing = DeviceBufferMut::allocate(queue, batch.num_rows())?;
    passing.fill(1)?;
    for (condition, literal) in conditions.iter().zip(literals) {
        let column = inputs[&condition.column].column;
        test(launcher, column, condition, literal.as_ref(), &mut passing)?;
    }
    let columns = columns.iter().map(|column| inputs[column].clone());
    let columns = columns.collect();
    Ok(Choice { columns, passing })
}

fn test(
    launcher: &Launcher,
    c: Column,
    condition: &Condition,
    literal: Option<&DeviceBuffer>,
    passing: &mut DeviceBufferMut,
) -> Result<()> {
    let passing = to(passing);
    let keep = |at, bit, wanted: bool| {
        let words = [at, bit, c.rows, u64::from(wanted), passing];
        // SAFETY: these are the kernel's parameters. It reads lent bits, and writes a byte for each row of memory that is not frozen.
        unsafe { launcher.launch("keep", c.rows, &words) }
    };
    let is_null = matches!(condition.test, Test::IsNull);
    if is_null || c.bits != 0 {
        keep(c.bits, c.bit, !is_null)?;
    }
    let (kernel, words) = match &condition.test {
        Test::IsNull | Test::IsNotNull => return Ok(()),
        Test::Boolean { passes } => {
            let fail = [false, true].into_iter().zip(passes);
            let mut fail = fail.filter(|(_, passes)| !**passes);
            return fail.try_for_each(|(value, _)| keep(c.values, c.first_bit, !value));
        }
        Test::Compare {
            passing: orderings,
            literal,
        } => {
            let column = [c.family, c.width, c.values, c.rows, u64::from(*orderings)];
            ("compare", [&column[..], &literal.0, &[passing]].concat())
        }
        Test::Bytes {
            passing: orderings, ..
        } => {
            let of = literal.map(|literal| (word(literal.address()), literal.len()));
            let (at, len) = of.unwrap_or_default();
            let column = [c.layout, c.width, c.values, c.data, c.rows];
            let literal = [at, len as u64, u64::from(*orderings), passing];
            ("compare_bytes", [&column[..], &literal].concat())
        }
    };
    // SAFETY: these are the kernel's parameters. It reads rows of a valid column, which is lent, and the literal, which was uploaded on the
    // queue and is freed in its order. It writes a byte for each row of memory that is not frozen.
    unsafe { launcher.launch(kernel, c.rows, &words) }
}
