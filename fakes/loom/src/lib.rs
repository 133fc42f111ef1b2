//! Checks the state of both sides of an async device stream, in the crate's own files, with the
//! model checker loom: in every order of events.
#![cfg(test)]

#[path = "../../../src/stream/async_stream/demand.rs"]
mod demand;
#[allow(dead_code)]
#[path = "../../../src/stream/async_stream/inbox.rs"]
mod inbox;
mod models;
mod sync;

/// The path by which those files import their locks.
mod stream {
    pub(crate) mod async_stream {
        pub(crate) use crate::sync;
    }
}
