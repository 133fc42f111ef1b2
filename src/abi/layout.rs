//! Sizes, member offsets and constants of the C structs, as tables for a comparison with a C
//! compiler.

use std::mem::offset_of;

use arrow_schema::ffi::Flags;

use super::c_data::{CArray, CSchema};
use super::{
    ArrowDeviceType, FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask,
    FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream,
};

/// The layout of one struct; sizes, alignments and offsets are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StructLayout {
    /// The name in `abi.h`.
    pub name: &'static str,
    /// `sizeof`.
    pub size: usize,
    /// `_Alignof`.
    pub align: usize,
    /// Each member and its `offsetof`.
    pub fields: &'static [(&'static str, usize)],
}

/// Fills [`STRUCTS`] from the Rust types, and checks them against the numbers of 64-bit targets
/// when this crate is compiled.
macro_rules! layouts {
    ($($name:literal, $bytes:literal bytes: $ty:ty { $($field:ident $at:literal),* $(,)? })*) => {
        /// All structs of the interface, with all members in their order.
        pub const STRUCTS: &[StructLayout] = &[$(StructLayout {
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

/// Returns all numeric constants of the interface with their names in `abi.h`.
pub fn constants() -> Vec<(String, i64)> {
    let flag = |name: &str, flag: Flags| (format!("ARROW_FLAG_{name}"), flag.bits());
    let mut all = vec![
        flag("DICTIONARY_ORDERED", Flags::DICTIONARY_ORDERED),
        flag("NULLABLE", Flags::NULLABLE),
        flag("MAP_KEYS_SORTED", Flags::MAP_KEYS_SORTED),
    ];
    all.extend(ArrowDeviceType::ALL.map(|of| {
        let name = of.name().unwrap_or_default();
        (format!("ARROW_DEVICE_{name}"), of.value().into())
    }));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of `abi.h`, in its order.
    #[test]
    fn numbers() {
        let codes = constants().into_iter().map(|(_, value)| value);
        let flags = [1, 2, 4];
        let devices = [1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
        assert!(codes.eq(flags.into_iter().chain(devices)));
    }

    #[test]
    fn names_are_unique_and_fields_ascend() {
        for (i, s) in STRUCTS.iter().enumerate() {
            assert!(STRUCTS[..i].iter().all(|other| other.name != s.name));
            assert!(s.fields.is_sorted_by(|a, b| a.1 < b.1), "{}", s.name);
            assert_eq!(s.size % s.align, 0);
        }
    }
}
