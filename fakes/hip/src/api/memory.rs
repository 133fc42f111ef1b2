//! Allocating, freeing, pools.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

use crate::call::{forward, on_device};
use crate::ffi::*;

forward! {
    hipMemGetInfo(free: *mut usize, total: *mut usize) => cuMemGetInfo_v2(free, total);
    hipMemGetAddressRange(pbase: *mut *mut c_void, psize: *mut usize, dptr: *mut c_void) =>
        cuMemGetAddressRange_v2(pbase.cast(), psize, address(dptr));
    hipMallocManaged(dev_ptr: *mut *mut c_void, size: usize, flags: c_uint) =>
        cuMemAllocManaged(dev_ptr.cast(), size, flags);

    // `hipMemPoolProps` and `CUmemPoolProps` are laid out alike and have the same numbers.
    hipMemPoolCreate(mem_pool: *mut Handle, pool_props: *const c_void) =>
        cuMemPoolCreate(mem_pool, pool_props);
    hipMemPoolDestroy(mem_pool: Handle) => cuMemPoolDestroy(mem_pool);
    hipMemPoolSetAttribute(mem_pool: Handle, attr: c_int, value: *mut c_void) =>
        cuMemPoolSetAttribute(mem_pool, attr, value);
    hipMemPoolTrimTo(mem_pool: Handle, min_bytes_to_hold: usize) =>
        cuMemPoolTrimTo(mem_pool, min_bytes_to_hold);
    hipMallocFromPoolAsync(dev_ptr: *mut *mut c_void, size: usize, mem_pool: Handle, stream: Handle) =>
        cuMemAllocFromPoolAsync(dev_ptr.cast(), size, mem_pool, stream);
    hipFreeAsync(dev_ptr: *mut c_void, stream: Handle) => cuMemFreeAsync(address(dev_ptr), stream);
}

/// Nothing is allocated for no bytes, unlike CUDA's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipMalloc(ptr: Out<*mut c_void>, size: usize) -> Code {
    on_device(|driver| match size {
        0 => ptr.put(null_mut()),
        // SAFETY: the caller guarantees that `ptr` is valid for the write of a pointer.
        _ => unsafe { driver.cuMemAlloc_v2(ptr.raw().cast(), size) },
    })
}

/// Null is fine, unlike CUDA's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipFree(ptr: *mut c_void) -> Code {
    on_device(|driver| match ptr.is_null() {
        true => Ok(()),
        // SAFETY: the caller guarantees that nothing uses the memory any more.
        false => unsafe { driver.cuMemFree_v2(address(ptr)) },
    })
}

/// CUDA has no flags for coherence.
fn host_flags(flags: c_uint) -> Outcome<c_uint> {
    const COHERENT: c_uint = 0x4000_0000;
    const NON_COHERENT: c_uint = 0x8000_0000;
    let coherence = flags & (COHERENT | NON_COHERENT);
    // Portable, mapped, write-combined.
    match flags ^ coherence {
        others @ 0..=7 if coherence.count_ones() <= 1 => Ok(others),
        _ => Err(INVALID_VALUE),
    }
}

/// As [`hipMalloc`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipHostMalloc(
    ptr: Out<*mut c_void>,
    size: usize,
    flags: c_uint,
) -> Code {
    on_device(|driver| {
        let flags = host_flags(flags)?;
        match size {
            0 => ptr.put(null_mut()),
            // SAFETY: the caller guarantees that `ptr` is valid for the write of a pointer.
            _ => unsafe { driver.cuMemHostAlloc(ptr.raw(), size, flags) },
        }
    })
}

/// As [`hipFree`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipHostFree(ptr: *mut c_void) -> Code {
    on_device(|driver| match ptr.is_null() {
        true => Ok(()),
        // SAFETY: the caller guarantees that nothing uses the memory any more.
        false => unsafe { driver.cuMemFreeHost(ptr) },
    })
}
