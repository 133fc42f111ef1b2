//! Async device streams between this crate and SedonaDB's `sedona-extension`, both ways and in one process, on the CPU: all that SedonaDB has.
//! Where it does what the specification has otherwise, a comment says so, and the test shows what this crate makes of it.
//!
//! Neither side's types are the other's, only their layouts are: pointers to the C structs cross.

mod from_sedona;
mod kit;
mod plans;
#[path = "../../tests/it/support/mod.rs"]
mod support;
mod to_sedona;

use std::mem::{align_of, offset_of, size_of};

use arrow_device::abi as ours;
use sedona_extension::extension as theirs;

/// Both have the layout of the C structs.
macro_rules! same_layout {
    ($name:ident: $($field:ident)*) => {
        const _: () = {
            assert!(size_of::<ours::$name>() == size_of::<theirs::$name>());
            assert!(align_of::<ours::$name>() == align_of::<theirs::$name>());
            $(assert!(offset_of!(ours::$name, $field) == offset_of!(theirs::$name, $field));)*
        };
    };
}

same_layout!(FFI_ArrowDeviceArray:);
same_layout!(FFI_ArrowAsyncTask: extract_data private_data);
same_layout!(FFI_ArrowAsyncProducer: device_type request cancel additional_metadata private_data);
same_layout!(FFI_ArrowAsyncDeviceStreamHandler: on_schema on_next_task on_error release producer private_data);

// The members of ours are private; its own tests compare them with the C header.
const _: () = {
    assert!(offset_of!(theirs::FFI_ArrowDeviceArray, device_id) == 80);
    assert!(offset_of!(theirs::FFI_ArrowDeviceArray, device_type) == 88);
    assert!(offset_of!(theirs::FFI_ArrowDeviceArray, sync_event) == 96);
    assert!(offset_of!(theirs::FFI_ArrowDeviceArray, reserved) == 104);
};
