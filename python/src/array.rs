//! Arrays of any type.

use arrow_device::abi::ArrowDeviceType;
use arrow_device::dlpack::{DLDataType, DLDevice, DlpackOptions, DlpackStream};
use arrow_device::python::{
    array_from_python, array_to_python, host_array_to_python, schema_to_python, tensor_from_python,
    tensor_from_python_shared, tensor_to_python,
};
use arrow_device::{DeviceArray, Error};
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};

use crate::{export_options, name_stream, open};

/// An array on a device.
#[pyclass(frozen)]
pub(crate) struct Array(pub(crate) DeviceArray);

#[pymethods]
impl Array {
    /// Makes an array of any object with `__arrow_c_device_array__` or `__arrow_c_array__`, without copying it.
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

    /// The data type, as arrow-rs writes it.
    #[getter]
    fn r#type(&self) -> String {
        self.0.data_type().to_string()
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// Returns some of the elements, without copying them.
    fn slice(&self, offset: usize, length: usize) -> PyResult<Self> {
        Ok(Self(self.0.slice(offset, length)?))
    }

    /// Returns the same array on a device. An array that is already there is not copied.
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

    /// Raises an error if the host cannot read the array.
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

    /// Makes an array of any object with `__dlpack__` and `__dlpack_device__`. Memory that the host can read is copied, unless
    /// `copy=False` asks to share it. Then nothing may write to it while the array, or anything made of it, lives.
    #[staticmethod]
    #[pyo3(signature = (object, *, copy = None))]
    fn from_dlpack(object: &Bound<'_, PyAny>, copy: Option<bool>) -> PyResult<Self> {
        let column = match copy {
            // SAFETY: the documentation above requires Python code that passes `copy=False` to guarantee that nothing writes.
            Some(false) => unsafe { tensor_from_python_shared(object) },
            _ => tensor_from_python(object),
        };
        column.map(Self)
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        // SAFETY: the DLPack protocol obliges the Python code that calls this to pass a live stream of the array's device,
        // and not to write to a tensor that is not a copy.
        unsafe { tensor_to_python(py, &self.0, stream, max_version, dl_device, copy) }
    }

    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        let device = DLDevice::try_from(self.0.device().id())?;
        Ok((device.device_type.value(), device.device_id))
    }

    /// The CUDA Array Interface, version 3, for the same columns as `__dlpack__`. Other arrays
    /// do not have this attribute. The array must live until the consumer's work is done.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let absent =
            |e: Error| PyAttributeError::new_err(format!("no __cuda_array_interface__: {e}"));
        let (array, id) = (&self.0, self.0.device().id());
        if !matches!(
            id.device_type,
            ArrowDeviceType::CUDA | ArrowDeviceType::CUDA_MANAGED
        ) {
            return Err(PyAttributeError::new_err(format!(
                "{id} is not a CUDA device"
            )));
        }
        // The queue waits until the data is ready; the consumer waits for the queue's stream.
        let queue = array.device().default_queue();
        let options = DlpackOptions::new(DlpackStream::from(&queue));
        let tensor = py
            .detach(|| array.export_dlpack(&options))
            .map_err(absent)?;
        let stream = queue.dlpack_stream().map_err(absent)?;
        let bytes = tensor.data_type().bits / 8;
        let kind = match tensor.data_type().code {
            DLDataType::INT => 'i',
            DLDataType::UINT => 'u',
            DLDataType::BOOL => 'b',
            _ => 'f',
        };
        let order = if bytes == 1 { '|' } else { '<' };
        let read_only = true;
        let dict = PyDict::new(py);
        dict.set_item("version", 3)?;
        dict.set_item("shape", PyTuple::new(py, tensor.shape())?)?;
        dict.set_item("typestr", format!("{order}{kind}{bytes}"))?;
        dict.set_item("data", (tensor.address().address(), read_only))?;
        dict.set_item("strides", py.None())?;
        dict.set_item("stream", stream)?;
        Ok(dict)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}
