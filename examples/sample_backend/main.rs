//! A device that the crate does not know, in one file, and a program that uses it. The guide "Add a device in an afternoon" in the crate's
//! repository goes through that file.
//!
//! The device is asynchronous: work is queued, and runs later on the stream's thread. A real provider has the calls of its runtime where
//! this one has threads and the heap.

mod device;

use std::thread::sleep;
use std::time::{Duration, Instant};

use arrow_array::record_batch;
use arrow_device::device::engine::Engine;
use arrow_device::{ArrowDeviceType, DeviceArray, DeviceBufferMut, Devices, Queue, Result};
use arrow_schema::DataType;

use device::{SampleDevice, SampleQueue};

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    // From now on, uploads and imports find the devices vpi:0, vpi:1 and so on.
    let devices = Devices::global();
    devices.register(ArrowDeviceType::VPI, |id| SampleDevice::open(id, false));
    let device = Devices::open("vpi:0")?;

    let orders = record_batch!(("price", Float64, [Some(9.0), None, Some(4.0)]))?;
    let on_device = device.upload(&orders)?;
    let queue = device.new_queue()?;
    let doubled = double(&on_device.column_by_name("price")?, &queue)?; // waits for nothing
    println!("doubled on {device}: {:?}", doubled.to_host()?);

    drop((on_device, doubled, queue));
    device.synchronize()?;
    let engine = Engine::<SampleDevice>::of(&device)?;
    // A thread of the crate gives back what the upload kept until its copies were done. So it may take a moment longer.
    let patience = Instant::now() + Duration::from_secs(10);
    while engine.in_use() != (0, 0, 0) {
        assert!(
            Instant::now() < patience,
            "not freed: {:?}",
            engine.in_use()
        );
        sleep(Duration::from_millis(1));
    }
    println!("all memory was freed: {:?}", device.stats());
    Ok(())
}

/// Returns twice the values of `column`, null where it is null.
fn double(column: &DeviceArray, queue: &Queue) -> Result<DeviceArray> {
    let doubled = DeviceBufferMut::for_values::<f64>(queue, column.len())?;
    let input = column.values_on::<f64>(queue)?; // the queue waits until the column is ready
    let (from, to, rows) = (input.address(), doubled.address(), input.len());
    let kernel = move || {
        for row in 0..rows {
            let (from, to) = (from.as_ptr().cast::<f64>(), to.as_ptr().cast::<f64>());
            // SAFETY: both have `rows` values, and live until this queue has done its work so far:
            // `input` is on loan to the queue, and `doubled` is freed in its order.
            unsafe { to.add(row).write(2.0 * from.add(row).read()) };
        }
        Ok(())
    };
    // SAFETY: the kernel writes only `doubled`, which nothing else uses yet.
    unsafe { SampleQueue::of(queue)?.launch(kernel) }?;
    drop(input); // the loan ends behind the kernel
    column.with_values(DataType::Float64, doubled.freeze()?)
}
