//! Import and export of the C structs, and the rules of their ownership.

mod c_array;
mod export;
mod foreign;
mod import;
mod options;
mod path;
pub(crate) mod schema;
pub(crate) mod validate;

#[cfg(feature = "async")]
pub(crate) use export::export_async;
#[cfg(feature = "async")]
pub(crate) use import::check_async;
pub use options::{ExportOptions, ImportOptions, ReleasePolicy, SyncPolicy, Validation};
