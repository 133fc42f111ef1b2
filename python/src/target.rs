//! Which device an operation is for.

use std::hash::{Hash, Hasher};

use arrow_device::{Devices, ExportOptions, SyncPolicy};
use pyo3::prelude::*;

/// A device: the CPU, a GPU, the simulated device.
///
/// Args:
///     name: "cpu", "sim" (simulated, Linux), "cuda:0", "cuda-host:0" (page-locked), "cuda-managed:0". Without a number, number 0.
///
/// Raises:
///     ValueError: for a name that is none.
///     NotImplementedError: if there is no such device, with the reason.
#[pyclass(frozen, eq, hash, module = "arrow_device")]
#[derive(PartialEq)]
pub(crate) struct Device(pub(crate) arrow_device::Device);

impl Hash for Device {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.id().hash(state);
    }
}

/// A device as an argument: itself or its name.
#[derive(FromPyObject)]
pub(crate) enum Target<'py> {
    #[pyo3(annotation = "Device")]
    Device(Bound<'py, Device>),
    #[pyo3(annotation = "str")]
    Name(String),
}

impl Target<'_> {
    pub(crate) fn open(&self, py: Python<'_>) -> PyResult<arrow_device::Device> {
        match self {
            Self::Device(device) => Ok(device.get().0.clone()),
            Self::Name(name) => Ok(py.detach(|| Devices::open(name))?),
        }
    }
}

/// Consumers of memory that the host can read often ignore events, so the export waits until such memory is ready.
pub(crate) fn export_options(is_host_readable: bool) -> ExportOptions {
    ExportOptions::new(if is_host_readable {
        SyncPolicy::Wait
    } else {
        SyncPolicy::Event
    })
}
