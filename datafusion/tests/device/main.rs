//! What must hold of plans with device operators in them.

mod errors;
mod kit;
mod lifetime;
mod merged;
mod operator;
mod plans;
mod runtimes;
mod schemas;
mod sink;
mod transfers;
