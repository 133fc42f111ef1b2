//! What the host changes in transferred bytes: bit shifts and offset rebasing, while packing for an upload or in
//! place after a download; and what refers to rows or buffers of one input, where several are concatenated.

use arrow_buffer::bit_mask::set_bits;

use crate::device::{ALIGNMENT, DevicePtr};

/// One buffer's bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) src: DevicePtr,
    /// Byte offset in the slab.
    pub(crate) dst: usize,
    /// The length in bytes of the result.
    pub(crate) dst_bytes: usize,
    pub(crate) fix: Fix,
    /// These are the last bytes of their buffer, which its padding follows.
    pub(crate) last: bool,
}

/// What the host changes in a piece.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Fix {
    None,
    /// The result is `bits` bits from bit `skip` of the source. With `counts` they are the validity bitmap of that node of the
    /// plan, and its nulls are to be counted in it.
    Bits {
        skip: u8,
        bits: usize,
        counts: Option<u32>,
    },
    /// `base`, which is not 0, is subtracted from every offset or dictionary key of `width` bytes.
    Offsets {
        width: u8,
        base: i64,
    },
    /// There is no source: the bytes are in [`Made::ready`], from this byte on.
    Ready(usize),
    /// Views whose data buffer `i` becomes element `i` of this table.
    Views(u32),
    /// Offsets of a dense union, to each of which the element of this table is added that its row's type id says.
    Union {
        ids: DevicePtr,
        starts: u32,
    },
    /// There is no source of its own: the result is a bitmap of the bits of this [join](Made::joins).
    Join(u32),
}

/// What the changes of a plan refer to.
#[derive(Debug, Default)]
pub(crate) struct Made {
    pub(crate) ready: Vec<u8>,
    /// Of [`Fix::Views`] and of [`Fix::Union`].
    pub(crate) tables: Vec<Vec<u32>>,
    pub(crate) joins: Vec<Join>,
}

/// A bitmap that is put together from bits of several.
#[derive(Debug)]
pub(crate) struct Join {
    pub(crate) parts: Vec<Bits>,
    /// The node of the plan whose nulls are found in it.
    pub(crate) node: usize,
}

/// Bits of a bitmap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bits {
    /// The byte that holds the first bit; `None` if all bits are set.
    pub(crate) src: Option<DevicePtr>,
    /// Bits to skip in that byte.
    pub(crate) skip: usize,
    /// The first bit in the result.
    pub(crate) at: usize,
    /// The number of bits.
    pub(crate) bits: usize,
    /// The unset ones are nulls that nobody has counted yet.
    pub(crate) counts: bool,
}

impl Bits {
    /// The number of bytes of the source.
    pub(crate) fn bytes(&self) -> usize {
        match self.src {
            Some(_) => (self.skip + self.bits).div_ceil(8),
            None => 0,
        }
    }
}

impl Piece {
    /// The length in bytes of the source.
    #[inline]
    pub(crate) fn src_bytes(&self) -> usize {
        match self.fix {
            Fix::None | Fix::Offsets { .. } | Fix::Views(_) | Fix::Union { .. } => self.dst_bytes,
            Fix::Bits { skip, bits, .. } => (usize::from(skip) + bits).div_ceil(8),
            Fix::Ready(_) | Fix::Join(_) => 0,
        }
    }

    /// The bytes that the piece takes in the slab: with its padding, if that follows.
    #[inline]
    pub(crate) fn region(&self) -> usize {
        let bytes = self.src_bytes().max(self.dst_bytes);
        match self.last {
            // Its buffer starts at a multiple of 64, and ends at one.
            true => (self.dst + bytes).next_multiple_of(ALIGNMENT) - self.dst,
            false => self.dst_bytes,
        }
    }

    /// Whether the result is the source's bytes.
    pub(crate) fn is_plain(&self) -> bool {
        match self.fix {
            Fix::None => true,
            // Except for the bits after the last row.
            Fix::Bits { skip, .. } => skip == 0,
            _ => false,
        }
    }

    /// How many leading bytes of the result are the same as those of the source. The host makes the rest.
    pub(crate) fn straight(&self) -> usize {
        match self.fix {
            Fix::None => self.dst_bytes,
            // The bits after the last row must become zero.
            Fix::Bits {
                skip: 0,
                bits,
                counts: None,
            } => bits / 8,
            _ => 0,
        }
    }

    /// Bytes `start..start + bytes` of the result as a piece of their own. Both are multiples of 64, except at the
    /// end of the piece; `start` is arbitrary in a piece of bits.
    pub(crate) fn part(&self, start: usize, bytes: usize) -> Self {
        let fix = match self.fix {
            Fix::Bits { skip, bits, counts } => Fix::Bits {
                skip,
                bits: (bits - start * 8).min(bytes * 8),
                counts,
            },
            Fix::Ready(at) => Fix::Ready(at + start),
            Fix::Union { ids, starts } => Fix::Union {
                ids: ids.offset(start / 4),
                starts,
            },
            fix => fix,
        };
        Self {
            src: self.src.offset(start),
            dst: self.dst + start,
            dst_bytes: bytes,
            fix,
            last: self.last && start + bytes == self.dst_bytes,
        }
    }
}

/// Copies the `bits` bits from bit `skip` (0 to 7) of `src` to the start of `dst`, and zeroes the rest of the last
/// byte. Goes upwards, so that `dst` may be `src`.
///
/// # Safety
/// `src` is readable for `(skip + bits)` bits, `dst` writable for `bits` bits, both rounded up to
/// bytes; they do not overlap unless `dst <= src`.
unsafe fn shift_bits(src: *const u8, dst: *mut u8, skip: u8, bits: usize) {
    let bytes = bits.div_ceil(8);
    let source_bytes = (usize::from(skip) + bits).div_ceil(8);
    if skip == 0 {
        // SAFETY: the caller guarantees `bits` bits, which is `bytes` bytes, of either; `copy` permits overlap.
        unsafe { std::ptr::copy(src, dst, bytes) };
    } else {
        let mut i = 0;
        // Words, as long as the byte that follows in the source is there.
        while i + 8 < source_bytes {
            // SAFETY: `i + 9 <= source_bytes`, which the caller guarantees; the result has at least one byte less, so
            // `i + 8` of its bytes are writable.
            unsafe {
                let low = u64::from_le(src.add(i).cast::<u64>().read_unaligned()) >> skip;
                let high = u64::from(*src.add(i + 8)) << (64 - u32::from(skip));
                let word = (low | high).to_le();
                dst.add(i).cast::<u64>().write_unaligned(word);
            }
            i += 8;
        }
        while i < bytes {
            // SAFETY: `i < bytes <= source_bytes`, and byte `i + 1` is read only if it is below `source_bytes`: the caller
            // guarantees so many bytes of either.
            unsafe {
                let low = *src.add(i) >> skip;
                let high = if i + 1 < source_bytes {
                    *src.add(i + 1) << (8 - skip)
                } else {
                    0
                };
                *dst.add(i) = low | high;
            }
            i += 1;
        }
    }
    if bits % 8 != 0 {
        // SAFETY: `bits` is not 0, so byte `bytes - 1` is one of the result's, which the caller guarantees.
        unsafe { *dst.add(bytes - 1) &= (1 << (bits % 8)) - 1 };
    }
}

/// Subtracts `base` from every integer of `width` bytes (1, 2, 4 or 8). Invalid offsets may wrap; they stay invalid, and
/// nothing is read through them.
fn rebase(offsets: &mut [u8], width: u8, base: i64) {
    // As arrays of bytes, since they need not be aligned; the compiler vectorises this.
    fn each<const N: usize>(offsets: &mut [u8], subtract: impl Fn([u8; N]) -> [u8; N]) {
        for offset in offsets.chunks_exact_mut(N) {
            let mut value = [0; N];
            value.copy_from_slice(offset);
            offset.copy_from_slice(&subtract(value));
        }
    }
    match width {
        1 => each(offsets, |v| {
            i8::from_ne_bytes(v).wrapping_sub(base as i8).to_ne_bytes()
        }),
        2 => each(offsets, |v| {
            i16::from_ne_bytes(v)
                .wrapping_sub(base as i16)
                .to_ne_bytes()
        }),
        4 => each(offsets, |v| {
            i32::from_ne_bytes(v)
                .wrapping_sub(base as i32)
                .to_ne_bytes()
        }),
        _ => each(offsets, |v| {
            i64::from_ne_bytes(v).wrapping_sub(base).to_ne_bytes()
        }),
    }
}

/// Replaces the data buffers of views by those in `table`.
fn renumber(views: &mut [u8], table: &[u32]) {
    for view in views.chunks_exact_mut(16) {
        // Length, prefix, index and offset; at most 12 bytes are in the view itself.
        let word =
            |at: usize| u32::from_ne_bytes([view[at], view[at + 1], view[at + 2], view[at + 3]]);
        if let (13.., Some(new)) = (word(0), table.get(word(8) as usize)) {
            view[8..12].copy_from_slice(&new.to_ne_bytes());
        }
    }
}

/// Adds to each offset of a dense union what `starts` has for its row's type id.
fn advance(offsets: &mut [u8], ids: &[i8], starts: &[u32]) {
    for (offset, id) in offsets.chunks_exact_mut(4).zip(ids) {
        let start = usize::try_from(*id).map_or(0, |id| starts[id] as i32);
        let old = i32::from_ne_bytes([offset[0], offset[1], offset[2], offset[3]]);
        offset.copy_from_slice(&old.wrapping_add(start).to_ne_bytes());
    }
}

/// Puts a bitmap together. Returns the nulls that were found.
///
/// # Safety
/// `sources` are where the bits of the parts that have a source are, in order: host memory that is readable for their lengths, and
/// outside of `out`.
unsafe fn join(
    parts: &[Bits],
    mut sources: impl Iterator<Item = DevicePtr>,
    out: &mut [u8],
) -> usize {
    out.fill(0);
    let mut found = 0;
    for part in parts {
        let Some(from) = part.src.and_then(|_| sources.next()) else {
            set_ones(out, part.at, part.bits);
            continue;
        };
        // SAFETY: the caller guarantees that the source is readable for its length and outside of `out`.
        let from = unsafe { std::slice::from_raw_parts(from.as_ptr().cast::<u8>(), part.bytes()) };
        let unset = set_bits(out, from, part.at, part.skip, part.bits);
        found += if part.counts { unset } else { 0 };
    }
    found
}

/// Sets `bits` bits from bit `at` on.
fn set_ones(bytes: &mut [u8], at: usize, bits: usize) {
    let (first, last) = (at.div_ceil(8), (at + bits) / 8);
    let mut each = |bits: std::ops::Range<usize>| {
        bits.for_each(|bit| bytes[bit / 8] |= 1 << (bit % 8));
    };
    if first >= last {
        return each(at..at + bits);
    }
    each(at..first * 8);
    each(last * 8..at + bits);
    bytes[first..last].fill(0xFF);
}

/// Zeroes the padding of a piece's region from `start` on; returns how many bytes come before it.
#[inline]
fn pad(piece: &Piece, start: usize, out: &mut [u8]) -> usize {
    let there = piece.dst_bytes.saturating_sub(start).min(out.len());
    // From the start of the last block that has bytes; mostly it is the only one, of constant size.
    let last = there / ALIGNMENT * ALIGNMENT;
    match out[last..].split_first_chunk_mut::<ALIGNMENT>() {
        Some((block, rest)) => {
            *block = [0; ALIGNMENT];
            if !rest.is_empty() {
                rest.fill(0);
            }
        }
        None => out[there..].fill(0),
    }
    there
}

/// Writes bytes `start..start + out.len()` of a piece's region, with its padding, from its source in host memory or
/// from what was made. `start` and the length of `out` are multiples of 64, except at the end of a piece.
///
/// # Safety
/// The piece's sources are readable host memory for their lengths, and do not overlap `out`.
#[inline]
pub(crate) unsafe fn pack(piece: &Piece, made: &Made, start: usize, out: &mut [u8]) {
    if !matches!(piece.fix, Fix::None) {
        // SAFETY: the caller keeps to the contract of `pack`, which is that of `pack_fixed`.
        return unsafe { pack_fixed(*piece, made, start, out) };
    }
    let there = pad(piece, start, out);
    let src = piece.src.as_ptr().cast::<u8>().cast_const();
    // SAFETY: the caller guarantees a readable source of the piece's length, which does not overlap `out`; `pad` returns
    // at most the length of `out`, and `start + there` is at most the piece's length.
    unsafe {
        src.wrapping_add(start)
            .copy_to_nonoverlapping(out.as_mut_ptr(), there)
    };
}

/// As [`pack`], for pieces with a fix.
///
/// # Safety
/// As [`pack`].
#[inline(never)]
unsafe fn pack_fixed(piece: Piece, made: &Made, start: usize, out: &mut [u8]) {
    let there = pad(&piece, start, out);
    let out = &mut out[..there];
    let src = piece.src.as_ptr().cast::<u8>().cast_const();
    let src = src.wrapping_add(start);
    match piece.fix {
        _ if out.is_empty() => {}
        Fix::Ready(at) => out.copy_from_slice(&made.ready[at + start..][..out.len()]),
        Fix::Bits { skip, bits, .. } => {
            let bits = (bits - start * 8).min(out.len() * 8);
            // SAFETY: the caller guarantees a source of `skip + bits` bits of the whole piece, from `start` bytes less, which
            // does not overlap `out`; `bits` is at most what `out` holds.
            unsafe { shift_bits(src, out.as_mut_ptr(), skip, bits) }
        }
        Fix::Join(i) => {
            let parts = &made.joins[i as usize].parts;
            // SAFETY: the caller guarantees that the sources, which are where the parts say, are readable and outside of `out`.
            unsafe { join(parts, parts.iter().filter_map(|part| part.src), out) };
        }
        _ => {
            // SAFETY: the caller guarantees a source of the piece's length, and `start + out.len()` is at most that (`pad`).
            out.copy_from_slice(unsafe { std::slice::from_raw_parts(src, out.len()) });
            let ids = match piece.fix {
                Fix::Union { ids, .. } => ids.offset(start / 4),
                _ => DevicePtr::NULL,
            };
            // SAFETY: the caller guarantees that type ids are readable for their rows.
            unsafe { change(piece.fix, made, ids, out) };
        }
    }
}

/// Applies a change to values that have been copied.
///
/// # Safety
/// For the offsets of a union, `ids` are the type ids of the rows, in readable host memory.
unsafe fn change(fix: Fix, made: &Made, ids: DevicePtr, values: &mut [u8]) {
    match fix {
        Fix::Offsets { width, base } => rebase(values, width, base),
        Fix::Views(table) => renumber(values, &made.tables[table as usize]),
        Fix::Union { starts, .. } if !ids.is_null() => {
            let rows = values.len() / 4;
            // SAFETY: the caller guarantees a readable type id for each row.
            let ids = unsafe { std::slice::from_raw_parts(ids.as_ptr().cast::<i8>(), rows) };
            advance(values, ids, &made.tables[starts as usize]);
        }
        _ => {}
    }
}

/// Applies a piece's fix to the bytes of its source, which were copied to the start of `region`, and zeroes the
/// padding. Returns the nulls that were found in a [join](Fix::Join).
///
/// # Safety
/// `others` are where the piece's other sources are, if it has any: the type ids of a union, or the bits of a join, as
/// [`join`] asks for.
pub(crate) unsafe fn fix_in_place(
    piece: &Piece,
    made: &Made,
    others: &[DevicePtr],
    region: &mut [u8],
) -> usize {
    let mut found = 0;
    let out = &mut region[..piece.dst_bytes];
    match piece.fix {
        Fix::None => {}
        Fix::Ready(at) => out.copy_from_slice(&made.ready[at..][..piece.dst_bytes]),
        Fix::Bits { skip, bits, .. } => {
            let ptr = region.as_mut_ptr();
            // SAFETY: the region holds the piece's source (`Piece::region`), which is `skip + bits` bits, and the result is
            // not longer.
            unsafe { shift_bits(ptr, ptr, skip, bits) };
        }
        Fix::Join(i) => {
            let parts = &made.joins[i as usize].parts;
            // SAFETY: the caller guarantees what `join` asks for.
            found = unsafe { join(parts, others.iter().copied(), out) };
        }
        Fix::Offsets { .. } | Fix::Views(_) | Fix::Union { .. } => {
            let ids = others.first().copied().unwrap_or(DevicePtr::NULL);
            // SAFETY: the caller guarantees the type ids.
            unsafe { change(piece.fix, made, ids, out) };
        }
    }
    region[piece.dst_bytes..].fill(0);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::gather::{int, push_int};

    fn source(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i * 37 + i / 7) as u8).collect()
    }

    fn bit(bytes: &[u8], i: usize) -> bool {
        bytes[i / 8] >> (i % 8) & 1 == 1
    }

    /// The region of a piece over `from`, packed `step` bytes at a time over what was there before.
    fn packed(from: &[u8], dst_bytes: usize, fix: Fix, step: usize) -> Vec<u8> {
        let piece = Piece {
            src: DevicePtr::new(from.as_ptr().cast_mut().cast()),
            dst: 0,
            dst_bytes,
            fix,
            last: true,
        };
        let made = Made {
            ready: b"0123456789".to_vec(),
            ..Made::default()
        };
        let mut out = vec![0xAA; piece.region()];
        for (i, part) in out.chunks_mut(step).enumerate() {
            // SAFETY: every caller passes a source that is as long as its piece says, and `out` is fresh.
            unsafe { pack(&piece, &made, i * step, part) };
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
                let fix = Fix::Bits {
                    skip,
                    bits,
                    counts: None,
                };
                let all = packed(&from, bits.div_ceil(8), fix, 4096);
                assert_eq!(all, packed(&from, bits.div_ceil(8), fix, 64));
                let mut region = vec![0xAA; all.len()];
                region[..from.len()].copy_from_slice(&from);
                let piece = Piece {
                    src: DevicePtr::NULL,
                    dst: 0,
                    dst_bytes: bits.div_ceil(8),
                    fix,
                    last: true,
                };
                // SAFETY: there is no other source.
                unsafe { fix_in_place(&piece, &Made::default(), &[], &mut region) };
                assert_eq!(all, region, "in place: {skip}, {bits}");
                for i in 0..all.len() * 8 {
                    let expected = i < bits && bit(&from, usize::from(skip) + i);
                    assert_eq!(bit(&all, i), expected, "bit {i} of {bits} from {skip}");
                }
            }
        }
    }

    #[test]
    fn offsets_from_any_address() {
        for (width, base) in [
            (4u8, 1i64 << 20),
            (8, 1 << 40),
            (4, -3),
            (8, 77),
            (1, -200),
            (2, -40_000),
        ] {
            let w = usize::from(width);
            for count in [1, 2, 15, 16, 17, 40] {
                let from = source(count * w + 1);
                let fix = Fix::Offsets { width, base };
                let all = packed(&from[1..], count * w, fix, 4096);
                assert_eq!(all, packed(&from[1..], count * w, fix, 64));
                let (offsets, padding) = all.split_at(count * w);
                for (to, from) in offsets.chunks(w).zip(from[1..].chunks(w)) {
                    let mut less = Vec::new();
                    push_int(&mut less, int(from, w).wrapping_sub(base), w);
                    assert_eq!(to, less);
                }
                assert!(padding.iter().all(|byte| *byte == 0));
            }
        }
    }

    #[test]
    fn plain_bytes_and_padding() {
        for bytes in (1..70).chain([127, 128, 129, 200]) {
            let from = source(bytes);
            let all = packed(&from, bytes, Fix::None, 4096);
            assert_eq!(all, packed(&from, bytes, Fix::None, 64));
            let (plain, padding) = all.split_at(bytes);
            assert_eq!(plain, from);
            assert!(padding.iter().all(|byte| *byte == 0));
        }
        let ready = packed(&[], 4, Fix::Ready(3), 64);
        assert_eq!((&ready[..4], &ready[4..]), (&b"3456"[..], &[0; 60][..]));
    }

    #[test]
    fn ones_anywhere() {
        for at in 0..20 {
            for bits in 0..40 {
                let mut bytes = [0; 8];
                set_ones(&mut bytes, at, bits);
                let expected = ((1u64 << bits) - 1) << at;
                assert_eq!(u64::from_le_bytes(bytes), expected, "{bits} from {at}");
            }
        }
    }
}
