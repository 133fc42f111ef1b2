//! Devices.

use std::collections::HashMap;

use arrow_device::Devices;
use pyo3::prelude::*;

use crate::record_batch::RecordBatch;
use crate::target::Device;

#[pymethods]
impl Device {
    #[new]
    fn new(py: Python<'_>, name: &str) -> PyResult<Self> {
        Ok(Self(py.detach(|| Devices::open(name))?))
    }

    /// The first GPU. Never another device.
    ///
    /// Raises:
    ///     NotImplementedError: if there is none, with the reason.
    #[staticmethod]
    fn gpu(py: Python<'_>) -> PyResult<Self> {
        Ok(Self(py.detach(Devices::gpu)?))
    }

    /// The name: "cuda:0".
    #[getter]
    fn name(&self) -> String {
        self.0.to_string()
    }

    /// Whether the host can read the device's memory.
    #[getter]
    fn is_host_readable(&self) -> bool {
        self.0.is_host_readable()
    }

    /// Copies a table, a frame or a batch of any library to the device, as one batch. Returns before the copy is done. What is
    /// there already is not copied, except to join several batches.
    ///
    /// Args:
    ///     data: an object with `__arrow_c_device_array__`, `__arrow_c_array__`, `__arrow_c_device_stream__` or `__arrow_c_stream__`.
    ///
    /// Raises:
    ///     TypeError: for any other object.
    ///     ValueError: for invalid data, with the path of the field, and for a single column: put it in a table, or use `Array(...).to`.
    ///     NotImplementedError: for a copy that the devices cannot do.
    ///     MemoryError: if the device has no memory for it.
    fn upload(&self, data: &Bound<'_, PyAny>) -> PyResult<RecordBatch> {
        RecordBatch::read(data, &self.0)
    }

    /// Waits for all work of the device.
    ///
    /// Raises:
    ///     RuntimeError: the error of work that failed.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let wait = || {
            self.0.synchronize()?;
            self.0.take_drop_error().map_or(Ok(()), Err)
        };
        Ok(py.detach(wait)?)
    }

    /// What the device has done since it was opened. Numbers: `allocations`, `frees`, `copies`, `host_waits`. Bytes: `allocated_bytes`,
    /// `bytes_to_device`, `bytes_to_host`, `bytes_on_device` (within it, or straight from another device), `host_copied_bytes` (by the CPU).
    fn counters(&self) -> HashMap<&'static str, u64> {
        let stats = self.0.stats();
        HashMap::from([
            ("allocations", stats.allocations),
            ("allocated_bytes", stats.allocated_bytes),
            ("frees", stats.frees),
            ("copies", stats.copies),
            ("bytes_to_device", stats.bytes_to_device),
            ("bytes_to_host", stats.bytes_to_host),
            ("bytes_on_device", stats.bytes_on_device),
            ("host_copied_bytes", stats.host_copied_bytes),
            ("host_waits", stats.host_waits),
        ])
    }

    fn __str__(&self) -> String {
        self.name()
    }

    fn __repr__(&self) -> String {
        format!("Device('{}')", self.0)
    }
}
