//! [`Known`]: what a backend has said about addresses.

use std::ops::Range;

use crate::device::AddressClass;

/// Addresses of one class.
type Part = (Range<usize>, AddressClass);

/// The answers of a backend during one import.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// The first answer. Most arrays lie in one allocation and need no list.
    first: Option<Part>,
    /// Later answers about more than was asked, in the order of their first addresses.
    others: Vec<Part>,
}

impl Known {
    /// Returns the class of addresses. Calls `ask` if they do not lie in a range that is known; it
    /// returns their class, and the range around them that has it.
    pub(super) fn class(
        &mut self,
        wanted: Range<usize>,
        ask: impl FnOnce() -> (AddressClass, Range<usize>),
    ) -> AddressClass {
        let holds = |part: &&Part| part.0.start <= wanted.start && wanted.end <= part.0.end;
        let after = self
            .others
            .partition_point(|part| part.0.start <= wanted.start);
        let before = self.others[..after].last();
        let found = self.first.iter().chain(before).find(holds);
        if let Some((_, class)) = found {
            return *class;
        }
        let (class, range) = ask();
        if self.first.is_none() {
            self.first = Some((range, class));
        } else if range != wanted {
            let at = self
                .others
                .partition_point(|part| part.0.start < range.start);
            self.others.insert(at, (range, class));
        }
        class
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use AddressClass::{Device, Host, Inaccessible};

    /// Asks about addresses of allocations of 100 bytes at each multiple of 1000.
    fn class(known: &mut Known, wanted: Range<usize>, questions: &mut usize) -> AddressClass {
        known.class(wanted.clone(), || {
            *questions += 1;
            let start = wanted.start / 1000 * 1000;
            match start {
                _ if wanted.end > start + 100 => (Inaccessible, wanted),
                3000 => (Host, start..start + 100),
                _ => (Device, start..start + 100),
            }
        })
    }

    #[test]
    fn each_allocation_is_asked_about_once() {
        let (mut known, mut questions) = (Known::default(), 0);
        for round in 0..3 {
            for allocation in [7, 3, 1, 9, 2, 8] {
                let start = allocation * 1000 + round;
                let expected = if allocation == 3 { Host } else { Device };
                for wanted in [start..start + 10, start + 50..allocation * 1000 + 100] {
                    assert_eq!(class(&mut known, wanted, &mut questions), expected);
                }
            }
        }
        assert_eq!(questions, 6);
    }

    #[test]
    fn nothing_is_known_beyond_a_range() {
        let (mut known, mut questions) = (Known::default(), 0);
        for start in [1000, 2000] {
            assert_eq!(class(&mut known, start..start + 10, &mut questions), Device);
            for wanted in [start + 90..start + 101, start..start + 101] {
                let before = questions;
                assert_eq!(class(&mut known, wanted, &mut questions), Inaccessible);
                assert_eq!(questions, before + 1);
            }
        }
        // The gap between the two, and what is before the first.
        assert_eq!(class(&mut known, 1000..2010, &mut questions), Inaccessible);
        assert_eq!(class(&mut known, 950..1010, &mut questions), Inaccessible);
    }
}
