//! A kernel in GLSL on a column with nulls: it doubles the values, and the validity bitmap is kept.
//!
//! ```sh
//! cargo run -p arrow-device-vulkan --example kernel            # the kernel gets addresses
//! cargo run -p arrow-device-vulkan --example kernel handles    # the kernel gets descriptors of VkBuffers
//! ```

mod kernel;

use std::process::ExitCode;
use std::sync::Arc;

use arrow_array::record_batch;
use arrow_device::{Device, DeviceArray, DeviceBufferMut, DeviceRecordBatch, Devices, Queue};
use arrow_device_vulkan::{VulkanDevice, register};
use arrow_schema::{DataType, Field, Schema};
use kernel::{Arguments, Kernel};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Returns twice the values of `column`, null where it is null.
fn double(kernel: &Kernel, column: &DeviceArray, queue: &Queue) -> Result<DeviceArray> {
    let doubled = DeviceBufferMut::for_values::<f32>(queue, column.len())?;
    let input = column.values_on::<f32>(queue)?; // the queue waits until the column is ready
    let rows = u32::try_from(input.len())?;
    // SAFETY: both hold this many floats. The drop of `input` records the use, so that its memory is freed afterwards.
    unsafe { kernel.launch(input.address(), doubled.address(), rows) }?;
    Ok(column.with_values(DataType::Float32, doubled.freeze()?)?)
}

fn run(device: &Device, arguments: Arguments) -> Result<()> {
    let batch = record_batch!(("price", Float32, [Some(9.0), Some(1.5), None, Some(4.0)]))?;
    println!("{device}: {}", VulkanDevice::of(device)?.info());
    let rows = device.upload(&batch)?.slice(1, 3)?; // one copy; the slice copies nothing

    let queue = device.new_queue()?;
    let kernel = Kernel::new(&queue, arguments)?;
    let price = rows.column_by_name("price")?;
    let doubled = double(&kernel, &price, &queue)?; // does not wait for the kernel

    // A new batch of an uploaded column and a computed one.
    let fields = ["price", "doubled"].map(|name| Field::new(name, DataType::Float32, true));
    let schema = Arc::new(Schema::new(fields.to_vec()));
    let result = DeviceRecordBatch::try_new(schema, &[price, doubled])?;

    let expected = record_batch!(
        ("price", Float32, [Some(1.5), None, Some(4.0)]),
        ("doubled", Float32, [Some(3.0), None, Some(8.0)])
    )?;
    let result = result.to_host()?; // waits for the kernel and the copy
    assert_eq!(result, expected);
    println!("price   {:?}", result.column(0));
    println!("doubled {:?}", result.column(1));
    Ok(())
}

fn main() -> ExitCode {
    let arguments = match std::env::args().nth(1).as_deref() {
        None => Arguments::Addresses,
        Some("handles") => Arguments::Handles,
        Some(other) => return fail(2, &format!("no such argument: {other}")),
    };
    register(Devices::global());
    let device = match Devices::open("vulkan:0") {
        Ok(device) => device,
        Err(e) => return fail(2, &e.to_string()), // says what is missing
    };
    match run(&device, arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => fail(1, &e.to_string()),
    }
}

fn fail(status: u8, why: &str) -> ExitCode {
    eprintln!("kernel: {why}");
    ExitCode::from(status)
}
