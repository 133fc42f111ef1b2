//! Record batches.

use arrow_device::DeviceRecordBatch;
use arrow_device::python::{
    array_from_python, array_to_python, host_array_to_python, schema_to_python,
};
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::array::Array;
use crate::{export_options, name_stream, open};

/// A record batch on a device.
#[pyclass(frozen)]
pub(crate) struct Batch(pub(crate) DeviceRecordBatch);

#[pymethods]
impl Batch {
    /// Makes a batch of any object with `__arrow_c_device_array__` or `__arrow_c_array__`, without copying it.
    #[new]
    fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let imported = array_from_python(object);
        imported.map(Self).map_err(|e| name_stream(object, e))
    }

    /// The device's name.
    #[getter]
    fn device(&self) -> String {
        self.0.device().to_string()
    }

    #[getter]
    fn column_names(&self) -> Vec<String> {
        let schema = self.0.schema();
        schema.fields().iter().map(|f| f.name().clone()).collect()
    }

    fn __len__(&self) -> usize {
        self.0.num_rows()
    }

    /// Returns a column by its name.
    fn __getitem__(&self, name: &str) -> PyResult<Array> {
        match self.0.column_by_name(name) {
            Ok(column) => Ok(Array(column)),
            Err(e) => Err(PyKeyError::new_err(e.to_string())),
        }
    }

    /// Returns some of the rows, without copying them.
    fn slice(&self, offset: usize, length: usize) -> PyResult<Self> {
        Ok(Self(self.0.slice(offset, length)?))
    }

    /// Returns the same batch on a device. A batch that is already there is not copied.
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

    /// Raises an error if the host cannot read the batch.
    #[pyo3(signature = (requested_schema = None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyCapsule>, Bound<'py, PyCapsule>)> {
        host_array_to_python(py, &self.0, requested_schema)
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        schema_to_python(py, &self.0)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}
