//! Streams of record batches, which can be consumed once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow_device::abi::ArrowDeviceType;
use arrow_device::python::{
    check_request, host_stream_to_python, schema_to_python, stream_from_python, stream_to_python,
};
use arrow_device::{DeviceRecordBatchReader, DeviceRecordBatches, Devices, upload_reader};
use arrow_schema::{DataType, SchemaRef};
use pyo3::exceptions::{PyNotImplementedError, PyStopAsyncIteration, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::ahead::upload_ahead;
use crate::record_batch::RecordBatch;
use crate::schema::{Schema, summary};
use crate::signals::signalled;
use crate::target::{Target, export_options};

type Reader = Box<dyn DeviceRecordBatchReader + Send>;

/// A stream of record batches on a device, which can be consumed once: by a loop (`for` or `async for`), by another library, or by a
/// method that says so. A loop over a stream that has been consumed finds nothing. An error of the data's source, or of a copy, is raised
/// in the place of its batch.
///
/// Args:
///     data: an object with `__arrow_c_device_stream__` or `__arrow_c_stream__`: a table, a frame, a reader, a query's result. A
///         `RecordBatch` is none: it has `to` and `to_host` itself.
///
/// Raises:
///     TypeError: for any other object.
///     ValueError: for an invalid schema, with the path of the field, and for a stream of arrays that are no batches.
#[pyclass(frozen, module = "arrow_device")]
pub(crate) struct Stream {
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    progress: Arc<Progress>,
    reader: Mutex<Option<Reader>>,
}

/// What a stream has returned so far, to whomever.
#[derive(Default)]
struct Progress {
    batches: AtomicU64,
    rows: AtomicU64,
    bytes: AtomicU64,
}

impl Stream {
    pub(crate) fn of(reader: impl DeviceRecordBatchReader + Send + 'static) -> Self {
        let (schema, device_type) = (reader.schema(), reader.device_type());
        let progress = Arc::new(Progress::default());
        let counted = progress.clone();
        let reader = signalled(reader).inspect(move |batch| {
            if let Ok(batch) = batch {
                counted.batches.fetch_add(1, Ordering::Relaxed);
                let (rows, bytes) = (batch.num_rows(), batch.get_array_memory_size());
                counted.rows.fetch_add(rows as u64, Ordering::Relaxed);
                counted.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
            }
        });
        let reader = DeviceRecordBatches::new(reader, schema.clone(), device_type);
        Self {
            schema,
            device_type,
            progress,
            reader: Mutex::new(Some(Box::new(reader))),
        }
    }

    /// Must be called detached from the interpreter, since another thread may hold the lock for long.
    fn lock(&self) -> MutexGuard<'_, Option<Reader>> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, py: Python<'_>) -> PyResult<Reader> {
        let reader = py.detach(|| self.lock().take());
        reader.ok_or_else(|| PyValueError::new_err("the stream has already been consumed"))
    }

    /// Checks the arguments of a method before the stream is consumed.
    fn check(
        &self,
        requested_schema: Option<&Bound<'_, PyAny>>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let data_type = DataType::Struct(self.schema.fields().clone());
        check_request(&data_type, requested_schema, kwargs)
    }

    fn is_host_readable(&self) -> bool {
        matches!(
            self.device_type,
            ArrowDeviceType::CPU
                | ArrowDeviceType::CUDA_HOST
                | ArrowDeviceType::CUDA_MANAGED
                | ArrowDeviceType::ROCM_HOST
        )
    }
}

#[pymethods]
impl Stream {
    #[new]
    fn new(data: &Bound<'_, PyAny>) -> PyResult<Self> {
        stream_from_python(data).map(Self::of)
    }

    /// The columns' names and types.
    #[getter]
    fn schema(&self) -> Schema {
        Schema(self.schema.clone())
    }

    /// The type of device that all batches are on: "cpu", "cuda".
    #[getter]
    fn device_type(&self) -> String {
        let name = self.device_type.short_name();
        name.map_or_else(|| self.device_type.to_string(), str::to_owned)
    }

    /// How many batches the stream has returned, to this program or to a library that reads it.
    #[getter]
    fn batches(&self) -> u64 {
        self.progress.batches.load(Ordering::Relaxed)
    }

    /// How many rows the stream has returned.
    #[getter]
    fn rows(&self) -> u64 {
        self.progress.rows.load(Ordering::Relaxed)
    }

    /// The bytes of the batches that the stream has returned.
    #[getter]
    fn bytes(&self) -> u64 {
        self.progress.bytes.load(Ordering::Relaxed)
    }

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<RecordBatch>> {
        let next = py.detach(|| match &mut *self.lock() {
            Some(reader) => reader.next().transpose(),
            None => Ok(None),
        })?;
        Ok(next.map(RecordBatch))
    }

    fn __aiter__(this: Py<Self>) -> Py<Self> {
        this
    }

    /// Each batch is waited for by a thread of asyncio's default executor. A wait that is cancelled loses its batch.
    fn __anext__<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let next = this.getattr("_next")?;
        let asyncio = this.py().import("asyncio")?;
        asyncio.call_method1("to_thread", (next,))
    }

    fn _next(&self, py: Python<'_>) -> PyResult<RecordBatch> {
        let next = self.__next__(py)?;
        next.ok_or_else(|| PyStopAsyncIteration::new_err(()))
    }

    /// Returns a stream that moves each batch to a device. Consumes this one.
    ///
    /// Args:
    ///     device: the device, or its name.
    ///     ahead: 0 reads and moves a batch when it is asked for. With more, two threads read and copy at most twice as many
    ///         batches and two more before they are asked for, of a stream that the host can read.
    ///     memory_budget: the bytes of batches that are read and not taken yet, after which reading ahead pauses. At least one batch
    ///         is read.
    ///
    /// Raises:
    ///     ValueError: if the stream has been consumed.
    ///     NotImplementedError: to read ahead of a stream that the host cannot read.
    #[pyo3(signature = (device, *, ahead = 0, memory_budget = 268435456))]
    fn to(
        &self,
        py: Python<'_>,
        device: Target<'_>,
        ahead: usize,
        memory_budget: usize,
    ) -> PyResult<Self> {
        let device = device.open(py)?;
        if ahead > 0 && !self.is_host_readable() {
            return Err(PyNotImplementedError::new_err(format!(
                "the host cannot read a stream on {}, so it is not read ahead",
                self.device_type()
            )));
        }
        let reader = self.take(py)?;
        if ahead > 0 {
            let reader = reader.into_host_reader();
            let reader = upload_ahead(reader, &device, ahead, memory_budget)?;
            return Ok(Self::of(reader));
        }
        let (schema, device_type) = (self.schema.clone(), device.id().device_type);
        let moved = reader.map(move |batch| batch?.to_device(&device));
        let moved = DeviceRecordBatches::new(moved, schema, device_type);
        Ok(Self::of(moved))
    }

    /// Returns the stream on the CPU. Unlike `to("cpu")`, it copies the next batch while one is in use, and does not copy what the
    /// host can read. Consumes this one.
    ///
    /// Raises:
    ///     ValueError: if the stream has been consumed.
    fn to_host(&self, py: Python<'_>) -> PyResult<Self> {
        let reader = self.take(py)?.into_host_reader();
        Ok(Self::of(upload_reader(reader, &Devices::cpu())))
    }

    /// Reads the stream to its end, and returns its batches as one, on their device. Consumes the stream.
    ///
    /// Raises:
    ///     ValueError: if the stream has been consumed.
    fn read_all(&self, py: Python<'_>) -> PyResult<RecordBatch> {
        let mut reader = self.take(py)?.peekable();
        let device = py.detach(|| match reader.peek() {
            Some(Ok(batch)) => batch.device().clone(),
            _ => Devices::cpu(),
        });
        let reader = DeviceRecordBatches::new(reader, self.schema.clone(), self.device_type);
        RecordBatch::join(py, reader, &device)
    }

    #[pyo3(signature = (requested_schema = None, **kwargs))]
    fn __arrow_c_device_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        self.check(requested_schema, kwargs)?;
        let options = export_options(self.is_host_readable());
        stream_to_python(py, self.take(py)?, options, requested_schema, kwargs)
    }

    /// Raises:
    ///     NotImplementedError: if the host cannot read the batches.
    #[pyo3(signature = (requested_schema = None))]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        self.check(requested_schema, None)?;
        if !self.is_host_readable() {
            return Err(PyNotImplementedError::new_err(format!(
                "the host cannot read a stream on {}: use to_host() or __arrow_c_device_stream__",
                self.device_type()
            )));
        }
        host_stream_to_python(py, self.take(py)?.into_host_reader(), requested_schema)
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        schema_to_python(py, self.schema.as_ref())
    }

    fn __repr__(&self) -> String {
        let (device, schema) = (self.device_type(), summary(&self.schema));
        let (rows, bytes) = (self.rows(), self.bytes());
        format!("<Stream: on {device}, {rows} rows and {bytes} bytes read so far; {schema}>")
    }
}
