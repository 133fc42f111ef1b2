//! Python: the Arrow PyCapsule interface for devices, through [`pyo3`], which is re-exported here.
//!
//! | function | for |
//! | --- | --- |
//! | [`array_to_python`] | what `__arrow_c_device_array__` answers |
//! | [`stream_to_python`] | what `__arrow_c_device_stream__` answers |
//! | [`host_stream_to_python`] | what `__arrow_c_stream__` answers, for consumers that do not know of devices |
//! | [`array_from_python`] | taking over an array or a batch from any object that has such a method |
//! | [`stream_from_python`] | taking over a stream, likewise |
//!
//! With the feature `dlpack`, columns also go through `__dlpack__`: `tensor_to_python`, `tensor_from_python` (which copies
//! memory that the host can read, since others may write to it), `tensor_from_python_shared` (which does not).
//!
//! There are no Python classes here: an extension module has its own. The crate `python` of the
//! repository is a complete one. Whether the module is an extension (`extension-module`,
//! `PYO3_BUILD_EXTENSION_MODULE`) or a program that embeds Python is the module's choice too.
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
//!         array_to_python(py, &self.0, &options, requested_schema, kwargs)
//!     }
//! }
//! ```
//!
//! # The interpreter
//!
//! While these functions, and the streams that go through them, wait for a device or for a producer, the thread is
//! detached from the interpreter, so that others may use it; [`Detached`] does that for readers. What else waits
//! (`to_host`, `to_device`) is the caller's to put into `py.detach`.
//!
//! Some producers' releases drop Python objects without attaching to the interpreter first. What came from Python is
//! therefore released by a thread that is attached: by this one if it is, else, some time later, by a thread that this
//! module starts for it, so that a release never waits for the interpreter. When the interpreter is gone, or going, such
//! memory is left alone: leaked, not released; and streams from Python end with an error.
//!
//! # Trust
//!
//! A capsule's pointers are trusted, as all of Python trusts them, and so is that one consumer at a time takes from a
//! capsule. Values are not: they are checked ([`Validation::Full`](crate::Validation::Full)) unless an `unsafe` variant
//! is asked not to. A stream of this module that is called while another call on it is under way refuses the second call
//! (`EBUSY`).
//!
//! Source: "The Arrow PyCapsule Interface" of the Arrow format documentation.

mod attached;
mod capsule;
mod data;
mod errors;
mod export;
mod import;
mod request;
mod stream;
#[cfg(feature = "dlpack")]
mod tensor;

pub use attached::Detached;
pub use data::{CapsuleArray, CapsuleStream};
pub use export::{array_to_python, host_stream_to_python, stream_to_python};
pub use import::{
    array_from_python, array_from_python_with, stream_from_python, stream_from_python_with,
};
pub use pyo3;
pub use request::check_request;
#[cfg(feature = "dlpack")]
pub use tensor::{tensor_from_python, tensor_from_python_shared, tensor_to_python};
