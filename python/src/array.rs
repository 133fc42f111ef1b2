//! Arrays of any type.

use arrow_device::abi::ArrowDeviceType;
use arrow_device::dlpack::{DLDataType, DLDevice, DlpackOptions, DlpackStream};
use arrow_device::python::{
    array_from_python, array_to_python, host_array_to_python, schema_to_python, tensor_from_python,
    tensor_from_python_shared, tensor_to_python,
};
use arrow_device::{DeviceArray, Devices, Error};
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PySlice, PyTuple};

use crate::target::{Device, Target, export_options};
use crate::{name_stream, range};

/// An array on a device: a column, or an array of any library, which is not copied.
///
/// `array[10:20]` is a slice, which is not copied. Single elements are not read from a device: copy with `to_host()`, and pass the array to
/// another library.
///
/// Args:
///     data: an object with `__arrow_c_device_array__` or `__arrow_c_array__`. `from_dlpack` takes tensors.
///
/// Raises:
///     TypeError: for any other object.
///     ValueError: for invalid data, with the path of the field.
///     NotImplementedError: for a device that is not available.
#[pyclass(frozen, module = "arrow_device")]
pub(crate) struct Array(pub(crate) DeviceArray);

#[pymethods]
impl Array {
    #[new]
    fn new(data: &Bound<'_, PyAny>) -> PyResult<Self> {
        let imported = array_from_python(data);
        imported.map(Self).map_err(|e| name_stream(data, e))
    }

    /// The device.
    #[getter]
    fn device(&self) -> Device {
        Device(self.0.device().clone())
    }

    /// The type, as arrow-rs writes it: "Int64", "Utf8".
    #[getter]
    fn r#type(&self) -> String {
        self.0.data_type().to_string()
    }

    /// The number of nulls, or None while it is unknown, since that would have to be read from the device.
    #[getter]
    fn null_count(&self) -> Option<usize> {
        self.0.null_count()
    }

    /// The bytes of the allocations that the array keeps alive: a slice keeps the whole of them.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.get_array_memory_size()
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// Returns `length` elements from `offset` on, without copying them.
    ///
    /// Raises:
    ///     ValueError: if there are fewer.
    fn slice(&self, offset: usize, length: usize) -> PyResult<Self> {
        Ok(Self(self.0.slice(offset, length)?))
    }

    /// Returns the elements of a slice with a step of 1, without copying them.
    fn __getitem__(&self, key: &Bound<'_, PyAny>) -> PyResult<Self> {
        let key = key.cast::<PySlice>();
        let text = "an array has slices, such as array[0:1], and no single values";
        let key = key.map_err(|_| PyTypeError::new_err(text))?;
        let (offset, length) = range(key, self.0.len())?;
        self.slice(offset, length)
    }

    /// Returns the same array on a device, given by itself or its name. Returns before the copy is done. An array that is there
    /// already is not copied.
    ///
    /// Raises:
    ///     ValueError, NotImplementedError: as `Device(name)`, and for a copy that the devices cannot do.
    ///     MemoryError: if the device has no memory for it.
    fn to(&self, py: Python<'_>, device: Target<'_>) -> PyResult<Self> {
        let device = device.open(py)?;
        Ok(Self(py.detach(|| self.0.to_device(&device))?))
    }

    /// Waits for the array, and returns it on the CPU. Memory that the host can read is not copied.
    ///
    /// Raises:
    ///     RuntimeError: the error of work that failed.
    ///     MemoryError: if the host has no memory for it.
    fn to_host(&self, py: Python<'_>) -> PyResult<Self> {
        let copied = || match self.0.field() {
            Some(field) => self.on_cpu()?.with_field(field.clone()),
            None => self.on_cpu(),
        };
        Ok(Self(py.detach(copied)?))
    }

    /// Whether all work that writes the array is done. Does not wait.
    fn is_ready(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(py.detach(|| self.0.is_ready())?)
    }

    /// Waits until all work that writes the array is done.
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
    ///     NotImplementedError: if the host cannot read the array.
    #[pyo3(signature = (requested_schema = None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyCapsule>, Bound<'py, PyCapsule>)> {
        host_array_to_python(py, self.0.clone(), requested_schema)
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        schema_to_python(py, &self.0)
    }

    /// Makes an array of any object with `__dlpack__` and `__dlpack_device__`: of a tensor with one dimension numbers or booleans of
    /// a byte, with more of them lists of fixed size. Memory of a GPU is shared.
    ///
    /// Args:
    ///     data: the tensor.
    ///     copy: memory that the host can read is copied, unless False asks to share it. Then nothing may write to it while the
    ///         array, or anything made of it, lives.
    ///
    /// Raises:
    ///     TypeError: for any other object.
    ///     ValueError: for a tensor that is not compact, or of a type that Arrow does not have.
    ///     NotImplementedError: for a device that is not available.
    #[staticmethod]
    #[pyo3(signature = (data, *, copy = None))]
    fn from_dlpack(data: &Bound<'_, PyAny>, copy: Option<bool>) -> PyResult<Self> {
        let column = match copy {
            // SAFETY: the documentation above requires Python code that passes `copy=False` to guarantee that nothing writes.
            Some(false) => unsafe { tensor_from_python_shared(data) },
            _ => tensor_from_python(data),
        };
        column.map(Self)
    }

    /// Raises:
    ///     BufferError: for what DLPack cannot express: nulls, text, booleans of a bit.
    ///     ValueError: for a stream that the device cannot have.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let to_host = dl_device == Some((ArrowDeviceType::CPU.value(), 0));
        if to_host && self.0.device().id().device_type != ArrowDeviceType::CPU {
            if copy == Some(false) {
                let device = self.0.device();
                let text = format!("the data is on {device}, so the CPU needs a copy");
                return Err(PyBufferError::new_err(text));
            }
            let host = self.to_host(py)?;
            return host.__dlpack__(py, None, max_version, None, copy);
        }
        // SAFETY: the DLPack protocol obliges the Python code that calls this to pass a live stream of the array's device,
        // and not to write to a tensor that is not a copy.
        unsafe { tensor_to_python(py, &self.0, stream, max_version, dl_device, copy) }
    }

    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        let device = DLDevice::try_from(self.0.device().id())?;
        Ok((device.device_type.value(), device.device_id))
    }

    /// The CUDA Array Interface, version 3, for the same columns as `__dlpack__`. Other arrays do not have this attribute. The
    /// array must live until the consumer's work is done.
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
        let (array, bytes) = (&self.0, self.nbytes());
        let (kind, rows, device) = (array.data_type(), array.len(), array.device());
        format!("<Array: {kind}, {rows} rows on {device}, {bytes} bytes>")
    }
}

impl Array {
    fn on_cpu(&self) -> arrow_device::Result<DeviceArray> {
        Devices::cpu().upload_array(&self.0.to_host()?)
    }
}
