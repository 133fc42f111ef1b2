//! What comes in and goes out through the C functions.

use std::ffi::{c_int, c_void};

/// `hipError_t` or `CUresult`, as a number: there may be codes that nobody has a name for.
pub type Code = c_int;
/// `Err` is HIP's code.
pub type Outcome<T = ()> = Result<T, Code>;
/// Contexts, streams, events, pools, modules, functions.
pub type Handle = *mut c_void;
/// `CUdeviceptr`. HIP has pointers in its place.
pub type Address = u64;

const _: () = assert!(size_of::<*mut c_void>() == size_of::<Address>());

pub const INVALID_VALUE: Code = 1;
pub const INVALID_MEMCPY_DIRECTION: Code = 21;
pub const NO_DEVICE: Code = 100;
pub const INVALID_DEVICE: Code = 101;
pub const NOT_READY: Code = 600;
pub const NOT_SUPPORTED: Code = 801;
pub const STREAM_CAPTURE_UNSUPPORTED: Code = 900;
pub const UNKNOWN: Code = 999;

/// A pointer parameter that the function writes one value to.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Writes the value; null is refused.
    pub fn put(self, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: an `Out` comes only from a caller of a HIP function, who upholds that it points to
        // room for the value.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// As [`put`](Self::put), unless the pointer is null.
    pub fn put_if(self, value: T) {
        let _ = self.put(value);
    }

    /// For the driver to write to.
    pub fn raw(self) -> *mut T {
        self.0
    }
}

/// A pointer as CUDA takes it.
pub fn address(pointer: *const c_void) -> Address {
    pointer.expose_provenance() as Address
}

/// As HIP gives it.
pub fn pointer(address: Address) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}
