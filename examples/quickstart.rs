//! A record batch goes to a device, through the C Device interface, and comes back.

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

    // A device without hardware; Devices::open(name) gives others.
    let device = Devices::simulated()?;
    let on_device = device.upload(&batch)?;

    // Two C structs, for any consumer in this process. Here this program is the consumer as well.
    let (array, schema) = on_device.export(SyncPolicy::Event)?;
    // SAFETY: the structs were just exported; their data is valid.
    let again = unsafe { DeviceRecordBatch::import(array, &schema) }?;

    let back = again.to_host()?;
    assert_eq!(back, batch);
    println!("{} rows went there and back", back.num_rows());
    Ok(())
}
