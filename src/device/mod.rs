//! Devices, queues, events.

mod backend;
mod cpu;
mod event;
mod handle;
mod id;
mod queue;
mod reaper;
mod registry;
mod stats;

pub use backend::{
    AddressClass, Backend, CopyKind, CopyOp, DevicePtr, EventPtr, Notify, RawQueue, device_error,
};
pub(crate) use cpu::ALIGNMENT;
pub use event::SyncEvent;
pub(crate) use event::EventRef;
pub use handle::Device;
pub use id::DeviceId;
pub use queue::Queue;
pub use registry::Devices;
pub(crate) use stats::Counters;
pub use stats::TransferStats;
