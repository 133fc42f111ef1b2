//! What the ROCm backend assumes of newer versions of HIP, compared with their bindings at compile
//! time.

use std::ffi::c_int;
use std::mem::offset_of;

use cubecl_hip_sys as hip;
use hip::{hipError_t, hipStream_t};

// The function that came later.
const _: unsafe extern "C" fn(hipStream_t, *mut c_int) -> hipError_t = hip::hipStreamGetDevice;

// The numbers: memory types, and attributes and flags, which are as in the older bindings.
const _: () = {
    assert!(hip::hipMemoryType_hipMemoryTypeUnregistered == 0);
    assert!(hip::hipMemoryType_hipMemoryTypeHost == 1);
    assert!(hip::hipMemoryType_hipMemoryTypeDevice == 2);
    assert!(hip::hipMemoryType_hipMemoryTypeManaged == 3);
    assert!(hip::hipDeviceAttribute_t_hipDeviceAttributeConcurrentManagedAccess == 9);
    assert!(hip::hipDeviceAttribute_t_hipDeviceAttributeMemoryPoolsSupported == 88);
    assert!(hip::hipEventDisableTiming == 2);
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
