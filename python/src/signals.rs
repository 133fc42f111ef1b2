//! Ctrl-C during long reads.

use std::sync::OnceLock;
use std::thread::{self, ThreadId};

use arrow_device::{DeviceRecordBatch, DeviceRecordBatchReader, Result};
use arrow_schema::ArrowError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Python's main thread, which alone runs signal handlers. Empty if another one has imported this module.
static MAIN: OnceLock<ThreadId> = OnceLock::new();

pub(crate) fn init(py: Python<'_>) -> PyResult<()> {
    let threading = py.import("threading")?;
    let [current, main] =
        ["current_thread", "main_thread"].map(|name| threading.call_method0(name));
    if current?.is(&main?) {
        let _ = MAIN.set(thread::current().id());
    }
    Ok(())
}

/// Ends before the next batch if a signal's handler raises an exception.
pub(crate) fn signalled(
    mut reader: impl DeviceRecordBatchReader,
) -> impl Iterator<Item = Result<DeviceRecordBatch>> {
    std::iter::from_fn(move || match check() {
        Ok(()) => reader.next(),
        Err(e) => Some(Err(e)),
    })
}

/// Runs the handlers of signals that have arrived, if this is the main thread, and returns the exception that one raises. Other
/// threads must not wait for the interpreter: a consumer may hold it while it waits for them.
///
/// # Errors
/// The exception, which becomes itself again where the error is raised.
pub(crate) fn check() -> Result<()> {
    // SAFETY: this function may be called at any time.
    if MAIN.get() != Some(&thread::current().id()) || unsafe { ffi::Py_IsInitialized() } == 0 {
        return Ok(());
    }
    // SAFETY: there is an interpreter. pyo3 is not asked, since a consumer may have detached this thread without its knowledge. What
    // is taken here is released below, and the token does not outlive that.
    let raised = unsafe {
        let ensured = ffi::PyGILState_Ensure();
        let py = Python::assume_attached();
        let raised = (ffi::PyErr_CheckSignals() != 0).then(|| PyErr::fetch(py));
        ffi::PyGILState_Release(ensured);
        raised
    };
    raised.map_or(Ok(()), |e| {
        Err(ArrowError::ExternalError(Box::new(e)).into())
    })
}
