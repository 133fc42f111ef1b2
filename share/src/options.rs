//! How a publisher behaves, and what it has done.

use std::time::Duration;

use crate::wire::Users;

/// What becomes of [`Publisher::send`](crate::Publisher::send) after a subscriber has died. Its leases end either way, at once: the system has
/// taken its mappings away.
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
#[derive(Clone, Debug)]
pub struct PublisherOptions {
    pub(crate) leases: usize,
    pub(crate) patience: Duration,
    pub(crate) dead: DeadPeers,
    pub(crate) users: Users,
}

impl Default for PublisherOptions {
    /// 16 leases for each subscriber, a patience of a minute, [`DeadPeers::Forget`], this process's own user.
    fn default() -> Self {
        Self {
            leases: 16,
            patience: Duration::from_secs(60),
            dead: DeadPeers::default(),
            users: Users::default(),
        }
    }
}

impl PublisherOptions {
    /// Sets how many batches a subscriber may have at a time, at least one. With so many, [`Publisher::send`](crate::Publisher::send) waits for it.
    #[must_use]
    pub fn with_leases(mut self, leases: usize) -> Self {
        self.leases = leases.max(1);
        self
    }

    /// Sets how long [`Publisher::send`](crate::Publisher::send) waits for a subscriber that has all its leases, before it returns [`Error::TimedOut`](crate::Error::TimedOut).
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Sets what becomes of [`Publisher::send`](crate::Publisher::send) after a subscriber has died.
    #[must_use]
    pub fn with_dead_peers(mut self, dead: DeadPeers) -> Self {
        self.dead = dead;
        self
    }

    /// Allows subscribers of another user. The socket's file is then open to everybody, and this check alone decides.
    #[must_use]
    pub fn with_user(mut self, user: u32) -> Self {
        self.users.0.push(user);
        self
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
