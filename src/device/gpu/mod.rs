//! What GPU runtimes share: a backend over streams, events, pools and page-locked memory. CUDA and
//! HIP are alike enough that each brings only its calls ([`Runtime`]).
//!
//! | file | what is in it |
//! | --- | --- |
//! | `runtime.rs` | the calls that a vendor brings, and what they answer |
//! | `library.rs` | a vendor's library, loaded at run time |
//! | `context.rs` | what all work of a device goes through: the context guard, errors, reuse of events |
//! | `shared.rs` | what a device and its queues have in common |
//! | `queue.rs` | streams as queues |
//! | `copy.rs` | lists of copies |
//! | `jobs.rs` | copies and fills that the host does in a stream's order |
//! | `blocks.rs` | reuse of memory that is slow to allocate, and its free |
//! | `page_locked.rs` | page-locked memory for staging, within a limit |
//! | `pointer.rs` | whose memory an address is |
//! | `backend.rs` | the backend itself |

mod backend;
mod blocks;
mod context;
mod copy;
mod jobs;
mod library;
mod page_locked;
mod pointer;
mod queue;
mod runtime;
mod shared;

pub(in crate::device) use self::backend::Gpu;
pub(in crate::device) use self::context::EventCell;
pub(in crate::device) use self::copy::{CopyAttributes, CopyList};
pub(in crate::device) use self::library::{either, functions, load};
pub(in crate::device) use self::queue::GpuQueue;
pub(in crate::device) use self::runtime::{
    Answer, Before, Code, Failed, HostFunction, Meaning, Memory, Names, Peer, PointerKind,
    RawEvent, RawStream, Runtime, to_ptr,
};
pub(in crate::device) use self::shared::Shared;

use std::ffi::c_int;

use crate::device::DeviceId;
use crate::error::{Error, Result};

/// Most bytes of page-locked memory that a device takes for staging and for downloads, unless its
/// configuration says otherwise.
pub(in crate::device) const PAGE_LOCKED_LIMIT: usize = 2 << 30;

/// The number of a device in its runtime, if there are so many.
pub(in crate::device) fn ordinal_of(vendor: &str, id: DeviceId, count: c_int) -> Result<c_int> {
    let ordinal = c_int::try_from(id.id)
        .ok()
        .filter(|n| (0..count).contains(n));
    ordinal.ok_or_else(|| {
        let reason = match count {
            0 => format!("there is no {vendor} device"),
            1 => format!("there is one {vendor} device, 0"),
            n => format!("there are {n} {vendor} devices, 0 to {}", n - 1),
        };
        absent(id, reason)
    })
}

/// [`Error::DeviceNotAvailable`].
pub(in crate::device) fn absent(device: DeviceId, reason: impl Into<String>) -> Error {
    Error::DeviceNotAvailable {
        device,
        reason: reason.into().into(),
    }
}

/// The number that an id has, for a vendor that counts from 0.
pub(in crate::device) fn number_of(vendor: &str, id: DeviceId) -> Result<usize> {
    let text = || format!("{vendor} devices are numbered from 0");
    usize::try_from(id.id).map_err(|_| absent(id, text()))
}
