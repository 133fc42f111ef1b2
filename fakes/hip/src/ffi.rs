//! The parameters and return codes of the C functions.

use std::ffi::c_void;

#[path = "../../out.rs"]
mod out;
pub(crate) use out::*;

const _: () = assert!(size_of::<*mut c_void>() == size_of::<Address>());

pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const STREAM_CAPTURE_UNSUPPORTED: Code = 900;

/// Makes the address that CUDA takes of a pointer.
pub(crate) fn address(pointer: *const c_void) -> Address {
    pointer.expose_provenance() as Address
}

/// Makes the pointer that HIP returns of an address.
pub(crate) fn pointer(address: Address) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}
