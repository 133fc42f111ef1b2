//! Exchanges device data with Python objects through the Arrow PyCapsule interface (feature `pyo3`).
//!
//! An extension module written with [`pyo3`], which is re-exported here, calls these functions in the methods of its own
//! classes:
//!
//! ```
//! use arrow_device::python::pyo3::prelude::*;
//! use arrow_device::python::pyo3::types::{PyCapsule, PyDict};
//! use arrow_device::python::{array_from_python, array_to_python};
//! use arrow_device::{DeviceRecordBatch, ExportOptions, SyncPolicy};
//!
//! struct Batch(DeviceRecordBatch); // a #[pyclass]
//!
//! impl Batch {
//!     // #[staticmethod]
//!     fn from_arrow(object: &Bound<'_, PyAny>) -> PyResult<Self> {
//!         array_from_python(object).map(Self)
//!     }
//!
//!     // #[pyo3(signature = (requested_schema = None, **kwargs))]
//!     fn __arrow_c_device_array__<'py>(
//!         &self,
//!         py: Python<'py>,
//!         requested_schema: Option<&Bound<'py, PyAny>>,
//!         kwargs: Option<&Bound<'py, PyDict>>,
//!     ) -> PyResult<(Bound<'py, PyCapsule>, Bound<'py, PyCapsule>)> {
//!         let options = ExportOptions::new(SyncPolicy::Event);
//!         array_to_python(py, self.0.clone(), &options, requested_schema, kwargs)
//!     }
//! }
//! ```
//!
//! | function | use |
//! | --- | --- |
//! | [`array_to_python`], [`stream_to_python`] | make the results of `__arrow_c_device_array__` and `__arrow_c_device_stream__` |
//! | [`host_array_to_python`], [`host_stream_to_python`] | make the results of `__arrow_c_array__` and `__arrow_c_stream__`, for consumers that do not support devices |
//! | [`schema_to_python`] | makes the result of `__arrow_c_schema__` |
//! | [`array_from_python`] | imports an array or a batch from any object with such a method |
//! | [`stream_from_python`] | imports a stream from any object with such a method |
//! | [`schema_from_python`] | imports a schema from any object with such a method |
//!
//! With the feature `dlpack`, columns are also exchanged through `__dlpack__`: `tensor_to_python`, `tensor_from_python`
//! (which copies memory that the host can read, since others may write to it) and `tensor_from_python_shared` (which never
//! copies).
//!
//! There are no Python classes here: an extension module has its own. The folder `python` of the repository is a complete
//! package. Whether an extension module is built (pyo3's feature `extension-module`, or `PYO3_BUILD_EXTENSION_MODULE`) or a
//! program that embeds Python is decided by the crate that uses this one.
//!
//! # Host methods
//!
//! Most libraries (polars, DuckDB, DataFusion, pandas) know the methods without `device` only. An object whose data the host can
//! read should have them too. If the host cannot read the data, such a method raises an error, so that nothing is copied
//! unasked, and consumers that know devices call the other one. An object whose data is never readable for the host does without.
//!
//! # The interpreter
//!
//! While these functions and the streams that they make wait for a device or for a producer, they release the interpreter
//! (the GIL), so that other threads can use it. Other calls that wait, such as `to_host`, `to_device` and the `next` of a reader on
//! the host, belong in `py.detach`.
//!
//! The releases of some producers drop Python objects without attaching to the interpreter first. Data from Python is
//! therefore released by a thread that is attached: by the current thread if it is, otherwise, somewhat later, by a thread
//! that this module starts. So a release never waits for the interpreter. Once the interpreter is shutting down, such data
//! is leaked instead, and streams from Python end with an error.
//!
//! # Trust
//!
//! The pointers in a capsule are trusted, as everywhere in Python. So is the rule that only one consumer takes the struct out
//! of it. Values are not trusted: they are checked ([`Validation::Full`](crate::Validation::Full)). If a stream of this module is
//! called while another call on it is under way, the second call fails with `EBUSY`.
//!
//! The interface is specified in "The Arrow PyCapsule Interface" of the Arrow format documentation.

use arrow_schema::ArrowError;
use pyo3::exceptions::{
    PyMemoryError, PyNotImplementedError, PyOSError, PyRuntimeError, PyTypeError, PyValueError,
};
use pyo3::prelude::*;

use crate::error::Error;
use attached::attached;

mod attached;
mod capsule;
mod export;
mod import;
mod stream;
#[cfg(feature = "dlpack")]
mod tensor;

pub use export::{
    array_to_python, check_request, host_array_to_python, host_stream_to_python, schema_to_python,
    stream_to_python,
};
pub use import::{array_from_python, schema_from_python, stream_from_python};
pub use pyo3;
#[cfg(feature = "dlpack")]
pub use tensor::{tensor_from_python, tensor_from_python_shared, tensor_to_python};

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
fn wrong_type(object: &Bound<'_, PyAny>, expected: &str) -> PyResult<PyErr> {
    let name = object.get_type().name()?;
    let text = format!("expected {expected}, got an object of type {name}");
    Ok(PyTypeError::new_err(text))
}
