//! Arrays of any type.

use arrow_device::DeviceArray;
use arrow_device::python::{array_from_python, array_to_python};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::{export_options, open};

/// An array on a device.
#[pyclass(frozen)]
pub struct Array(pub DeviceArray);

#[pymethods]
impl Array {
    /// From any object with `__arrow_c_device_array__` or `__arrow_c_array__`, without a copy.
    #[new]
    fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        array_from_python(object).map(Self)
    }

    /// The device's name.
    #[getter]
    fn device(&self) -> String {
        self.0.device().to_string()
    }

    /// The data type, as arrow-rs writes it.
    #[getter]
    fn r#type(&self) -> String {
        self.0.data_type().to_string()
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// Elements without a copy.
    fn slice(&self, offset: usize, length: usize) -> PyResult<Self> {
        Ok(Self(self.0.slice(offset, length)?))
    }

    /// The same array on a device; nothing is copied if it is there.
    fn to(&self, py: Python<'_>, device: &str) -> PyResult<Self> {
        let device = open(py, device)?;
        Ok(Self(py.detach(|| self.0.to_device(&device))?))
    }

    #[pyo3(signature = (requested_schema = None, **kwargs))]
    fn __arrow_c_device_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<(Bound<'py, PyCapsule>, Bound<'py, PyCapsule>)> {
        let options = export_options(self.0.device());
        array_to_python(py, &self.0, &options, requested_schema, kwargs)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}
