//! [`Error`], the error type of this crate.

use std::borrow::Cow;
use std::sync::Arc;

use arrow_schema::ArrowError;

use crate::abi::DeviceId;

/// The result of a fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The error type of this crate.
///
/// Each variant has what is needed to act on it: the device, the operation, sizes in bytes, the field path
/// (`children[2].buffers[1]`) and the cause.
///
/// Converted to an [`ArrowError`], an error becomes [`ArrowError::ExternalError`]; converting that back returns the original error.
/// At the C boundary it becomes an errno ([`Error::errno`]) and a message.
///
/// ```
/// use arrow_device::{Devices, Error};
/// use arrow_schema::ArrowError;
///
/// let error: Error = Devices::open("no such device").unwrap_err();
/// let in_arrow = ArrowError::from(error);
/// assert!(matches!(Error::from(in_arrow), Error::InvalidArgument(_)));
/// ```
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no backend for this device, or it could not be started.
    #[error("device {device} is not available: {reason}")]
    DeviceNotAvailable {
        /// The requested device.
        device: DeviceId,
        /// What is missing and what to do about it.
        reason: Cow<'static, str>,
    },
    /// The device does not support this operation.
    #[error("{operation} is not supported on {device}: {reason}")]
    NotSupported {
        /// The device.
        device: DeviceId,
        /// The operation.
        operation: &'static str,
        /// Why, and what to do instead.
        reason: Cow<'static, str>,
    },
    /// The device, or the host on its behalf, has not enough memory.
    #[error("out of memory on {device}: {operation} asked for {bytes} bytes")]
    OutOfMemory {
        /// The device.
        device: DeviceId,
        /// The operation that needed the memory.
        operation: &'static str,
        /// The number of bytes requested.
        bytes: usize,
    },
    /// A call of the device's runtime failed.
    #[error("{operation} failed on {device}: {message} (code {code})")]
    Device {
        /// The device.
        device: DeviceId,
        /// The call that failed.
        operation: &'static str,
        /// The runtime's error code.
        code: i32,
        /// The runtime's message.
        message: Cow<'static, str>,
    },
    /// Imported data violates a rule of the Arrow format or of the C interfaces.
    #[error("invalid input at {path}: {message}")]
    InvalidInput {
        /// The path from the root: `array.children[2].buffers[1]`, `schema.children[0].name`.
        path: Cow<'static, str>,
        /// The rule that it violates.
        message: Cow<'static, str>,
    },
    /// An argument is invalid: an index, a range, a type, a value of another device.
    #[error("invalid argument: {0}")]
    InvalidArgument(Cow<'static, str>),
    /// A C struct or stream was used after its release.
    #[error("{0} was already released")]
    Released(&'static str),
    /// A callback of a foreign producer returned an error.
    #[error("{operation} of a foreign producer failed with errno {errno}: {message}")]
    Foreign {
        /// The callback.
        operation: &'static str,
        /// The errno that it returned.
        errno: i32,
        /// The producer's message, or a note that there is none.
        message: Cow<'static, str>,
    },
    /// The producer of an async device stream reported an error, or failed to hand over a task.
    #[cfg(feature = "async")]
    #[error("the producer of an async stream reported errno {errno}: {message}")]
    AsyncProducer {
        /// The producer's errno.
        errno: i32,
        /// The producer's message, or a note that there is none.
        message: Cow<'static, str>,
        /// Metadata of the error.
        metadata: std::collections::HashMap<String, String>,
    },
    /// A panic was caught at the C boundary.
    #[error("{operation} panicked: {message}")]
    Panic {
        /// The callback in which it happened.
        operation: &'static str,
        /// The panic's message.
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

/// Returns an [`Error::InvalidArgument`] from the function. Its text is that of [`format!`].
macro_rules! bail {
    ($($text:tt)*) => {
        return Err($crate::error::Error::argument(format!($($text)*)))
    };
}
pub(crate) use bail;

impl Error {
    /// Creates an [`Error::InvalidInput`].
    pub(crate) fn invalid(
        path: impl Into<Cow<'static, str>>,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::InvalidInput {
            path: path.into(),
            message: message.into(),
        }
    }

    /// Creates an [`Error::InvalidArgument`].
    pub(crate) fn argument(message: impl Into<Cow<'static, str>>) -> Self {
        Self::InvalidArgument(message.into())
    }

    /// Returns the errno for this error at a C boundary: `EINVAL`, `ENOMEM`, `EIO`, `ENOTSUP`, `ECANCELED`, or the errno of a
    /// foreign producer, unchanged unless it is 0, which would mean success: then `EIO`. An error of another library that was caused by
    /// one of this crate has the errno of that one.
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
                // Another library's error may have been caused by one of this crate's.
                ArrowError::ExternalError(e) => caused_by(&**e).map_or(libc::EIO, Self::errno),
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

/// The first error of this crate among what caused `e`, and itself.
fn caused_by<'a>(e: &'a (dyn std::error::Error + 'static)) -> Option<&'a Error> {
    std::iter::successors(Some(e), |e| e.source()).find_map(|e| e.downcast_ref())
}

impl From<ArrowError> for Error {
    /// Returns the original error if `e` wraps an [`Error`], and else wraps `e`.
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
