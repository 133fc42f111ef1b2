//! Converts errors to Python exceptions.

use arrow_schema::ArrowError;
use pyo3::exceptions::{
    PyMemoryError, PyNotImplementedError, PyOSError, PyRuntimeError, PyTypeError, PyValueError,
};
use pyo3::prelude::*;

use super::attached::attached;
use crate::error::Error;

impl From<Error> for PyErr {
    /// Chooses the exception by the errno: `ValueError` for invalid input and arguments, `NotImplementedError` for a device
    /// that is not available or does not support the operation, `MemoryError`; otherwise `OSError` with the errno of a
    /// foreign producer, or `RuntimeError` for errors of this crate's own devices. The text is the error's. A Python
    /// exception that a reader returned is raised again unchanged.
    fn from(e: Error) -> Self {
        if let Some(raised) = raised(&e) {
            return raised;
        }
        let text = e.to_string();
        match (e.errno(), &e) {
            (libc::EINVAL, _) => PyValueError::new_err(text),
            (libc::ENOMEM, _) => PyMemoryError::new_err(text),
            (libc::ENOTSUP | libc::ENOSYS, _) => PyNotImplementedError::new_err(text),
            (errno, Error::Foreign { .. }) => PyOSError::new_err((errno, text)),
            _ => PyRuntimeError::new_err(text),
        }
    }
}

fn raised(e: &Error) -> Option<PyErr> {
    let Error::Arrow(e) = e else { return None };
    let ArrowError::ExternalError(source) = e.as_ref() else {
        return None;
    };
    let raised = source.downcast_ref::<PyErr>()?;
    attached(|py| raised.clone_ref(py))
}

/// The error for an object of a wrong type.
pub(super) fn wrong_type(object: &Bound<'_, PyAny>, expected: &str) -> PyResult<PyErr> {
    let name = object.get_type().name()?;
    let text = format!("expected {expected}, got an object of type {name}");
    Ok(PyTypeError::new_err(text))
}
