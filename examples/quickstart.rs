//! Uploads a record batch to a device, hands it over through the Arrow C Device data interface, and downloads it again.

use std::sync::Arc;

use arrow_array::{Int64Array, RecordBatch, StringArray};
use arrow_device::{DeviceRecordBatch, Devices, SyncPolicy};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let batch = RecordBatch::try_from_iter([
        ("id", Arc::new(Int64Array::from(vec![1, 2, 3])) as _),
        (
            "name",
            Arc::new(StringArray::from(vec![Some("a"), None, Some("c")])) as _,
        ),
    ])?;

    // A simulated device, which needs no GPU. `Devices::open("cuda:0")` opens a real one.
    let device = Devices::simulated()?;
    let on_device = device.upload(&batch)?;

    // Two C structs, which any library in this process can consume. Here the program consumes them itself.
    let (array, schema) = on_device.export(SyncPolicy::Event)?;
    // SAFETY: `import` requires live structs that follow the specification and hold valid data. `export` just made them.
    let again = unsafe { DeviceRecordBatch::import(array, &schema, None) }?;

    let back = again.to_host()?;
    assert_eq!(back, batch);
    println!(
        "{} rows went to {device} and came back identical",
        back.num_rows()
    );
    Ok(())
}
