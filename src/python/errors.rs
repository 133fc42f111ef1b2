//! Errors as Python exceptions.

use arrow_schema::ArrowError;
use pyo3::PyErr;
use pyo3::exceptions::{
    PyMemoryError, PyNotImplementedError, PyOSError, PyRuntimeError, PyValueError,
};

use super::attached::attached;
use crate::error::Error;

impl From<Error> for PyErr {
    /// By the errno: `ValueError` for input and arguments that break a rule, `NotImplementedError` for what a device
    /// cannot do or a device that is not there, `MemoryError`; else `OSError` with the errno of a foreign producer, and
    /// `RuntimeError` for what this crate's own devices report. The text is the error's. An exception of Python that a
    /// reader answered with is raised again as it was.
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
