//! What the example does. Steps that wait say so; all others return at once.

use std::error::Error;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::Float64Type;
use arrow_array::{Array, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow_device::cuda::cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};
use arrow_device::cuda::cudarc::nvrtc::Ptx;
use arrow_device::{
    Device, DeviceArray, DeviceBufferMut, DeviceRecordBatch, ExportOptions, NullCounts, Queue,
    SyncPolicy, TransferStats, Validity,
};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field, Schema};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The kernel's source. The driver compiles it, so no CUDA toolkit is needed.
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

/// Loads the kernel into a device. cudarc has `Ptx` behind its feature `nvrtc`, which loads no library by itself; a program
/// enables it in its own dependency on cudarc.
pub(crate) fn load(device: &Device) -> Result<CudaFunction> {
    let module = device
        .as_cuda()?
        .cuda_context()?
        .load_module(Ptx::from_src(PTX))?;
    Ok(module.load_function("product_f64")?)
}

/// Computes `a * b` on the device, null where either is null. The host does not wait; the queue does.
pub(crate) fn product(
    kernel: &CudaFunction,
    a: &DeviceArray,
    b: &DeviceArray,
    queue: &Queue,
) -> Result<DeviceArray> {
    let rows = a.len();
    assert_eq!(rows, b.len());
    let mut out = DeviceBufferMut::allocate(queue, rows * 8)?;
    let mut out_mask = DeviceBufferMut::allocate(queue, rows.div_ceil(8))?;
    if rows > 0 {
        // The queue waits until the columns are ready. The type is checked.
        let (a_values, b_values) = (a.values_on::<f64>(queue)?, b.values_on::<f64>(queue)?);
        let (a_mask, b_mask) = (a.validity_on(queue)?, b.validity_on(queue)?);
        // In a sliced column, row 0 may be any bit of the bitmap. The values start at row 0.
        let a_bit = a_mask.as_ref().map_or(0, |bits| bits.bit_offset());
        let b_bit = b_mask.as_ref().map_or(0, |bits| bits.bit_offset());

        let stream = queue.cuda_stream()?;
        let mut launch = stream.launch_builder(kernel);
        launch.arg(&a_values);
        match &a_mask {
            Some(bits) => launch.arg(bits),
            None => launch.arg(&0u64),
        };
        launch.arg(&a_bit).arg(&b_values);
        match &b_mask {
            Some(bits) => launch.arg(bits),
            None => launch.arg(&0u64),
        };
        launch.arg(&b_bit);
        launch.arg(&mut out).arg(&mut out_mask).arg(&rows);
        // One GPU thread computes 8 rows.
        let threads = u32::try_from(rows.div_ceil(8))?;
        // SAFETY: `launch` requires arguments that match the kernel's parameters and memory that holds what it accesses. The
        // arguments are those of `kernel.ptx` in order; it accesses `rows` values and bits, which all buffers hold.
        unsafe { launch.launch(LaunchConfig::for_num_elems(threads)) }?;
        // The guards are dropped here. The columns' memory is not freed before the kernel has finished.
    }
    // Both buffers are ready once the queue has done its work so far. The number of nulls is not known yet.
    let (out, out_mask) = (out.freeze()?, out_mask.freeze()?);
    let validity = Validity::new(out_mask, 0, rows)?;
    let column = DeviceArray::from_values(DataType::Float64, rows, out, Some(validity))?;
    Ok(column)
}

/// Uploads a batch, runs the kernel on it, exports and imports the result, and downloads it.
pub(crate) fn run(device: &Device) -> Result<Report> {
    let batch = orders(ROWS + SKIPPED)?;
    let kernel = load(device)?;
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
