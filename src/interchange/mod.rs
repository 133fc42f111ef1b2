//! C structs in and out; the ownership rules in one place.

mod arena;
#[cfg(feature = "async")]
mod checking;
mod cudf;
mod export;
#[cfg(feature = "async")]
mod exporting;
mod import;
mod options;
mod path;
pub(crate) mod schema;
pub(crate) mod validate;

#[cfg(feature = "async")]
pub(crate) use checking::Checking;
pub use cudf::check_for_cudf;
pub use export::{ExportOptions, NullCounts, ReleasePolicy, SyncPolicy};
#[cfg(feature = "async")]
pub(crate) use exporting::Exporting;
pub use options::{ImportOptions, Validation};
