//! The types that the functions of this module accept.

use std::sync::Arc;

use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{Field, Schema};

use crate::abi::FFI_ArrowDeviceArray;
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::error::Result;
use crate::interchange::schema::{as_schema, export_field, export_schema};
use crate::interchange::{ExportOptions, ImportOptions};

/// What a schema capsule describes: a [`Field`], a [`Schema`], or the type of a [`DeviceArray`] or a [`DeviceRecordBatch`].
pub trait CapsuleSchema: sealed::Schema {}

impl<T: sealed::Schema> CapsuleSchema for T {}

/// Data that an array capsule holds: a [`DeviceArray`] or a [`DeviceRecordBatch`].
pub trait CapsuleArray: sealed::Array {}

impl<T: sealed::Array> CapsuleArray for T {}

pub(super) mod sealed {
    use super::*;

    pub trait Schema {
        fn schema(&self) -> Result<FFI_ArrowSchema>;
    }

    pub trait Array: Schema + Sized + Send + Sync {
        /// The array itself, of structs for a batch.
        fn as_array(&self) -> &DeviceArray;
        fn export(&self, options: &ExportOptions) -> Result<FFI_ArrowDeviceArray>;
        /// # Safety
        /// The same as for [`DeviceArray::import_as`].
        unsafe fn import(
            array: FFI_ArrowDeviceArray,
            field: Field,
            options: &ImportOptions,
        ) -> Result<Self>;
    }
}

impl sealed::Schema for Field {
    fn schema(&self) -> Result<FFI_ArrowSchema> {
        export_field(self)
    }
}

impl sealed::Schema for Schema {
    fn schema(&self) -> Result<FFI_ArrowSchema> {
        export_schema(self)
    }
}

impl sealed::Schema for DeviceArray {
    fn schema(&self) -> Result<FFI_ArrowSchema> {
        match self.field() {
            Some(field) => export_field(field),
            None => export_field(&Field::new("", self.data_type().clone(), true)),
        }
    }
}

impl sealed::Schema for DeviceRecordBatch {
    fn schema(&self) -> Result<FFI_ArrowSchema> {
        export_schema(self.schema_ref())
    }
}

impl sealed::Array for DeviceArray {
    fn as_array(&self) -> &DeviceArray {
        self
    }

    fn export(&self, options: &ExportOptions) -> Result<FFI_ArrowDeviceArray> {
        self.export_array(options)
    }

    unsafe fn import(
        array: FFI_ArrowDeviceArray,
        field: Field,
        options: &ImportOptions,
    ) -> Result<Self> {
        // SAFETY: the caller guarantees that the array may be imported with these options.
        unsafe { Self::import_as(array, Arc::new(field), options) }
    }
}

impl sealed::Array for DeviceRecordBatch {
    fn as_array(&self) -> &DeviceArray {
        self.as_struct()
    }

    fn export(&self, options: &ExportOptions) -> Result<FFI_ArrowDeviceArray> {
        self.export_array(options)
    }

    unsafe fn import(
        array: FFI_ArrowDeviceArray,
        field: Field,
        options: &ImportOptions,
    ) -> Result<Self> {
        // SAFETY: the caller guarantees that the array may be imported with these options.
        unsafe { Self::import_as(array, as_schema(field)?, options) }
    }
}
