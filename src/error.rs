//! One error type for the whole crate.

use std::borrow::Cow;
use std::sync::Arc;

use arrow_schema::ArrowError;

use crate::abi::DeviceId;

/// What every fallible call of this crate returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation did not succeed.
///
/// Variants are named by outcome. Each carries what is needed to act on it: the device, the
/// operation, sizes in bytes, the field path (`children[2].buffers[1]`) and the cause.
///
/// Crossing into arrow-rs an error becomes [`ArrowError::ExternalError`]; converting such an
/// [`ArrowError`] back gives the original error again. Crossing the C boundary it becomes an
/// errno ([`Error::errno`]) and a text.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No backend serves this device, or it could not be started.
    #[error("device {device} is not available: {reason}")]
    DeviceNotAvailable {
        /// The device that was asked for.
        device: DeviceId,
        /// What is missing and what to do about it.
        reason: Cow<'static, str>,
    },
    /// The device exists, but cannot do this.
    #[error("{operation} is not supported on {device}: {reason}")]
    NotSupported {
        /// The device.
        device: DeviceId,
        /// The operation that was refused.
        operation: &'static str,
        /// Why, and what to do instead.
        reason: Cow<'static, str>,
    },
    /// The device, or the host on its behalf, has no memory left.
    #[error("out of memory on {device}: {operation} asked for {bytes} bytes")]
    OutOfMemory {
        /// The device.
        device: DeviceId,
        /// The operation that asked.
        operation: &'static str,
        /// How many bytes it asked for.
        bytes: usize,
    },
    /// A call of the device's runtime failed.
    #[error("{operation} failed on {device}: {message} (code {code})")]
    Device {
        /// The device.
        device: DeviceId,
        /// The call that failed.
        operation: &'static str,
        /// The runtime's own code.
        code: i32,
        /// The runtime's own text.
        message: Cow<'static, str>,
    },
    /// Data from outside breaks a rule of the Arrow format or of the C interfaces.
    #[error("invalid input at {path}: {message}")]
    InvalidInput {
        /// Where, from the root: `array.children[2].buffers[1]`, `schema.children[0].name`.
        path: Cow<'static, str>,
        /// Which rule it breaks.
        message: Cow<'static, str>,
    },
    /// A caller's argument does not fit: an index, a range, a type, another device.
    #[error("invalid argument: {0}")]
    InvalidArgument(Cow<'static, str>),
    /// A C struct or stream was used after its release.
    #[error("{0} was already released")]
    Released(&'static str),
    /// A callback of a foreign producer answered with an error.
    #[error("{operation} of a foreign producer failed with errno {errno}: {message}")]
    Foreign {
        /// The callback.
        operation: &'static str,
        /// The errno that it returned.
        errno: i32,
        /// Its own text, or a note that it gave none.
        message: Cow<'static, str>,
    },
    /// The producer of an async device stream reported an error, or could not hand over what it announced.
    #[cfg(feature = "async")]
    #[error("the producer of an async stream reported errno {errno}: {message}")]
    AsyncProducer {
        /// The producer's own code.
        errno: i32,
        /// Its own text, or a note that it gave none.
        message: Cow<'static, str>,
        /// Whatever else it told of the error.
        metadata: std::collections::HashMap<String, String>,
    },
    /// A panic or a foreign exception was caught at the C boundary.
    #[error("{operation} panicked: {message}")]
    Panic {
        /// The callback in which it happened.
        operation: &'static str,
        /// The panic's text, or what threw: `a C++ exception (std::runtime_error)`.
        message: Cow<'static, str>,
    },
    /// The operation was cancelled.
    #[error("{operation} was cancelled")]
    Cancelled {
        /// The operation.
        operation: &'static str,
    },
    /// An error of arrow-rs.
    #[error("{0}")]
    Arrow(#[source] Arc<ArrowError>),
}

impl Error {
    /// [`Error::InvalidInput`] at `path`.
    pub(crate) fn invalid(
        path: impl Into<Cow<'static, str>>,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::InvalidInput {
            path: path.into(),
            message: message.into(),
        }
    }

    /// [`Error::InvalidArgument`].
    pub(crate) fn argument(message: impl Into<Cow<'static, str>>) -> Self {
        Self::InvalidArgument(message.into())
    }

    /// The errno that stands for this error at a C boundary: `EINVAL`, `ENOMEM`, `EIO`,
    /// `ENOTSUP`, `ECANCELED`, or a foreign producer's own errno, unchanged. Never 0: an error does not
    /// look like success.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            Self::DeviceNotAvailable { .. } | Self::NotSupported { .. } => libc::ENOTSUP,
            Self::OutOfMemory { .. } => libc::ENOMEM,
            Self::InvalidInput { .. } | Self::InvalidArgument(_) | Self::Released(_) => {
                libc::EINVAL
            }
            Self::Foreign { errno, .. } => *errno,
            #[cfg(feature = "async")]
            Self::AsyncProducer { errno, .. } => *errno,
            Self::Cancelled { .. } => libc::ECANCELED,
            Self::Device { .. } | Self::Panic { .. } => libc::EIO,
            Self::Arrow(e) => match e.as_ref() {
                ArrowError::MemoryError(_) => libc::ENOMEM,
                ArrowError::NotYetImplemented(_) => libc::ENOTSUP,
                ArrowError::InvalidArgumentError(_)
                | ArrowError::SchemaError(_)
                | ArrowError::CDataInterface(_)
                | ArrowError::ParseError(_)
                | ArrowError::CastError(_) => libc::EINVAL,
                _ => libc::EIO,
            },
        };
        if errno == 0 { libc::EIO } else { errno }
    }
}

impl From<ArrowError> for Error {
    /// Gives back the original error if `e` carries one of ours, else wraps `e`.
    fn from(e: ArrowError) -> Self {
        match e {
            ArrowError::ExternalError(source) => match source.downcast::<Error>() {
                Ok(ours) => *ours,
                Err(source) => Self::Arrow(Arc::new(ArrowError::ExternalError(source))),
            },
            e => Self::Arrow(Arc::new(e)),
        }
    }
}

impl From<Error> for ArrowError {
    fn from(e: Error) -> Self {
        Self::ExternalError(Box::new(e))
    }
}
