//! [`Error`].

use std::borrow::Cow;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use arrow_device::DeviceId;
use arrow_schema::ArrowError;

/// The result of a fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The error type of this crate.
///
/// It converts to an [`arrow_device::Error`] (and so to an [`ArrowError`]), for readers and streams.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation of the core failed, or it refused what a peer sent.
    #[error(transparent)]
    Device(#[from] arrow_device::Error),
    /// A call of the system failed.
    #[error("{operation}: {source}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The peer sent what the protocol does not allow, or a description that does not fit the memory.
    #[error("the peer broke the protocol: {0}")]
    Protocol(Cow<'static, str>),
    /// The peer may not or cannot take part: another user, another version.
    #[error("refused: {0}")]
    Refused(Cow<'static, str>),
    /// The publisher's connection ended without an end of the stream: it has died, or was dropped.
    #[error("the publisher has gone without ending the stream")]
    PublisherDied,
    /// A subscriber's connection ended without a farewell.
    #[error("a subscriber has died")]
    SubscriberDied,
    /// The publisher ended the stream with an error.
    #[error("the publisher failed: {0}")]
    Failed(String),
    /// Nobody did in time what was waited for.
    #[error("timed out: {0}")]
    TimedOut(&'static str),
}

impl Error {
    pub(crate) fn protocol(what: impl Into<Cow<'static, str>>) -> Self {
        Self::Protocol(what.into())
    }

    /// Refuses what a peer sent.
    pub(crate) fn broken<T>(what: impl Into<Cow<'static, str>>) -> Result<T> {
        Err(Self::protocol(what))
    }

    /// Refuses what cannot take part.
    pub(crate) fn refused<T>(what: impl Into<Cow<'static, str>>) -> Result<T> {
        Err(Self::Refused(what.into()))
    }

    /// Refuses a device whose memory has no descriptors.
    pub(crate) fn not_shared(device: DeviceId, reason: &'static str) -> Self {
        Self::Device(arrow_device::Error::NotSupported {
            device,
            operation: "sharing with another process",
            reason: reason.into(),
        })
    }

    /// Makes an error of a failed call.
    pub(crate) fn of<E: Into<io::Error>>(operation: &'static str) -> impl Fn(E) -> Self {
        move |source| Self::Io {
            operation,
            source: source.into(),
        }
    }
}

/// Refuses what a forked child asks for that belongs to this process, its parent: it has neither the threads nor all of the memory, and
/// locks may be held for ever there.
pub(crate) fn check_process(process: u32) -> Result<()> {
    match process == std::process::id() {
        true => Ok(()),
        false => Error::refused("this process was forked; what it asks for is its parent's"),
    }
}

/// Locks a mutex whose data is consistent whenever the lock is free.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl From<Error> for arrow_device::Error {
    fn from(e: Error) -> Self {
        match e {
            Error::Device(e) => e,
            e => ArrowError::ExternalError(Box::new(e)).into(),
        }
    }
}
