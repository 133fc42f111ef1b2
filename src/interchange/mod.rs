//! Import and export of the C structs, and the rules of their ownership.

mod c_array;
#[cfg(feature = "async")]
mod checking;
mod export;
#[cfg(feature = "async")]
mod exporting;
mod foreign;
mod import;
mod options;
mod path;
mod release;
pub(crate) mod schema;
pub(crate) mod validate;

#[cfg(feature = "async")]
pub(crate) use checking::Checking;
#[cfg(feature = "async")]
pub(crate) use exporting::Exporting;
pub use options::{ExportOptions, ImportOptions, NullCounts, SyncPolicy, Validation};
pub use release::ReleasePolicy;
