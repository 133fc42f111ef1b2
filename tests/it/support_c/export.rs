//! Small arrays, and imports of what was exported.

use std::sync::Arc;

use arrow_array::{ArrayRef, Int32Array};
use arrow_data::{ArrayData, ffi::FFI_ArrowArray};
use arrow_device::{
    ArrowDeviceType, Device, DeviceArray, DeviceRecordBatch, FFI_ArrowDeviceArray, ImportOptions,
};
use arrow_schema::{DataType, Field, Schema};

use super::sim::Place;

pub(crate) fn ints(n: i32) -> ArrayRef {
    Arc::new(Int32Array::from_iter(
        (0..n).map(|i| (i % 3 > 0).then_some(i)),
    ))
}

pub(crate) fn field(data_type: &DataType) -> Arc<Field> {
    Arc::new(Field::new("f", data_type.clone(), true))
}

pub(crate) fn import(
    exported: FFI_ArrowDeviceArray,
    data_type: &DataType,
    place: &Place,
) -> DeviceArray {
    // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type is the exported one.
    unsafe { DeviceArray::import_as(exported, field(data_type), &place.options) }.unwrap()
}

/// `ArrayData` on a device, as a C struct has it, with its offsets.
pub(crate) fn upload_data(device: &Device, data: &ArrayData) -> DeviceArray {
    let array = FFI_ArrowArray::new(data);
    let (cpu, none) = (ArrowDeviceType::CPU, std::ptr::null_mut());
    // SAFETY: the array is arrow-rs's, in host memory, and ready.
    let array = unsafe { FFI_ArrowDeviceArray::new(array, cpu, -1, none) };
    // SAFETY: the same; its values are valid, and the type is its own.
    let array = unsafe {
        DeviceArray::import_as(array, field(data.data_type()), &ImportOptions::default())
    };
    array.unwrap().to_device(device).unwrap()
}

/// A batch of these columns, named by number.
pub(crate) fn join(columns: &[DeviceArray]) -> DeviceRecordBatch {
    let fields = columns.iter().enumerate();
    let fields: Vec<_> = fields
        .map(|(i, c)| Field::new(i.to_string(), c.data_type().clone(), true))
        .collect();
    DeviceRecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap()
}
