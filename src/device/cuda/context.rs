//! One context of one device: how it is retained and released.

use std::ffi::c_int;
use std::fmt;
use std::sync::{Arc, Mutex};

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute};

use super::driver::Driver;
use crate::device::backend::device_error;
use crate::device::gpu::{Answer, Failed, Library, absent, absent_after, find};
use crate::device::{DeviceId, lock};
use crate::error::{Error, Result};

/// A context.
pub(super) struct Cuda {
    pub(super) driver: &'static Driver,
    /// The device's number in the driver.
    pub(super) ordinal: c_int,
    device: CUdevice,
    pub(super) raw: CUcontext,
    /// The context's owner; `None` if it is the primary one, which is retained here.
    pub(super) given: Option<Arc<CudaContext>>,
    /// Primary contexts of other devices, by ordinal, retained.
    others: Mutex<Vec<(c_int, CUdevice, CUcontext)>>,
}

// SAFETY: the driver accepts the handles on any thread; each call makes the context current there.
unsafe impl Send for Cuda {}
// SAFETY: the driver accepts the handles on several threads at once, and `others` is locked.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// Makes a device's primary context, or adopts the one that is given.
    pub(super) fn new(id: DeviceId, given: Option<Arc<CudaContext>>) -> Result<Self> {
        let (driver, ordinal) = find::<Driver>(id)?;
        let device =
            device_of(driver, ordinal).map_err(|failed| absent_after(driver, id, failed))?;
        let raw = match &given {
            Some(context) if context.ordinal() as i64 != id.id => {
                let ordinal = context.ordinal();
                return Err(Error::argument(format!(
                    "a context of CUDA device {ordinal} for {id}"
                )));
            }
            Some(context) => context.cu_ctx(),
            None => retain(driver, device).map_err(|Failed { call, code }| {
                // The failure may pass, so it does not say that there is no such device.
                device_error(id, call, code, driver.text(code))
            })?,
        };
        // From here on `drop` releases the context.
        let cuda = Self {
            driver,
            ordinal,
            device,
            raw,
            given,
            others: Mutex::new(Vec::new()),
        };
        if !cuda.has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING) {
            return Err(absent(id, "the device has no unified addressing"));
        }
        Ok(cuda)
    }

    /// Whether a device attribute is set. The driver may not know it: then it is not.
    pub(super) fn has(&self, attribute: CUdevice_attribute) -> bool {
        let mut value = 0;
        let ask = &self.driver.cuDeviceGetAttribute;
        // SAFETY: `value` is valid for the write of an int.
        let code = unsafe { ask(&raw mut value, attribute as c_int, self.device) };
        code == 0 && value != 0
    }

    /// Returns the primary context of another device, for copies out of its memory. It is kept as
    /// long as this one.
    pub(super) fn primary_of(&self, ordinal: c_int) -> Answer<CUcontext> {
        let mut others = lock(&self.others);
        if let Some((_, _, raw)) = others.iter().find(|(of, ..)| *of == ordinal) {
            return Ok(*raw);
        }
        let device = device_of(self.driver, ordinal)?;
        let raw = retain(self.driver, device)?;
        others.push((ordinal, device, raw));
        Ok(raw)
    }
}

fn device_of(driver: &Driver, ordinal: c_int) -> Answer<CUdevice> {
    let call = &driver.cuDeviceGet;
    let mut device: CUdevice = 0;
    // SAFETY: `device` is valid for the write of a handle.
    call.check(unsafe { call(&raw mut device, ordinal) })?;
    Ok(device)
}

/// Retains a device's primary context, which whoever calls releases.
fn retain(driver: &Driver, device: CUdevice) -> Answer<CUcontext> {
    let call = &driver.cuDevicePrimaryCtxRetain;
    let mut raw = std::ptr::null_mut();
    // SAFETY: `raw` is valid for the write of a handle.
    call.check(unsafe { call(&raw mut raw, device) })?;
    Ok(raw)
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if !self.driver.api().process.is_this() {
            // Its drop would call the driver.
            std::mem::forget(self.given.take());
            return;
        }
        let release = self.driver.cuDevicePrimaryCtxRelease.function;
        for (_, device, _) in lock(&self.others).drain(..) {
            // SAFETY: the context was retained in `primary_of`, and is released once.
            unsafe { release(device) };
        }
        match self.given.take() {
            Some(context) => self.driver.let_go(context, || ()),
            // SAFETY: the context was retained in `new`, and is released once.
            None => unsafe {
                release(self.device);
            },
        }
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.raw)
    }
}
