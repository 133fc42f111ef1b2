//! Errors as Python exceptions.

use pyo3::PyErr;
use pyo3::exceptions::{
    PyMemoryError, PyNotImplementedError, PyOSError, PyRuntimeError, PyValueError,
};

use crate::error::Error;

impl From<Error> for PyErr {
    /// `ValueError` for input and arguments that break a rule, `NotImplementedError` for what a device cannot do or a
    /// device that is not there, `MemoryError`, `OSError` with the errno of a foreign producer, `RuntimeError` for what
    /// else fails. The text is the error's.
    fn from(e: Error) -> Self {
        let text = e.to_string();
        match e {
            Error::OutOfMemory { .. } => PyMemoryError::new_err(text),
            Error::Foreign { errno, .. } => PyOSError::new_err((errno, text)),
            Error::DeviceNotAvailable { .. } | Error::NotSupported { .. } => {
                PyNotImplementedError::new_err(text)
            }
            e => match e.errno() {
                libc::EINVAL => PyValueError::new_err(text),
                libc::ENOMEM => PyMemoryError::new_err(text),
                libc::ENOTSUP => PyNotImplementedError::new_err(text),
                _ => PyRuntimeError::new_err(text),
            },
        }
    }
}
