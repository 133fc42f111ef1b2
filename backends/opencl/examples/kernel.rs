//! A kernel in OpenCL C on a column with nulls: it doubles the values, and the validity bitmap is kept.
//!
//! ```sh
//! cargo run -p arrow-device-opencl --example kernel            # the first device
//! cargo run -p arrow-device-opencl --example kernel handles    # with cl_mem buffers
//! ```

use std::ptr::null_mut;
use std::sync::Arc;

use arrow_array::record_batch;
use arrow_device::{DeviceArray, DeviceBufferMut, DeviceRecordBatch, Queue};
use arrow_device_opencl::{OpenClConfig, OpenClDevice, OpenClMemory, OpenClQueue};
use arrow_schema::{DataType, Field, Schema};
use cl3::command_queue::enqueue_nd_range_kernel;
use cl3::error_codes::ClError;
use cl3::event::release_event;
use cl3::kernel::{create_kernel, release_kernel, set_kernel_arg};
use cl3::program::{build_program, create_program_with_source, release_program};
use cl3::types::{cl_kernel, cl_ulong};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The last two parameters are the offsets of the columns in the memory of the first two, in bytes.
const SOURCE: &str = "
kernel void double_f64(global const char* input, global char* output, ulong input_at, ulong output_at) {
    size_t row = get_global_id(0);
    global const double* from = (global const double*)(input + input_at);
    global double* to = (global double*)(output + output_at);
    to[row] = 2 * from[row];
}";

/// Returns twice the values of `column`, null where it is null.
fn double(kernel: cl_kernel, column: &DeviceArray, queue: &Queue) -> Result<DeviceArray> {
    let doubled = DeviceBufferMut::for_values::<f64>(queue, column.len())?;
    let input = column.values_on::<f64>(queue)?; // the queue waits until the column is ready
    let opencl = OpenClQueue::of(queue)?;
    let rows = input.len();
    // SAFETY: the kernel is live, only this thread uses it, and these are its parameters. It runs once for each row, on memory
    // that lives until it is enqueued; the drop of `input` then records the use. OpenCL runs no kernel of 0 items.
    unsafe {
        let input_at = opencl.set_kernel_arg(kernel, 0, input.address())? as cl_ulong;
        let output_at = opencl.set_kernel_arg(kernel, 1, doubled.address())? as cl_ulong;
        set_kernel_arg(
            kernel,
            2,
            size_of::<cl_ulong>(),
            (&raw const input_at).cast(),
        )
        .map_err(ClError)?;
        set_kernel_arg(
            kernel,
            3,
            size_of::<cl_ulong>(),
            (&raw const output_at).cast(),
        )
        .map_err(ClError)?;
        if rows > 0 {
            let (items, none) = ([rows], std::ptr::null());
            let event = enqueue_nd_range_kernel(
                opencl.handle(),
                kernel,
                1,
                none,
                items.as_ptr(),
                none,
                0,
                none.cast(),
            )
            .map_err(ClError)?;
            release_event(event).map_err(ClError)?;
        }
    }
    Ok(column.with_values(DataType::Float64, doubled.freeze()?)?)
}

fn main() -> Result<()> {
    let batch = record_batch!(("price", Float64, [Some(9.0), Some(1.5), None, Some(4.0)]))?;
    let mut config = OpenClConfig::new(0);
    let handles = std::env::args()
        .nth(1)
        .is_some_and(|memory| memory == "handles");
    if handles {
        config = config.with_memory(OpenClMemory::Handles);
    }
    let device = config.open()?; // or an error that says what is missing
    let opencl = OpenClDevice::of(&device)?;
    println!("{device}: {}, {:?}", opencl.info(), opencl.memory());
    let program = create_program_with_source(opencl.context(), &[SOURCE]).map_err(ClError)?;
    build_program(program, &[opencl.device_id()], c"", None, null_mut()).map_err(ClError)?;
    let kernel = create_kernel(program, c"double_f64").map_err(ClError)?;
    let rows = device.upload(&batch)?.slice(1, 3)?; // one copy; the slice copies nothing

    let queue = device.new_queue()?;
    let price = rows.column_by_name("price")?;
    let doubled = double(kernel, &price, &queue)?; // does not wait for the kernel

    // A new batch of an uploaded column and a computed one.
    let fields = ["price", "doubled"].map(|name| Field::new(name, DataType::Float64, true));
    let result =
        DeviceRecordBatch::try_new(Arc::new(Schema::new(fields.to_vec())), &[price, doubled])?;

    let expected = record_batch!(
        ("price", Float64, [Some(1.5), None, Some(4.0)]),
        ("doubled", Float64, [Some(3.0), None, Some(8.0)])
    )?;
    assert_eq!(result.to_host()?, expected); // waits for the kernel and the copy
    // SAFETY: both were made here, and nothing uses them any more.
    unsafe {
        release_kernel(kernel).map_err(ClError)?;
        release_program(program).map_err(ClError)?;
    }
    Ok(())
}
