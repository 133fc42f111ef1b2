//! What is known about addresses.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{from_mut, null_mut};

use crate::call::on_device;
use crate::control;
use crate::ffi::*;

/// `hipPointerAttribute_t`, laid out alike in all versions.
#[repr(C)]
pub(crate) struct PointerAttributes {
    kind: c_int,
    device: c_int,
    device_pointer: *mut c_void,
    host_pointer: *mut c_void,
    is_managed: c_int,
    allocation_flags: c_uint,
}

#[derive(Clone, Copy)]
enum MemoryType {
    Host,
    Device,
    Managed,
}

impl MemoryType {
    /// `hipMemoryType`.
    fn number(self) -> c_int {
        match (self, control::is_hip_5()) {
            (Self::Host, true) => 0,
            (Self::Device, true) => 1,
            (Self::Managed, true) => 4,
            (Self::Host, false) => 1,
            (Self::Device, false) => 2,
            (Self::Managed, false) => 3,
        }
    }
}

const UNREGISTERED: PointerAttributes = PointerAttributes {
    kind: 0,
    device: -1,
    device_pointer: null_mut(),
    host_pointer: null_mut(),
    is_managed: 0,
    allocation_flags: 0,
};

/// What CUDA says of an address; null members where it says nothing.
#[derive(Default)]
struct Answer {
    memory_type: c_uint,
    device_pointer: Address,
    host_pointer: Address,
    is_managed: c_int,
    ordinal: c_int,
}

/// `CUpointer_attribute`: memory type, device pointer, host pointer, is managed, device ordinal.
const NAMES: [c_int; 5] = [2, 3, 4, 8, 9];

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipPointerGetAttributes(
    attributes: Out<PointerAttributes>,
    ptr: *const c_void,
) -> Code {
    on_device(|driver| {
        let mut answer = Answer::default();
        let values: [*mut c_void; NAMES.len()] = [
            from_mut(&mut answer.memory_type).cast(),
            from_mut(&mut answer.device_pointer).cast(),
            from_mut(&mut answer.host_pointer).cast(),
            from_mut(&mut answer.is_managed).cast(),
            from_mut(&mut answer.ordinal).cast(),
        ];
        // SAFETY: there are as many names as values, and each value points to memory for its
        // attribute.
        unsafe {
            driver.cuPointerGetAttributes(
                NAMES.len() as c_uint,
                NAMES.as_ptr(),
                values.as_ptr(),
                address(ptr),
            )
        }?;
        const HOST: c_uint = 1;
        let kind = match answer.memory_type {
            0 if control::is_hip_5() => return Err(INVALID_VALUE),
            0 => return attributes.put(UNREGISTERED),
            _ if answer.is_managed != 0 => MemoryType::Managed,
            HOST => MemoryType::Host,
            _ => MemoryType::Device,
        };
        attributes.put(PointerAttributes {
            kind: kind.number(),
            device: answer.ordinal,
            device_pointer: pointer(answer.device_pointer),
            host_pointer: pointer(answer.host_pointer),
            is_managed: answer.is_managed,
            allocation_flags: 0,
        })
    })
}
