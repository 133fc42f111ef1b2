//! ROCm devices: ARROW_DEVICE_ROCM and ROCM_HOST, on the HIP runtime. The public interface is
//! [`crate::rocm`].
//!
//! | file | contents |
//! | --- | --- |
//! | `mod.rs` | how a device is opened, and events that are given |
//! | `sys.rs` | the runtime's library, loaded at run time |
//! | `runtime.rs` | a device, and what HIP does differently from CUDA, for [`gpu`] |

mod runtime;
mod sys;

use std::sync::Arc;

pub(crate) use self::runtime::Rocm;
use self::sys::Hip;
use crate::abi::ArrowDeviceType;
use crate::device::gpu::{self, Gpu, Library, RawEvent};
use crate::device::{Device, DeviceId, Devices};
use crate::error::Result;

/// Returns the number of ROCm devices.
///
/// # Errors
/// Returns [`Error::DeviceNotAvailable`] with the reason if there is no HIP runtime.
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

/// An event that was given to this crate, which destroys it.
pub(crate) struct GivenEvent {
    hip: &'static Hip,
    event: RawEvent,
}

impl GivenEvent {
    /// # Safety
    /// The event is live, and belongs to this crate from now on.
    pub(crate) unsafe fn new(rocm: &Gpu<Rocm>, event: RawEvent) -> Self {
        let hip = rocm.context.runtime.hip;
        Self { hip, event }
    }
}

impl Drop for GivenEvent {
    fn drop(&mut self) {
        if !self.hip.process().is_this() {
            return;
        }
        // HIP destroys events whatever device is current; an error has no place to go.
        // SAFETY: the caller of `new` gave the event to this crate, and nothing uses it any more.
        let destroy = || unsafe { self.hip.calls().destroy_event(self.event) };
        let _ = self.hip.quietly(destroy);
    }
}
