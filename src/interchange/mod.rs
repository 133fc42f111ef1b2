//! C structs in and out; the ownership rules in one place.

mod arena;
mod cudf;
mod export;
mod import;
pub(crate) mod schema;
pub(crate) mod validate;

pub use cudf::check_for_cudf;
pub use export::{ExportOptions, NullCounts, ReleasePolicy, SyncPolicy};
pub use import::{ImportOptions, Validation};
