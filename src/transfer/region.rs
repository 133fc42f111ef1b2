//! [`CopyRegion`]: where some bytes of a result come from, and what the host changes in them on the way.

use arrow_buffer::bit_mask::set_bits;

use crate::data::numbers::{count_bits, int};
use crate::device::DevicePtr;
use crate::transfer::staging;

/// Regions of at least this many bytes are copied directly from where they are, if the device can do that. That costs up
/// to two copies more, its own and that of what was packed before it, and saves the host `DIRECT` bytes of packing. The
/// documentation of [`HostSlab`](crate::HostSlab) promises this number.
pub(super) const DIRECT: usize = staging(1 << 20);

/// Some bytes of one buffer of a transfer's result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyRegion {
    /// The first byte of the source.
    pub(super) src: DevicePtr,
    /// Byte offset in the memory of the result.
    pub(super) dst: usize,
    /// The bytes of the result.
    pub(super) len: usize,
    /// The zeros that follow, where a buffer ends.
    pub(super) pad: usize,
    /// The source is followed by so many zeros too.
    pub(super) padded: bool,
    pub(super) rewrite: Rewrite,
}

/// What the host changes in a region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Rewrite {
    /// Nothing.
    None,
    /// Nothing, but the source is memory of the host that the plan keeps.
    Made,
    /// The result is `bits` bits from bit `skip` of the source, or that many set bits if there is no source. They start at bit
    /// `at` of the first byte, whose bits before that are another region's.
    Bits {
        skip: u8,
        at: u8,
        bits: usize,
        /// Those that are not set are nulls, to be added to this one of the plan's counts.
        counts: Option<u32>,
    },
    /// `n` is added to each integer of `width` bytes (1, 2, 4 or 8). Invalid offsets may wrap; they stay invalid, and
    /// nothing is read through them.
    Add { width: u8, n: i64 },
    /// Views whose data buffer `i` becomes element `i` of this one of the plan's tables.
    Views(u32),
}

impl CopyRegion {
    /// `len` bytes that are copied as they are.
    pub(super) fn new(src: DevicePtr, len: usize) -> Self {
        Self {
            src,
            dst: 0,
            len,
            pad: 0,
            padded: false,
            rewrite: Rewrite::None,
        }
    }

    pub(super) fn rewritten(self, rewrite: Rewrite) -> Self {
        Self { rewrite, ..self }
    }

    pub(super) fn padded(self, padded: bool) -> Self {
        Self { padded, ..self }
    }

    /// The bytes of the result with their padding.
    pub(super) fn room(&self) -> usize {
        self.len + self.pad
    }

    /// The bytes that are read from the arrays.
    pub(super) fn source(&self) -> usize {
        match self.rewrite {
            Rewrite::Made => 0,
            Rewrite::Bits { .. } if self.src.is_null() => 0,
            Rewrite::Bits { skip, bits, .. } => (usize::from(skip) + bits).div_ceil(8),
            _ => self.len,
        }
    }

    /// Whether the bits do not start a byte: the region before has others in it.
    pub(super) fn shares_byte(&self) -> bool {
        matches!(self.rewrite, Rewrite::Bits { at: 1.., .. })
    }

    /// Bytes `start..end` of the result and its padding as a region of their own. `start` is a multiple of 16, so that it divides no
    /// value that is rewritten.
    pub(super) fn part(&self, start: usize, end: usize) -> Self {
        let len = end.min(self.len).saturating_sub(start);
        let mut part = Self {
            src: self.src.offset(start),
            dst: self.dst + start,
            len,
            pad: end - start - len,
            padded: false,
            rewrite: self.rewrite,
        };
        match (&mut part.rewrite, self.rewrite) {
            (rewrite, _) if len == 0 => *rewrite = Rewrite::None,
            (
                rewrite,
                Rewrite::Bits {
                    skip,
                    at,
                    bits,
                    counts,
                },
            ) => {
                // The first bit of the part, of those of the region and of the source.
                let done = (start * 8).saturating_sub(usize::from(at));
                let first = usize::from(skip) + done;
                let at = if start == 0 { at } else { 0 };
                part.src = match self.src.is_null() {
                    true => DevicePtr::NULL,
                    false => self.src.offset(first / 8),
                };
                *rewrite = Rewrite::Bits {
                    skip: (first % 8) as u8,
                    at,
                    bits: (bits - done).min(len * 8 - usize::from(at)),
                    counts,
                };
            }
            _ => {}
        }
        part
    }

    /// Writes the result and its padding to `out`. Bits before the first one of the result stay.
    ///
    /// # Safety
    /// `src`, where the source's bytes are, is readable, and `out` is writable, each for its length. They do not overlap, or are
    /// the same; then `out` has room for the source too.
    #[inline]
    pub(super) unsafe fn write(&self, tables: &[Vec<u32>], src: *const u8, out: *mut u8) {
        // SAFETY: the caller guarantees so many bytes of either, and that they do not overlap unless they are the same.
        unsafe {
            if !matches!(self.rewrite, Rewrite::Bits { .. }) && !std::ptr::eq(src, out) {
                src.copy_to_nonoverlapping(out, self.len);
            }
            if !matches!(self.rewrite, Rewrite::None | Rewrite::Made) {
                self.change(tables, src, out);
            }
            out.add(self.len).write_bytes(0, self.pad);
        }
    }

    /// Changes values that are at `out`, or writes bits there.
    ///
    /// # Safety
    /// As [`write`](Self::write).
    #[inline(never)]
    unsafe fn change(&self, tables: &[Vec<u32>], src: *const u8, out: *mut u8) {
        let mut moved = Vec::new();
        let source = match self.rewrite {
            Rewrite::Bits { .. } if !src.is_null() => {
                // SAFETY: the caller guarantees the source's bytes.
                let source = unsafe { std::slice::from_raw_parts(src, self.source()) };
                if std::ptr::eq(src, out) {
                    moved.extend_from_slice(source);
                }
                Some(if moved.is_empty() { source } else { &moved[..] })
            }
            _ => None,
        };
        // SAFETY: the caller guarantees so many bytes, and that nothing else uses them: bits that were there have moved.
        let result = unsafe { std::slice::from_raw_parts_mut(out, self.len) };
        match self.rewrite {
            Rewrite::None | Rewrite::Made => {}
            Rewrite::Bits { skip, at, bits, .. } => {
                put_bits(source, result, skip.into(), at.into(), bits);
            }
            Rewrite::Add { width, n } => add(result, width, n),
            Rewrite::Views(table) => renumber(result, &tables[table as usize]),
        }
    }

    /// Returns the nulls to be counted in the result, which is at the start of `out`, and where they are counted.
    pub(super) fn nulls(&self, out: &[u8]) -> Option<(usize, usize)> {
        match self.rewrite {
            Rewrite::Bits {
                at,
                bits,
                counts: Some(i),
                ..
            } => Some((i as usize, bits - count_bits(out, at.into(), bits))),
            _ => None,
        }
    }
}

/// Writes `bits` bits from bit `skip` of `source`, or set bits, from bit `at` (0 to 7) of `out` on, and zeroes the rest of it. The bits
/// before stay.
fn put_bits(source: Option<&[u8]>, out: &mut [u8], skip: usize, at: usize, bits: usize) {
    let before = out.first().map_or(0, |first| first & ((1 << at) - 1));
    match source {
        Some(source) => {
            out.fill(0);
            set_bits(out, source, at, skip, bits);
        }
        None => {
            out.fill(0xff);
            if let Some(last) = out.get_mut((at + bits) / 8) {
                *last = (1 << ((at + bits) % 8)) - 1;
            }
        }
    }
    if let Some(first) = out.first_mut() {
        *first = *first & (0xff << at) | before;
    }
}

/// Adds `n` to every integer of `width` bytes. They need not be aligned.
fn add(values: &mut [u8], width: u8, n: i64) {
    macro_rules! each {
        ($t:ty) => {
            for bytes in values.chunks_exact_mut(size_of::<$t>()) {
                let old = <$t>::from_ne_bytes((&*bytes).try_into().unwrap_or_default());
                bytes.copy_from_slice(&old.wrapping_add(n as $t).to_ne_bytes());
            }
        };
    }
    match width {
        1 => each!(i8),
        2 => each!(i16),
        4 => each!(i32),
        _ => each!(i64),
    }
}

/// Replaces the data buffers of views by those in `table`.
fn renumber(views: &mut [u8], table: &[u32]) {
    for view in views.chunks_exact_mut(16) {
        // Length, prefix, index and offset; at most 12 bytes are in the view itself.
        let word = |at: usize| int(&view[at..], 4) as u32;
        if let (13.., Some(new)) = (word(0), table.get(word(8) as usize)) {
            view[8..12].copy_from_slice(&new.to_ne_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::numbers::push_int;

    fn source(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i * 37 + i / 7) as u8).collect()
    }

    fn bit(bytes: &[u8], i: usize) -> bool {
        bytes[i / 8] >> (i % 8) & 1 == 1
    }

    fn region(from: &[u8], len: usize, rewrite: Rewrite) -> CopyRegion {
        let src = DevicePtr::new(from.as_ptr().cast_mut().cast());
        let mut region = CopyRegion::new(src, len).rewritten(rewrite);
        region.pad = len.next_multiple_of(64) - len;
        region
    }

    /// The region and its padding, written `step` bytes at a time over what was there before.
    fn written(region: &CopyRegion, step: usize) -> Vec<u8> {
        let mut out = vec![0xAA; region.room()];
        for start in (0..out.len()).step_by(step) {
            let part = region.part(start, out.len().min(start + step));
            let (src, out) = (part.src.as_ptr().cast_const(), &mut out[part.dst..]);
            // SAFETY: every caller passes a source that is as long as its region says, and `out` is fresh.
            unsafe { part.write(&[], src.cast(), out.as_mut_ptr()) };
        }
        out
    }

    #[test]
    fn bits_from_any_bit() {
        // No byte more than the bits need: Miri detects reads past them.
        for skip in 0..8u8 {
            let few = if cfg!(miri) { 7 } else { 1 };
            for bits in (1..150).step_by(few).chain([511, 512, 513, 520]) {
                let from = source((usize::from(skip) + bits).div_ceil(8));
                let rewrite = Rewrite::Bits {
                    skip,
                    at: 0,
                    bits,
                    counts: Some(3),
                };
                let region = region(&from, bits.div_ceil(8), rewrite);
                let all = written(&region, 4096);
                assert_eq!(all, written(&region, 64));
                let mut same = vec![0xAA; all.len().max(from.len())];
                same[..from.len()].copy_from_slice(&from);
                let out = same.as_mut_ptr();
                // SAFETY: the source is there, which has room for the result.
                unsafe { region.write(&[], out, out) };
                assert_eq!(all, same[..all.len()], "in place: {skip}, {bits}");
                for i in 0..all.len() * 8 {
                    let expected = i < bits && bit(&from, usize::from(skip) + i);
                    assert_eq!(bit(&all, i), expected, "bit {i} of {bits} from {skip}");
                }
                let nulls = (0..bits).filter(|i| !bit(&all, *i)).count();
                assert_eq!(region.nulls(&all), Some((3, nulls)));
            }
        }
    }

    /// Bits of several sources, or of none, one after the other in the same bytes.
    #[test]
    fn bits_to_any_bit() {
        for at in 0..8u8 {
            for bits in (1..40).chain([511, 512, 530]) {
                for skip in [None, Some(0), Some(3)] {
                    let from = source((usize::from(skip.unwrap_or(0)) + bits).div_ceil(8));
                    let rewrite = Rewrite::Bits {
                        skip: skip.unwrap_or(0),
                        at,
                        bits,
                        counts: None,
                    };
                    let len = (usize::from(at) + bits).div_ceil(8);
                    let mut region = region(&from, len, rewrite);
                    if skip.is_none() {
                        region.src = DevicePtr::NULL;
                    }
                    let all = written(&region, 4096);
                    assert_eq!(all, written(&region, 64));
                    for i in 0..all.len() * 8 {
                        let expected = match i.checked_sub(at.into()) {
                            // What was there before.
                            None => i % 2 == 1,
                            Some(i) if i < bits => {
                                skip.is_none_or(|skip| bit(&from, usize::from(skip) + i))
                            }
                            Some(_) => false,
                        };
                        assert_eq!(
                            bit(&all, i),
                            expected,
                            "bit {i}, {bits} from {skip:?} to {at}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn integers_from_any_address() {
        for (width, n) in [
            (4u8, -1i64 << 20),
            (8, -1 << 40),
            (4, 3),
            (8, -77),
            (1, 200),
            (2, 40_000),
        ] {
            let w = usize::from(width);
            for count in [1, 2, 15, 16, 17, 40] {
                let from = source(count * w + 1);
                let region = region(&from[1..], count * w, Rewrite::Add { width, n });
                let all = written(&region, 4096);
                assert_eq!(all, written(&region, 64));
                let (values, padding) = all.split_at(count * w);
                for (to, from) in values.chunks(w).zip(from[1..].chunks(w)) {
                    let mut more = Vec::new();
                    push_int(&mut more, int(from, w).wrapping_add(n), w);
                    assert_eq!(to, more);
                }
                assert!(padding.iter().all(|byte| *byte == 0));
            }
        }
    }

    #[test]
    fn plain_bytes_and_padding() {
        for bytes in (1..70).chain([127, 128, 129, 200]) {
            let from = source(bytes);
            for rewrite in [Rewrite::None, Rewrite::Made] {
                let region = region(&from, bytes, rewrite);
                let all = written(&region, 4096);
                assert_eq!(all, written(&region, 64));
                let (plain, padding) = all.split_at(bytes);
                assert_eq!(plain, from);
                assert!(padding.iter().all(|byte| *byte == 0));
            }
        }
    }
}
