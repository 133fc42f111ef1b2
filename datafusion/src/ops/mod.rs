//! Operators that need no kernel.

pub(super) mod coalesce;
pub(super) mod form;
pub(super) mod origin;
mod shared;
mod streams;
