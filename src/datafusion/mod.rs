//! DataFusion: device streams as tables, plans as device streams, operators on a device.
mod metrics;
mod plan;
mod rule;
mod sink;
mod source;
mod transitions;

pub use plan::{DeviceExec, DevicePlan, SendableDeviceStream, execute_child};
pub use rule::DeviceTransitions;
pub use sink::{execute_on_device, export_plan};
pub use source::{DeviceScanExec, DeviceTable, OpenPartition};
pub use transitions::{DeviceToHostExec, HostToDeviceExec};
