//! Streams of record batches, which can be consumed once.

use std::sync::{Mutex, MutexGuard, PoisonError};

use arrow_device::abi::ArrowDeviceType;
use arrow_device::python::{
    check_request, host_stream_to_python, schema_to_python, stream_from_python, stream_to_python,
};
use arrow_device::{
    Device, DeviceRecordBatch, DeviceRecordBatchReader, Devices, ExportOptions, SyncPolicy,
    upload_reader,
};
use arrow_schema::{DataType, SchemaRef};
use pyo3::exceptions::{PyNotImplementedError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::batch::Batch;
use crate::open;

type Reader = Box<dyn DeviceRecordBatchReader + Send>;

/// A stream of record batches on devices.
#[pyclass(frozen)]
pub(crate) struct Stream {
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    reader: Mutex<Option<Reader>>,
}

impl Stream {
    fn of(reader: impl DeviceRecordBatchReader + Send + 'static) -> Self {
        Self {
            schema: reader.schema(),
            device_type: reader.device_type(),
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
    /// Makes a stream of any object with `__arrow_c_device_stream__` or `__arrow_c_stream__`.
    #[new]
    fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        stream_from_python(object).map(Self::of)
    }

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Batch>> {
        let next = py.detach(|| match &mut *self.lock() {
            Some(reader) => reader.next().transpose(),
            None => Ok(None),
        })?;
        Ok(next.map(Batch))
    }

    /// Returns a stream that moves each batch to a device when it is read. Consumes this one.
    fn to(&self, py: Python<'_>, device: &str) -> PyResult<Self> {
        let device = open(py, device)?;
        let reader = self.take(py)?;
        Ok(Self::of(Moved {
            reader,
            device,
            failed: false,
        }))
    }

    /// Returns the stream on the CPU. Unlike `to("cpu")`, it copies the next batch while one is in use. Consumes this one.
    fn to_host(&self, py: Python<'_>) -> PyResult<Self> {
        let reader = self.take(py)?.into_host_reader();
        Ok(Self::of(upload_reader(reader, &Devices::cpu())))
    }

    #[pyo3(signature = (requested_schema = None, **kwargs))]
    fn __arrow_c_device_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        self.check(requested_schema, kwargs)?;
        // As for batches, the export waits until memory that the host can read is ready.
        let options = ExportOptions::new(if self.is_host_readable() {
            SyncPolicy::Wait
        } else {
            SyncPolicy::Event
        });
        stream_to_python(py, self.take(py)?, options, requested_schema, kwargs)
    }

    /// Raises an error if the host cannot read the batches.
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
                self.device_type
            )));
        }
        host_stream_to_python(py, self.take(py)?.into_host_reader(), requested_schema)
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        schema_to_python(py, self.schema.as_ref())
    }
}

/// Moves each batch to a device. Ends after an error.
struct Moved {
    reader: Reader,
    device: Device,
    failed: bool,
}

impl Iterator for Moved {
    type Item = arrow_device::Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let batch = self.reader.next()?;
        let batch = batch.and_then(|batch| batch.to_device(&self.device));
        self.failed = batch.is_err();
        Some(batch)
    }
}

impl DeviceRecordBatchReader for Moved {
    fn schema(&self) -> SchemaRef {
        self.reader.schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device.id().device_type
    }
}
