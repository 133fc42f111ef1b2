//! Sizes and member offsets of the C structs: what 64-bit targets must have. Tests compare them with a C compiler.

use std::mem::offset_of;

use super::c_data::{CArray, CSchema};
use super::{
    FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask,
    FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream,
};

/// Checks the Rust types when this crate is compiled.
macro_rules! layouts {
    ($($name:literal, $bytes:literal bytes: $ty:ty { $($field:ident $at:literal),* $(,)? })*) => {
        /// All structs of the interface, with all members in their order.
        #[cfg(test)]
        const STRUCTS: &[tests::StructLayout] = &[$(tests::StructLayout {
            name: $name,
            size: size_of::<$ty>(),
            align: align_of::<$ty>(),
            fields: &[$((stringify!($field), offset_of!($ty, $field))),*],
        }),*];

        #[cfg(target_pointer_width = "64")]
        const _: () = {$(
            assert!(size_of::<$ty>() == $bytes && align_of::<$ty>() == 8);
            $(assert!(offset_of!($ty, $field) == $at);)*
        )*};
    };
}

layouts! {
    "ArrowSchema", 72 bytes: CSchema {
        format 0, name 8, metadata 16, flags 24, n_children 32, children 40, dictionary 48, release 56, private_data 64,
    }
    "ArrowArray", 80 bytes: CArray {
        length 0, null_count 8, offset 16, n_buffers 24, n_children 32, buffers 40, children 48, dictionary 56, release 64,
        private_data 72,
    }
    "ArrowDeviceArray", 128 bytes: FFI_ArrowDeviceArray {
        array 0, device_id 80, device_type 88, sync_event 96, reserved 104,
    }
    "ArrowDeviceArrayStream", 48 bytes: FFI_ArrowDeviceArrayStream {
        device_type 0, get_schema 8, get_next 16, get_last_error 24, release 32, private_data 40,
    }
    "ArrowAsyncTask", 16 bytes: FFI_ArrowAsyncTask { extract_data 0, private_data 8 }
    "ArrowAsyncProducer", 40 bytes: FFI_ArrowAsyncProducer {
        device_type 0, request 8, cancel 16, additional_metadata 24, private_data 32,
    }
    "ArrowAsyncDeviceStreamHandler", 48 bytes: FFI_ArrowAsyncDeviceStreamHandler {
        on_schema 0, on_next_task 8, on_error 16, release 24, producer 32, private_data 40,
    }
}

#[cfg(test)]
mod tests;
