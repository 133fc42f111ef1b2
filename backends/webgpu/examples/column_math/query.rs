//! The query on the GPU.

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use arrow_array::{ArrayRef, Decimal128Array, Int64Array, RecordBatch};
use arrow_buffer::ArrowNativeType;
use arrow_device::{
    Device, DeviceArray, DeviceBufferMut, DeviceRecordBatch, Loan, Queue, Validity,
};
use arrow_device_wgpu::{ARROW_NO_BITMAP, ARROW_WGSL, Binding, WgpuDevice, wgpu};
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};

use crate::Result;
use crate::shader::{dispatch, pipeline, run};

/// The columns that the query reads.
pub(crate) const COLUMNS: [&str; 4] = ["l_shipdate", "l_discount", "l_quantity", "l_extendedprice"];
const MONEY: DataType = DataType::Decimal128(15, 2);
pub(crate) const TYPES: [DataType; 4] = [DataType::Date32, MONEY, MONEY, MONEY];

/// Days since 1970, hundredths, hundredths: what `filter.wgsl` has, too.
pub(crate) const YEAR: Range<i32> = 8766..9131;
pub(crate) const DISCOUNTS: RangeInclusive<i32> = 5..=7;
pub(crate) const QUANTITY: i32 = 2400;

/// The bytes of a partial sum, `Sum` in `reduce.wgsl`.
const SUM: usize = 32;
/// Invocations of a workgroup, in all shaders.
const GROUP: usize = 256;
/// The most workgroups that sum a batch.
const SUMS: usize = 256;

/// Returns the columns of a batch that has those of [`COLUMNS`].
pub(crate) fn columns(batch: &RecordBatch) -> [&ArrayRef; 4] {
    std::array::from_fn(|i| batch.column(i))
}

fn result_schema() -> SchemaRef {
    let revenue = Field::new("revenue", DataType::Decimal128(38, 4), true);
    Arc::new(Schema::new(vec![
        revenue,
        Field::new("rows", DataType::Int64, false),
    ]))
}

/// Makes the result's batch, for the CPU.
pub(crate) fn result(
    revenue: Option<i128>,
    rows: i64,
) -> std::result::Result<RecordBatch, ArrowError> {
    let revenue = Decimal128Array::from(vec![revenue]).with_precision_and_scale(38, 4)?;
    let columns: Vec<ArrayRef> = vec![Arc::new(revenue), Arc::new(Int64Array::from(vec![rows]))];
    RecordBatch::try_new(result_schema(), columns)
}

/// The compiled shaders, for one device.
pub(crate) struct Query {
    queue: Queue,
    filter: wgpu::ComputePipeline,
    sum: wgpu::ComputePipeline,
    total: wgpu::ComputePipeline,
}

impl Query {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let gpu = WgpuDevice::of(device)?.device();
        let reduce = include_str!("reduce.wgsl");
        Ok(Self {
            queue: device.default_queue(),
            filter: pipeline(gpu, &[ARROW_WGSL, include_str!("filter.wgsl")]),
            sum: pipeline(gpu, &[ARROW_WGSL, reduce, include_str!("sum.wgsl")]),
            total: pipeline(gpu, &[ARROW_WGSL, reduce, include_str!("total.wgsl")]),
        })
    }

    /// Queues the query. Does not wait for it.
    pub(crate) fn run(&self, batches: &[DeviceRecordBatch]) -> Result<DeviceRecordBatch> {
        let count: usize = batches.iter().map(|batch| groups(batch.num_rows())).sum();
        let sums = DeviceBufferMut::allocate(&self.queue, count * SUM)?;
        let mut first = 0;
        for batch in batches.iter().filter(|batch| batch.num_rows() > 0) {
            self.sum_batch(batch, &sums, first)?;
            first += groups(batch.num_rows());
        }
        self.total(&sums, count)
    }

    /// Filters the rows of a batch, and leaves its partial sums from number `first` on.
    fn sum_batch(
        &self,
        batch: &DeviceRecordBatch,
        sums: &DeviceBufferMut,
        first: usize,
    ) -> Result<()> {
        let (queue, rows) = (&self.queue, batch.num_rows());
        let gpu = WgpuDevice::of(queue.device())?;
        let [shipped, discount, quantity, price] = COLUMNS.map(|name| batch.column_by_name(name));
        let (shipped, discount, quantity, price) = (shipped?, discount?, quantity?, price?);
        let shipped = Column::<i32>::new(gpu, &shipped, queue)?;
        let discount = Column::<i128>::new(gpu, &discount, queue)?;
        let quantity = Column::<i128>::new(gpu, &quantity, queue)?;
        let price = Column::<i128>::new(gpu, &price, queue)?;
        let mut selected = DeviceBufferMut::allocate(queue, rows.div_ceil(8))?;
        selected.fill(0)?;
        // SAFETY: the shaders write only this memory, which nothing else uses, and are submitted below.
        let (selected, sums) = unsafe { (gpu.bind(&selected)?, gpu.bind(sums)?) };

        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        dispatch(
            gpu.device(),
            &mut encoder,
            &self.filter,
            &[
                rows as u32,
                shipped.first,
                shipped.first_bit,
                discount.first,
                discount.first_bit,
                quantity.first,
                quantity.first_bit,
                selected.first::<u32>(),
            ],
            &[
                &shipped.values,
                shipped.bits(),
                &discount.values,
                discount.bits(),
                &quantity.values,
                quantity.bits(),
                &selected,
            ],
            rows.div_ceil(GROUP),
        );
        dispatch(
            gpu.device(),
            &mut encoder,
            &self.sum,
            &[
                rows as u32,
                price.first,
                price.first_bit,
                discount.first,
                selected.first::<u32>(),
                sums.first::<[u8; SUM]>() + first as u32,
            ],
            &[
                &price.values,
                price.bits(),
                &discount.values,
                &selected,
                &sums,
            ],
            groups(rows),
        );
        gpu.queue().submit([encoder.finish()]);
        Ok(())
    }

    /// Adds up the partial sums, to a batch of one row.
    fn total(&self, sums: &DeviceBufferMut, count: usize) -> Result<DeviceRecordBatch> {
        let queue = &self.queue;
        let gpu = WgpuDevice::of(queue.device())?;
        let revenue = DeviceBufferMut::for_values::<i128>(queue, 1)?;
        let revenue_bits = DeviceBufferMut::allocate(queue, 1)?;
        let rows = DeviceBufferMut::for_values::<i64>(queue, 1)?;
        {
            // SAFETY: the shader writes only memory that nothing else uses, and is submitted before that is frozen.
            let bind = |memory| unsafe { gpu.bind(memory) };
            let sums = bind(sums)?;
            let results = [bind(&revenue)?, bind(&revenue_bits)?, bind(&rows)?];
            let [revenue, revenue_bits, rows] = &results;
            let places = [
                sums.first::<[u8; SUM]>(),
                count as u32,
                revenue.first::<i128>(),
                revenue_bits.first::<u32>(),
                rows.first::<i64>(),
            ];
            run(
                gpu,
                &self.total,
                &places,
                &[&sums, revenue, revenue_bits, rows],
                1,
            );
        }
        let valid = Validity::new(revenue_bits.freeze()?, 0, 1)?;
        let money = DataType::Decimal128(38, 4);
        let revenue = DeviceArray::from_values(money, 1, revenue.freeze()?, Some(valid))?;
        let rows = DeviceArray::from_values(DataType::Int64, 1, rows.freeze()?, None)?;
        Ok(DeviceRecordBatch::try_new(
            result_schema(),
            &[revenue, rows],
        )?)
    }
}

/// How many workgroups sum this many rows.
fn groups(rows: usize) -> usize {
    rows.div_ceil(GROUP).min(SUMS)
}

/// A column lent to the queue, as shaders see it.
struct Column<'a, T> {
    values: Binding,
    bits: Option<Binding>,
    /// The first row's element of the values.
    first: u32,
    /// The first row's bit of the bitmap.
    first_bit: u32,
    /// Until the work is submitted.
    _loans: (Loan<'a, T>, Option<Loan<'a, bool>>),
}

impl<'a, T: ArrowNativeType> Column<'a, T> {
    fn new(gpu: &WgpuDevice, column: &'a DeviceArray, queue: &Queue) -> Result<Self> {
        let values = column.values_on::<T>(queue)?;
        let bits = column.validity_on(queue)?;
        let loans = (values, bits);
        // SAFETY: the shaders only read columns, and are submitted while the loans are there.
        let values = unsafe { gpu.bind(&loans.0) }?;
        // SAFETY: the shaders only read the bitmap, and are submitted while its loan is there.
        let bits = loans
            .1
            .as_ref()
            .map(|bits| unsafe { gpu.bind(bits) })
            .transpose()?;
        Ok(Self {
            first: values.first::<T>(),
            first_bit: bits.as_ref().map_or(ARROW_NO_BITMAP, Binding::first_bit),
            values,
            bits,
            _loans: loans,
        })
    }

    /// Returns the bitmap, or what is bound in its place.
    fn bits(&self) -> &Binding {
        self.bits.as_ref().unwrap_or(&self.values)
    }
}
