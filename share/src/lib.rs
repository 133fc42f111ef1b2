#![doc = include_str!("../README.md")]
#![cfg(target_os = "linux")]
#![deny(unsafe_op_in_unsafe_fn)]

mod build;
#[cfg(feature = "cuda")]
mod cuda;
mod describe;
mod device;
mod error;
mod lease;
mod manifest;
mod options;
mod peers;
mod publisher;
mod region;
mod schema;
mod sending;
mod stream;
mod subscriber;
mod wire;

#[cfg(feature = "cuda")]
pub use cuda::shared_cuda;
pub use device::{shared_cpu, shared_sim};
pub use error::{Error, Result};
pub use options::{DeadPeers, PublisherOptions, PublisherStats};
pub use publisher::Publisher;
pub use stream::SubscriberStream;
pub use subscriber::{Subscriber, SubscriberOptions};
pub use wire::socket_pair;

/// The programs of the guide, which are compiled.
#[cfg(doctest)]
#[doc = include_str!("../../docs/guide/processes.md")]
mod guide {}
