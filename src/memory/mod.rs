//! Memory with an owner.

mod buffer;
mod owner;
mod slab;

pub use buffer::{DeviceBuffer, DeviceBufferMut, Loan};
pub(crate) use buffer::{check_queue, host_buffer};
pub(crate) use owner::{Kept, Memory, Owner, Ready};
pub use slab::HostSlab;
pub(crate) use slab::SlabPool;
