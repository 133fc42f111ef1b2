//! What the ROCm backend assumes of newer versions of HIP, compared with their bindings at compile
//! time.
#![allow(dead_code)]

#[path = "../../../src/device/gpu/newer_hip.rs"]
mod newer_hip;

use std::ffi::{c_int, c_uint, c_void};
use std::mem::offset_of;

use cubecl_hip_sys as hip;
use hip::{hipError_t, hipMemcpyAttributes, hipStream_t};

// The functions.
const _: newer_hip::CopyList<hipStream_t, hipError_t, hipMemcpyAttributes> =
    hip::hipMemcpyBatchAsync;
const _: newer_hip::StreamDevice<hipStream_t, hipError_t> = hip::hipStreamGetDevice;
const _: unsafe extern "C" fn(hipStream_t, hip::hipHostFn_t, *mut c_void) -> hipError_t =
    hip::hipLaunchHostFunc;
const _: unsafe extern "C" fn(
    hipStream_t,
    hip::hipStreamCallback_t,
    *mut c_void,
    c_uint,
) -> hipError_t = hip::hipStreamAddCallback;
const _: hip::hipStreamCallback_t = {
    unsafe extern "C" fn callback(_: hipStream_t, _: hipError_t, _: *mut c_void) {}
    Some(callback)
};

// The numbers: memory types, and attributes and flags, which are as in the older bindings.
const _: () = {
    use newer_hip::memory_type as ours;
    assert!(ours::UNREGISTERED == hip::hipMemoryType_hipMemoryTypeUnregistered);
    assert!(ours::HOST == hip::hipMemoryType_hipMemoryTypeHost);
    assert!(ours::DEVICE == hip::hipMemoryType_hipMemoryTypeDevice);
    assert!(ours::MANAGED == hip::hipMemoryType_hipMemoryTypeManaged);
    assert!(hip::hipDeviceAttribute_t_hipDeviceAttributeConcurrentManagedAccess == 9);
    assert!(hip::hipDeviceAttribute_t_hipDeviceAttributeMemoryPoolsSupported == 88);
    assert!(hip::hipEventBlockingSync == 1 && hip::hipEventDisableTiming == 2);
    assert!(hip::hipMemcpyKind_hipMemcpyDefault == 4);
    assert!(hip::hipMemPoolAttr_hipMemPoolAttrReleaseThreshold == 4);
};

// The layouts.
const _: () = {
    use hip::{hipMemPoolProps as Pool, hipPointerAttribute_t as Pointer};
    assert!(size_of::<Pool>() == 88 && offset_of!(Pool, location) == 8);
    assert!(size_of::<Pointer>() == 32 && offset_of!(Pointer, type_) == 0);
    assert!(offset_of!(Pointer, device) == 4 && offset_of!(Pointer, devicePointer) == 8);
    assert!(offset_of!(Pointer, hostPointer) == 16 && offset_of!(Pointer, isManaged) == 24);
    assert!(offset_of!(Pointer, allocationFlags) == 28);
    assert!(size_of::<hipError_t>() == size_of::<c_int>());
};
