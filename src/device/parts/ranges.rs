//! The live allocations of a device, by address.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;

use crate::device::backend::{AddressClass, DevicePtr, PointerInfo};
use crate::device::lock;

/// The live allocations of a device, by address, each with a value: the handle that its addresses stand for, for example.
///
/// Allocations do not overlap. One is inserted when the runtime has returned it, and removed **before** it is given back to
/// the runtime, which may hand out its addresses again at once, to another thread.
///
/// ```
/// use arrow_device::device::{AddressClass, DevicePtr, parts::Ranges};
///
/// let ranges = Ranges::new();
/// let base = DevicePtr::new(std::ptr::without_provenance_mut(0x10000));
/// ranges.insert(base, 4096, "handle 7");
///
/// let found = ranges.find(base.offset(100)).unwrap();
/// assert_eq!((found.value, found.offset), ("handle 7", 100));
///
/// let classify = |offset, bytes| ranges.classify(base.offset(offset), bytes, AddressClass::Device);
/// let class = |offset, bytes| classify(offset, bytes).map(|found| found.class);
/// assert_eq!(class(4000, 96), Some(AddressClass::Device));
/// assert_eq!(class(4000, 97), Some(AddressClass::Inaccessible)); // longer than the allocation
/// assert_eq!(class(5000, 1), None); // not ours
///
/// assert_eq!(ranges.remove(base), Some((4096, "handle 7")));
/// assert!(ranges.is_empty());
/// ```
pub struct Ranges<T>(Mutex<BTreeMap<usize, Entry<T>>>);

struct Entry<T> {
    base: DevicePtr,
    bytes: usize,
    value: T,
}

/// The answer of [`Ranges::find`].
#[derive(Clone, Debug)]
pub struct Found<T> {
    /// The allocation's value.
    pub value: T,
    /// Its first byte.
    pub base: DevicePtr,
    /// Its length in bytes.
    pub bytes: usize,
    /// How many bytes after `base` the address lies; less than `bytes`.
    pub offset: usize,
}

impl<T> Ranges<T> {
    /// Makes an empty table.
    pub const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Adds an allocation of `bytes` bytes. It replaces one with the same base.
    pub fn insert(&self, base: DevicePtr, bytes: usize, value: T) {
        let entry = Entry { base, bytes, value };
        // What was there is dropped without the lock, since that may run a foreign destructor.
        let _replaced = { lock(&self.0).insert(base.address(), entry) };
    }

    /// As [`insert`](Self::insert), unless one of the bytes lies in an allocation of the table. Returns whether it was added.
    pub fn insert_apart(&self, base: DevicePtr, bytes: usize, value: T) -> bool {
        let mut ranges = lock(&self.0);
        let start = base.address();
        let last_before_end = ranges.range(..start.saturating_add(bytes)).next_back();
        let is_apart = last_before_end
            .is_none_or(|(from, entry)| *from < start && entry.bytes <= start - from);
        if is_apart {
            ranges.insert(start, Entry { base, bytes, value });
        }
        is_apart
    }

    /// Removes the allocation that begins at `base`. Returns its length in bytes and its value.
    pub fn remove(&self, base: DevicePtr) -> Option<(usize, T)> {
        let entry = lock(&self.0).remove(&base.address())?;
        Some((entry.bytes, entry.value))
    }

    /// Returns the answer of [`Backend::classify`](crate::device::Backend::classify) for `bytes` bytes at `address`: `class` with
    /// the addresses of the whole allocation if all of them lie in one, and [`AddressClass::Inaccessible`] if the first does but not
    /// all of them do. `None` if the first lies in none: that is for the runtime to classify.
    pub fn classify(
        &self,
        address: DevicePtr,
        bytes: usize,
        class: AddressClass,
    ) -> Option<PointerInfo> {
        let ranges = lock(&self.0);
        let (_, entry) = ranges.range(..=address.address()).next_back()?;
        let offset = address.address() - entry.base.address();
        // None of its bytes lie behind the end of an allocation: 0 bytes belong to it.
        let (class, range) = match entry.bytes.checked_sub(offset)? {
            left if bytes <= left => (class, entry.base.range(entry.bytes)),
            0 => return None,
            _ => (AddressClass::Inaccessible, address.range(bytes)),
        };
        Some(PointerInfo::new(class, range))
    }

    /// Returns the number of allocations.
    pub fn len(&self) -> usize {
        lock(&self.0).len()
    }

    /// Returns whether there are no allocations.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<T: Clone> Ranges<T> {
    /// Returns the allocation in which `address` lies, with a clone of its value, for which a handle or an [`Arc`] is best: the
    /// table is locked meanwhile.
    ///
    /// [`Arc`]: std::sync::Arc
    pub fn find(&self, address: DevicePtr) -> Option<Found<T>> {
        let ranges = lock(&self.0);
        let (_, entry) = ranges.range(..=address.address()).next_back()?;
        let offset = address.address() - entry.base.address();
        (offset < entry.bytes).then(|| Found {
            value: entry.value.clone(),
            base: entry.base,
            bytes: entry.bytes,
            offset,
        })
    }
}

impl<T> Default for Ranges<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> fmt::Debug for Ranges<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = lock(&self.0);
        let ranges = ranges.values().map(|entry| (entry.base, entry.bytes));
        f.debug_map().entries(ranges).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: usize) -> DevicePtr {
        DevicePtr::new(std::ptr::without_provenance_mut(address))
    }

    /// Two neighbours, and one apart.
    fn ranges() -> Ranges<&'static str> {
        let ranges = Ranges::default();
        ranges.insert(at(1000), 100, "a");
        ranges.insert(at(1100), 50, "b");
        ranges.insert(at(2000), 10, "c");
        ranges
    }

    #[test]
    fn an_address_is_found_in_one_allocation() {
        let ranges = ranges();
        let found = |address| {
            let found = ranges.find(at(address))?;
            assert_eq!(found.base.address() + found.offset, address);
            Some((found.value, found.offset, found.bytes))
        };
        assert_eq!(found(999), None);
        assert_eq!(found(1000), Some(("a", 0, 100)));
        assert_eq!(found(1099), Some(("a", 99, 100)));
        assert_eq!(found(1100), Some(("b", 0, 50)));
        assert_eq!(found(1150), None);
        assert_eq!(found(2009), Some(("c", 9, 10)));
        assert_eq!(found(usize::MAX), None);
        assert_eq!(ranges.len(), 3);
        assert_eq!(ranges.remove(at(1001)), None);
        assert_eq!(ranges.remove(at(1000)), Some((100, "a")));
        assert_eq!(found(1099), None);
        ranges.insert(at(1100), 60, "d");
        assert_eq!(found(1150), Some(("d", 50, 60)));
        assert_eq!(ranges.len(), 2);
    }

    #[test]
    fn what_is_inserted_apart_overlaps_nothing() {
        let ranges = ranges();
        for (address, bytes) in [
            (1000, 100),
            (999, 2),
            (1149, 1),
            (1990, 100),
            (0, usize::MAX),
        ] {
            assert!(!ranges.insert_apart(at(address), bytes, "x"), "{address}");
        }
        assert_eq!(ranges.len(), 3);
        assert!(ranges.insert_apart(at(1150), 850, "between"));
        assert!(ranges.insert_apart(at(0), 1000, "before"));
        assert!(ranges.insert_apart(at(2010), usize::MAX, "behind"));
        assert!(!ranges.insert_apart(at(1500), 1, "x"));
        assert_eq!(ranges.find(at(1999)).unwrap().value, "between");
    }

    #[test]
    fn all_bytes_lie_in_one_allocation() {
        let ranges = ranges();
        let classify = |address, bytes| {
            let found = ranges.classify(at(address), bytes, AddressClass::Device)?;
            Some((found.class, found.range))
        };
        let device = |range| Some((AddressClass::Device, range));
        assert_eq!(classify(1000, 100), device(1000..1100));
        assert_eq!(classify(1099, 1), device(1000..1100));
        // The neighbour is another allocation.
        assert_eq!(
            classify(1099, 2),
            Some((AddressClass::Inaccessible, 1099..1101))
        );
        assert_eq!(classify(1100, 50), device(1100..1150));
        assert_eq!(
            classify(1140, usize::MAX),
            Some((AddressClass::Inaccessible, 1140..usize::MAX))
        );
        // Zero bytes at the end.
        assert_eq!(classify(1150, 0), device(1100..1150));
        assert_eq!(classify(1150, 1), None);
        assert_eq!(classify(1151, 0), None);
        assert_eq!(classify(999, 1), None);
    }
}
