//! Devices, queues, events.

mod backend;
mod id;
#[cfg(feature = "sim")]
pub mod sim;

pub use backend::{
    AddressClass, Backend, CopyKind, CopyOp, DevicePtr, EventPtr, Notify, RawQueue, device_error,
};
pub use id::DeviceId;
