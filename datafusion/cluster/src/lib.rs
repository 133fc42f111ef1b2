//! Device operators of [`arrow-device-datafusion`](arrow_device_datafusion) on the workers of engines that run DataFusion's plans on many machines.
#![deny(missing_docs)]

mod codec;

pub use codec::{
    DeviceCodec, DevicePlanCodec, DeviceTableCodec, DeviceTables, PlanDecoder, PlanEncoder,
};
