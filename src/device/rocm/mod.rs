//! ROCm devices: ARROW_DEVICE_ROCM and ROCM_HOST, on the HIP runtime. The public interface is
//! [`crate::rocm`].
//!
//! | file | contents |
//! | --- | --- |
//! | `mod.rs` | how a device is opened |
//! | `sys.rs` | the runtime's library, loaded at run time |
//! | `runtime.rs` | a device, and what HIP does differently from CUDA, for [`gpu`] |

mod runtime;
mod sys;

use std::sync::Arc;

pub(crate) use self::runtime::Rocm;
use self::sys::Hip;
use crate::abi::ArrowDeviceType;
use crate::device::gpu::{self, Gpu};
use crate::device::{Device, DeviceId, Devices};
use crate::error::Result;

/// Returns the number of ROCm devices.
///
/// # Errors
/// Returns [`Error::DeviceNotAvailable`](crate::Error::DeviceNotAvailable) with the reason if there is no HIP runtime.
pub fn device_count() -> Result<usize> {
    gpu::device_count::<Hip>(ArrowDeviceType::ROCM)
}

/// Registers the two ROCm device types with a set of devices. [`Devices::global`] has them already.
pub fn register(devices: &Devices) {
    for device_type in [ArrowDeviceType::ROCM, ArrowDeviceType::ROCM_HOST] {
        devices.register(device_type, move |ordinal| {
            let id = DeviceId::new(device_type, ordinal);
            Device::new(Arc::new(Gpu::new(id, Rocm::new(id)?)?))
        });
    }
}
