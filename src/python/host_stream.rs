//! `struct ArrowArrayStream`. arrow-rs's type for it has callbacks out of which nothing may unwind.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use arrow_schema::ffi::FFI_ArrowSchema;

use crate::abi::c_data::CArray;
use crate::abi::guard;

/// `struct ArrowArrayStream` of the C stream interface. Dropping it releases it.
#[repr(C)]
pub(super) struct HostStream {
    pub(super) get_schema:
        Option<unsafe extern "C-unwind" fn(*mut Self, *mut FFI_ArrowSchema) -> c_int>,
    pub(super) get_next: Option<unsafe extern "C-unwind" fn(*mut Self, *mut CArray) -> c_int>,
    pub(super) get_last_error: Option<unsafe extern "C-unwind" fn(*mut Self) -> *const c_char>,
    pub(super) release: Option<unsafe extern "C-unwind" fn(*mut Self)>,
    pub(super) private_data: *mut c_void,
}

// SAFETY: the C stream interface allows calls from any thread, one at a time.
unsafe impl Send for HostStream {}

impl HostStream {
    pub(super) const fn empty() -> Self {
        Self {
            get_schema: None,
            get_next: None,
            get_last_error: None,
            release: None,
            private_data: ptr::null_mut(),
        }
    }
}

impl Drop for HostStream {
    fn drop(&mut self) {
        let this = ptr::from_mut(self);
        // SAFETY: `this` is a live struct that nothing else uses, and its `release` is its own callback. A moved or released
        // struct has none.
        let outcome = unsafe {
            guard::release_once("ArrowArrayStream.release", this, &raw mut (*this).release)
        };
        // A drop cannot report a panic of the callback. The struct is released all the same.
        drop(outcome);
    }
}
