use crate::error::Result;
use arrow_schema::{Field, Schema, SchemaRef, ffi::FFI_ArrowSchema};
pub(crate) fn import_field(s: &FFI_ArrowSchema) -> Result<Field> {
    Ok(Field::try_from(s)?)
}
pub(crate) fn import_schema(s: &FFI_ArrowSchema) -> Result<SchemaRef> {
    Ok(Schema::try_from(s)?.into())
}
pub(crate) fn export_field(s: &Field) -> Result<FFI_ArrowSchema> {
    Ok(FFI_ArrowSchema::try_from(s)?)
}
pub(crate) fn export_schema(s: &Schema) -> Result<FFI_ArrowSchema> {
    Ok(FFI_ArrowSchema::try_from(s)?)
}
