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
//! A crate that adds a device implements [`engine::Runtime`] over the calls of its runtime, opens devices by [`engine::Engine::open`] and
//! registers them with [`Devices::register`]. [`Backend`] and [`RawQueue`] are what the engine implements.

pub(crate) mod backend;
mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod default_set;
pub mod engine;
mod event;
#[cfg(any(feature = "cuda", feature = "rocm"))]
pub(crate) mod gpu;
mod handle;
pub(crate) mod host_pool;
mod queue;
mod registry;
#[cfg(feature = "rocm")]
pub(crate) mod rocm;
#[cfg(feature = "sim")]
pub mod sim;
mod stats;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use crate::abi::DeviceId;
pub(crate) use backend::absent;
pub use backend::{
    AddressClass, Backend, Capabilities, CopyKind, CopyOp, DevicePtr, EventPtr, ExportSync,
    PointerInfo, RawQueue, Relation, device_error,
};
pub(crate) use cpu::{ALIGNMENT, HostBackend};
pub(crate) use engine::{FORKED, Process};
pub use event::SyncEvent;
pub(crate) use event::{EventRef, Seen, completion, now};
pub(crate) use handle::host_memory;
pub use handle::{Device, WeakDevice};
pub use queue::Queue;
pub use registry::Devices;

pub(crate) use stats::Counters;
pub use stats::TransferStats;

/// Locks a mutex whose data is consistent whenever the lock is free: no code that may panic runs
/// halfway through a change.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
