//! Three major versions of arrow-rs in one program: batches of libraries on arrow 58 and on arrow 60 go to a device and come back.
//!
//! Their types are not the types of arrow-device, which a program has once, with one major version. What crosses are pointers to the
//! structs of the C data interface, which are the same in all versions: no value is copied from one version to another.

use std::ptr::{self, null_mut};

use arrow_array::StructArray;
use arrow_array::ffi::{FFI_ArrowArray, FFI_ArrowSchema, to_ffi};
use arrow_device::{ArrowDeviceType, DeviceRecordBatch, Devices, FFI_ArrowDeviceArray};

/// A library on another major version.
macro_rules! library {
    ($library:ident, $arrow_array:ident) => {
        mod $library {
            use std::ffi::c_void;
            use std::sync::Arc;

            use $arrow_array::ffi::{FFI_ArrowArray, FFI_ArrowSchema, from_ffi, to_ffi};
            use $arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray, StructArray};

            fn batch() -> RecordBatch {
                let ids: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3]));
                let names: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None, Some("c")]));
                RecordBatch::try_from_iter([("id", ids), ("name", names)]).unwrap()
            }

            /// Moves a batch into two C structs.
            ///
            /// # Safety
            /// The pointers are valid for writes of an `ArrowArray` and of an `ArrowSchema`.
            pub(super) unsafe fn export(array: *mut c_void, schema: *mut c_void) {
                let (a, s) = to_ffi(&StructArray::from(batch()).into()).unwrap();
                // SAFETY: the caller guarantees that both are valid for writes; the types have the layouts of the C structs.
                unsafe {
                    array.cast::<FFI_ArrowArray>().write(a);
                    schema.cast::<FFI_ArrowSchema>().write(s);
                }
            }

            /// Takes a batch over, and returns whether it is the one that `export` gives.
            ///
            /// # Safety
            /// The pointers are those of an `ArrowArray` and its `ArrowSchema`, which comply with the C data interface.
            pub(super) unsafe fn import(array: *mut c_void, schema: *mut c_void) -> bool {
                // SAFETY: the caller guarantees that these are the C structs, whose layouts the types have; both are left released.
                let data = unsafe {
                    let schema = FFI_ArrowSchema::from_raw(schema.cast());
                    from_ffi(FFI_ArrowArray::from_raw(array.cast()), &schema)
                };
                RecordBatch::from(StructArray::from(data.unwrap())) == batch()
            }
        }
    };
}

library!(on_58, arrow_array_58);
library!(on_60, arrow_array_60);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Devices::gpu().or_else(|_| Devices::simulated())?;
    for from_58 in [true, false] {
        // A library's batch, into structs that stand here.
        let (mut array, mut schema) = (FFI_ArrowArray::empty(), FFI_ArrowSchema::empty());
        let structs = (ptr::from_mut(&mut array), ptr::from_mut(&mut schema));
        let export = if from_58 {
            on_58::export
        } else {
            on_60::export
        };
        // SAFETY: both structs are empty, and may be overwritten.
        unsafe { export(structs.0.cast(), structs.1.cast()) };

        // SAFETY: a library of arrow-rs exported the array from the host's memory, and it is ready.
        let array =
            unsafe { FFI_ArrowDeviceArray::new(array, ArrowDeviceType::CPU, -1, null_mut()) };
        // SAFETY: the array complies with the interface, as every one that arrow-rs exports, and the schema is the one exported with it.
        let batch = unsafe { DeviceRecordBatch::import(array, &schema, None) }?;
        let on_device = batch.to_device(&device)?;

        // Back on the host, and over to the other library.
        let result = StructArray::from(on_device.to_host()?);
        let (mut array, mut schema) = to_ffi(&result.into())?;
        let structs = (ptr::from_mut(&mut array), ptr::from_mut(&mut schema));
        let import = if from_58 {
            on_60::import
        } else {
            on_58::import
        };
        // SAFETY: `to_ffi` made both structs.
        let same = unsafe { import(structs.0.cast(), structs.1.cast()) };
        assert!(same && array.is_released());
        println!("{device}: {}", batch.schema());
    }
    Ok(())
}
