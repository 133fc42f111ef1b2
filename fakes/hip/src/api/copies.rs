//! Copies and fills.

use std::ffi::{c_int, c_uchar, c_void};

use crate::call::{forward, on_device};
use crate::contexts::primary;
use crate::control::version;
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

/// `hipMemcpyAttributes` and `CUmemcpyAttributes` are laid out alike and have the same numbers. HIP
/// does without them, and before 7.3 refuses them; CUDA asks for them.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipMemcpyBatchAsync(
    dsts: *mut *mut c_void,
    srcs: *mut *mut c_void,
    sizes: *mut usize,
    count: usize,
    attrs: *mut c_void,
    attrsIdxs: *mut usize,
    numAttrs: usize,
    failIdx: Out<usize>,
    stream: Handle,
) -> Code {
    on_device(|driver| {
        if numAttrs > 0 && version() < 70_300_000 {
            return Err(NOT_SUPPORTED);
        }
        // In the stream's order, from the first copy on.
        let (mut in_order, mut first) = ([1 as c_int, 0, 0, 0, 0, 0], 0);
        let (attrs, attrsIdxs, numAttrs) = match numAttrs {
            0 => ((&raw mut in_order).cast(), &raw mut first, 1),
            some => (attrs, attrsIdxs, some),
        };
        let (dsts, srcs): (*mut Address, *mut Address) = (dsts.cast(), srcs.cast());
        if !driver.has_batch_v2() {
            let failed = failIdx.raw();
            // SAFETY: CUDA requires of the lists what HIP requires, which the caller guarantees.
            return unsafe {
                driver.cuMemcpyBatchAsync(
                    dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failed, stream,
                )
            };
        }
        // SAFETY: CUDA requires of the lists what HIP requires, which the caller guarantees.
        let copied = unsafe {
            driver
                .cuMemcpyBatchAsync_v2(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, stream)
        };
        // That is "no copy in particular".
        copied.inspect_err(|_| failIdx.put_if(usize::MAX))
    })
}
