//! Whose memory an address is, by the runtime's own knowledge.

use super::context::Current;
use super::runtime::{Answer, PointerKind};

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
