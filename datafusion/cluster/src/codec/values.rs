//! Devices, schemas and numbers as messages, and back.

use std::sync::Arc;

use arrow_device::{ArrowDeviceType, DeviceId};
use arrow_device_datafusion::DeviceSpec;
use datafusion::arrow::datatypes::{Schema, SchemaRef};
use datafusion::error::{DataFusionError, Result};
use datafusion_proto::protobuf;

use super::{unreadable, wire};

/// The message of a description. One that was made of an opened device becomes that of its type and id.
pub(super) fn device_message(device: &DeviceSpec) -> wire::Device {
    wire::Device {
        device_type: device.device_type().value(),
        id: device.id(),
    }
}

pub(super) fn device_of(device: &Option<wire::Device>) -> Result<DeviceSpec> {
    let device = device.as_ref();
    let device = device.ok_or_else(|| unreadable("a node without a device"))?;
    let device_type = ArrowDeviceType::new(device.device_type);
    Ok(match device.id {
        Some(id) => DeviceId::new(device_type, id).into(),
        None => DeviceSpec::any(device_type),
    })
}

pub(super) fn schema_message(schema: &Schema) -> Result<protobuf::Schema> {
    let message = protobuf::Schema::try_from(schema);
    message.map_err(|e| {
        DataFusionError::NotImplemented(format!("a device plan's schema cannot travel: {e}"))
    })
}

pub(super) fn read_schema(schema: &Option<protobuf::Schema>) -> Result<SchemaRef> {
    let schema = schema.as_ref();
    let schema = schema.ok_or_else(|| unreadable("a node without a schema"))?;
    Ok(Arc::new(Schema::try_from(schema).map_err(unreadable)?))
}

pub(super) fn number(value: u64) -> Result<usize> {
    usize::try_from(value).map_err(unreadable)
}

pub(super) fn optional(value: Option<u64>) -> Result<Option<usize>> {
    value.map(number).transpose()
}
