//! Error texts, and the thread's last error. These need no driver.

use std::ffi::c_char;

use crate::call::{last_error, take_last_error};
use crate::errors;
use crate::ffi::Code;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipGetErrorName(hip_error: Code) -> *const c_char {
    errors::texts(hip_error).0.as_ptr()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipGetErrorString(hipError: Code) -> *const c_char {
    errors::texts(hipError).1.as_ptr()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipGetLastError() -> Code {
    take_last_error()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipPeekAtLastError() -> Code {
    last_error()
}
