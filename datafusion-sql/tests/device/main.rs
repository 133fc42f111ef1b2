//! What must hold of plans with device operators in them.

mod kit;
mod plans;
mod transfers;
