//! Devices, queues and events, and what a crate implements to add a device.
//!
//! Programs use [`Devices`], [`Device`], [`Queue`] and [`SyncEvent`], which are also at the root of
//! the crate:
//!
//! ```
//! use arrow_device::{DeviceBufferMut, Devices};
//!
//! let device = Devices::cpu();
//! let queue = device.new_queue()?;
//! let before = device.stats();
//! let memory = DeviceBufferMut::allocate(&queue, 64)?;
//! queue.synchronize()?;
//! assert_eq!(device.stats().since(&before).allocations, 1);
//! # drop(memory);
//! # Ok::<(), arrow_device::Error>(())
//! ```
//!
//! A crate that adds a device implements [`Backend`] and [`RawQueue`], wraps the backend by
//! [`Device::new`] and registers it with [`Devices::register`]. The module [`parts`] has what most backends need: a pool of
//! device memory, a table of its addresses, and more.

mod backend;
pub(crate) mod block;
mod completion;
mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod default_set;
mod event;
#[cfg(any(feature = "cuda", feature = "rocm"))]
pub(crate) mod gpu;
mod handle;
mod lock;
pub mod parts;
mod process;
mod queue;
mod registry;
#[cfg(feature = "rocm")]
pub(crate) mod rocm;
#[cfg(feature = "sim")]
pub mod sim;
mod stats;

pub use crate::abi::DeviceId;
pub use backend::{
    AddressClass, Backend, Capabilities, CopyKind, CopyOp, DevicePtr, EventPtr, ExportSync,
    PointerInfo, RawQueue, Relation, device_error,
};
pub(crate) use completion::Completion;
#[cfg(feature = "async")]
pub(crate) use completion::completion;
pub(crate) use cpu::{ALIGNMENT, HostBackend};
pub use event::SyncEvent;
pub(crate) use event::{EventRef, Seen};
pub use handle::{Device, WeakDevice};
pub(crate) use lock::lock;
#[cfg(feature = "sim")]
pub(crate) use parts::is_worker;
#[cfg(any(feature = "cuda", feature = "rocm"))]
pub(crate) use process::FORKED;
pub(crate) use process::Process;
pub use queue::Queue;
pub use registry::Devices;
pub(crate) use registry::host_memory;
pub(crate) use stats::Counters;
pub use stats::TransferStats;
