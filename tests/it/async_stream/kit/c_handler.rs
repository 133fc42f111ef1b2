//! `struct ArrowAsyncDeviceStreamHandler`, as bindings of the C header have it.

use std::ffi::{c_char, c_int, c_void};

use arrow_device::abi::{FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask};
use arrow_schema::ffi::FFI_ArrowSchema;

use super::Handler;

#[repr(C)]
pub(crate) struct CHandler {
    pub on_schema: unsafe extern "C-unwind" fn(*mut Handler, *mut FFI_ArrowSchema) -> c_int,
    pub on_next_task:
        unsafe extern "C-unwind" fn(*mut Handler, *mut FFI_ArrowAsyncTask, *const c_char) -> c_int,
    pub on_error: unsafe extern "C-unwind" fn(*mut Handler, c_int, *const c_char, *const c_char),
    pub release: Option<unsafe extern "C-unwind" fn(*mut Handler)>,
    pub producer: *mut FFI_ArrowAsyncProducer,
    pub private_data: *mut c_void,
}

impl CHandler {
    /// The members of a handler.
    pub(crate) fn of(handler: &Handler) -> &Self {
        assert!(!handler.is_released());
        // SAFETY: both are the C struct, and one that is not released has all callbacks.
        unsafe { &*std::ptr::from_ref(handler).cast() }
    }

    pub(crate) fn into_ffi(self) -> Handler {
        // SAFETY: both are the C struct.
        unsafe { std::mem::transmute(self) }
    }
}

/// A handler that was released.
pub(crate) fn released_handler() -> Handler {
    // SAFETY: zero is a value of each of its members.
    unsafe { std::mem::zeroed() }
}

/// A struct with no task in it.
pub(crate) fn no_task() -> FFI_ArrowAsyncTask {
    FFI_ArrowAsyncTask {
        extract_data: None,
        private_data: std::ptr::null_mut(),
    }
}
