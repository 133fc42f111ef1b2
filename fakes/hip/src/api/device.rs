//! Initialisation, versions, devices.

use std::ffi::c_int;

use crate::call::{call, forward};
use crate::contexts::{current_device, set_current_device};
use crate::control;
use crate::driver::Driver;
use crate::ffi::*;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipRuntimeGetVersion(runtimeVersion: Out<c_int>) -> Code {
    call(|_| runtimeVersion.put(control::version()))
}

fn device_count(driver: &Driver) -> Outcome<c_int> {
    let mut count = 0;
    // SAFETY: `count` is valid for the write of an int.
    unsafe { driver.cuDeviceGetCount(&mut count) }?;
    Ok(count)
}

/// Writes 0 if there is no device, and then fails.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipGetDeviceCount(count: Out<c_int>) -> Code {
    count.put_if(0);
    call(|driver| match device_count(driver)? {
        0 => Err(NO_DEVICE),
        devices => count.put(devices),
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipGetDevice(deviceId: Out<c_int>) -> Code {
    call(|_| deviceId.put(current_device()))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipSetDevice(deviceId: c_int) -> Code {
    call(|driver| {
        if !(0..device_count(driver)?).contains(&deviceId) {
            return Err(INVALID_DEVICE);
        }
        set_current_device(deviceId);
        Ok(())
    })
}

/// Those attributes that the backend asks for.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipDeviceGetAttribute(
    pi: Out<c_int>,
    attr: c_int,
    deviceId: c_int,
) -> Code {
    call(|driver| {
        let attribute = match attr {
            9 => 89,   // concurrentManagedAccess
            24 => 83,  // managedMemory
            85 => 41,  // unifiedAddressing
            88 => 115, // memoryPoolsSupported
            _ => return Err(INVALID_VALUE),
        };
        // SAFETY: the caller guarantees that `pi` points to an `int`.
        unsafe { driver.cuDeviceGetAttribute(pi.raw(), attribute, deviceId) }
    })
}

forward! {
    hipDeviceSynchronize() => cuCtxSynchronize();
}
