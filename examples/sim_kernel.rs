//! Runs kernels on columns of a record batch, on the simulated device: one on a column, one on two columns, and a filter.
//!
//! On the simulated device a kernel is a closure. The guide (`docs/guide/kernels.md`) has the same program for CUDA.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::Float64Type;
use arrow_array::{Float64Array, RecordBatch, record_batch};
use arrow_device::device::sim::SimMemory;
use arrow_device::{
    DeviceArray, DeviceBufferMut, DeviceRecordBatch, Devices, Queue, Result, SyncPolicy, Validity,
};
use arrow_schema::{DataType, Field, Schema};

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let orders = record_batch!(
        (
            "price",
            Float64,
            [Some(9.0), Some(1.5), None, Some(4.0), Some(0.5)]
        ),
        (
            "quantity",
            Float64,
            [Some(9.0), Some(2.0), Some(3.0), None, Some(8.0)]
        )
    )?;
    let device = Devices::simulated()?;
    let orders = device.upload(&orders)?.slice(1, 4)?; // one copy; the slice copies nothing

    // The kernels run one after the other on this queue. Nothing here waits for them, except `above`.
    let queue = device.new_queue()?;
    let (price, quantity) = (
        orders.column_by_name("price")?,
        orders.column_by_name("quantity")?,
    );
    let doubled = double(&price, &queue)?;
    let total = product(&price, &quantity, &queue)?;
    let large = above(&total, 3.5, &queue)?;
    assert_eq!(
        large.to_host()?.as_primitive::<Float64Type>(),
        &Float64Array::from(vec![4.0])
    );

    // A new batch of an uploaded column and two computed ones, for any consumer in this process.
    let field = |name| Field::new(name, DataType::Float64, true);
    let schema = Schema::new(vec![field("price"), field("doubled"), field("total")]);
    let result = DeviceRecordBatch::try_new(Arc::new(schema), &[price, doubled, total])?;
    let (array, schema) = result.export(SyncPolicy::Event)?;
    // SAFETY: `export` made both structs, and nothing else uses them.
    let imported = unsafe { DeviceRecordBatch::import(array, &schema, None) }?;

    let back: RecordBatch = imported.to_host()?; // waits for the kernels and the copy
    let expected = record_batch!(
        ("price", Float64, [Some(1.5), None, Some(4.0), Some(0.5)]),
        ("doubled", Float64, [Some(3.0), None, Some(8.0), Some(1.0)]),
        ("total", Float64, [Some(3.0), None, None, Some(4.0)])
    )?;
    assert_eq!(back, expected);
    println!("{back:?}");
    Ok(())
}

/// Returns twice the values of `column`, null where it is null.
pub(crate) fn double(column: &DeviceArray, queue: &Queue) -> Result<DeviceArray> {
    let doubled = DeviceBufferMut::for_values::<f64>(queue, column.len())?;
    let input = column.values_on::<f64>(queue)?; // the queue waits until the column is ready
    let (from, to, rows) = (input.address(), doubled.address(), input.len());
    let kernel = move |memory: &mut SimMemory<'_>| {
        let values = memory.slice::<f64>(from, rows)?.iter();
        let doubled: Vec<f64> = values.map(|value| value * 2.0).collect();
        memory.write(to, &doubled)
    };
    // SAFETY: the kernel writes only `doubled`, which nothing else uses yet.
    unsafe { queue.as_sim()?.launch(kernel) }?;
    column.with_values(DataType::Float64, doubled.freeze()?)
}

/// Returns `a * b`, null where one of them is null.
pub(crate) fn product(a: &DeviceArray, b: &DeviceArray, queue: &Queue) -> Result<DeviceArray> {
    let rows = a.len();
    assert_eq!(b.len(), rows);
    let products = DeviceBufferMut::for_values::<f64>(queue, rows)?;
    let valid = DeviceBufferMut::allocate(queue, rows.div_ceil(8))?;
    let (x, y) = (a.values_on::<f64>(queue)?, b.values_on::<f64>(queue)?);
    let bitmaps = [a.validity_on(queue)?, b.validity_on(queue)?];
    let bits = bitmaps
        .each_ref()
        .map(|b| b.as_ref().map(|b| (b.address(), b.bit_offset())));
    let (from, to, bits_to) = (
        [x.address(), y.address()],
        products.address(),
        valid.address(),
    );
    let kernel = move |memory: &mut SimMemory<'_>| {
        let (x, y) = (
            memory.slice::<f64>(from[0], rows)?,
            memory.slice::<f64>(from[1], rows)?,
        );
        let products: Vec<f64> = x.iter().zip(y).map(|(x, y)| x * y).collect();
        memory.write(to, &products)?;
        let both = &memory.bits(bits[0], rows)? & &memory.bits(bits[1], rows)?;
        memory.write(bits_to, &both.sliced()[..rows.div_ceil(8)])
    };
    // SAFETY: the kernel writes only `products` and `valid`, which nothing else uses yet.
    unsafe { queue.as_sim()?.launch(kernel) }?;
    DeviceArray::from_values(
        DataType::Float64,
        rows,
        products.freeze()?,
        Some(Validity::new(valid.freeze()?, 0, rows)?),
    )
}

/// Returns the values of `column` above `limit`, in their order. A null is not above it. Waits for the kernel, since the
/// number of values is known only then.
pub(crate) fn above(column: &DeviceArray, limit: f64, queue: &Queue) -> Result<DeviceArray> {
    let rows = column.len();
    let mut kept = DeviceBufferMut::for_values::<f64>(queue, rows)?; // room for all rows
    let count = DeviceBufferMut::for_values::<u64>(queue, 1)?;
    let (input, bitmap) = (column.values_on::<f64>(queue)?, column.validity_on(queue)?);
    let bits = bitmap
        .as_ref()
        .map(|bits| (bits.address(), bits.bit_offset()));
    let (from, to, count_to) = (input.address(), kept.address(), count.address());
    let kernel = move |memory: &mut SimMemory<'_>| {
        let valid = memory.bits(bits, rows)?;
        let values = memory.slice::<f64>(from, rows)?.iter().zip(&valid);
        let kept = values.filter(|(value, valid)| *valid && **value > limit);
        let kept: Vec<f64> = kept.map(|(value, _)| *value).collect();
        memory.write(count_to, &[kept.len() as u64])?;
        memory.write(to, &kept)
    };
    // SAFETY: the kernel writes only `kept` and `count`, which nothing else uses yet.
    unsafe { queue.as_sim()?.launch(kernel) }?;
    let count = count.freeze()?.to_host()?; // waits for the kernel
    let count = count.typed_data::<u64>()[0] as usize;
    kept.truncate(8 * count); // bytes
    kept.shrink_to_fit()?;
    DeviceArray::from_values(DataType::Float64, count, kept.freeze()?, None)
}
