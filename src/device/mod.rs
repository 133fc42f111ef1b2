//! Devices, queues, events.

mod backend;
mod id;

pub use backend::{
    AddressClass, Backend, CopyKind, CopyOp, DevicePtr, EventPtr, Notify, RawQueue, device_error,
};
pub use id::DeviceId;
