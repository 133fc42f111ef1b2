//! Copies and fills.

use std::ffi::{c_int, c_uchar, c_void};

use crate::call::{forward, on_device};
use crate::contexts::primary;
use crate::ffi::*;

forward! {
    hipMemcpyAsync(
        dst: *mut c_void, src: *const c_void, sizeBytes: usize, kind: c_int, stream: Handle,
    ) => cuMemcpyAsync(target(dst, kind)?, address(src), sizeBytes, stream);
    hipMemsetD8Async(dest: *mut c_void, value: c_uchar, count: usize, stream: Handle) =>
        cuMemsetD8Async(address(dest), value, count, stream);
}

/// The target of a copy whose direction exists. The driver finds the direction by the addresses.
fn target(dst: *mut c_void, kind: c_int) -> Outcome<Address> {
    // From host to host, up, down, on a device, unsaid.
    match kind {
        0..=4 => Ok(address(dst)),
        _ => Err(INVALID_MEMCPY_DIRECTION),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipMemcpyPeerAsync(
    dst: *mut c_void,
    dstDeviceId: c_int,
    src: *const c_void,
    srcDevice: c_int,
    sizeBytes: usize,
    stream: Handle,
) -> Code {
    on_device(|driver| {
        let of_target = primary(driver, dstDeviceId)?;
        let of_source = primary(driver, srcDevice)?;
        let (dst, src) = (address(dst), address(src));
        // SAFETY: CUDA requires of the memory what HIP requires, which the caller guarantees.
        unsafe { driver.cuMemcpyPeerAsync(dst, of_target, src, of_source, sizeBytes, stream) }
    })
}
