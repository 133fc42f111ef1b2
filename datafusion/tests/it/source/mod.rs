//! Tables of real sources: what they declare, what reaches them, and what may be inserted.

mod declared;
mod dml;
mod elsewhere;
mod filters;
mod insert;
mod requests;
mod statistics;
mod streams;
pub(crate) mod watched;
