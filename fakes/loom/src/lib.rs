//! Runs the state of both sides of an async device stream, the very files, in every order of events.
#![cfg(test)]

#[path = "../../../src/stream/async_stream/producer/demand.rs"]
mod demand;
#[allow(dead_code)]
#[path = "../../../src/stream/async_stream/consumer/inbox.rs"]
mod inbox;
mod models;
mod sync;

/// Where those files look for their locks.
mod stream {
    pub(crate) mod async_stream {
        pub(crate) use crate::sync;
    }
}
