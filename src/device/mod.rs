//! Devices, queues, events.

mod backend;
pub(crate) mod block;
mod bulk;
#[cfg(feature = "async")]
mod completion;
mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod default_set;
mod event;
#[cfg(any(feature = "cuda", feature = "rocm"))]
mod gpu;
mod handle;
mod name;
mod order;
mod queue;
mod reaper;
mod registry;
#[cfg(feature = "rocm")]
pub(crate) mod rocm;
#[cfg(feature = "sim")]
pub mod sim;
mod stats;

pub use crate::abi::DeviceId;
pub use backend::{
    AddressClass, Backend, CopyKind, CopyOp, DevicePtr, EventPtr, Notify, RawQueue, device_error,
};
pub(crate) use bulk::{LARGE, copy_large};
#[cfg(feature = "async")]
pub(crate) use completion::Completion;
pub(crate) use cpu::ALIGNMENT;
#[cfg(test)]
pub(crate) use cpu::HostBackend;
pub(crate) use event::EventRef;
pub use event::SyncEvent;
pub use handle::Device;
pub(crate) use order::Place;
pub use queue::Queue;
pub use registry::Devices;
pub(crate) use stats::Counters;
pub use stats::TransferStats;
