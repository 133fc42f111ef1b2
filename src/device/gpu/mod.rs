//! What GPU libraries share: the provider of a device over streams, events, pools and page-locked memory, for the
//! [engine](crate::device::engine). CUDA's driver and HIP's runtime have most calls alike ([`Calls`]); a vendor provides the rest
//! ([`Library`], [`Vendor`]).
//!
//! | file | contents |
//! | --- | --- |
//! | `vendor.rs` | what a vendor provides, and its library, loaded at run time |
//! | `api.rs` | handles, codes, and the table of functions that both libraries have |
//! | `context.rs` | the entry into the library, errors, when a device is lost, and events |
//! | `memory.rs` | memory of each kind, whose memory an address is, and lists of copies |
//! | `runtime.rs` | the provider and its streams |

mod api;
mod context;
mod memory;
mod runtime;
mod vendor;

pub(crate) use self::api::{Answer, Call, Calls, Code, RawEvent, RawStream, functions};
#[cfg(test)]
pub(crate) use self::api::{NOT_CAPTURED, PoolProps, RELAXED, RELEASE_THRESHOLD};
pub(crate) use self::context::{Event, Origin};
pub(crate) use self::runtime::{Gpu, Stream};
pub(crate) use self::vendor::{
    Found, Library, PointerKind, Vendor, device_count, find, has, load, text,
};
#[cfg(feature = "cuda")]
pub(crate) use self::{api::Failed, context::Context, memory::Block};
