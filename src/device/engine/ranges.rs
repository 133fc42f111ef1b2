//! The live allocations of a device, by address: any ([`Ranges`]), and a runtime's ([`Memories`]).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;

use super::health::Guarded;
use crate::device::backend::{AddressClass, DevicePtr, PointerInfo};
use crate::device::lock;

/// The live allocations of a device, by address, each with a value: the handle that its addresses stand for, for example.
///
/// Allocations do not overlap. One is inserted when the runtime has returned it, and removed **before** it is given back to
/// the runtime, which may hand out its addresses again at once, to another thread.
pub(crate) struct Ranges<T>(Mutex<BTreeMap<usize, Entry<T>>>);

struct Entry<T> {
    base: DevicePtr,
    bytes: usize,
    value: T,
}

fn overlaps<T>(ranges: &BTreeMap<usize, Entry<T>>, base: DevicePtr, bytes: usize) -> bool {
    let range = base.range(bytes);
    let last_before_end = ranges.range(..range.end).next_back();
    last_before_end.is_some_and(|(from, entry)| from.saturating_add(entry.bytes) > range.start)
}

impl<T> Ranges<T> {
    /// Makes an empty table.
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Adds an allocation of `bytes` bytes. It replaces one with the same base.
    pub(crate) fn insert(&self, base: DevicePtr, bytes: usize, value: T) {
        let entry = Entry { base, bytes, value };
        // What was there is dropped without the lock, since that may run a foreign destructor.
        let _replaced = { lock(&self.0).insert(base.address(), entry) };
    }

    /// As [`insert`](Self::insert), unless one of the bytes lies in an allocation of the table. Returns whether it was added.
    pub(crate) fn insert_apart(&self, base: DevicePtr, bytes: usize, value: T) -> bool {
        let mut ranges = lock(&self.0);
        let is_apart = !overlaps(&ranges, base, bytes);
        if is_apart {
            let entry = Entry { base, bytes, value };
            ranges.insert(base.address(), entry);
        }
        is_apart
    }

    /// Returns whether one of the bytes lies in an allocation of the table.
    pub(crate) fn overlaps(&self, base: DevicePtr, bytes: usize) -> bool {
        overlaps(&lock(&self.0), base, bytes)
    }

    /// Removes the allocation that begins at `base`. Returns its value.
    pub(crate) fn remove(&self, base: DevicePtr) -> Option<T> {
        let entry = lock(&self.0).remove(&base.address())?;
        Some(entry.value)
    }

    /// Returns the answer of [`Backend::classify`](crate::device::Backend::classify) for `bytes` bytes at `address`: `class` with
    /// the addresses of the whole allocation if all of them lie in one, and [`AddressClass::Inaccessible`] if the first does but not
    /// all of them do. `None` if the first lies in none: that is for the runtime to classify.
    pub(crate) fn classify(
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

    /// Removes all allocations.
    pub(crate) fn clear(&self) {
        let all = std::mem::take(&mut *lock(&self.0));
        // Dropped without the lock.
        drop(all);
    }

    /// Returns the number of allocations.
    pub(crate) fn len(&self) -> usize {
        lock(&self.0).len()
    }
}

impl<T: Clone> Ranges<T> {
    /// Returns a clone of the value of the allocation in which all of `bytes` bytes at an address lie, for which a handle or an
    /// [`Arc`] is best (the table is locked meanwhile), and how many bytes after the base they begin.
    ///
    /// [`Arc`]: std::sync::Arc
    pub(crate) fn find(&self, address: DevicePtr, bytes: usize) -> Option<(T, usize)> {
        let ranges = lock(&self.0);
        let (_, entry) = ranges.range(..=address.address()).next_back()?;
        let offset = address.address() - entry.base.address();
        let is_inside = offset < entry.bytes && bytes <= entry.bytes - offset;
        is_inside.then(|| (entry.value.clone(), offset))
    }
}

/// Memory, with its length in bytes as the runtime was asked for it.
pub(super) type Piece<M> = (Guarded<M>, usize);

/// The memory of a device that is in use, by address: of the device, and of the host. A [`Runtime`](super::Runtime) that needs the handle behind an address
/// finds it here; only the engine adds and removes.
pub struct Memories<M> {
    pub(super) live: Ranges<Piece<M>>,
    pub(super) host: Ranges<Piece<M>>,
}

impl<M> Default for Memories<M> {
    fn default() -> Self {
        Self {
            live: Ranges::new(),
            host: Ranges::new(),
        }
    }
}

impl<M> fmt::Debug for Memories<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (device, host) = (self.live.len(), self.host.len());
        write!(f, "Memories({device} on the device, {host} on the host)")
    }
}

impl<M: Clone> Memories<M> {
    /// Returns the memory in which all of `bytes` bytes at an address lie, and the offset of the address in it in bytes. `None` if there is
    /// none that the engine has allocated, or that was [wrapped](crate::DeviceBuffer::wrap).
    pub fn find(&self, address: DevicePtr, bytes: usize) -> Option<(M, usize)> {
        let ((memory, _), offset) = self
            .live
            .find(address, bytes)
            .or_else(|| self.host.find(address, bytes))?;
        Some((M::clone(&memory), offset))
    }

    /// As [`find`](Self::find), in host memory alone: where the device's addresses are not the host's, one number may be both.
    pub fn find_host(&self, address: DevicePtr, bytes: usize) -> Option<(M, usize)> {
        let ((memory, _), offset) = self.host.find(address, bytes)?;
        Some((M::clone(&memory), offset))
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
        let ranges = Ranges::new();
        ranges.insert(at(1000), 100, "a");
        ranges.insert(at(1100), 50, "b");
        ranges.insert(at(2000), 10, "c");
        ranges
    }

    #[test]
    fn an_address_is_found_in_one_allocation() {
        let ranges = ranges();
        let found = |address| ranges.find(at(address), 1);
        assert_eq!(found(999), None);
        assert_eq!(found(1000), Some(("a", 0)));
        assert_eq!(found(1099), Some(("a", 99)));
        assert_eq!(found(1100), Some(("b", 0)));
        assert_eq!(found(1150), None);
        assert_eq!(found(2009), Some(("c", 9)));
        assert_eq!(found(usize::MAX), None);
        assert_eq!(ranges.find(at(1001), 99), Some(("a", 1)));
        assert_eq!(ranges.find(at(1001), 100), None);
        assert_eq!(ranges.len(), 3);
        assert_eq!(ranges.remove(at(1001)), None);
        assert_eq!(ranges.remove(at(1000)), Some("a"));
        assert_eq!(found(1099), None);
        ranges.insert(at(1100), 60, "d");
        assert_eq!(found(1150), Some(("d", 50)));
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
        assert_eq!(ranges.find(at(1999), 1).unwrap().0, "between");
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
