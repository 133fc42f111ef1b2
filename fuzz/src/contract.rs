//! What the caller of an import answers for.
//!
//! `DeviceArray::import` asks that pointers that are not null are valid for what the structs say; "Null
//! pointers", counts, sizes and values it checks. So an input is given to it only if:
//! - a list of buffers or children that is not null has as many entries as its count says, unless the
//!   count is not the type's: then the list must not be read;
//! - what a list of children and a dictionary point to are structs;
//! - **where the host reads the memory** (CPU, and page-locked memory without a backend), and no device
//!   knows allocations, a buffer that is not null has the bytes that length and offset claim, the last
//!   offset of binary and text, and the sizes of a view's buffers. Offsets before the last, views, keys,
//!   type ids, run ends and text are anything;
//! - on a simulated device buffers are anything: it knows its allocations. The sizes of a view's
//!   buffers may be in host memory; those are there.
//!
//! Lengths, offsets and counts are anything, as are null and misaligned pointers of the structs, released
//! structs, and labels of devices.

use std::ops::Range;

use arrow_schema::DataType;

use crate::foreign::{CArray, Foreign};
use crate::kinds;
use crate::sketch::{Holds, buffers, is_view};

/// Types of devices whose memory an import may read in place.
const READ_IN_PLACE: [i32; 3] = [1, 3, 11];

/// Whether an import may be asked.
pub(crate) fn holds(foreign: &Foreign<'_>) -> bool {
    let check = Check {
        regions: &foreign.regions,
        on_host: READ_IN_PLACE.contains(&foreign.root.device_type),
    };
    check.node(&foreign.root.array, foreign.data_type).is_some()
}

struct Check<'a> {
    regions: &'a [Range<usize>],
    on_host: bool,
}

/// `None` if something is claimed that is not there.
type Holding = Option<()>;

impl Check<'_> {
    fn there(&self, start: usize, bytes: usize) -> Holding {
        let end = start.checked_add(bytes)?;
        let within = |region: &Range<usize>| region.start <= start && end <= region.end;
        (bytes == 0 || self.regions.iter().any(within)).then_some(())
    }

    /// The entries of a list. None if it must be refused before it is read.
    fn list(&self, list: usize, n: i64) -> Option<Option<Vec<usize>>> {
        let Ok(n) = usize::try_from(n) else {
            return Some(None);
        };
        if list == 0 || !list.is_multiple_of(8) {
            return Some(None);
        }
        self.there(list, n.checked_mul(8)?)?;
        // SAFETY: there are so many.
        let entries = (0..n).map(|i| unsafe { *(list as *const usize).add(i) });
        Some(Some(entries.collect()))
    }

    fn node(&self, array: &CArray, data_type: &DataType) -> Holding {
        const REFUSED: Holding = Some(());
        let kinds = buffers(data_type);
        let is_view = is_view(data_type);
        let fixed = kinds.len() as i64;
        let n_buffers = array.n_buffers;
        let counts = array.release.is_some()
            && if is_view {
                n_buffers > fixed && n_buffers < 1 << 25
            } else {
                n_buffers == fixed
            };
        if !counts {
            return REFUSED;
        }
        let Some(list) = self.list(array.buffers.addr(), n_buffers)? else {
            return REFUSED;
        };
        let length = u64::try_from(array.length);
        let offset = u64::try_from(array.offset);
        let (Ok(length), Ok(offset)) = (length, offset) else {
            return REFUSED;
        };
        let rows = length + offset;
        if self.on_host && length > 0 {
            for (i, kind) in kinds.iter().enumerate() {
                let bytes = match kind {
                    Holds::Bytes if list[i - 1] == 0 => 0,
                    // Refused, if not as too large then as too small.
                    Holds::Bytes => {
                        let last = self.last_offset(list[i - 1], kinds[i - 1], rows)?;
                        last.unwrap_or_default()
                    }
                    kind => kind.bytes(rows).unwrap_or(0),
                };
                if list[i] != 0 {
                    self.there(list[i], bytes)?;
                }
            }
        }
        if is_view {
            self.variadic(&list[kinds.len()..])?;
        }
        self.below(array, data_type)
    }

    fn variadic(&self, list: &[usize]) -> Holding {
        let (sizes, list) = list.split_last()?;
        if *sizes == 0 || list.is_empty() {
            return Some(());
        }
        match self.there(*sizes, list.len() * 8) {
            // Of the device.
            None if !self.on_host => return Some(()),
            there => there?,
        }
        for (i, buffer) in list.iter().enumerate() {
            // SAFETY: there are so many.
            let size = unsafe { (*sizes as *const i64).add(i).read_unaligned() };
            if self.on_host && *buffer != 0 {
                self.there(*buffer, usize::try_from(size).unwrap_or(0))?;
            }
        }
        Some(())
    }

    fn last_offset(&self, offsets: usize, kind: Holds, rows: u64) -> Option<Result<usize, ()>> {
        let Holds::Offsets(width) = kind else {
            return Some(Err(()));
        };
        let Some(bytes) = kind.bytes(rows) else {
            return Some(Err(()));
        };
        self.there(offsets, bytes)?;
        let last = offsets + bytes - width;
        // SAFETY: there.
        let last = unsafe {
            match width {
                4 => i64::from((last as *const i32).read_unaligned()),
                _ => (last as *const i64).read_unaligned(),
            }
        };
        Some(usize::try_from(last).map_err(drop))
    }

    fn below(&self, array: &CArray, data_type: &DataType) -> Holding {
        let types = kinds::children(data_type);
        let aligned = |child: usize| child != 0 && child.is_multiple_of(8);
        let one = |child: usize, data_type: &DataType| match aligned(child) {
            // SAFETY: lists hold structs of `foreign`, null, or misaligned pointers.
            true => self.node(unsafe { &*(child as *const CArray) }, data_type),
            false => Some(()),
        };
        if let DataType::Dictionary(_, values) = data_type {
            return match array.n_children {
                0 => one(array.dictionary.addr(), values),
                _ => Some(()),
            };
        }
        if array.n_children != types.len() as i64 || !array.dictionary.is_null() {
            return Some(());
        }
        let Some(list) = self.list(array.children.addr(), array.n_children)? else {
            return Some(());
        };
        list.into_iter()
            .zip(types)
            .try_for_each(|(child, t)| one(child, t))
    }
}
