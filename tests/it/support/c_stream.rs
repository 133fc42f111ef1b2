//! `struct ArrowDeviceArrayStream`, as bindings of the C header have it.

use std::ffi::{c_char, c_int, c_void};

use arrow_device::{ArrowDeviceType, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream as Stream};
use arrow_schema::ffi::FFI_ArrowSchema;

#[repr(C)]
pub(crate) struct CStream {
    pub device_type: ArrowDeviceType,
    pub get_schema: unsafe extern "C-unwind" fn(*mut Stream, *mut FFI_ArrowSchema) -> c_int,
    pub get_next: unsafe extern "C-unwind" fn(*mut Stream, *mut FFI_ArrowDeviceArray) -> c_int,
    pub get_last_error: unsafe extern "C-unwind" fn(*mut Stream) -> *const c_char,
    pub release: Option<unsafe extern "C-unwind" fn(*mut Stream)>,
    pub private_data: *mut c_void,
}

impl CStream {
    /// The members of a stream.
    pub(crate) fn of(stream: &Stream) -> &Self {
        assert!(!stream.is_released());
        // SAFETY: both are the C struct, and one that is not released has all callbacks.
        unsafe { &*std::ptr::from_ref(stream).cast() }
    }

    pub(crate) fn into_ffi(self) -> Stream {
        // SAFETY: both are the C struct.
        unsafe { std::mem::transmute(self) }
    }
}
