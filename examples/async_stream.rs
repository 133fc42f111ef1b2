//! Consumes an async device stream in a Tokio program.
//!
//! `serve` stands for another library: it receives a pointer to the C struct and produces batches from a task.

use arrow_array::{RecordBatch, record_batch};
use arrow_device::abi::FFI_ArrowAsyncDeviceStreamHandler;
use arrow_device::async_stream::{AsyncDeviceRecordBatchStream, DeviceRecordBatchStream, produce};
use arrow_device::{
    Device, DeviceRecordBatches, Devices, Error, ExportOptions, ImportOptions, SyncPolicy,
};
use futures::{StreamExt, stream};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Devices::simulated().unwrap_or_else(|_| Devices::cpu());

    // The consumer requests two batches at first, and one more for each that it takes.
    // SAFETY: `handler` requires a producer that follows the specification and sends valid data. `serve` is built on
    // `produce`, which does, and sends uploaded record batches.
    let (handler, opening) =
        unsafe { AsyncDeviceRecordBatchStream::handler(2, ImportOptions::default()) };
    serve(handler, &device)?;

    // The schema and the producer's metadata arrive before the first batch.
    let stream = opening.await?;
    println!("{:?} on {}", stream.metadata(), stream.device_type());

    // The batches are in device memory. This stream downloads them, and no thread blocks on a copy.
    let mut batches = stream.into_host_stream();
    let mut sum = 0;
    while let Some(batch) = batches.next().await {
        let batch = batch?;
        let ids = batch.column(0).as_any().downcast_ref().unwrap();
        sum += arrow_array::Int64Array::iter(ids).flatten().sum::<i64>();
    }
    println!("the sum of all ids is {sum}");
    assert_eq!(sum, 10 * (1 + 2 + 3));
    Ok(())
}

/// Another library's producer: sends ten batches, each uploaded to the device.
fn serve(to: *mut FFI_ArrowAsyncDeviceStreamHandler, device: &Device) -> Result<(), Error> {
    let batch: RecordBatch = record_batch!(("id", Int64, [1, 2, 3]))?;
    let (schema, on, device_type) = (batch.schema(), device.clone(), device.id().device_type);
    let batches = stream::iter(0..10).map(move |_| on.upload(&batch));
    let metadata = [("batches".to_owned(), "10".to_owned())].into();
    let batches = DeviceRecordBatches::from_stream(batches, schema, device_type);
    let (batches, options) = (
        batches.with_metadata(metadata),
        ExportOptions::new(SyncPolicy::Event),
    );
    // SAFETY: `produce` requires a live handler that stays at its address until it is released. `to` comes from
    // `AsyncDeviceRecordBatchStream::handler`, which leaves it on the heap until then.
    let producing = unsafe { produce(batches, to, options) };
    tokio::spawn(async move { println!("the producer ended: {:?}", producing.await) });
    Ok(())
}
