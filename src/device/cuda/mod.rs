//! CUDA devices: ARROW_DEVICE_CUDA, CUDA_HOST and CUDA_MANAGED. The public interface is
//! [`crate::cuda`].
//!
//! | file | contents |
//! | --- | --- |
//! | `mod.rs` | how a device is opened |
//! | `sys.rs` | the driver library, loaded at run time |
//! | `runtime.rs` | a device's context, what CUDA does differently from HIP, for [`gpu`], and objects of cudarc's that are kept |

mod runtime;
mod sys;

use std::sync::Arc;

use cudarc::driver::CudaContext;

pub(crate) use self::runtime::{Cuda, Kept};
use self::sys::Driver;
use crate::abi::ArrowDeviceType;
use crate::device::gpu::{self, Gpu};
use crate::device::{Device, DeviceId, Devices};
use crate::error::{Error, Result};

/// The device types, one for each kind of memory.
const TYPES: [ArrowDeviceType; 3] = [
    ArrowDeviceType::CUDA,
    ArrowDeviceType::CUDA_HOST,
    ArrowDeviceType::CUDA_MANAGED,
];

/// Returns the number of CUDA devices.
///
/// # Errors
/// Returns [`Error::DeviceNotAvailable`] with the reason if there is no driver.
pub fn device_count() -> Result<usize> {
    gpu::device_count::<Driver>(ArrowDeviceType::CUDA)
}

/// Registers the three CUDA device types with a set of devices, in their primary contexts.
/// [`Devices::global`] has them already.
pub fn register(devices: &Devices) {
    for device_type in TYPES {
        devices.register(device_type, move |ordinal| {
            open(DeviceId::new(device_type, ordinal), None)
        });
    }
}

/// Opens a device in its primary context, or in the one that is given.
fn open(id: DeviceId, given: Option<Arc<CudaContext>>) -> Result<Device> {
    Device::new(Arc::new(Gpu::new(id, Cuda::new(id, given)?)?))
}

impl Device {
    /// Opens the device of a CUDA context, which may be another one than the device's primary one.
    /// Arrays of the device have the type `device_type`: ARROW_DEVICE_CUDA for the device's own
    /// memory, CUDA_HOST for page-locked host memory, or CUDA_MANAGED. The device keeps the context
    /// alive. [`Devices::open`]`("cuda:0")` uses the primary context.
    ///
    /// ```no_run
    /// use arrow_device::abi::ArrowDeviceType;
    /// use arrow_device::{Device, cuda::cudarc::driver::CudaContext};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let context = CudaContext::new(0)?; // the program's own
    /// let device = Device::from_cuda_context(context, ArrowDeviceType::CUDA)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for another device type,
    /// [`Error::DeviceNotAvailable`] with the reason if the device lacks what is needed, and
    /// otherwise [`Error::Device`] with the driver's error.
    pub fn from_cuda_context(
        context: Arc<CudaContext>,
        device_type: ArrowDeviceType,
    ) -> Result<Self> {
        let id = DeviceId::new(device_type, context.ordinal() as i64);
        if !TYPES.contains(&device_type) {
            drop(Kept::new(context, ()));
            return Err(Error::argument(format!("{id} is no CUDA device")));
        }
        open(id, Some(context))
    }

    /// Returns cudarc's handle of a CUDA device's context. For the primary context, the first call
    /// makes the handle and waits for the context's work: cudarc does so when it begins to order
    /// slices between streams. A context that was passed to
    /// [`from_cuda_context`](Self::from_cuda_context) is returned as it is.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the device is not a CUDA device of this crate, and
    /// [`Error::Device`] if cudarc cannot retain the context.
    pub fn cuda_context(&self) -> Result<Arc<CudaContext>> {
        Gpu::<Cuda>::of(self)?.context.handle()
    }
}
