//! What the C structs look like from Rust, as tables: for comparing with a C compiler.

use std::mem::offset_of;

use arrow_schema::ffi::Flags;

use super::c_data::{CArray, CSchema};
use super::{
    ArrowDeviceType, FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask,
    FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream,
};

/// One struct; sizes, alignments and offsets are in bytes.
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

macro_rules! layouts {
    ($($name:literal = $ty:ty { $($field:ident),* $(,)? })*) => {
        /// All structs of the interface, with all members in their order.
        pub const STRUCTS: &[StructLayout] = &[$(StructLayout {
            name: $name,
            size: size_of::<$ty>(),
            align: align_of::<$ty>(),
            fields: &[$((stringify!($field), offset_of!($ty, $field))),*],
        }),*];
    };
}

layouts! {
    "ArrowSchema" = CSchema {
        format, name, metadata, flags, n_children, children, dictionary, release, private_data,
    }
    "ArrowArray" = CArray {
        length, null_count, offset, n_buffers, n_children, buffers, children, dictionary, release,
        private_data,
    }
    "ArrowDeviceArray" = FFI_ArrowDeviceArray {
        array, device_id, device_type, sync_event, reserved,
    }
    "ArrowDeviceArrayStream" = FFI_ArrowDeviceArrayStream {
        device_type, get_schema, get_next, get_last_error, release, private_data,
    }
    "ArrowAsyncTask" = FFI_ArrowAsyncTask { extract_data, private_data }
    "ArrowAsyncProducer" = FFI_ArrowAsyncProducer {
        device_type, request, cancel, additional_metadata, private_data,
    }
    "ArrowAsyncDeviceStreamHandler" = FFI_ArrowAsyncDeviceStreamHandler {
        on_schema, on_next_task, on_error, release, producer, private_data,
    }
}

/// All numeric constants of the interface under their names in `abi.h`.
pub const CONSTANTS: &[(&str, i64)] = &[
    (
        "ARROW_FLAG_DICTIONARY_ORDERED",
        Flags::DICTIONARY_ORDERED.bits(),
    ),
    ("ARROW_FLAG_NULLABLE", Flags::NULLABLE.bits()),
    ("ARROW_FLAG_MAP_KEYS_SORTED", Flags::MAP_KEYS_SORTED.bits()),
    ("ARROW_DEVICE_CPU", code(ArrowDeviceType::CPU)),
    ("ARROW_DEVICE_CUDA", code(ArrowDeviceType::CUDA)),
    ("ARROW_DEVICE_CUDA_HOST", code(ArrowDeviceType::CUDA_HOST)),
    ("ARROW_DEVICE_OPENCL", code(ArrowDeviceType::OPENCL)),
    ("ARROW_DEVICE_VULKAN", code(ArrowDeviceType::VULKAN)),
    ("ARROW_DEVICE_METAL", code(ArrowDeviceType::METAL)),
    ("ARROW_DEVICE_VPI", code(ArrowDeviceType::VPI)),
    ("ARROW_DEVICE_ROCM", code(ArrowDeviceType::ROCM)),
    ("ARROW_DEVICE_ROCM_HOST", code(ArrowDeviceType::ROCM_HOST)),
    ("ARROW_DEVICE_EXT_DEV", code(ArrowDeviceType::EXT_DEV)),
    (
        "ARROW_DEVICE_CUDA_MANAGED",
        code(ArrowDeviceType::CUDA_MANAGED),
    ),
    ("ARROW_DEVICE_ONEAPI", code(ArrowDeviceType::ONEAPI)),
    ("ARROW_DEVICE_WEBGPU", code(ArrowDeviceType::WEBGPU)),
    ("ARROW_DEVICE_HEXAGON", code(ArrowDeviceType::HEXAGON)),
];

const fn code(device_type: ArrowDeviceType) -> i64 {
    device_type.value() as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of `abi.h`, in its order.
    #[test]
    fn constants() {
        let codes: Vec<i64> = CONSTANTS.iter().map(|(_, value)| *value).collect();
        let flags = [1, 2, 4];
        let devices = [1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
        assert_eq!(codes, [&flags[..], &devices[..]].concat());
        for ((name, value), known) in CONSTANTS[3..].iter().zip(ArrowDeviceType::ALL) {
            assert_eq!(name.strip_prefix("ARROW_DEVICE_"), known.name());
            assert_eq!(*value, i64::from(known.value()));
        }
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
