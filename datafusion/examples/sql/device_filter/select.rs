//! What a filter does with batches: it counts what passes, and then copies it to memory of just that size.
//!
//! Nothing here blocks. Only counts come to the host, once for each batch.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use arrow_device::{
    Device, DeviceArray, DeviceBuffer, DeviceBufferMut, DeviceRecordBatch, Error, Queue, Result,
    Validity,
};
use arrow_device_datafusion::DeviceReservation;
use datafusion::arrow::array::cast::AsArray;
use datafusion::arrow::datatypes::{DataType, SchemaRef, UInt64Type};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::filter::FilterExec;

use super::column::{Format, Input, Text};
use super::held::Held;
use super::kernels::{Kernels, Picked, To};
use super::predicate::{Condition, Test, conditions};

/// What to do with each batch.
#[derive(Debug)]
pub(crate) struct Filter {
    conditions: Vec<Condition>,
    /// The columns to keep, in this order.
    columns: Vec<usize>,
    /// The schema of these columns.
    schema: SchemaRef,
}

impl Filter {
    /// Returns `None` if the kernels do not support what `host` does.
    pub(crate) fn new(host: &FilterExec) -> Option<Self> {
        let (input, schema) = (host.input().schema(), host.schema());
        let mut fields = schema.fields().iter();
        let all_fit = fields.all(|field| Format::of(field.data_type()).is_some());
        let columns = match host.projection() {
            Some(projection) => projection.to_vec(),
            None => (0..input.fields().len()).collect(),
        };
        Some(Self {
            conditions: conditions(host.predicate(), &input).filter(|_| all_fit)?,
            columns,
            schema,
        })
    }
}

/// A filter that runs on a device.
pub(crate) struct Running {
    filter: Arc<Filter>,
    kernels: Arc<dyn Kernels>,
    queue: Queue,
    /// The memory of batches from when they are read until their rows have been gathered.
    memory: Arc<DeviceReservation>,
    /// The literal of each condition, if it is text or binary.
    literals: Vec<Option<Text>>,
}

impl Running {
    /// Uploads the literals that are text or binary.
    pub(crate) fn start(
        filter: Arc<Filter>,
        kernels: Arc<dyn Kernels>,
        device: &Device,
        memory: DeviceReservation,
    ) -> Result<Self> {
        let queue = device.new_queue()?;
        let literal = |condition: &Condition| match &condition.test {
            Test::Bytes { literal, .. } => Text::upload(literal, &queue).map(Some),
            _ => Ok(None),
        };
        let literals = filter.conditions.iter().map(literal);
        let literals = literals.collect::<Result<_>>()?;
        Ok(Self {
            filter,
            kernels,
            queue,
            memory: Arc::new(memory),
            literals,
        })
    }

    /// Queues the kernels that find and measure the rows of a batch that pass; the batch is not empty. Returns what they
    /// have found, once their counts have been copied to the host.
    pub(crate) fn select(
        &self,
        batch: &DeviceRecordBatch,
    ) -> Result<impl Future<Output = Result<Selected>> + Send + use<>> {
        let needed = self.needed(batch);
        let (mut held, found) = Held::allocate(&self.memory, needed, || self.find(batch))?;
        let Found {
            inputs,
            picked,
            starts,
            kept,
            counts,
        } = found;
        let counts = counts.start_to_host(&self.queue)?;
        Ok(async move {
            let counts = counts.await?;
            // The kernels have run, so the columns that are only tested are no longer in use.
            held.shrink_to(kept);
            let counts = counts.as_primitive::<UInt64Type>().values();
            let counts = counts.iter().map(|n| usize::try_from(*n));
            let counts = counts.collect::<Result<_, _>>();
            Ok(Selected {
                inputs,
                picked,
                starts,
                held,
                counts: counts.map_err(|e| Error::InvalidArgument(e.to_string().into()))?,
            })
        })
    }

    /// Queues the kernels, which write to memory that this allocates.
    fn find(&self, batch: &DeviceRecordBatch) -> Result<Found> {
        let (rows, queue, kernels) = (batch.num_rows(), &self.queue, &self.kernels);
        let filter = &*self.filter;
        let tested = filter.conditions.iter().map(|condition| condition.column);
        let mut inputs = BTreeMap::new();
        for column in tested.chain(filter.columns.iter().copied()) {
            if let Entry::Vacant(entry) = inputs.entry(column) {
                entry.insert(Input::new(batch.column(column)?, queue)?);
            }
        }
        let mut passing = DeviceBufferMut::allocate(queue, rows)?;
        passing.fill(1)?;
        for (condition, literal) in filter.conditions.iter().zip(&self.literals) {
            self.test(
                &inputs[&condition.column],
                condition,
                literal.as_ref(),
                &mut passing,
            )?;
        }
        let mut picked = DeviceBufferMut::for_values::<u64>(queue, rows)?;
        // How many rows pass; then for each column, how many of these are null, and how many bytes they have.
        let numbers = 1 + 2 * filter.columns.len();
        let mut counts = DeviceBufferMut::for_values::<u64>(queue, numbers)?;
        counts.fill(0)?;
        kernels.select(queue, &passing, &mut picked, &mut counts, 0)?;
        let mut starts = Vec::new();
        for (i, column) in filter.columns.iter().enumerate() {
            let input = &inputs[column];
            let mut of = None;
            input.lend(queue, |column| {
                if !column.validity.at.is_null() {
                    kernels.count_nulls(queue, column, &passing, &mut counts, 1 + 2 * i)?;
                }
                if let Format::Offsets { .. } | Format::Views = column.format {
                    let starts = DeviceBufferMut::for_values::<u64>(queue, rows)?;
                    let starts = of.insert(starts);
                    kernels.measure(queue, column, &passing, starts, &mut counts, 2 + 2 * i)?;
                }
                Ok(())
            })?;
            starts.push(of);
        }
        inputs.retain(|column, _| filter.columns.contains(column));
        let kept: Vec<usize> = inputs.keys().copied().collect();
        let numbered: usize = starts.iter().flatten().map(DeviceBufferMut::len).sum();
        let kept = batch.project(&kept)?.get_array_memory_size() + picked.len() + numbered;
        let counts = DeviceArray::from_values(DataType::UInt64, numbers, counts.freeze()?, None)?;
        Ok(Found {
            inputs,
            picked,
            starts,
            kept,
            counts,
        })
    }

    /// The most bytes that a batch keeps while its rows are selected: its own, also those that are a table's for ever, which cannot
    /// be told from others; a byte for each row, its number, and where its bytes begin in each column of text.
    fn needed(&self, batch: &DeviceRecordBatch) -> usize {
        let fields = self.filter.schema.fields().iter();
        let formats = fields.filter_map(|field| Format::of(field.data_type()));
        let texts =
            formats.filter(|format| matches!(format, Format::Offsets { .. } | Format::Views));
        let of_row = 1 + size_of::<u64>() * (1 + texts.count());
        batch.get_array_memory_size() + batch.num_rows() * of_row
    }

    fn test(
        &self,
        input: &Input,
        condition: &Condition,
        literal: Option<&Text>,
        passing: &mut DeviceBufferMut,
    ) -> Result<()> {
        let (queue, kernels) = (&self.queue, &self.kernels);
        input.lend(queue, |column| {
            let is_null = matches!(condition.test, Test::IsNull);
            if is_null || !column.validity.at.is_null() {
                kernels.keep(queue, column.validity, !is_null, passing)?;
            }
            match &condition.test {
                Test::IsNull | Test::IsNotNull => Ok(()),
                Test::Boolean {
                    pass_false,
                    pass_true,
                } => {
                    if !pass_false {
                        kernels.keep(queue, column.values, true, passing)?;
                    }
                    if !pass_true {
                        kernels.keep(queue, column.values, false, passing)?;
                    }
                    Ok(())
                }
                Test::Compare {
                    kind,
                    passing: orderings,
                    literal,
                } => kernels.compare(queue, column, *kind, *orderings, *literal, passing),
                Test::Bytes {
                    passing: orderings, ..
                } => match literal {
                    Some(literal) => literal.lend(queue, |at, len| {
                        kernels.compare_bytes(queue, column, *orderings, (at, len), passing)
                    }),
                    None => Ok(()),
                },
            }
        })
    }

    /// Queues the kernels that copy the rows of some batches, at least one, to one batch. Its memory has the size of these
    /// rows, rounded up to 64 bytes for each buffer.
    pub(crate) fn gather(&self, batches: &[Selected]) -> Result<DeviceRecordBatch> {
        let filter = &*self.filter;
        let rows = batches.iter().map(Selected::rows).sum();
        let device = self.queue.device();
        if filter.columns.is_empty() {
            return DeviceRecordBatch::try_new_with_rows(device, filter.schema.clone(), &[], rows);
        }
        let columns = (0..filter.columns.len()).map(|i| self.gather_column(batches, i, rows));
        let columns: Vec<_> = columns.collect::<Result<_>>()?;
        DeviceRecordBatch::try_new(filter.schema.clone(), &columns)
    }

    fn gather_column(&self, batches: &[Selected], i: usize, rows: usize) -> Result<DeviceArray> {
        let (queue, kernels) = (&self.queue, &self.kernels);
        let data_type = self.filter.schema.field(i).data_type();
        let unsupported = || Error::InvalidArgument(format!("no kernels for {data_type}").into());
        let format = Format::of(data_type).ok_or_else(unsupported)?;
        let nulls = batches.iter().map(|batch| batch.nulls(i)).sum();
        let bytes: usize = batches.iter().map(|batch| batch.bytes(i)).sum();
        if bytes > i32::MAX as usize && format != (Format::Offsets { width: 8 }) {
            let what = format!(
                "DeviceFilterExec on {}: {bytes} bytes of {data_type} in a result of {rows} rows; smaller batches are needed",
                queue.device()
            );
            return Err(Error::InvalidArgument(what.into()));
        }
        let zeros = |rows: usize| {
            let mut bits = DeviceBufferMut::allocate(queue, rows.div_ceil(8))?;
            bits.fill(0).map(|()| bits)
        };
        let mut validity = (nulls > 0).then(|| zeros(rows)).transpose()?;
        let mut values = match format {
            Format::Bits => zeros(rows)?,
            Format::Fixed { width, .. } => DeviceBufferMut::allocate(queue, rows * width)?,
            Format::Offsets { width } => DeviceBufferMut::allocate(queue, (rows + 1) * width)?,
            Format::Views => DeviceBufferMut::for_values::<u128>(queue, rows)?,
        };
        let mut data = DeviceBufferMut::allocate(queue, bytes)?;
        let mut to = To::default();
        for batch in batches {
            let picked = Picked {
                rows: &batch.picked,
                count: batch.rows(),
            };
            let input = &batch.inputs[&self.filter.columns[i]];
            input.lend(queue, |column| {
                if let Some(validity) = &mut validity {
                    kernels.gather_bits(queue, column.validity, &picked, validity, to)?;
                }
                match (format, &batch.starts[i]) {
                    (Format::Bits, _) => {
                        kernels.gather_bits(queue, column.values, &picked, &mut values, to)
                    }
                    (_, Some(starts)) => kernels.gather_bytes(
                        queue,
                        column,
                        &picked,
                        starts,
                        &mut values,
                        &mut data,
                        to,
                    ),
                    (_, None) => kernels.gather(queue, column, &picked, &mut values, to),
                }
            })?;
            to.row += batch.rows();
            to.byte += batch.bytes(i);
        }
        let validity = validity.map(|bits| Validity::new(bits.freeze()?, 0, rows));
        let validity = validity.transpose()?;
        let mut buffers: Vec<Option<DeviceBuffer>> = vec![Some(values.freeze()?)];
        match format {
            Format::Offsets { .. } => buffers.push(Some(data.freeze()?)),
            Format::Views if bytes > 0 => buffers.push(Some(data.freeze()?)),
            _ => {}
        }
        // SAFETY: the rows are copies of rows of a valid column, nulls as empty text; `gather_bytes` makes offsets that ascend
        // to the size of the data, and views into the only data buffer; `count_nulls` has counted the unset bits that
        // `gather_bits` copies. `batches` has a column of this type, since the schema is the filter's.
        unsafe {
            let validity = validity.map(|bits| bits.with_null_count(nulls));
            let device = queue.device();
            DeviceArray::from_parts(device, data_type.clone(), rows, validity, &buffers, &[])
        }
    }
}

/// What kernels that are queued find of a batch.
struct Found {
    /// The columns to keep.
    inputs: BTreeMap<usize, Input>,
    picked: DeviceBufferMut,
    starts: Vec<Option<DeviceBufferMut>>,
    /// The bytes of these.
    kept: usize,
    counts: DeviceArray,
}

/// The rows of a batch that pass, which are still in the batch's memory.
pub(crate) struct Selected {
    /// The columns to keep.
    inputs: BTreeMap<usize, Input>,
    picked: DeviceBufferMut,
    /// For each column to keep of text or binary, where the bytes of a row begin.
    starts: Vec<Option<DeviceBufferMut>>,
    held: Held,
    counts: Vec<usize>,
}

impl Selected {
    /// How many rows pass.
    pub(crate) fn rows(&self) -> usize {
        self.counts[0]
    }

    fn nulls(&self, column: usize) -> usize {
        self.counts[1 + 2 * column]
    }

    fn bytes(&self, column: usize) -> usize {
        self.counts[2 + 2 * column]
    }

    /// How many bytes of device memory it keeps, which are reserved.
    pub(crate) fn kept(&self) -> usize {
        self.held.bytes()
    }

    /// The most bytes that a column of text or binary has.
    pub(crate) fn most_bytes(&self) -> usize {
        (0..self.starts.len())
            .map(|i| self.bytes(i))
            .max()
            .unwrap_or(0)
    }
}
