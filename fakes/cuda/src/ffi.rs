//! What comes in and goes out through the C functions.

use std::ffi::{CStr, c_char, c_int, c_void};

/// `CUresult`, as a number: there may be codes that nobody has a name for.
pub type Code = c_int;
/// `Err` is what the function answers.
pub type Outcome<T = ()> = Result<T, Code>;
/// Contexts, streams, events, pools, modules, functions.
pub type Handle = *mut c_void;
/// `CUdeviceptr`.
pub type Address = u64;

pub const INVALID_VALUE: Code = 1;
pub const OUT_OF_MEMORY: Code = 2;
pub const NOT_INITIALIZED: Code = 3;
pub const DEINITIALIZED: Code = 4;
pub const INVALID_DEVICE: Code = 101;
pub const INVALID_IMAGE: Code = 200;
pub const INVALID_CONTEXT: Code = 201;
pub const INVALID_PTX: Code = 218;
pub const INVALID_HANDLE: Code = 400;
pub const NOT_FOUND: Code = 500;
pub const NOT_READY: Code = 600;
pub const ILLEGAL_ADDRESS: Code = 700;
pub const PEER_UNSUPPORTED: Code = 217;
pub const PEER_ALREADY_ENABLED: Code = 704;
pub const PEER_NOT_ENABLED: Code = 705;
pub const CONTEXT_IS_DESTROYED: Code = 709;
pub const ALREADY_REGISTERED: Code = 712;
pub const NOT_REGISTERED: Code = 713;
pub const MISALIGNED_ADDRESS: Code = 716;
pub const LAUNCH_FAILED: Code = 719;
pub const NOT_PERMITTED: Code = 800;
pub const NOT_SUPPORTED: Code = 801;
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
        self.put_if(value);
        Ok(())
    }

    /// Writes the value unless the pointer is null.
    pub fn put_if(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: an `Out` comes only from a caller of a driver function, who upholds that it
            // points to room for the value.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Writes as many bytes of `bytes` as `room` has, as an array parameter.
    pub fn put_bytes(self, bytes: &[u8], room: usize) {
        if !self.0.is_null() {
            // SAFETY: as in `put_if`; the caller upholds that there are `room` bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    bytes.as_ptr(),
                    self.0.cast::<u8>(),
                    bytes.len().min(room),
                )
            }
        }
    }
}

/// A pointer parameter that the function reads values from.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T> In<T> {
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }
}

impl<T: Copy> In<T> {
    pub fn get(self) -> Outcome<T> {
        self.at(0)
    }

    /// The value at `index`; null is refused.
    pub fn at(self, index: usize) -> Outcome<T> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: an `In` comes only from a caller of a driver function, who upholds that it points
        // to as many values as the function takes.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// `count` values; null is refused.
    pub fn list(self, count: usize) -> Outcome<Vec<T>> {
        (0..count).map(|index| self.at(index)).collect()
    }
}

impl In<c_char> {
    /// A text that ends with a NUL.
    pub fn text(self) -> Outcome<String> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: as in `at`; the caller upholds that the text ends with a NUL.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// A handle as a number.
pub fn number(handle: Handle) -> usize {
    handle.addr()
}

/// A number as a handle. It is never followed.
pub fn handle(number: usize) -> Handle {
    std::ptr::without_provenance_mut(number)
}
