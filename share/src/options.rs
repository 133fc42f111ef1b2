//! How a publisher behaves, and what it has done.

use std::time::Duration;

/// What becomes of [`Publisher::send`](crate::Publisher::send) after a subscriber has died. Its leases end either way: at once, as the system has
/// taken its mappings away. Those of one that broke the protocol end when it returns them, or ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum DeadPeers {
    /// It is counted ([`PublisherStats::died`]), and others are served on.
    #[default]
    Forget,
    /// The next call of `send` returns [`Error::SubscriberDied`](crate::Error::SubscriberDied), once for each.
    Report,
}

/// How a [`Publisher`](crate::Publisher) behaves.
///
/// ```
/// use arrow_device_share::{Publisher, PublisherOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("batches");
/// let options = PublisherOptions { leases: 4, ..Default::default() };
/// let publisher = Publisher::bind_with(&path, options)?;
/// # drop(publisher);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct PublisherOptions {
    /// How many batches a subscriber may have at a time, 16 by default and at least one. With so many,
    /// [`Publisher::send`](crate::Publisher::send) waits for it.
    pub leases: usize,
    /// How long [`Publisher::send`](crate::Publisher::send) waits for a subscriber that has all its leases, before it returns
    /// [`Error::TimedOut`](crate::Error::TimedOut): a minute by default.
    pub patience: Duration,
    /// What becomes of [`Publisher::send`](crate::Publisher::send) after a subscriber has died.
    pub dead_peers: DeadPeers,
    /// Other users whose processes may subscribe, beside this process's own. With any, the socket's file is open to everybody, and this
    /// check alone decides.
    pub users: Vec<u32>,
}

impl Default for PublisherOptions {
    fn default() -> Self {
        Self {
            leases: 16,
            patience: Duration::from_secs(60),
            dead_peers: DeadPeers::default(),
            users: Vec::new(),
        }
    }
}

/// What a publisher has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PublisherStats {
    /// Batches that were sent.
    pub batches: u64,
    /// How many of these had to be copied first, because they did not lie in one shareable allocation.
    pub copied_batches: u64,
    /// Bytes of memory that these keep, all of which were copied once.
    pub copied_bytes: u64,
    /// Subscribers now.
    pub subscribers: usize,
    /// Batches and dictionaries that subscribers have now.
    pub leases: usize,
    /// Subscribers that have gone in order.
    pub left: u64,
    /// Subscribers that have died, or broke the protocol.
    pub died: u64,
}
