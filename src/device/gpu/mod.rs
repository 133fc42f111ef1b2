//! What GPU libraries share: a backend over streams, events, pools and page-locked memory. CUDA's
//! driver and HIP's runtime have most calls alike ([`Api`]); each vendor adds those that differ
//! ([`Runtime`]).
//!
//! | file | contents |
//! | --- | --- |
//! | `api.rs` | handles, codes, and the table of functions that both libraries have |
//! | `library.rs` | a vendor's library, loaded at run time |
//! | `runtime.rs` | what differs between vendors |
//! | `entry.rs` | the guard that makes a context current, and scopes in which calls share one entry |
//! | `calls.rs` | the calls that can be made while a context is current |
//! | `context.rs` | what a device and its queues share: errors, events, and memory that is to be freed |
//! | `event.rs` | events in places to which `sync_event` can point |
//! | `blocks.rs` | reuse of memory that is slow to allocate |
//! | `queue.rs` | streams as queues |
//! | `copy.rs` | lists of copies |
//! | `backend.rs` | the backend itself |

mod api;
mod backend;
mod blocks;
mod calls;
mod context;
mod copy;
mod entry;
mod event;
mod library;
mod queue;
mod runtime;

#[cfg(feature = "rocm")]
pub(crate) use self::api::HIP;
pub(crate) use self::api::{
    Answer, Api, Call, Calls, Code, RawEvent, RawStream, find_call, functions,
};
#[cfg(feature = "cuda")]
pub(crate) use self::api::{CUDA, Failed};
#[cfg(test)]
pub(crate) use self::api::{NOT_CAPTURED, PoolProps, RELAXED, RELEASE_THRESHOLD};
pub(crate) use self::backend::Gpu;
pub(crate) use self::context::Context;
pub(crate) use self::event::EventCell;
#[cfg(feature = "cuda")]
pub(crate) use self::library::absent_after;
pub(crate) use self::library::{Library, absent, device_count, find, load, number_of, text};
pub(crate) use self::queue::GpuQueue;
pub(crate) use self::runtime::{Before, Found, Memory, Peer, PointerKind, Runtime};
