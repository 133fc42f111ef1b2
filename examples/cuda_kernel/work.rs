//! What the example does. Steps that wait say so; all others return at once.

use std::error::Error;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float64Type, UInt64Type};
use arrow_array::{Array, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow_device::cuda::cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};
use arrow_device::cuda::cudarc::nvrtc::Ptx;
use arrow_device::{
    Device, DeviceArray, DeviceBits, DeviceBufferMut, DeviceRecordBatch, ExportOptions, NullCounts,
    Queue, SyncPolicy, TransferStats, Validity,
};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field, Schema};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The kernels' source. The driver compiles it, so no CUDA toolkit is needed.
const PTX: &str = include_str!("kernel.ptx");

const ROWS: usize = 100_000;
/// How many rows the kernel skips. The number is odd, so that the validity bitmaps start inside a byte.
const SKIPPED: usize = 3;

/// The result of [`run`].
pub(crate) struct Report {
    pub rows: usize,
    /// How many products are null.
    pub nulls: usize,
    /// Whether the exported struct carried an event for its consumer to wait for.
    pub has_event: bool,
    /// The device's counters.
    pub stats: TransferStats,
}

/// Creates a batch of four columns. Price and quantity are null in different rows.
pub(crate) fn orders(rows: usize) -> Result<RecordBatch> {
    let numbers = 0..rows as i64;
    let id: Int64Array = numbers.clone().map(Some).collect();
    let item: StringArray = numbers.clone().map(|i| Some(format!("item {i}"))).collect();
    let price: Float64Array = numbers
        .clone()
        .map(|i| (i % 7 != 2).then_some(i as f64 * 0.37 - 1e3))
        .collect();
    let quantity: Float64Array = numbers
        .map(|i| (i % 5 != 4).then_some((i % 23) as f64))
        .collect();
    Ok(RecordBatch::try_from_iter([
        ("id", Arc::new(id) as _),
        ("item", Arc::new(item) as _),
        ("price", Arc::new(price) as _),
        ("quantity", Arc::new(quantity) as _),
    ])?)
}

/// Loads a kernel into a device. cudarc has `Ptx` behind its feature `nvrtc`, which loads no library by itself; a program
/// enables it in its own dependency on cudarc.
pub(crate) fn load(device: &Device, name: &str) -> Result<CudaFunction> {
    let module = device
        .as_cuda()?
        .cuda_context()?
        .load_module(Ptx::from_src(PTX))?;
    Ok(module.load_function(name)?)
}

/// Returns twice the values of `column`, null where it is null.
pub(crate) fn double(
    kernel: &CudaFunction,
    column: &DeviceArray,
    queue: &Queue,
) -> Result<DeviceArray> {
    let mut doubled = DeviceBufferMut::allocate(queue, 8 * column.len())?; // bytes
    let input = column.values_on::<f64>(queue)?; // the stream waits until the column is ready
    let (rows, stream) = (input.len(), queue.cuda_stream()?);
    let mut launch = stream.launch_builder(kernel);
    launch.arg(&input).arg(&mut doubled).arg(&rows);
    let threads = u32::try_from(rows.max(1))?; // CUDA refuses a launch of none
    // SAFETY: these are the parameters of `double_f64`, which stays within `rows`.
    unsafe { launch.launch(LaunchConfig::for_num_elems(threads)) }?;
    Ok(column.with_values(DataType::Float64, doubled.freeze()?)?)
}

/// Returns `a * b`, null where one of them is null.
pub(crate) fn product(
    kernel: &CudaFunction,
    a: &DeviceArray,
    b: &DeviceArray,
    queue: &Queue,
) -> Result<DeviceArray> {
    let rows = a.len();
    assert_eq!(b.len(), rows);
    let mut products = DeviceBufferMut::allocate(queue, 8 * rows)?; // bytes
    let mut valid = DeviceBufferMut::allocate(queue, rows.div_ceil(8))?;
    let (x, y) = (a.values_on::<f64>(queue)?, b.values_on::<f64>(queue)?);
    let (x_valid, y_valid) = (a.validity_on(queue)?, b.validity_on(queue)?);
    let [x_bits, y_bits] = [&x_valid, &y_valid].map(bitmap);
    let stream = queue.cuda_stream()?;
    let mut launch = stream.launch_builder(kernel);
    launch.arg(&x).arg(&x_bits.0).arg(&x_bits.1);
    launch.arg(&y).arg(&y_bits.0).arg(&y_bits.1);
    launch.arg(&mut products).arg(&mut valid).arg(&rows);
    let threads = u32::try_from(rows.div_ceil(8).max(1))?; // one for 8 rows
    // SAFETY: these are the parameters of `product_f64`, which stays within `rows`.
    unsafe { launch.launch(LaunchConfig::for_num_elems(threads)) }?;
    let valid = Validity::new(valid.freeze()?, 0, rows)?;
    Ok(DeviceArray::from_values(
        DataType::Float64,
        rows,
        products.freeze()?,
        Some(valid),
    )?)
}

/// Returns the values of `column` above `limit`, in their order. A null is not above it. Waits for the kernel, since the
/// number of values is known only then.
pub(crate) fn above(
    kernel: &CudaFunction,
    column: &DeviceArray,
    limit: f64,
    queue: &Queue,
) -> Result<DeviceArray> {
    let rows = column.len();
    let mut kept = DeviceBufferMut::allocate(queue, 8 * rows)?; // bytes, for all rows at most
    let mut count = DeviceBufferMut::allocate(queue, 8)?;
    let (input, valid) = (column.values_on::<f64>(queue)?, column.validity_on(queue)?);
    let bits = bitmap(&valid);
    let stream = queue.cuda_stream()?;
    let mut launch = stream.launch_builder(kernel);
    launch.arg(&input).arg(&bits.0).arg(&bits.1).arg(&limit);
    launch.arg(&mut kept).arg(&mut count).arg(&rows);
    // One thread, which keeps the order. A fast filter first computes the place of each value with a prefix sum.
    // SAFETY: these are the parameters of `above_f64`, which stays within `rows`.
    unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }?;
    let count = DeviceArray::from_values(DataType::UInt64, 1, count.freeze()?, None)?;
    let count = count.to_host()?.as_primitive::<UInt64Type>().value(0) as usize;
    let kept = kept.freeze()?.slice(0, 8 * count)?;
    Ok(DeviceArray::from_values(
        DataType::Float64,
        count,
        kept,
        None,
    )?)
}

/// Returns the address of a bitmap and the number of bits before the first row's. The kernels take address 0 for none.
fn bitmap(bits: &Option<DeviceBits<'_>>) -> (usize, usize) {
    bits.as_ref()
        .map_or((0, 0), |bits| (bits.address().address(), bits.bit_offset()))
}

/// Uploads a batch, runs the kernel on it, exports and imports the result, and downloads it.
pub(crate) fn run(device: &Device) -> Result<Report> {
    let batch = orders(ROWS + SKIPPED)?;
    let kernel = load(device, "product_f64")?;
    let before = device.stats();

    // The upload runs on the device's default queue. The kernel runs on another, which waits for the upload.
    let uploaded = device.upload(&batch)?;
    let queue = device.new_queue()?;

    let orders = uploaded.slice(SKIPPED, ROWS)?;
    let price = orders.column_by_name("price")?;
    let quantity = orders.column_by_name("quantity")?;
    let total = product(&kernel, &price, &quantity, &queue)?;

    // The batch combines an uploaded column and a computed one. Each has its own event.
    let schema = Schema::new(vec![
        Field::new("id", DataType::Int64, true),
        Field::new("total", DataType::Float64, true),
    ]);
    let result =
        DeviceRecordBatch::try_new(Arc::new(schema), &[orders.column_by_name("id")?, total])?;

    // Two C structs for any consumer in this process, with one event for both columns. An exact null count would wait for
    // the kernel, which may still be running.
    let options = ExportOptions::new(SyncPolicy::Event).with_null_counts(NullCounts::AllowUnknown);
    let array = result.export_array(&options)?;
    let schema = FFI_ArrowSchema::try_from(&*result.schema())?;
    let has_event = !array.sync_event().is_null();
    // A consumer sees only the structs. Here it is this crate.
    // SAFETY: `import` requires live structs that follow the specification and hold valid data. The array was just exported,
    // and the schema is that of the same batch.
    let imported = unsafe { DeviceRecordBatch::import(array, &schema) }?;
    // The download starts after the event, and this thread waits for it.
    let back = imported.to_host()?;

    let stats = device.stats().since(&before);
    let nulls = check(&batch.slice(SKIPPED, ROWS), &back)?;
    Ok(Report {
        rows: back.num_rows(),
        nulls,
        has_event,
        stats,
    })
}

/// Runs the other two kernels on a slice of a column, and compares their results with the CPU's own.
pub(crate) fn double_and_filter(device: &Device) -> Result<()> {
    const LIMIT: f64 = -980.0;
    let orders = orders(100)?;
    let queue = device.new_queue()?;
    let price = device.upload(&orders)?.column_by_name("price")?;
    let price = price.slice(SKIPPED, 90)?;
    let doubled = double(&load(device, "double_f64")?, &price, &queue)?;
    let large = above(&load(device, "above_f64")?, &price, LIMIT, &queue)?;

    let price = orders.column_by_name("price").ok_or("no such column")?;
    let price = price.slice(SKIPPED, 90);
    let price = price.as_primitive::<Float64Type>();
    let expected: Float64Array = price.iter().map(|price| Some(2.0 * price?)).collect();
    if doubled.to_host()?.as_primitive::<Float64Type>() != &expected {
        return Err("the doubled prices are wrong".into());
    }
    let kept = price.iter().flatten().filter(|price| *price > LIMIT);
    let expected = Float64Array::from_iter_values(kept);
    if large.to_host()?.as_primitive::<Float64Type>() != &expected {
        return Err("the prices above the limit are wrong".into());
    }
    Ok(())
}

/// Compares the result with the CPU's own. Returns how many products are null.
pub(crate) fn check(orders: &RecordBatch, back: &RecordBatch) -> Result<usize> {
    let floats = |name: &str| {
        let column = orders.column_by_name(name).ok_or("no such column")?;
        Ok::<_, Box<dyn Error>>(column.as_primitive::<Float64Type>())
    };
    let (price, quantity) = (floats("price")?, floats("quantity")?);
    let total = back.column(1).as_primitive::<Float64Type>();
    if back.num_rows() != orders.num_rows() || back.column(0) != orders.column(0) {
        return Err("the ids that came back are not those that went up".into());
    }
    for row in 0..orders.num_rows() {
        let expected = (price.is_valid(row) && quantity.is_valid(row))
            .then(|| price.value(row) * quantity.value(row));
        let found = total.is_valid(row).then(|| total.value(row));
        if expected.map(f64::to_bits) != found.map(f64::to_bits) {
            return Err(format!("row {row}: expected {expected:?}, found {found:?}").into());
        }
    }
    Ok(total.null_count())
}
