//! Record batches.

use std::sync::Arc;

use arrow_device::python::{
    array_from_python, array_to_python, host_array_to_python, schema_to_python, stream_from_python,
};
use arrow_device::{DeviceRecordBatch, DeviceRecordBatchReader, Devices};
use arrow_schema::Field;
use pyo3::exceptions::{PyIndexError, PyKeyError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PySlice};

use crate::array::Array;
use crate::schema::{Schema, summary};
use crate::signals::signalled;
use crate::target::{Device, Target, export_options};
use crate::{name_stream, range};

/// A record batch on a device: columns of the same length. A batch of any library is not copied.
///
/// `batch["id"]` and `batch[0]` are columns, and raise KeyError and IndexError if there is none; `batch[10:20]` is rows. None is copied.
///
/// Args:
///     data: an object with `__arrow_c_device_array__` or `__arrow_c_array__`. `Device.upload` and `Stream` take tables too.
///
/// Raises:
///     TypeError: for any other object.
///     ValueError: for invalid data, with the path of the field.
///     NotImplementedError: for a device that is not available.
#[pyclass(frozen, module = "arrow_device")]
pub(crate) struct RecordBatch(pub(crate) DeviceRecordBatch);

/// A column or rows.
#[derive(FromPyObject)]
enum Key<'py> {
    #[pyo3(annotation = "str")]
    Name(String),
    #[pyo3(annotation = "int")]
    Index(isize),
    #[pyo3(annotation = "slice")]
    Rows(Bound<'py, PySlice>),
}

#[pymethods]
impl RecordBatch {
    #[new]
    pub(crate) fn new(data: &Bound<'_, PyAny>) -> PyResult<Self> {
        let imported = array_from_python(data);
        imported.map(Self).map_err(|e| name_stream(data, e))
    }

    /// Makes a batch of arrays of the same length on one device, which are not copied.
    ///
    /// Raises:
    ///     ValueError: if there is no array, or if numbers, lengths or devices differ.
    #[staticmethod]
    fn from_arrays(arrays: Vec<Bound<'_, Array>>, names: Vec<String>) -> PyResult<Self> {
        if arrays.len() != names.len() {
            let text = format!("{} arrays and {} names", arrays.len(), names.len());
            return Err(PyValueError::new_err(text));
        }
        let arrays: Vec<_> = arrays.iter().map(|array| array.get().0.clone()).collect();
        let fields = arrays.iter().zip(names).map(|(array, name)| {
            let field = array.field().map(|field| field.as_ref().clone());
            let field = field.unwrap_or_else(|| Field::new("", array.data_type().clone(), true));
            field.with_name(name).with_nullable(true)
        });
        let schema = arrow_schema::Schema::new(fields.collect::<Vec<_>>());
        let batch = DeviceRecordBatch::try_new(Arc::new(schema), &arrays)?;
        Ok(Self(batch))
    }

    /// The device.
    #[getter]
    fn device(&self) -> Device {
        Device(self.0.device().clone())
    }

    /// The columns' names and types.
    #[getter]
    fn schema(&self) -> Schema {
        Schema(self.0.schema())
    }

    /// The number of rows, as `len(batch)`.
    #[getter]
    fn num_rows(&self) -> usize {
        self.0.num_rows()
    }

    /// The number of columns.
    #[getter]
    fn num_columns(&self) -> usize {
        self.0.num_columns()
    }

    /// The bytes of the allocations that the batch keeps alive: a slice keeps the whole of them.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.get_array_memory_size()
    }

    fn __len__(&self) -> usize {
        self.0.num_rows()
    }

    /// Returns a column by its name or its number, or the rows of a slice with a step of 1. Nothing is copied.
    fn __getitem__<'py>(&self, py: Python<'py>, key: Key<'py>) -> PyResult<Bound<'py, PyAny>> {
        let columns = self.0.num_columns();
        let column = match key {
            Key::Rows(rows) => {
                let (offset, length) = range(&rows, self.0.num_rows())?;
                let rows = self.slice(offset, length)?.into_pyobject(py)?;
                return Ok(rows.into_any());
            }
            Key::Name(name) => (self.0.column_by_name(&name)).map_err(|e| {
                PyKeyError::new_err(format!("{e}; there are {}", summary(self.0.schema_ref())))
            })?,
            Key::Index(index) => {
                let from_start = index + if index < 0 { columns as isize } else { 0 };
                let found = usize::try_from(from_start).ok().filter(|i| *i < columns);
                let text = || PyIndexError::new_err(format!("no column {index} of {columns}"));
                self.0.column(found.ok_or_else(text)?)?
            }
        };
        Ok(Array(column).into_pyobject(py)?.into_any())
    }

    /// Returns `length` rows from `offset` on, without copying them.
    ///
    /// Raises:
    ///     ValueError: if there are fewer.
    fn slice(&self, offset: usize, length: usize) -> PyResult<Self> {
        Ok(Self(self.0.slice(offset, length)?))
    }

    /// Returns the same batch on a device, given by itself or its name. Returns before the copy is done. A batch that is there
    /// already is not copied.
    ///
    /// Raises:
    ///     ValueError, NotImplementedError: as `Device(name)`, and for a copy that the devices cannot do.
    ///     MemoryError: if the device has no memory for it.
    fn to(&self, py: Python<'_>, device: Target<'_>) -> PyResult<Self> {
        let device = device.open(py)?;
        Ok(Self(py.detach(|| self.0.to_device(&device))?))
    }

    /// Waits for the batch, and returns it on the CPU. Memory that the host can read is not copied.
    ///
    /// Raises:
    ///     RuntimeError: the error of work that failed.
    ///     MemoryError: if the host has no memory for it.
    fn to_host(&self, py: Python<'_>) -> PyResult<Self> {
        let copied = || Devices::cpu().upload(&self.0.to_host()?);
        Ok(Self(py.detach(copied)?))
    }

    /// Whether all work that writes the batch is done. Does not wait.
    fn is_ready(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(py.detach(|| self.0.is_ready())?)
    }

    /// Waits until all work that writes the batch is done.
    ///
    /// Raises:
    ///     RuntimeError: the error of work that failed.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| self.0.wait())?)
    }

    #[pyo3(signature = (requested_schema = None, **kwargs))]
    fn __arrow_c_device_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<(Bound<'py, PyCapsule>, Bound<'py, PyCapsule>)> {
        let options = export_options(self.0.device().is_host_readable());
        array_to_python(py, self.0.clone(), &options, requested_schema, kwargs)
    }

    /// Raises:
    ///     NotImplementedError: if the host cannot read the batch.
    #[pyo3(signature = (requested_schema = None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyCapsule>, Bound<'py, PyCapsule>)> {
        host_array_to_python(py, self.0.clone(), requested_schema)
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        schema_to_python(py, self.0.schema_ref().as_ref())
    }

    fn __repr__(&self) -> String {
        let (rows, columns) = (self.0.num_rows(), self.0.num_columns());
        let (device, bytes) = (self.0.device(), self.nbytes());
        let schema = summary(self.0.schema_ref());
        format!(
            "<RecordBatch: {rows} rows of {columns} columns on {device}, {bytes} bytes; {schema}>"
        )
    }
}

impl RecordBatch {
    /// Reads any object with one of the Arrow methods as one batch on a device.
    pub(crate) fn read(data: &Bound<'_, PyAny>, device: &arrow_device::Device) -> PyResult<Self> {
        let py = data.py();
        let has = |method| data.hasattr(method);
        if has("__arrow_c_device_array__")? || has("__arrow_c_array__")? {
            let batch = Self::new(data)?;
            return Ok(Self(py.detach(|| batch.0.to_device(device))?));
        }
        if !has("__arrow_c_device_stream__")? && !has("__arrow_c_stream__")? {
            let text = "expected a table, a frame or a batch of an Arrow library, got an object of";
            let text = format!("{text} type {}", data.get_type().name()?);
            return Err(PyTypeError::new_err(text));
        }
        let reader = stream_from_python(data)?;
        Self::join(py, reader, device)
    }

    /// Moves all batches of a stream to a device, and joins them there.
    pub(crate) fn join(
        py: Python<'_>,
        reader: impl DeviceRecordBatchReader + Send,
        device: &arrow_device::Device,
    ) -> PyResult<Self> {
        let schema = reader.schema();
        let join = || {
            let mut batches = signalled(reader)
                .map(|batch| batch?.to_device(device)?.with_schema(schema.clone()))
                .collect::<arrow_device::Result<Vec<_>>>()?;
            match (batches.pop(), batches.is_empty()) {
                (None, _) => device.upload(&arrow_array::RecordBatch::new_empty(schema)),
                (Some(only), true) => Ok(only),
                (Some(last), false) => {
                    batches.push(last);
                    DeviceRecordBatch::concat(&schema, &batches, None)
                }
            }
        };
        Ok(Self(py.detach(join)?))
    }
}
