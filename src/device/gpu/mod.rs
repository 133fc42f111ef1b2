//! What GPU libraries share: a backend over streams, events, pools and page-locked memory. CUDA's
//! driver and HIP's runtime have most calls alike ([`Calls`]); a vendor provides the rest
//! ([`Library`], [`Runtime`]).
//!
//! | file | contents |
//! | --- | --- |
//! | `runtime.rs` | what a vendor provides, and its library, loaded at run time |
//! | `api.rs` | handles, codes, and the table of functions that both libraries have |
//! | `context.rs` | what a device and its queues share: the entry into the library, errors, streams to destroy |
//! | `kept.rs` | what a device keeps for its next use: events, and memory that is slow to free |
//! | `memory.rs` | memory in no stream's order, and where it is freed |
//! | `queue.rs` | streams as queues |
//! | `backend.rs` | the backend itself |

mod api;
mod backend;
mod context;
mod kept;
mod memory;
mod queue;
mod runtime;

pub(crate) use self::api::{Answer, Call, Calls, Code, RawEvent, RawStream, functions};
#[cfg(test)]
pub(crate) use self::api::{NOT_CAPTURED, PoolProps, RELAXED, RELEASE_THRESHOLD};
pub(crate) use self::backend::Gpu;
pub(crate) use self::kept::EventCell;
pub(crate) use self::queue::GpuQueue;
pub(crate) use self::runtime::{
    Found, Library, PointerKind, Runtime, device_count, find, load, text,
};
#[cfg(feature = "cuda")]
pub(crate) use self::{api::Failed, context::Context};
