//! Which device has kernels, loaded once for each.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arrow_device::device::WeakDevice;
use arrow_device::{ArrowDeviceType, Device, Error, Result};

use super::kernels::{Kernels, Launcher};

/// Returns whether this example has kernels for devices of a type. It needs no device. That a device of the simulated one's type
/// is another library's, which has no kernels, is an error when the filter runs.
pub(crate) fn exist_for(device_type: ArrowDeviceType) -> bool {
    let cuda = cfg!(feature = "cuda") && device_type == ArrowDeviceType::CUDA;
    device_type == ArrowDeviceType::EXT_DEV || cuda
}

/// The kernels of the devices that have run a filter. Those of a device are loaded once, by its first filter. The cache does not
/// keep a device: the kernels of one that is gone are dropped with the next filter of another.
#[derive(Debug, Default)]
pub(crate) struct KernelCache {
    loaded: Mutex<Vec<(WeakDevice, Arc<Kernels>)>>,
    loads: AtomicUsize,
}

impl KernelCache {
    /// Returns a new queue of a device with its kernels. While one thread loads them, others wait for it.
    ///
    /// # Errors
    /// Returns an error if there are none for the device, or if it cannot load them.
    pub(crate) fn launcher(&self, device: &Device) -> Result<Launcher> {
        let (kernels, queue) = (self.of(device)?, device.new_queue()?);
        Ok(Launcher { kernels, queue })
    }

    fn of(&self, device: &Device) -> Result<Arc<Kernels>> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.retain(|(known, _)| known.upgrade().is_some());
        let mut known = loaded.iter();
        if let Some((_, kernels)) = known.find(|(known, _)| *known == device.downgrade()) {
            return Ok(kernels.clone());
        }
        let kernels = load(device)?;
        self.loads.fetch_add(1, Ordering::Relaxed);
        loaded.push((device.downgrade(), kernels.clone()));
        Ok(kernels)
    }

    /// Returns how often kernels were loaded.
    pub(crate) fn loads(&self) -> usize {
        self.loads.load(Ordering::Relaxed)
    }

    /// Returns of how many devices there are kernels.
    pub(crate) fn len(&self) -> usize {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.len()
    }
}

fn load(device: &Device) -> Result<Arc<Kernels>> {
    if device.default_queue().as_sim().is_ok() {
        return Ok(Arc::new(Kernels::Sim));
    }
    #[cfg(feature = "cuda")]
    if device.cuda_context().is_ok() {
        return Ok(Arc::new(Kernels::Cuda(super::cuda::Cuda::load(device)?)));
    }
    Err(Error::NotSupported {
        device: device.id(),
        operation: "DeviceFilterExec",
        reason: "the example has kernels for the simulated device and, with the feature `cuda`, for CUDA devices".into(),
    })
}
