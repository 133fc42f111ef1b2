//! The parameters and return codes of the C functions.

use std::ffi::{CStr, c_char};

#[path = "../../out.rs"]
mod out;
pub(crate) use out::*;

pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const INVALID_IMAGE: Code = 200;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const INVALID_PTX: Code = 218;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_FOUND: Code = 500;
pub(crate) const ILLEGAL_ADDRESS: Code = 700;
pub(crate) const CONTEXT_IS_DESTROYED: Code = 709;
pub(crate) const ALREADY_REGISTERED: Code = 712;
pub(crate) const NOT_REGISTERED: Code = 713;
pub(crate) const MISALIGNED_ADDRESS: Code = 716;
pub(crate) const LAUNCH_FAILED: Code = 719;
pub(crate) const NOT_PERMITTED: Code = 800;

/// A pointer parameter that the function reads values from.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T> In<T> {
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }
}

impl<T: Copy> In<T> {
    pub(crate) fn get(self) -> Outcome<T> {
        self.at(0)
    }

    /// The value at `index`; null is refused.
    pub(crate) fn at(self, index: usize) -> Outcome<T> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: an `In` comes only from the caller of a driver function, who guarantees that it
        // points to as many values as the function reads.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// `count` values; null is refused.
    pub(crate) fn list(self, count: usize) -> Outcome<Vec<T>> {
        (0..count).map(|index| self.at(index)).collect()
    }
}

impl In<c_char> {
    /// A text that ends with a NUL.
    pub(crate) fn text(self) -> Outcome<String> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: an `In` comes only from the caller of a driver function, who guarantees that the
        // text ends with a NUL.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// A handle as a number.
pub(crate) fn number(handle: Handle) -> usize {
    handle.addr()
}

/// A number as a handle. It is never followed.
pub(crate) fn handle(number: usize) -> Handle {
    std::ptr::without_provenance_mut(number)
}
