//! Memory and its owners: device buffers, host memory that becomes arrow buffers, and what keeps either alive.

mod buffer;
mod buffer_mut;
mod loan;
mod owner;
mod slab;

pub use buffer::DeviceBuffer;
pub(crate) use buffer::{Reading, host_buffer};
pub use buffer_mut::DeviceBufferMut;
pub use loan::Loan;
pub(crate) use loan::check_queue;
pub(crate) use owner::{Memory, Owner, Ready};

pub use slab::HostSlab;
