//! A Python extension module with arrays, batches and streams on any device. They are exchanged with any library that
//! implements the Arrow PyCapsule interface:
//!
//! ```text
//! PYO3_BUILD_EXTENSION_MODULE=1 cargo build --release -p arrow-device-python-example
//! cp target/release/libarrow_device_example.so arrow_device_example.so
//! ```
//!
//! ```python
//! import arrow_device_example as ad, pyarrow as pa
//! on_device = ad.Batch(pa.record_batch({"id": [1, 2, 3]})).to("sim")     # or "cuda", "cuda-managed", ...
//! back = pa.record_batch(on_device.to("cpu"))                            # or polars.DataFrame(...), ...
//! ```
//!
//! The classes are short, to serve as an example; `arrow_device::python` does the work.

mod array;
mod batch;
mod stream;

use std::collections::HashMap;

use arrow_device::python::pyo3;
use arrow_device::{Device, Devices, Error, ExportOptions, SyncPolicy};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// Arrow data on devices.
#[pymodule]
mod arrow_device_example {
    #[pymodule_export]
    use super::{array::Array, batch::Batch, stream::Stream};
    #[pymodule_export]
    use super::{counters, synchronize};
}

/// Opens a device by its name: "cpu", "sim", "cuda:1", ...
fn open(py: Python<'_>, name: &str) -> PyResult<Device> {
    Ok(py.detach(|| Devices::open(name))?)
}

/// Adds the name of the class for streams to the error that a table or a reader causes in another class.
fn name_stream(object: &Bound<'_, PyAny>, e: PyErr) -> PyErr {
    let has = |method| object.hasattr(method).unwrap_or(false);
    let is_array = has("__arrow_c_device_array__") || has("__arrow_c_array__");
    if is_array || !(has("__arrow_c_device_stream__") || has("__arrow_c_stream__")) {
        return e;
    }
    PyTypeError::new_err(format!("{}: use Stream", e.value(object.py())))
}

/// Returns the device's counters since it was opened.
#[pyfunction]
fn counters(py: Python<'_>, device: &str) -> PyResult<HashMap<&'static str, u64>> {
    let stats = open(py, device)?.stats();
    Ok(HashMap::from([
        ("allocations", stats.allocations),
        ("frees", stats.frees),
        ("copies", stats.copies),
        ("bytes_to_device", stats.bytes_to_device),
        ("bytes_to_host", stats.bytes_to_host),
        ("host_waits", stats.host_waits),
    ]))
}

/// Waits for all work of the device, and raises its errors.
#[pyfunction]
fn synchronize(py: Python<'_>, device: &str) -> PyResult<()> {
    let device = open(py, device)?;
    py.detach(|| {
        device.synchronize()?;
        device.take_drop_error().map_or(Ok(()), Err)
    })
    .map_err(Error::into)
}

/// Consumers of memory that the host can read often ignore events, so the export waits until such memory is ready.
fn export_options(device: &Device) -> ExportOptions {
    ExportOptions::new(if device.is_host_readable() {
        SyncPolicy::Wait
    } else {
        SyncPolicy::Event
    })
}

/// The programs of the page, which are tested as they stand.
#[cfg(doctest)]
#[doc = include_str!("../../docs/guide/python.md")]
mod page {}
