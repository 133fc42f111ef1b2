//! Memory and its owners: device buffers, host memory that becomes arrow buffers, and what keeps either alive.

mod buffer;
mod buffer_mut;
mod host_buffer;
mod loan;
mod owner;

pub use buffer::DeviceBuffer;
pub(crate) use buffer::Reading;
pub use buffer_mut::DeviceBufferMut;
pub use loan::Loan;
pub(crate) use loan::{check_queue, queue_for};
pub(crate) use owner::{Memory, Owner, Ready};

pub use host_buffer::HostBuffer;
