//! What the stand-ins' C functions return and write to: shared by both libraries, which include
//! this file.
#![allow(dead_code)] // each uses its part

use std::ffi::{c_int, c_void};

/// `CUresult` or `hipError_t`, as a number: there may be codes that have no name.
pub(crate) type Code = c_int;
/// `Err` is the code that the function returns.
pub(crate) type Outcome<T = ()> = Result<T, Code>;
/// Contexts, streams, events, pools, modules, functions.
pub(crate) type Handle = *mut c_void;
/// `CUdeviceptr`, for which HIP has pointers.
pub(crate) type Address = u64;

// Codes of the same meaning in both.
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const INVALID_DEVICE: Code = 101;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const NOT_SUPPORTED: Code = 801;
pub(crate) const UNKNOWN: Code = 999;

/// A pointer parameter that the function writes one value to.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Writes the value; refuses null.
    pub(crate) fn put(self, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: an `Out` comes only from the caller of a C function, who guarantees that the
        // pointer is valid for the write of the value.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes the value unless the pointer is null.
    pub(crate) fn put_if(self, value: T) {
        let _ = self.put(value);
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn raw(self) -> *mut T {
        self.0
    }

    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Writes as many of `bytes` as fit into `room` bytes, to an array parameter, unless the
    /// pointer is null.
    pub(crate) fn put_bytes(self, bytes: &[u8], room: usize) {
        let count = bytes.len().min(room);
        if !self.0.is_null() {
            // SAFETY: an `Out` comes only from the caller of a C function, who guarantees that
            // `room` bytes may be written.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.cast(), count) }
        }
    }
}
