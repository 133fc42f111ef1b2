//! The Python package `arrow-device`: its classes are short, since `arrow_device::python` does the work of exchanging data.
//!
//! ```text
//! pip install ./python
//! ```

mod ahead;
mod array;
mod device;
mod files;
mod record_batch;
mod schema;
#[cfg(target_os = "linux")]
mod share;
mod signals;
mod stream;
mod target;

use arrow_device::python::pyo3;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PySlice;

/// What the package `arrow_device` is made of.
#[pymodule(name = "_native")]
mod arrow_device_native {
    #[pymodule_export]
    use super::files::{read_ipc, read_parquet};
    #[cfg(target_os = "linux")]
    #[pymodule_export]
    use super::share::{Publisher, Subscriber, shared_cpu};
    #[pymodule_export]
    use super::{
        array::Array, record_batch::RecordBatch, schema::Schema, stream::Stream, target::Device,
    };
    use pyo3::prelude::*;

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::signals::init(module.py())
    }
}

/// Adds what takes a table or a reader to the error that it causes in a class for single arrays.
fn name_stream(object: &Bound<'_, PyAny>, e: PyErr) -> PyErr {
    let has = |method| object.hasattr(method).unwrap_or(false);
    let is_array = has("__arrow_c_device_array__") || has("__arrow_c_array__");
    if is_array || !(has("__arrow_c_device_stream__") || has("__arrow_c_stream__")) {
        return e;
    }
    let text = e.value(object.py());
    PyTypeError::new_err(format!("{text}: use Stream, or Device.upload"))
}

/// The offset and the length of a slice of `len` rows. Only a step of 1 takes no copy.
fn range(slice: &Bound<'_, PySlice>, len: usize) -> PyResult<(usize, usize)> {
    let indices = slice.indices(len.try_into()?)?;
    if indices.step != 1 {
        return Err(PyTypeError::new_err("the step of a slice must be 1"));
    }
    Ok((indices.start.try_into()?, indices.slicelength))
}
