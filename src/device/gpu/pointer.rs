//! Whose memory an address is, by the runtime's own knowledge.

use std::ffi::c_int;

use super::context::Current;
use super::runtime::Answer;

/// What a runtime must be told to copy out of other memory: a context's address, or a device's number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::device) struct Peer(pub(in crate::device) usize);

/// What kind of memory an address lies in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::device) enum PointerKind {
    /// Memory of the device of this ordinal; in which context, if it belongs to one (memory of a pool
    /// does not, and HIP has none).
    Device(c_int, Option<usize>),
    /// Page-locked host memory; whether a device reaches it under this very address.
    Host { mapped: bool },
    /// Managed memory.
    Managed,
    /// Nothing that the runtime knows: ordinary host memory, or no memory at all.
    Unknown,
}

/// What `bytes` bytes at `address` are; `None` if first and last byte are not the same, or there is no such
/// range. The allocation's own range is not asked for: it is wrong for mapped memory.
///
/// An error: the runtime cannot tell, so nothing may be assumed.
pub(super) fn kind_of(
    current: &Current<'_>,
    address: usize,
    bytes: usize,
) -> Answer<Option<PointerKind>> {
    let Some(last) = address.checked_add(bytes.saturating_sub(1)) else {
        return Ok(None);
    };
    if address == 0 {
        return Ok(None);
    }
    let kind = current.kind_of_byte(address)?;
    let same = bytes <= 1 || kind == current.kind_of_byte(last)?;
    Ok(same.then_some(kind))
}
