//! The types that the functions of this module accept.

use std::sync::Arc;

use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{Field, FieldRef, Schema, SchemaRef};

use crate::abi::FFI_ArrowDeviceArray;
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::error::Result;
use crate::interchange::schema::{export_field, export_schema, import_field, import_schema};
use crate::interchange::{ExportOptions, ImportOptions};

/// What a schema capsule describes: a [`Field`], a [`Schema`], or the type of a [`DeviceArray`] or a [`DeviceRecordBatch`].
pub trait CapsuleSchema: sealed::Schema {}

/// Data that an array capsule holds: a [`DeviceArray`] or a [`DeviceRecordBatch`].
pub trait CapsuleArray: sealed::Array {}

pub(super) mod sealed {
    use super::*;

    pub trait Schema {
        fn schema(&self) -> Result<FFI_ArrowSchema>;
    }

    pub trait Array: Schema + Sized + Send + Sync {
        /// The type that the schema capsule describes.
        type Type: Send;
        /// The array itself, of structs for a batch.
        fn as_array(&self) -> &DeviceArray;
        fn export(&self, options: &ExportOptions) -> Result<FFI_ArrowDeviceArray>;
        fn parse(schema: &FFI_ArrowSchema) -> Result<Self::Type>;
        /// # Safety
        /// The same as for [`DeviceArray::import_with`].
        unsafe fn import(
            array: FFI_ArrowDeviceArray,
            as_type: Self::Type,
            options: &ImportOptions,
        ) -> Result<Self>;
    }
}

impl CapsuleSchema for Field {}

impl sealed::Schema for Field {
    fn schema(&self) -> Result<FFI_ArrowSchema> {
        export_field(self)
    }
}

impl CapsuleSchema for Schema {}

impl sealed::Schema for Schema {
    fn schema(&self) -> Result<FFI_ArrowSchema> {
        export_schema(self)
    }
}

impl CapsuleSchema for DeviceArray {}

impl sealed::Schema for DeviceArray {
    fn schema(&self) -> Result<FFI_ArrowSchema> {
        match self.field() {
            Some(field) => export_field(field),
            None => export_field(&Field::new("", self.data_type().clone(), true)),
        }
    }
}

impl CapsuleSchema for DeviceRecordBatch {}

impl sealed::Schema for DeviceRecordBatch {
    fn schema(&self) -> Result<FFI_ArrowSchema> {
        export_schema(self.schema_ref())
    }
}

impl CapsuleArray for DeviceArray {}

impl sealed::Array for DeviceArray {
    type Type = FieldRef;

    fn as_array(&self) -> &DeviceArray {
        self
    }

    fn export(&self, options: &ExportOptions) -> Result<FFI_ArrowDeviceArray> {
        self.export_array(options)
    }

    fn parse(schema: &FFI_ArrowSchema) -> Result<FieldRef> {
        import_field(schema).map(Arc::new)
    }

    unsafe fn import(
        array: FFI_ArrowDeviceArray,
        field: FieldRef,
        options: &ImportOptions,
    ) -> Result<Self> {
        // SAFETY: the caller guarantees that the array may be imported with these options.
        unsafe { Self::import_as(array, field, options) }
    }
}

impl CapsuleArray for DeviceRecordBatch {}

impl sealed::Array for DeviceRecordBatch {
    type Type = SchemaRef;

    fn as_array(&self) -> &DeviceArray {
        self.as_struct()
    }

    fn export(&self, options: &ExportOptions) -> Result<FFI_ArrowDeviceArray> {
        self.export_array(options)
    }

    fn parse(schema: &FFI_ArrowSchema) -> Result<SchemaRef> {
        import_schema(schema)
    }

    unsafe fn import(
        array: FFI_ArrowDeviceArray,
        schema: SchemaRef,
        options: &ImportOptions,
    ) -> Result<Self> {
        // SAFETY: the caller guarantees that the array may be imported with these options.
        unsafe { Self::import_as(array, schema, options) }
    }
}
