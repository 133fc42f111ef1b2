//! Whose memory an address is, by the driver's own knowledge.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUpointer_attribute as Attribute};

use super::context::{Context, Current};
use crate::error::Result;

/// What kind of memory an address lies in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PointerKind {
    /// Memory of the device of this ordinal; in which context, if it belongs to one (memory of a pool
    /// does not).
    Device(c_int, Option<CUcontext>),
    /// Page-locked host memory; whether a device reaches it under this very address.
    Host { mapped: bool },
    /// Managed memory.
    Managed,
    /// Nothing that the driver knows: ordinary host memory, or no memory at all.
    Unknown,
}

/// Asks the driver about one byte. The context is current.
fn kind_of_byte(context: &Context, address: usize, _: &Current<'_>) -> Result<PointerKind> {
    let mut memory_type: c_uint = 0;
    let mut managed: c_uint = 0;
    let mut ordinal: c_int = -1;
    let mut device_pointer: CUdeviceptr = 0;
    let mut of: CUcontext = std::ptr::null_mut();
    let mut attributes = [
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
        Attribute::CU_POINTER_ATTRIBUTE_CONTEXT,
    ];
    let mut values: [*mut c_void; 5] = [
        (&raw mut memory_type).cast(),
        (&raw mut managed).cast(),
        (&raw mut ordinal).cast(),
        (&raw mut device_pointer).cast(),
        (&raw mut of).cast(),
    ];
    // SAFETY: each value has its attribute's type. The driver looks the address up, it does not
    // follow it.
    let code = unsafe {
        (context.driver.cuPointerGetAttributes)(
            attributes.len() as c_uint,
            attributes.as_mut_ptr(),
            values.as_mut_ptr(),
            address as CUdeviceptr,
        )
    };
    context.check("cuPointerGetAttributes", code)?;
    const HOST: c_uint = 1;
    const DEVICE: c_uint = 2;
    Ok(match memory_type {
        _ if managed != 0 => PointerKind::Managed,
        HOST => PointerKind::Host {
            mapped: device_pointer == address as CUdeviceptr,
        },
        DEVICE => PointerKind::Device(ordinal, (!of.is_null()).then_some(of)),
        _ => PointerKind::Unknown,
    })
}

/// What `bytes` bytes at `address` are; `None` if first and last byte are not the same, or there is
/// no such range. The context is current. The allocation's own range is not asked for: it is wrong for mapped memory.
///
/// An error: the driver cannot tell, so nothing may be assumed.
pub(super) fn kind_of(
    context: &Context,
    address: usize,
    bytes: usize,
    current: &Current<'_>,
) -> Result<Option<PointerKind>> {
    let Some(last) = address.checked_add(bytes.saturating_sub(1)) else {
        return Ok(None);
    };
    if address == 0 {
        return Ok(None);
    }
    let kind = kind_of_byte(context, address, current)?;
    let same = bytes <= 1 || kind == kind_of_byte(context, last, current)?;
    Ok(same.then_some(kind))
}
