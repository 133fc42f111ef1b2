//! Memory and its owners: device buffers, host memory that becomes arrow buffers, and what keeps either alive.

mod buffer;
mod owner;
mod reading;
mod slab;

pub use buffer::{DeviceBuffer, DeviceBufferMut, Loan};
pub(crate) use buffer::{check_queue, host_buffer};
pub(crate) use owner::{Kept, Memory, Owner, Ready};
pub(crate) use reading::{Reading, read_back};
pub use slab::HostSlab;
