//! Memory that others allocated, or say that they did.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use arrow_device::device::DevicePtr;
use arrow_device::{
    DeviceArray, DeviceBuffer, DeviceRecordBatch, Devices, Error, ExportOptions,
    FFI_ArrowDeviceArray, SyncPolicy,
};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field};

use super::{Opened, everywhere, host_memories, soon};
use crate::support::producer::{counted, ints, relabel};
use crate::support::{assert_same_batch, wide_batch};
use crate::vendor::{DEVICE, MEMORIES};

pub(crate) fn import(
    device: &Opened,
    array: FFI_ArrowDeviceArray,
    schema: &FFI_ArrowSchema,
) -> Result<DeviceRecordBatch, Error> {
    // SAFETY: the values are valid; whether the addresses are is the question.
    unsafe { DeviceRecordBatch::import(array, schema, &device.options) }
}

/// Other libraries label page-locked and managed memory as the device's own.
#[test]
fn memory_of_the_host_labelled_as_the_devices() {
    everywhere(|place| {
        let device = place.open(DEVICE);
        let sent = wide_batch(16, 700);
        for memory in host_memories() {
            let producer = place.open(memory);
            let up = producer.upload(&sent).unwrap();
            let (array, schema) = up.export(SyncPolicy::Wait).unwrap();
            drop(up);
            let array = relabel(array, device.id().device_type, device.id().id);
            let imported = import(&device, array, &schema).unwrap();
            assert_eq!(imported.device(), &device.device);
            // To the host, and within the device.
            assert_same_batch(
                &sent,
                &imported.to_host().unwrap(),
                format_args!("{memory:?}"),
            );
            let other = place.open(DEVICE);
            let copied = imported.to_device(&*other).unwrap();
            drop(imported);
            assert_same_batch(
                &sent,
                &copied.to_host().unwrap(),
                format_args!("{memory:?}"),
            );
            drop(copied);
            other.assert_done();
            producer.assert_done();
        }
        device.assert_done();
    });
}

/// What the device cannot read is refused, and released once.
#[test]
fn ordinary_memory_labelled_as_the_devices_is_refused() {
    everywhere(|place| {
        let batch = ints();
        let schema = FFI_ArrowSchema::try_from(&*batch.schema()).unwrap();
        for memory in MEMORIES {
            let device = place.open(memory);
            let released = Arc::new(AtomicUsize::new(0));
            let array = counted(&batch, &released);
            let array = relabel(array, device.id().device_type, device.id().id);
            let refused = import(&device, array, &schema);
            let e = refused.unwrap_err();
            assert!(matches!(e, Error::InvalidInput { .. }), "{e}");
            assert!(e.to_string().contains("buffers[1]"), "{e}");
            assert!(soon(|| released.load(SeqCst) > 0));
            assert_eq!(released.load(SeqCst), 1);
            device.assert_done();
        }
    });
}

/// An address that the host cannot read does not get the name of host memory.
#[test]
fn device_memory_labelled_as_the_hosts_is_refused() {
    everywhere(|place| {
        let device = place.open(DEVICE);
        for memory in host_memories() {
            let claimed = place.open(memory);
            let up = device.upload(&wide_batch(3, 50)).unwrap();
            let (array, schema) = up.export(SyncPolicy::Wait).unwrap();
            drop(up);
            let array = relabel(array, claimed.id().device_type, claimed.id().id);
            let e = import(&claimed, array, &schema).unwrap_err();
            assert!(matches!(e, Error::InvalidInput { .. }), "{memory:?}: {e}");
            claimed.assert_done();
        }
        device.assert_done();
    });
}

/// Addresses that are nobody's.
#[test]
fn addresses_of_nothing_are_refused() {
    everywhere(|place| {
        let device = place.open(DEVICE);
        for address in [64usize, 1 << 52] {
            let base = DevicePtr::new(std::ptr::without_provenance_mut(address));
            // SAFETY: nothing follows the address: it is refused, which is what is tested.
            let values =
                unsafe { DeviceBuffer::from_raw(&Devices::cpu(), base, 800, Box::new(()), None) };
            let array = DeviceArray::from_values(DataType::Int64, 100, values, None);
            let options = ExportOptions::new(SyncPolicy::Event);
            let array = array.unwrap().export_array(&options).unwrap();
            let array = relabel(array, device.id().device_type, device.id().id);
            let field = Arc::new(Field::new("v", DataType::Int64, true));
            // SAFETY: nothing follows the address: it is refused, which is what is tested.
            let e = unsafe { DeviceArray::import_as(array, field, &device.options) }.unwrap_err();
            assert!(matches!(e, Error::InvalidInput { .. }), "{e}");
            assert!(e.to_string().contains("buffers[1]"), "{e}");
        }
        let sent = wide_batch(2, 10);
        let back = device.upload(&sent).unwrap().to_host().unwrap();
        assert_same_batch(&sent, &back, "it works as before");
        device.assert_done();
    });
}
