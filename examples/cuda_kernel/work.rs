//! What the example does. Steps that wait say so; all others return at once.

use std::error::Error;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::Float64Type;
use arrow_array::{Array, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow_device::cuda::cudarc::driver::{CudaFunction, CudaModule, LaunchConfig, PushKernelArg};
use arrow_device::cuda::cudarc::nvrtc::Ptx;
use arrow_device::{
    Device, DeviceArray, DeviceBufferMut, DeviceRecordBatch, ExportOptions, Loan, Queue,
    SyncPolicy, TransferStats, Validity,
};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field, Schema};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The kernels, made of `kernel.cu`. The driver compiles this text for its GPU, so no CUDA toolkit is needed.
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

/// Loads a kernel into a device.
pub(crate) fn load(device: &Device, name: &str) -> Result<CudaFunction> {
    Ok(module(device)?.load_function(name)?)
}

/// Loads the kernels of [`above`].
pub(crate) fn load_above(device: &Device) -> Result<[CudaFunction; 3]> {
    let module = module(device)?;
    let names = ["count_above_f64", "scan_u64", "above_f64"];
    let [count, scan, keep] = names.map(|name| module.load_function(name));
    Ok([count?, scan?, keep?])
}

/// cudarc has `Ptx` behind its feature `nvrtc`, which loads no library by itself; a program enables it in its own dependency on
/// cudarc.
fn module(device: &Device) -> Result<Arc<CudaModule>> {
    let context = device.cuda_context()?;
    Ok(context.load_module(Ptx::from_src(PTX))?)
}

/// Returns twice the values of `column`, null where it is null.
pub(crate) fn double(
    kernel: &CudaFunction,
    column: &DeviceArray,
    queue: &Queue,
) -> Result<DeviceArray> {
    let mut doubled = DeviceBufferMut::for_values::<f64>(queue, column.len())?;
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
    let mut products = DeviceBufferMut::for_values::<f64>(queue, rows)?;
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

/// Returns the values of `column` above `limit`, in their order. A null is not above it. The first kernel counts the values of
/// each tile of rows, the second turns the counts into places, and the third copies the values there. Waits for them, since the
/// number of values is known only then.
pub(crate) fn above(
    kernels: &[CudaFunction; 3],
    column: &DeviceArray,
    limit: f64,
    queue: &Queue,
) -> Result<DeviceArray> {
    let [count, scan, keep] = kernels;
    let rows = column.len();
    let tiles = rows.div_ceil(2048).max(1);
    let mut kept = DeviceBufferMut::for_values::<f64>(queue, rows)?; // room for all rows
    let mut places = DeviceBufferMut::for_values::<u64>(queue, tiles + 1)?; // the last is the end
    let end = places.address().address() + 8 * tiles;
    let (input, valid) = (column.values_on::<f64>(queue)?, column.validity_on(queue)?);
    let bits = bitmap(&valid);
    let stream = queue.cuda_stream()?;
    let shape = |blocks, threads| LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (threads, 1, 1),
        shared_mem_bytes: 0,
    };
    let each_tile = shape(u32::try_from(tiles)?, 256);

    let mut launch = stream.launch_builder(count);
    launch.arg(&input).arg(&bits.0).arg(&bits.1).arg(&limit);
    launch.arg(&rows).arg(&tiles).arg(&mut places);
    // SAFETY: these are the parameters of `count_above_f64`, which stays within `rows` and writes `tiles` numbers.
    unsafe { launch.launch(each_tile) }?;
    let mut launch = stream.launch_builder(scan);
    launch.arg(&mut places).arg(&tiles).arg(&end);
    // SAFETY: these are the parameters of `scan_u64`, which is one block and writes `tiles` numbers and the end after them.
    unsafe { launch.launch(shape(1, 1024)) }?;
    let mut launch = stream.launch_builder(keep);
    launch.arg(&input).arg(&bits.0).arg(&bits.1).arg(&limit);
    launch
        .arg(&rows)
        .arg(&tiles)
        .arg(&mut places)
        .arg(&mut kept);
    // SAFETY: these are the parameters of `above_f64`, which stays within `rows` and writes the values that were counted.
    unsafe { launch.launch(each_tile) }?;

    let count = places.freeze()?.slice(8 * tiles, 8)?.to_host()?; // waits for the kernels
    let count = count.typed_data::<u64>()[0] as usize;
    kept.truncate(8 * count); // bytes
    kept.shrink_to_fit()?;
    Ok(DeviceArray::from_values(
        DataType::Float64,
        count,
        kept.freeze()?,
        None,
    )?)
}

/// Returns the address of a bitmap and the number of bits before the first row's. The kernels take address 0 for none.
fn bitmap(bits: &Option<Loan<'_, bool>>) -> (usize, usize) {
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
    let options = ExportOptions {
        counts_nulls: false,
        ..ExportOptions::new(SyncPolicy::Event)
    };
    let array = result.export_array(&options)?;
    let schema = FFI_ArrowSchema::try_from(&*result.schema())?;
    let has_event = !array.sync_event().is_null();
    // A consumer sees only the structs. Here it is this crate.
    // SAFETY: `import` requires live structs that follow the specification and hold valid data. The array was just exported,
    // and the schema is that of the same batch.
    let imported = unsafe { DeviceRecordBatch::import(array, &schema, None) }?;
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
    let orders = orders(SKIPPED + ROWS)?;
    let queue = device.new_queue()?;
    let price = device.upload(&orders)?.column_by_name("price")?;
    let price = price.slice(SKIPPED, ROWS)?;
    let doubled = double(&load(device, "double_f64")?, &price, &queue)?;
    let large = above(&load_above(device)?, &price, LIMIT, &queue)?;

    let price = orders.column_by_name("price").ok_or("no such column")?;
    let price = price.slice(SKIPPED, ROWS);
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
