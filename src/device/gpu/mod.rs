//! What GPU libraries share: a backend over streams, events, pools and page-locked memory. CUDA's
//! driver and HIP's runtime have most calls alike ([`Api`]); each vendor adds those that differ
//! ([`Runtime`]).
//!
//! | file | contents |
//! | --- | --- |
//! | `api.rs` | handles, codes and functions that both libraries have |
//! | `library.rs` | a vendor's library, loaded at run time |
//! | `newer_hip.rs` | what newer versions of HIP have that its bindings lack |
//! | `runtime.rs` | what differs between vendors |
//! | `context.rs` | what all work of a device goes through: errors, reuse of events |
//! | `entry.rs` | the guard that makes a context current, and scopes in which calls share one entry |
//! | `calls.rs` | the calls that can be made while a context is current |
//! | `shared.rs` | what a device and its queues have in common, and when memory is freed |
//! | `queue.rs` | streams as queues |
//! | `copy.rs` | lists of copies |
//! | `jobs.rs` | copies and fills that the host does in a stream's order |
//! | `blocks.rs` | reuse of memory that is slow to allocate |
//! | `leftovers.rs` | what could not be freed at once |
//! | `page_locked.rs` | page-locked memory for staging, within a limit |
//! | `backend.rs` | the backend itself |

mod api;
mod backend;
mod blocks;
mod calls;
mod context;
mod copy;
mod entry;
mod jobs;
mod leftovers;
mod library;
#[cfg_attr(not(feature = "rocm"), allow(dead_code))]
pub(crate) mod newer_hip;
mod page_locked;
mod queue;
mod runtime;
mod shared;

#[cfg(feature = "rocm")]
pub(crate) use self::api::StreamCallback;
pub(crate) use self::api::{
    Answer, Api, Call, Calls, Code, CopyList, HostFunction, LaunchHost, PoolProps, RawEvent,
    RawPool, RawStream, check_alike,
};
pub(crate) use self::backend::Gpu;
pub(crate) use self::context::EventCell;
pub(crate) use self::library::{
    Library, absent, called, device_count, either, find, find_call, functions, load, number_of,
    text,
};
pub(crate) use self::queue::GpuQueue;
pub(crate) use self::runtime::{Before, Found, Memory, Peer, PointerKind, Runtime};
pub(crate) use self::shared::Shared;
#[cfg(feature = "cuda")]
pub(crate) use self::{api::Failed, library::absent_after};

/// Most bytes of page-locked memory that a device takes for staging and for downloads, unless its
/// configuration says otherwise.
pub(crate) const PAGE_LOCKED_LIMIT: usize = 2 << 30;
